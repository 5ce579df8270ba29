"""Collectives over one mesh axis: counted, named when they fail, bounded in time, and without a
gradient.

Every rank of ``axis`` calls a function with tensors of the same shapes; a rank alone may gather,
reduce-scatter and exchange, which sends nothing. ``block_id`` is the id of the block that the
message is for (``register_block``): its bytes are booked to it, and a failure names both. Functions
that "start" return a ``Pending``, whose ``wait()`` gives the result. On gloo all is built on
all-to-all: 16 MiB take two ranks 4.5 ms; all-gather 70, reduce-scatter 39, all-reduce 12 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from paradyse.distributed.axis import SINGLE, Axis, device_of, resolve_axis
from paradyse.distributed.crossing import as_carried, start_all_to_all
from paradyse.distributed.lanes import lane_of
from paradyse.distributed.regions import WAIT, region

# torch 2.13 renamed both and deprecates the former names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TIMEOUT_VARIABLE = "PARADYSE_COLLECTIVE_TIMEOUT_S"
"""Environment variable: seconds after which a rank that waits in a collective gives up. Default
300. What NCCL carries ends by the process group's own time-out: asked for another one, NCCL keeps
the host waiting for each message."""

LONGEST_S = 10**7  # of a time-out: some months


class CollectiveError(RuntimeError):
    """A collective failed or timed out; its text names it, the block, and the rank that noticed."""


@dataclass
class Traffic:
    """What one block sent. Bytes are those this rank puts on the wire."""

    name: str
    strategy: str = ""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


RESERVED = (
    "agreement",
    "optimizer",
    "data parallel",
    "online costs",
    "measurement of the machine",
    "profile",
)
"""Names of messages that no block sends, with the same ids on every axis."""

AGREEMENT, OPTIMIZER, REPLICAS, ONLINE, MACHINE, PROFILE = range(len(RESERVED))
"""Block ids of the checks that ranks hold the same batch, of norms of gradients and whole tensors
asked for, of messages between replicas, of costs that ranks agree on, of rates of the machine, and
of a profile that is made."""


class _Blocks(list[Traffic]):
    """What blocks of one axis sent, by block id."""

    def __init__(self) -> None:
        super().__init__(map(Traffic, RESERVED))


def register_block(axis: Axis, name: str) -> int:
    """A new id for the block ``name`` among those that send over ``axis``."""
    blocks = axis.session.of(_Blocks)
    blocks.append(Traffic(name))
    return len(blocks) - 1


def traffic(axis: Axis, block_id: int) -> Traffic:
    """What the block ``block_id`` has sent over ``axis``."""
    return axis.session.of(_Blocks)[block_id]


def timeout() -> timedelta:
    """How long a rank waits in a collective on gloo, and in one that compares ranks.

    Raises:
        ValueError: the environment variable is no number of seconds above 0.
    """
    return _seconds_of(os.environ.get(TIMEOUT_VARIABLE, "300"))


@lru_cache(maxsize=8)
def _seconds_of(text: str) -> timedelta:
    seconds = math.nan
    with contextlib.suppress(ValueError):
        seconds = float(text)
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(
            f"{TIMEOUT_VARIABLE} is {text!r}: give a number of seconds above 0, at most "
            f"{LONGEST_S}, or leave it unset for 300"
        )
    return timedelta(seconds=seconds)


def failure(what: str, axis: Axis, block_id: int, error: Exception) -> CollectiveError:
    """What to raise where ``what`` did not complete, a collective of ``block_id`` over ``axis``,
    which raised ``error``: the ranks are out of step from now on."""
    axis.session.of(Started).broken = True
    block = traffic(axis, block_id)
    strategy = f" (strategy {block.strategy})" if block.strategy else ""
    return CollectiveError(
        f"rank {axis.rank} of {axis.size}: {what} of block '{block.name}'{strategy} did not "
        f"complete: another rank died, stalled or left the program ({error}). Look at the other "
        "ranks' output first; "
        f"{TIMEOUT_VARIABLE} (now {timeout().total_seconds():g} s) sets how long a rank waits."
    )


class _Pauses(list[float]):
    """Seconds after every collective, while ``settled`` is entered."""


@contextlib.contextmanager
def settled(pause_s: float = 1e-3) -> Iterator[None]:
    """Inside, a rank pauses ``pause_s`` seconds after every collective, until the thread that ran
    it has let go of its buffers, which who watches memory would not see."""
    pauses = SINGLE.session.of(_Pauses)
    pauses.append(pause_s)
    try:
        yield
    finally:
        pauses.pop()


Counts = Sequence[Sequence[int]]
"""[p][p], how many rows rank i has for rank j."""


@dataclass(frozen=True)
class Message:
    """What a rank must know of a collective to take part in it without the values."""

    kind: str
    shape: tuple[int, ...]
    """Of the tensor that it was called with."""
    dtype: torch.dtype
    device: str
    root: int = 0
    lane: str = ""
    """Of the axis, that carries it."""
    counts: Counts = ()
    """Of ``start_rows``."""

    def take_part(self, axis: Axis) -> None:
        """Send and receive unspecified values, so that the other ranks of ``axis`` go on."""
        axis = lane_of(axis, self.lane)
        shape = (sum(self.counts[axis.rank]), *self.shape[1:]) if self.counts else self.shape
        x = torch.zeros(shape, dtype=self.dtype, device=self.device)  # ranks may count by them
        again: dict[str, Callable[[], Any]] = {
            "all_to_all": lambda: all_to_all(x, axis, AGREEMENT),
            "all_gather": lambda: all_gather(x, axis, AGREEMENT),
            "reduce_scatter": lambda: reduce_scatter(x, axis, AGREEMENT),
            "all_reduce": lambda: all_reduce_in_place(x, axis, {AGREEMENT: x.nbytes}),
            "broadcast": lambda: broadcast(x, axis, self.root, AGREEMENT).wait(),
            "reduce": lambda: reduce_to(x, axis, self.root, AGREEMENT).wait(),
            "ring_exchange": lambda: ring_exchange(x, axis, AGREEMENT).wait(),
            "rows": lambda: start_rows(x, self.counts, axis, AGREEMENT).wait(),
        }
        again[self.kind]()


_MESSAGE = lru_cache(maxsize=1 << 12)(Message)
"""One for all that are alike: steps send the same again and again."""


class Started:
    """The messages that this rank has started on one axis and its lanes: as many as every rank in
    step, in the same order."""

    MOST = 1 << 15
    """To be remembered: on NCCL thousands may start before a rank hears that another one failed."""

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[Message] = deque(maxlen=self.MOST)
        self.block_id = AGREEMENT
        """What the last one was for."""
        self.broken = False
        """One of them failed: another rank is gone."""
        self.before: list[Callable[[], object]] = []
        """Called before each; what they raise keeps the message from starting."""
        self.notice: Callable[[], None] = lambda: None
        """Called before each that is not of an agreement; may raise as ``before`` does."""

    def add(self, message: Message, block_id: int) -> None:
        """``message`` has started, for the block ``block_id``."""
        self.count += 1
        self.latest.append(message)
        self.block_id = block_id


WAKE_S = 0.25
"""Whoever waits for a message on gloo asks so often whether it will ever come."""


class Watchers(list[Callable[[Axis], None]]):
    """Called while this rank waits for a message, with its axis; of the world. They may raise."""


class Pending:
    """A collective under way. ``wait`` returns its result."""

    def __init__(
        self, works: Sequence[Any], result: Any, what: str, axis: Axis, block_id: int, keep: Any
    ):
        self._works, self._result, self._context = works, result, (what, axis, block_id)
        self._finish: Callable[[Any], Any] | None = None
        self._keep = keep  # send buffers must outlive the transfer
        self._on_gloo = waits_on_host(axis)
        self._watched = block_id != AGREEMENT  # which nothing may interrupt

    def wait(self) -> Any:
        """The result, when it is there.

        Raises:
            CollectiveError: it failed, or took longer than ``TIMEOUT_VARIABLE`` says.
            torch.OutOfMemoryError: as the collective raised it.
        """
        if self._finish is None and not self._works:  # it was waited for, or there was none
            return self._result
        try:
            if self._works:
                what, axis, block_id = self._context
                block = traffic(axis, block_id)
                with region(WAIT, what, axis.lane, block.name, block.strategy):
                    for work in filter(None, self._works):
                        self._wait(work)
        except (torch.OutOfMemoryError, CollectiveError):  # the latter is another rank's word
            raise
        except RuntimeError as e:
            raise failure(*self._context, e) from e
        if pauses := SINGLE.session.of(_Pauses):
            time.sleep(pauses[-1])
        self._works, self._keep = (), None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> Pending:
        """This message, whose result is what ``finish`` makes of the former one, when it is waited
        for."""
        before = self._finish
        self._finish = finish if before is None else lambda result: finish(before(result))
        return self

    def _wait(self, work: Any) -> None:
        deadline = time.monotonic() + (patience := timeout().total_seconds())
        step = [timedelta(seconds=min(patience, WAKE_S))] if self._on_gloo else []
        while True:
            try:
                ended = work.wait(*step)
            except RuntimeError:
                if not self._on_gloo or time.monotonic() > deadline:
                    raise
                if not work.is_completed():
                    self._watch()
                    continue
                ended = work.wait(*step)  # it ended, well or not, just after the wait had
            if ended:
                return
            raise RuntimeError("wait returned False")

    def _watch(self) -> None:
        for watch in resolve_axis().session.of(Watchers) if self._watched else ():
            watch(self._context[1])


def _start(
    what: str,
    x: Tensor,
    axis: Axis,
    block_id: int,
    num_bytes: int,
    launch: Any,
    result: Any,
    kind: str = "",
    root: int = 0,
    counts: Counts = (),
) -> Pending:
    """Call ``launch`` to start the collective ``what`` with ``x``; ``kind`` where it is carried by
    another one."""
    started = axis.session.of(Started)
    for call in (*started.before, *([started.notice] if block_id != AGREEMENT else [])):
        call()
    block = traffic(axis, block_id)
    block.sent_bytes[what] += num_bytes
    block.calls[what] += 1
    try:
        works = launch()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        raise failure(what, axis, block_id, e) from e
    facts = kind or what, tuple(x.shape), x.dtype, x.device.type, root, axis.lane, counts
    started.add((Message if counts else _MESSAGE)(*facts), block_id)
    return Pending(works if isinstance(works, list) else [works], result, what, axis, block_id, x)


def waits_on_host(axis: Axis) -> bool:
    """Whether a message over ``axis`` is over when its ``wait`` is, as on gloo, or where one rank
    sends none; on NCCL the host goes on, and the device waits."""
    return axis.size == 1 or axis.backend == "gloo"


def start_exchange(
    x: Tensor, axis: Axis, block_id: int, what: str = "all_to_all", num_bytes: int | None = None
) -> Pending:
    """Start ``all_to_all`` of ``x``, booked as ``what`` and, where given, ``num_bytes``."""
    if axis.size == 1:
        return Pending([], x, what, axis, block_id, None)
    x = x.contiguous()
    out, each = torch.empty_like(x), [x.numel() // axis.size] * axis.size
    num_bytes = x.nbytes - x.nbytes // axis.size if num_bytes is None else num_bytes
    launch = partial(start_all_to_all, out.view(-1), x.view(-1), each, each, axis)
    return _start(what, x, axis, block_id, num_bytes, launch, out, "all_to_all")


def all_to_all(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """Send slice i of ``x`` [p, ...] to rank i; slice j of the result came from rank j."""
    return start_exchange(x, axis, block_id).wait()


def start_rows(x: Tensor, counts: Counts, axis: Axis, block_id: int) -> Pending:
    """Start sending rows of ``x`` [n, ...], those for rank 0 first, to the ranks of ``axis``: as
    many as ``counts`` says, which all ranks know. ``wait()`` gives those of rank 0, then 1, .."""
    x, width = x.contiguous(), math.prod(x.shape[1:])
    to_ranks, from_ranks = counts[axis.rank], [row[axis.rank] for row in counts]
    out = x.new_empty(sum(from_ranks), *x.shape[1:])
    leave, arrive = ([n * width for n in rows] for rows in (to_ranks, from_ranks))
    num_bytes = (sum(leave) - leave[axis.rank]) * x.itemsize
    most = max(map(max, counts)) * width
    launch = partial(start_all_to_all, out.view(-1), x.view(-1), arrive, leave, axis, most)
    return _start("all_to_all", x, axis, block_id, num_bytes, launch, out, "rows", counts=counts)


def all_gather(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """``x`` of every rank of ``axis``, stacked: [p, *x.shape]."""
    out: Tensor = start_all_gather(x, axis, block_id).wait()
    return out


def gather_objects(x: Any, axis: Axis, block_id: int) -> list[Any]:
    """``x`` of every rank of ``axis``. Ranks trust each other: what one pickles, all unpickle."""
    if axis.size == 1:
        return [x]
    pickled = bytearray(pickle.dumps(x))
    mine = torch.frombuffer(pickled, dtype=torch.uint8).to(device_of(axis.group))
    sizes = all_gather(mine.new_tensor([mine.numel()], dtype=torch.int64), axis, block_id)
    padded = pad(mine, (0, int(sizes.max()) - mine.numel()))
    rows = all_gather(padded, axis, block_id).cpu()
    return [
        pickle.loads(row[:n].numpy().tobytes())
        for row, n in zip(rows, sizes.flatten().tolist(), strict=True)
    ]


def start_all_gather(x: Tensor, axis: Axis, block_id: int) -> Pending:
    """Start ``all_gather`` of ``x``."""
    if axis.size == 1:
        return Pending([], x.unsqueeze(0), "all_gather", axis, block_id, None)
    if waits_on_host(axis):
        copies = x.unsqueeze(0).expand(axis.size, *x.shape)
        return start_exchange(copies, axis, block_id, "all_gather")
    x, num_bytes = x.contiguous(), x.nbytes * (axis.size - 1)
    out = x.new_empty((axis.size, *x.shape))
    both = as_carried(out.view(-1)), as_carried(x.view(-1))
    launch = partial(_ALL_GATHER, *both, group=axis.group, async_op=True)
    return _start("all_gather", x, axis, block_id, num_bytes, launch, out)


def travel_dtype(given: torch.dtype, summed: torch.dtype, axis: Axis) -> torch.dtype:
    """Dtype in which values in ``given`` travel to be added up in ``summed`` over ``axis``: in the
    latter, but on gloo, where they are added up after they came, in the smaller of both."""
    return given if waits_on_host(axis) and given.itemsize < summed.itemsize else summed


def reduce_scatter(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """Sum over ranks of slice r of ``x`` [p, ...], for this rank r: [...]."""
    summed: Tensor = start_reduce_scatter(x, axis, block_id).wait()
    return summed


def start_reduce_scatter(
    x: Tensor, axis: Axis, block_id: int, dtype: torch.dtype | None = None
) -> Pending:
    """Start ``reduce_scatter`` of ``x``.

    Args:
        dtype: in which the ranks' values are added up, and of the sum; None: that of ``x``. They
            travel as ``travel_dtype`` says.
    """
    dtype = dtype or x.dtype
    if axis.size == 1:
        return Pending([], x[0].to(dtype), "reduce_scatter", axis, block_id, None)
    x = x.to(travel_dtype(x.dtype, dtype, axis))
    if waits_on_host(axis):
        sent = start_exchange(x, axis, block_id, "reduce_scatter")
        return sent.then(partial(torch.sum, dim=0, dtype=dtype))
    x, num_bytes = x.contiguous(), x.nbytes - x[0].nbytes
    out = torch.empty_like(x[0])
    launch = partial(_REDUCE_SCATTER, out.view(-1), x.view(-1), group=axis.group, async_op=True)
    return _start("reduce_scatter", x, axis, block_id, num_bytes, launch, out)


_SMALL_ELEMENTS = 1 << 14
"""On gloo sums of fewer elements go as one all-to-all: half the time of its all-reduce."""


def all_reduce(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """Sum over ranks of ``x``, a new tensor of its shape; the same bits on every rank."""
    if waits_on_host(axis) and x.numel() < _SMALL_ELEMENTS:
        num_bytes = 2 * x.nbytes * (axis.size - 1) // axis.size
        copies = x.unsqueeze(0).expand(axis.size, *x.shape)
        parts = start_exchange(copies, axis, block_id, "all_reduce", num_bytes).wait()
        return parts.sum(0, dtype=x.dtype)
    out = x.clone(memory_format=torch.contiguous_format)
    return all_reduce_in_place(out, axis, {block_id: x.nbytes})


def all_reduce_in_place(x: Tensor, axis: Axis, shares: Mapping[int, int]) -> Tensor:
    """Sum over ranks of ``axis`` into ``x``, on behalf of several blocks.

    Args:
        shares: block id -> how many of the bytes of ``x`` are the block's.
    """
    total: Tensor = start_all_reduce(x, axis, shares).wait()
    return total


def start_all_reduce(x: Tensor, axis: Axis, shares: Mapping[int, int]) -> Pending:
    """Start ``all_reduce_in_place`` of ``x``, booked to the blocks of ``shares``."""
    first = next(iter(shares))
    for block_id, num_bytes in shares.items():
        block = traffic(axis, block_id)
        block.sent_bytes["all_reduce"] += 2 * num_bytes * (axis.size - 1) // axis.size
        block.calls["all_reduce"] += int(block_id != first)
    launch = partial(dist.all_reduce, x, group=axis.group, async_op=True)
    return _start("all_reduce", x, axis, first, 0, launch, x)


def broadcast(x: Tensor, axis: Axis, root: int, block_id: int) -> Pending:
    """Start sending ``x`` of rank ``root`` into ``x`` of all ranks, which is the result."""
    source = dist.get_process_group_ranks(axis.group)[root]
    launch = partial(dist.broadcast, x, source, group=axis.group, async_op=True)
    sent = x.nbytes * (axis.size - 1) if axis.rank == root else 0
    return _start("broadcast", x, axis, block_id, sent, launch, x, root=root)


def reduce_to(x: Tensor, axis: Axis, root: int, block_id: int) -> Pending:
    """Start summing ``x`` over ranks of ``axis`` into ``x`` of rank ``root``; on other ranks ``x``
    holds unspecified values."""
    target = dist.get_process_group_ranks(axis.group)[root]
    launch = partial(dist.reduce, x, target, group=axis.group, async_op=True)
    sent = x.nbytes if axis.rank != root else 0
    return _start("reduce", x, axis, block_id, sent, launch, x, root=root)


def ring_exchange(x: Tensor, axis: Axis, block_id: int) -> Pending:
    """Start sending ``x`` to the next rank of ``axis`` and receiving its like from the one before,
    booked to ``block_id``.

    ``wait()`` gives what was received; ``x`` must not be written before that.
    """
    ranks = dist.get_process_group_ranks(axis.group)
    to, source = ranks[(axis.rank + 1) % axis.size], ranks[axis.rank - 1]
    x = x.contiguous()
    out = torch.empty_like(x)
    launch: Callable[[], Any]
    if waits_on_host(axis):
        # its point-to-point takes ten times as long for small messages as an uneven all-to-all
        arrive, leave = ([x.numel() * (r == peer) for r in ranks] for peer in (source, to))
        launch = partial(start_all_to_all, out.view(-1), x.view(-1), arrive, leave, axis)
    else:
        sides = (dist.isend, x, to), (dist.irecv, out, source)
        ops = [dist.P2POp(*side, axis.group) for side in sides]
        launch = partial(dist.batch_isend_irecv, ops)
    return _start("ring_exchange", x, axis, block_id, x.nbytes, launch, out)
