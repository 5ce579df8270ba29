"""What ranks tell each other beside their messages: small facts between hosts, and alarms."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, device_of, resolve_axis
from paradyse.torch_private import default_store, num_process_groups, timeout_of

T = TypeVar("T")


def tell_all(mine: T, control: Axis) -> list[T]:
    """What every rank of ``control`` gives as ``mine``, small objects, in the order of ranks."""
    return collectives.gather_objects(mine, control, collectives.AGREEMENT)


ANSWER_S = 1.0
"""How long the store may take to answer."""


class WorldStore:
    """The store that ranks met at, which may be on a rank, or behind a network, that has stopped:
    then it never answers."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._waits = False
        """Whether a question has not been answered yet."""
        # When it is needed there may be no memory for a thread.
        thread = Thread(target=_answer, args=(self._questions, self._answers), daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._questions, thread)

    def ask(self, question: Callable[[Any], T], limit_s: float = ANSWER_S) -> T | None:
        """The answer to ``question``, which is given the store; None where it, or an earlier
        question, has none within ``limit_s``.

        Raises:
            RuntimeError: the store is gone; or what the question raises.
        """
        if self._waits:
            self._take(limit_s)
        if self._waits:
            return None
        self._questions.put((question, default_store()))
        self._waits = True
        answer: T | None = self._take(limit_s)
        return answer

    def _take(self, limit_s: float) -> Any:
        try:
            answer, error = self._answers.get(timeout=limit_s)
        except Empty:
            return None
        self._waits = False
        if error is not None:
            raise error
        return answer


def _answer(questions: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    """Answer ``questions`` until one is None: each by what it gives, and by the error it raises.
    The store is asked over a connection of its own, so that nothing else, such as the end of the
    process, waits where it does not answer."""
    own = None
    while (asked := questions.get()) is not None:
        question, store = asked
        try:
            own = own or store.clone()
            answers.put((question(own), None))
        except Exception as e:
            answers.put((None, e))


def _end(questions: SimpleQueue[Any], thread: Thread) -> None:
    """End the ``thread`` that answers ``questions``, also when the process ends: one that comes
    back from C++, with an answer or after letting go of the store, once the interpreter is on its
    way out aborts the process. Nobody waits long for an answer that does not come."""
    questions.put(None)
    if thread is not current_thread():
        thread.join(ANSWER_S)


class Alarm:
    """Whether a rank has failed, asked in passing: a key in the store of the world."""

    def __init__(self, name: str) -> None:
        self._name, self._num_settled = name, 0

    def ring(self) -> None:
        """This rank has failed. Without the store the others hear of it later."""
        key = self._key()
        with suppress(RuntimeError):
            world_store().ask(lambda store: store.set(key, ""))

    def rings(self) -> bool:
        """Whether any has, as far as the store tells."""
        key = self._key()
        return bool(world_store().ask(lambda store: store.check([key])))

    def reset(self) -> None:
        """All ranks know."""
        self._num_settled += 1

    def _key(self) -> str:
        return f"paradyse/alarm/{self._name}/{self._num_settled}"


def world_store() -> WorldStore:
    """The one of the present world."""
    return resolve_axis().session.of(WorldStore)


class Control(NamedTuple):
    """What carries small messages between hosts, apart from all others."""

    axis: Axis
    alarm: Alarm


class _Controls(dict[tuple[int, ...], Control]):
    """By their ranks; for the life of the world."""


def control_of(ranks: tuple[int, ...]) -> Control:
    """The one of ``ranks`` of the world; all of them ask for it at the same time.

    Raises:
        CollectiveError: not all of them came.
    """
    controls = resolve_axis().session.of(_Controls)
    if ranks not in controls:
        group = make_group(ranks, "gloo", collectives.timeout())
        name = f"control:{'-'.join(map(str, ranks))}"
        axis = Axis(name, len(ranks), ranks.index(dist.get_rank()), group)
        controls[ranks] = Control(axis, Alarm(name))
    return controls[ranks]


def group_like(group: Any) -> Any:
    """A process group of the ranks of ``group``, carried by the same and bounded in time alike; all
    of them ask for it at the same time.

    Args:
        group: of which this rank is one.
    Raises:
        CollectiveError: not all of them came.
    """
    ranks, kinds = dist.get_process_group_ranks(group), dist.get_backend_config(group)
    return make_group(tuple(ranks), kinds, timeout_of(group, device_of(group)))


class _Made(Counter[tuple[int, ...]]):
    """How many groups of these ranks were made."""


def _even_out(store: Any, key: str, ranks: tuple[int, ...]) -> None:
    """Have all ``ranks`` count equally many process groups, as the name of the next depends on it;
    they tell each other under ``key``, of which nothing stays."""
    told = {r: f"{key}/{r}" for r in ranks}
    store.set(told[dist.get_rank()], str(num_process_groups()))
    if dist.get_rank() == ranks[0]:
        store.set(key, str(max(int(store.get(k)) for k in told.values())))
    count_groups_to(int(store.get(key)))
    if store.add(f"{key}/read", 1) == len(ranks):
        for k in (*told.values(), key, f"{key}/read"):
            store.delete_key(k)


def count_groups_to(number: int) -> None:
    """Have this rank count ``number`` process groups, by further ones of its own."""
    while num_process_groups() < number:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


@contextmanager
def _unbound() -> Iterator[None]:
    """Inside, new groups are no splits of the world's communicator, as they are where the world was
    given a ``device_id``: in a split all ranks of the world take part, also those outside."""
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if world is None or bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def make_group(ranks: tuple[int, ...], backend: str, timeout: timedelta) -> Any:
    """A process group of ``ranks``. PyTorch makes it by the store, which never answers where the
    rank that has it has stopped.

    Args:
        ranks: of the world, this one among them; all of them ask for it at the same time.
        backend: what carries its messages, as of ``torch.distributed.new_group``.
        timeout: how long each of its messages may take.
    Raises:
        CollectiveError: not all of them came.
    """

    made = resolve_axis().session.of(_Made)
    made[ranks] += 1
    key = f"paradyse/groups/{'-'.join(map(str, ranks))}/{made[ranks]}"

    def make(store: Any) -> Any:
        _even_out(store, key, ranks)
        local = len(ranks) < dist.get_world_size()
        how = {"timeout": timeout, "backend": backend, "use_local_synchronization": local}
        with _unbound() if local else nullcontext():
            return dist.new_group(list(ranks), **how)

    limit_s = collectives.timeout().total_seconds() + ANSWER_S
    try:
        group = world_store().ask(make, limit_s)
        if group is None:
            raise RuntimeError("the store that ranks met at does not answer")
        return group
    except RuntimeError as e:
        world = resolve_axis(), collectives.AGREEMENT
        raise collectives.failure("making the group", *world, e) from e
