"""Ranks compare what they are about to do, and with what, before any message depends on it.

A rank that skips a batch, reads logits alone or holds other weights sends other messages than the
rest: then they hang, abort, or train on a mixture of two batches. So before every forward, every
backward and every read of an output that is gathered late, ranks exchange one small message of
fixed size over a group of their own, a digest of a few facts. Where digests differ all ranks
exchange the facts themselves and raise the same error, and are in step again. What the others tell
is heard before the next message of any other kind, not at once: the host computes meanwhile.
Backward of what every rank computes whole sends nothing before it compares gradients, and tells of
itself with these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paradyse.distributed import collectives
from paradyse.distributed.axis import (
    Axis,
    GroupMesh,
    everyone_of,
    ranks_of,
    resolve_axis,
    resolve_replicas,
)
from paradyse.distributed.calls import Call
from paradyse.distributed.collectives import CollectiveError, Pending, Started, Watchers
from paradyse.distributed.control import Control, control_of, group_like, tell_all
from paradyse.distributed.facts import DOING, difference, digest
from paradyse.distributed.failures import (
    Dropped,
    Failure,
    RanksDisagreeError,
    catch_up,
    error_of,
    first_line,
    is_out_of_memory,
    place_of,
    started,
)
from paradyse.distributed.lanes import open_lanes
from paradyse.distributed.running_backward import ENDED, FAILED, RUNNING, Backward, doing_backward
from paradyse.torch_private import at_end_of_backward

T = TypeVar("T")


class Agreement:
    """What the ranks of one sequence axis compare.

    Args:
        axis: the sequence axis.
        mesh: the option; its ranks, replicas included, train together. None: those of ``axis``.
            Of a ``GroupMesh`` they are those of all groups, which compare every call.
    """

    def __init__(self, axis: Axis, mesh: Any = None) -> None:
        of_all = everyone_of(axis, mesh)
        self.ranks = ranks = ranks_of(axis)
        """Of the axis."""
        everyone = _ranks_of_mesh(mesh) or ranks
        axes = axis, resolve_replicas(mesh), *([of_all] if of_all is not axis else [])
        self._axes = [a for a in axes if a.size > 1]
        self._of_axis = of_all.session.of(_Agreements)
        self._in_group = of_all is not axis
        self._num_calls = self._of_axis.num_calls if self._in_group else {True: 0, False: 0}
        """Of calls that train, and of others."""
        self._leader = ranks[0]
        self._among = control_of(ranks) if len(ranks) > 1 else None
        """What carries plans from the first rank of the axis to the others."""
        some = control_of(everyone if self._in_group else ranks)
        self._control = {False: some, True: control_of(everyone)}
        """What carries comparisons, by whether all ranks of the mesh take part."""
        self._left: Callable[[], None] | None = None
        """What the others wait for since this rank failed."""
        for a in self._axes:
            a.session.of(_Senders).add(of_all.name)
            before = a.session.of(Started).before
            if self._of_axis.settle not in before:
                before.append(self._of_axis.settle)

    def begin(
        self,
        trains: bool,
        facts: Mapping[str, Any],
        parameters: Sequence[weakref.ref[nn.Parameter]] = (),
        common: Mapping[str, Any] | None = None,
    ) -> Call:
        """A call of the model, to be compared with the other ranks' before its first message.

        Args:
            trains: gradients will be averaged over all ranks of the mesh.
            facts: what errors call it -> a number or text that the ranks of the axis must share.
            parameters: what backward of the call may give gradients to.
            common: as ``facts``, of a call that trains: all ranks of the mesh must share them.
        Raises:
            CollectiveError: a message has failed before, so ranks are no longer in step.
        """
        if self._is_broken():
            raise CollectiveError(
                "a collective has failed before: the ranks are out of step. Start them again, from "
                "a checkpoint"
            )
        self._num_calls[trains] += 1
        kind = "training call" if trains else "call without gradients"
        name = f"{kind} {self._num_calls[trains]}"
        self.tell(f"calls the model ({name})", facts, trains, common if trains else None)
        call = self._of_axis.calls[name] = Call(self, name, trains, parameters)
        self._of_axis.call = call
        return call

    def compare(
        self,
        doing: str,
        facts: Mapping[str, Any],
        together: bool = False,
        common: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare what this rank is ``doing`` and ``facts`` with the other ranks'.

        Args:
            doing: shared by all ranks of the mesh if ``together``, else by those of the axis.
            facts: shared by the ranks of the axis.
            common: shared as ``doing`` is.
        Raises:
            ValueError: on every rank, naming what differs, which rank holds what, and the way out.
            DroppedCallError: a rank has failed.
        """
        self.tell(doing, facts, together, common)
        self._of_axis.settle()

    def tell(
        self,
        doing: str,
        facts: Mapping[str, Any],
        together: bool = False,
        common: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
        number: int = 0,
    ) -> None:
        """The first half of ``compare``: its errors come before this rank's next message, or from
        its next comparison.

        Args:
            doing, facts, together, common: as of ``compare``.
            failure: of this rank.
            number: may be another one on other ranks, which ``hear`` then says.
        """
        self._of_axis.settle()
        if self._left is not None:
            left, self._left = self._left, None
            left()
        shared = {DOING: doing, **(common or {})}
        control = self._control[together]
        _name(control.axis, doing)
        row = [self._leader, digest(shared), digest(facts), failure is not None, number]
        mine = torch.tensor(row, device="cpu")  # whatever the default device
        table = collectives.start_all_gather(mine, control.axis, collectives.AGREEMENT)
        self._of_axis.told = _Told(self, control, shared, facts, failure, table)

    def fail(self, failure: Failure, together: bool) -> NoReturn:
        """Tell the other ranks of the ``failure`` of this one.

        Args:
            together: as of ``compare``.
        Raises:
            DroppedCallError: what all ranks are told.
        """
        self._control[together].alarm.ring()
        self.tell(f"failed in {failure.doing}", {}, together, failure=failure)
        self._of_axis.settle()
        raise AssertionError("all ranks drop a call that one has failed in")

    def listen(self) -> None:
        """Asked while this rank waits for a message.

        Raises:
            DroppedCallError: another rank has failed, so it will not come.
        """
        for together, control in self._control.items():
            if control.alarm.rings():
                self.compare("waits for a message", {}, together)

    def watch_backward(self, call: Call) -> Backward:
        """The backward under way, of ``call``; from within it."""
        for running in self._running(call):
            return running
        backward = Backward(call)
        self._of_axis.backwards.add(backward)
        at_end_of_backward(backward)
        return backward

    def _running(self, call: Call) -> list[Backward]:
        return [b for b in self._of_axis.backwards if b.call is call and b.state == RUNNING]

    def compare_in_backward(self, call: Call, number: int) -> bool:
        """Tell the others of the backward under way, of ``call``, where they were not told of it,
        and whether all ranks of the axis have this ``number`` then; False where they were told.

        Raises:
            ValueError, DroppedCallError: as ``compare``.
        """
        untold = [b for b in self._running(call) if b.outputs]
        for backward in untold:
            self._tell_begin(backward, number)
        return self._of_axis.settle() and bool(untold)

    def _tell_begin(self, backward: Backward, number: int = 0) -> None:
        outputs, backward.outputs = backward.outputs, []
        doing = doing_backward(backward.call, outputs)
        self.tell(doing, {}, backward.call.trains, backward.common, number=number)

    def near_end_of_backward(self, call: Call) -> None:
        """This rank has computed all of the backward under way, of ``call``, and is about to wait
        for gradients: the others are told meanwhile.

        Raises:
            DroppedCallError: another rank has failed.
        """
        for b in self._running(call):
            if not b.has_told:
                self._tell_end(b)

    def _tell_end(self, backward: Backward) -> None:
        backward.has_told = True
        if backward.outputs:
            self._tell_begin(backward)
        self.tell(f"ends backward of {backward.call.name}", {}, backward.call.trains)

    def end_backward(self, backward: Backward) -> None:
        """``backward`` has come to its end on this rank.

        Raises:
            DroppedCallError: not so on another rank.
        """
        if not backward.has_told:
            self._tell_end(backward)
        self._of_axis.settle()
        self._of_axis.end_backwards(ENDED)

    def fail_backward(self, call: Call, out_of_memory: bool) -> None:
        """The backward under way, of ``call``, failed on this rank, ``out_of_memory`` or not.

        Raises:
            DroppedCallError: what the other ranks are told.
            CollectiveError: they are gone.
        """
        if self._is_broken():
            return
        sent = self._axes[0].session.of(Started)
        place = f" after a message{place_of(self._axes[0], sent.block_id)}"
        doing, error = f"backward of {call.name}", "its own error says more"
        heard = resolve_axis().session.of(Dropped).heard
        own = Failure(dist.get_rank(), doing, place, error, out_of_memory, call=call.name)
        told = heard or own
        self.fail(replace(told, holds_graph=True), call.trains)

    @property
    def num_dropped(self) -> int:
        """How often the ranks have dropped a call: until then some may have counted it."""
        return self._of_axis.num_dropped

    @property
    def all_replicas_call(self) -> bool:
        """Whether the call under way trains, so that all ranks of the mesh make one."""
        call = self._of_axis.call
        return call is not None and call.trains

    def first_has(self, mine: T) -> T:
        """What the first rank of the axis gives as ``mine``, a small object, on every rank."""
        self._of_axis.settle()
        return mine if self._among is None else tell_all(mine, self._among.axis)[0]

    def first_says(self, numbers: Sequence[int]) -> list[int]:
        """What the first rank of the axis gives as ``numbers``, its choice of a plan, as many on
        every rank."""
        return self._all_say("chooses a plan", numbers)[0]

    def most_of(self, doing: str, numbers: Sequence[int]) -> list[int]:
        """The most that any rank of the axis gives of each of ``numbers``, as many on every rank.

        Args:
            doing: what the ranks do meanwhile, for errors.
        """
        return [max(of) for of in zip(*self._all_say(doing, numbers), strict=True)]

    def _all_say(self, doing: str, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank of the axis gives as ``numbers``."""
        self._of_axis.settle()
        if self._among is None:
            return [list(numbers)]
        control = self._among.axis
        _name(control, doing)
        mine = torch.tensor(numbers, device="cpu")
        said: list[list[int]] = collectives.all_gather(
            mine, control, collectives.AGREEMENT
        ).tolist()
        return said

    def _is_broken(self) -> bool:
        some = [*self._control.values(), *([self._among] if self._among else [])]
        axes = (*self._axes, *(control.axis for control in some))
        return any(a.session.of(Started).broken for a in axes)

    def hear(self, told: _Told) -> bool:
        """The second half of ``compare``, after ``told`` was told; whether all ranks of the axis
        have told the same number.

        Raises:
            ValueError, DroppedCallError: as ``compare``.
        """
        control = told.control
        table = told.table.wait().tolist()
        rows = {tuple(row[:-1]) for row in table}
        if any(failed for *_, failed in rows):
            self._drop_call(control, told.failure)
        if len({r[1] for r in rows}) == 1 and len(rows) == len({r[0] for r in rows}):
            return len({row[-1] for row in table if row[0] == self._leader}) == 1
        mine = self._leader, told.shared, {**told.shared, **told.facts}, self._num_calls
        all_told = tell_all(mine, control.axis)
        self._count_on(numbers for *_, numbers in all_told)
        control.alarm.reset()  # a rank may have failed before it heard of this
        self._of_axis.end_backwards(FAILED)
        self._of_axis.num_dropped += 1
        resolve_axis().session.of(Dropped).note(control.axis.group)
        raise RanksDisagreeError(
            difference(all_told, dist.get_process_group_ranks(control.axis.group))
        )

    def _count_on(self, all_numbers: Iterable[Mapping[bool, int]]) -> None:
        """Count calls from where the rank is that has counted the most: some may have failed, or
        done something else, before a call that others have begun."""
        told = list(all_numbers)
        for trains in self._num_calls:
            self._num_calls[trains] = max(numbers[trains] for numbers in told)

    def _drop_call(self, control: Control, failure: Failure | None) -> NoReturn:
        """Every rank of ``control`` comes here where one or several have a ``failure``."""
        counted = self._in_group, self._num_calls
        told = tell_all((failure, started(self._axes), counted), control.axis)
        self._count_on(numbers for *_, (group, numbers) in told if group == self._in_group)
        self._of_axis.end_backwards(FAILED)
        failures = [f for f, *_ in told if f is not None]
        catch_up_with = [messages for _, messages, _ in told]
        may_wait = failure is not None and failure.holds_graph
        try:
            self._catch_up(control, failures, catch_up_with, may_wait)
        except MemoryError:
            self._left = partial(self._catch_up, control, failures, catch_up_with)
        self._of_axis.num_dropped += 1
        resolve_axis().session.of(Dropped).note(control.axis.group, failures)
        raise error_of(failures)

    def _catch_up(
        self, control: Control, failures: list[Failure], told: list[Any], may_wait: bool = False
    ) -> None:
        """Be in step again.

        Args:
            told: by every rank, of its messages.
            may_wait: the others can wait until this rank has let go of what it computed.
        Raises:
            MemoryError: there is no memory for a message, and the others wait.
            CollectiveError: on all ranks: there is none, and one of them cannot wait.
        """
        problem = ""
        try:
            for axis in self._axes:
                catch_up(axis, told)
        except RuntimeError as e:
            if may_wait and is_out_of_memory(e):
                raise MemoryError from e
            problem = first_line(e)
        if problems := [p for p in tell_all(problem, control.axis) if p]:
            for axis in self._axes:
                axis.session.of(Started).broken = True
            raise CollectiveError(
                f"{error_of(failures)}. Then a rank could not even take part in the messages under "
                f"way ({problems[0]}): start all ranks again"
            )
        control.alarm.reset()
        here = [f.call for f in failures if f.out_of_memory and not f.elsewhere]
        for name in dict.fromkeys(here):  # in the order of ranks, on all of them
            if (call := self._of_axis.calls.get(name)) is not None:
                call.out_of_memory()


class _Told(NamedTuple):
    """What this rank has told the others, and has not heard of them yet."""

    by: Agreement
    control: Control
    shared: Mapping[str, Any]
    facts: Mapping[str, Any]
    failure: Failure | None
    table: Pending


class _Senders(set[str]):
    """Names of the sequence axes whose calls send messages over an axis: itself, or its replicas'.
    Axes of the same ranks share what carries alarms, so one of them must not hear another's."""


class _Agreements(dict[tuple[Any, ...], Agreement]):
    """Those of one axis, by its name and the ranks that train together; with those of groups whose
    weights lie over the axis, of which this rank is in one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None
        """The latest of any of them."""
        self.calls: weakref.WeakValueDictionary[str, Call] = weakref.WeakValueDictionary()
        """Those whose backward may still come, by name."""
        self.num_dropped = 0
        """How often ranks have dropped a call."""
        self.backwards: weakref.WeakSet[Backward] = weakref.WeakSet()
        self.told: _Told | None = None
        self.num_calls = {True: 0, False: 0}
        """Of calls of groups whose weights lie over the axis, as ``Agreement`` counts them."""

    def settle(self) -> bool:
        """Hear what the others tell, where this rank has told them something, and whether all have
        told the same number.

        Raises:
            ValueError, DroppedCallError: as ``Agreement.compare``.
        """
        told, self.told = self.told, None
        return told is not None and told.by.hear(told)

    def end_backwards(self, state: str) -> None:
        """Those under way are over, with ``state``."""
        for b in self.backwards:
            b.state = state if b.state == RUNNING else b.state


def current_call(axis: Axis) -> Call | None:
    """The latest call of a model over ``axis``; None where ranks are not compared."""
    return axis.session.of(_Agreements).call


def agreement_of(axis: Axis, mesh: Any = None) -> Agreement | None:
    """The agreement of ``axis``, of the option ``mesh``; None where there is one rank. All ranks of
    the mesh ask for it."""
    of_all = everyone_of(axis, mesh)
    if of_all.size == 1:
        return None
    # A group's by its own ranks: of one axis of replicas all have the same.
    key = (axis.name, *_ranks_of_mesh(mesh))
    known = of_all.session.of(_Agreements)
    if key not in known:
        if not known:
            watchers, listen = resolve_axis().session.of(Watchers), partial(_listen, of_all)
            watchers.append(listen)
            of_all.session.at_end.append(partial(watchers.remove, listen))
        known[key] = Agreement(axis, mesh)
        if axis.size > 1:
            open_lanes(axis, partial(group_like, axis.group))
    return known[key]


def _ranks_of_mesh(mesh: Any) -> tuple[int, ...]:
    """All ranks that train together by the option ``mesh``; none where it is None."""
    if isinstance(mesh, GroupMesh):
        return ranks_of(mesh.everyone)
    return tuple(mesh.mesh.flatten().tolist()) if mesh is not None else ()


def _listen(axis: Axis, waits: Axis) -> None:
    """While this rank ``waits`` for a message over that axis."""
    senders, call = waits.session.of(_Senders), current_call(axis)
    if call is not None and (axis.name in senders or not senders):
        call.agreement.listen()


def compare(axis: Axis, doing: str) -> None:
    """Compare what this rank is ``doing`` with the other ranks of ``axis``.

    Raises:
        ValueError: as ``Agreement.compare``.
    """
    agreement = agreement_of(axis)
    if agreement is not None:
        agreement.compare(doing, {})


def _name(control: Axis, doing: str) -> None:
    """Have errors of messages over ``control`` say what ranks were ``doing``."""
    collectives.traffic(control, collectives.AGREEMENT).name = f"agreement: {doing}"
