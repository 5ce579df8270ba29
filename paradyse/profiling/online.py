"""Plans that follow the run: what blocks really take is fed back to the planner.

One training call in ``SAMPLE_EVERY`` of a plan at a scale of lengths is watched: clocks at the
edges of every block, which then cannot run together, so that a short call takes longer. With a
profile it is one in ``SAMPLE_PROFILED``, once any time is known, as memory is not watched before.
Where that told nothing new it is half as often, down to one in ``SAMPLE_AT_LEAST``, until a variant
of the plan takes another time there.
Memory does not drift as times do: it is watched once for every variant and scale, and again when a
call is longer than those before. Every ``REFRESH_EVERY`` calls the ranks agree, in one small
message, on what the slowest of them took and the fullest of them held, against what was predicted
(``corrections``); plans are chosen anew where that changed. Clocks and the message's answer are
read ``SETTLE`` calls after they were started, so that the host does not wait for the device.

Memory is read off the allocator on CUDA, whose statistics are left as they are for others to read:
the peak between two edges is known where it is the highest so far, and is else taken for what was
held at them. The CPU's allocator keeps none: there autograd's hooks tell what backward needs, and
workspace stays as predicted; a rank on which the user's own hooks take what is saved, to compress
it or to move it elsewhere, measures nothing.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from paradyse.distributed import collectives
from paradyse.distributed.device_events import event_on
from paradyse.planning.attribution import caused_s
from paradyse.planning.corrections import (
    CONSTANTS,
    FLOOR,
    OF_REST,
    RATIOS,
    REST_SAVED,
    REST_WORKSPACE,
    SAVED,
    STATIC,
    TIME,
    WORKSPACE,
    Corrections,
    num_tokens,
    scale_of,
)
from paradyse.planning.costs import TimeParts
from paradyse.planning.splits import Splits
from paradyse.planning.time_ratios import OF_PRIOR, OF_PROFILE, Key, TimeRatios
from paradyse.profiling.marks import (
    END,
    GRAD,
    START,
    Clock,
    DeviceMemory,
    SavedMemory,
    Watch,
    WatchedFrame,
    find_spans,
    mark_ids,
    memory_of,
)
from paradyse.runtime.frame_maker import MakeFrame
from paradyse.runtime.program import Program, StepConstants
from paradyse.torch_private import at_end_of_backward, saved_tensors_hooks_are_free
from paradyse.types import HEAD, Plan, Workload
from paradyse.weights.sharded_tensor import lies_on_host, rows_here

log = logging.getLogger(__name__)

SAMPLE_EVERY, SAMPLE_PROFILED, SAMPLE_AT_LEAST = 4, 16, 32
"""One training call in so many of a plan at a scale of lengths is watched: at first without a
profile, at first with one, and where times have long been as they are."""

REFRESH_EVERY = 16
"""Training calls between two agreements."""

SETTLE = 4
"""How many calls the host may be ahead of the device."""

WARM_UP = 2
"""A plan is watched after this many calls, since the first ones compile."""

TIME_CHANGE, MEMORY_CHANGE = 0.05, 0.01
"""Plans are chosen anew once a time, or bytes, differ by more than this share from those that they
were chosen by."""

Slot = tuple[str, Hashable, int]
"""A quantity, what has it, and the scale or number of tokens (``corrections.Rows``)."""


@dataclass
class StepWatch(Watch):
    """The marks of one call and of its backward, at whose end it closes."""

    closed: bool = False
    _ending: bool = False

    def mark(self, at: str, block: int = -1) -> None:
        """Add a mark of kind ``at`` for ``block``, unless the step is over."""
        if self.closed:  # a second backward through the same graph
            return
        super().mark(at, block)
        if at == GRAD and not self._ending:
            self._ending = True
            at_end_of_backward(self.close)

    def close(self) -> None:
        """End the step: after backward, or when the next step begins if there was none."""
        if not self.closed:
            super().mark(END)
            self.closed = True


@dataclass
class _Record:
    """One watched call."""

    program: Program
    call: int
    workload: Workload
    plan: Plan
    memory: bool
    """Whether memory was watched; else time."""
    watch: StepWatch | None = None
    """None where this rank could not watch, or the call failed."""
    missing_bytes: int = 0
    """Bytes of gradients that were not there when the call began: they count as static."""


class _Agreement:
    """A message under way with what ``records`` tell."""

    def __init__(self, slots: dict[Slot, float], records: Sequence[_Record], program: Program):
        self.slots, self.records = tuple(slots), records
        device, on_cuda = program.device, program.device.type == "cuda"
        mine = torch.tensor(list(slots.values()), dtype=torch.float64, pin_memory=on_cuda)
        mine = mine.to(device, non_blocking=True)
        self._sent = collectives.start_all_gather(mine, program.ranks, collectives.ONLINE)
        self._event: Any = None
        if on_cuda:  # the copy waits on the device for the message, and the host for neither
            self._answer = self._sent.wait().to("cpu", non_blocking=True)
            self._event = event_on(device)

    def wait(self) -> dict[Slot, float]:
        """The largest value of any rank."""
        if self._event is None:
            self._answer = self._sent.wait()
        else:
            self._event.synchronize()
        return dict(zip(self.slots, self._answer.amax(0).tolist(), strict=True))


class Feedback:
    """Watches a program, in all captures of it, and corrects the costs of its planners.

    Args:
        splits: has the planners of the program.
        forget: called where plans are to be chosen anew, on all ranks at the same call.
    """

    def __init__(self, splits: Splits, forget: Callable[[], None]) -> None:
        self.splits, self.forget = splits, forget
        self.measured: dict[tuple[str, Hashable], dict[int, float]] = {}
        """What the ranks agreed on (``Corrections.measured``)."""
        self.times = TimeRatios(OF_PROFILE if splits.planner.cost_model else OF_PRIOR)
        self._used = self._snapshot()
        """The corrections that the present plans were chosen by."""
        self._calls = 0
        self._runs: Counter[Plan] = Counter()
        self._at_scale: Counter[tuple[Plan, int]] = Counter()
        self._sample_first = SAMPLE_PROFILED if splits.planner.cost_model else SAMPLE_EVERY
        self._sample_every: dict[tuple[Plan, int], int] = {}
        """Plan and scale -> one call in so many is watched, if not in ``_sample_first``."""
        self._known: dict[tuple[Key, int], int] = {}
        """Key and scale -> the most tokens whose memory was watched."""
        self._records: list[_Record] = []
        """Records since the last agreement."""
        self._agreement: _Agreement | None = None
        self.pauses: Callable[[], bool] = lambda: False
        """Whether the present call is not to be watched."""
        self._keys, self._time_keys = cache(self._find_keys), cache(self._find_time_keys)

    def run(
        self,
        program: Program,
        args: Sequence[Any],
        constants: StepConstants,
        workload: Workload,
        make: MakeFrame,
    ) -> Any:
        """The program's call, watched if it is its turn.

        Args:
            program: as captured for this call.
            args: the graph's inputs.
            constants: of the call's sizes and plan.
            workload: what the plan was made for.
            make: makes the frame of a call that is not watched here.
        """
        self._calls += 1
        if self._records and (last := self._records[-1].watch) is not None:
            last.close()
        if self._calls % REFRESH_EVERY == 0:
            self._start_agreement(program)
        elif self._calls % REFRESH_EVERY == SETTLE:
            self._finish_agreement()
        plan = Plan(constants.strategies, constants.head, program.ctx.at_rest)
        at = plan, scale_of(workload)
        first = SAMPLE_EVERY if self.times.empty else self._sample_first
        self._runs[plan] += 1
        self._at_scale[at] += 1
        record = None
        if self._runs[plan] > WARM_UP and not self.pauses():
            if self._is_new(plan, workload):
                record = self._watch_memory(program, args, workload, plan)
            elif self._at_scale[at] % self._sample_every.get(at, first) == 0:
                clock = Clock(program.device)
                record = _Record(program, self._calls, workload, plan, False, StepWatch(clock))
        if record is not None:
            self._records.append(record)
        watch = None if record is None else record.watch
        if record is None or watch is None:
            frame = make(program, args, constants)
            if record is not None:  # messages come as on ranks that can watch memory
                frame.gathering.shelf.holds = frame.gathering.streams.ahead = frame.fuses = False
            return frame.run()
        watch.mark(START)
        try:
            with watch.probe:
                return WatchedFrame(watch, program, args, constants).run()
        except BaseException:
            record.watch = None
            watch.close()
            raise

    def restart(self, first_has: Callable[[Any], Any]) -> None:
        """Count calls anew, and go on from what the first rank has measured, on all ranks: some may
        have counted a call, or taken over what it told, that others did not.

        Args:
            first_has: what the first rank gives as an object, on every rank.
        """
        self.measured, self.times = first_has((self.measured, self.times))
        self._calls = 0
        for counted in (self._runs, self._at_scale, self._sample_every, self._known, self._records):
            counted.clear()
        self._agreement = None
        self._used = self._snapshot()
        self.splits.correct(self._used)

    def _find_keys(self, plan: Plan) -> Mapping[Key, Sequence[int]]:
        """Keys of a plan's variants, each with the places of its blocks; the head is the last."""
        return _places(self.splits.planner_of(plan).keys(plan))

    def _find_time_keys(self, plan: Plan) -> Mapping[Key, Sequence[int]]:
        """The same of what times are known by."""
        return _places(self.splits.planner_of(plan).time_keys(plan))

    def _is_new(self, plan: Plan, workload: Workload) -> bool:
        """Whether memory is to be watched: once it is known that backward follows calls."""
        if self.times.empty:
            return False
        scale, tokens = scale_of(workload), num_tokens(workload)
        return any(self._known.get((k, scale), 0) < tokens for k in self._keys(plan))

    def _watch_memory(
        self,
        program: Program,
        args: Sequence[Any],
        workload: Workload,
        plan: Plan,
    ) -> _Record:
        scale, tokens = scale_of(workload), num_tokens(workload)
        for key in self._keys(plan):
            self._known[key, scale] = max(tokens, self._known.get((key, scale), 0))
        record = _Record(program, self._calls, workload, plan, True)
        record.missing_bytes = _missing_gradients(args)
        if program.device.type == "cuda":
            record.watch = StepWatch(DeviceMemory(program.device, reset=False))
        elif saved_tensors_hooks_are_free():
            record.watch = StepWatch(SavedMemory(map(rows_here, args)))
        return record

    def _start_agreement(self, program: Program) -> None:
        """Send the others what was measured; every rank comes here at the same call."""
        old = [r for r in self._records if r.call <= self._calls - SETTLE]
        self._records = self._records[len(old) :]
        if slots := self._read(old):
            self._agreement = _Agreement(slots, old, program)

    def _finish_agreement(self) -> None:
        """Take over what the ranks agree on; every rank comes here at the same call."""
        if self._agreement is None:
            return
        agreed, records = self._agreement.wait(), self._agreement.records
        self._agreement = None
        parts = self._parts(records)
        for (quantity, of, at), latest in agreed.items():
            if latest <= 0:
                continue
            if quantity == TIME:
                assert isinstance(of, tuple)
                self.times.add(of, at, latest, parts[of, at])
            else:
                row = self.measured.setdefault((quantity, of), {})
                row[at] = max(row.get(at, latest), latest)
        for r in records:  # no rank could: to be watched again
            if r.memory and not agreed[REST_SAVED, None, num_tokens(r.workload)]:
                for key in self._keys(r.plan):
                    self._known.pop((key, scale_of(r.workload)), None)
        now, used = self._snapshot(), self._used
        changed = {slot for slot in agreed if _changed(*slot, now, used)}
        if changed:
            self._used = now
            self.splits.correct(now)
            self.forget()
            for plan, scale in [*self._sample_every]:
                if any((TIME, key, scale) in changed for key in self._time_keys(plan)):
                    del self._sample_every[plan, scale]
            what = ", ".join(sorted({quantity for quantity, _, _ in changed}))
            log.info("plans are chosen anew after call %d, as measured: %s", self._calls, what)
        else:
            for plan, scale in {(r.plan, scale_of(r.workload)) for r in records if not r.memory}:
                if any(agreed[TIME, key, scale] > 0 for key in self._time_keys(plan)):
                    every = 2 * self._sample_every.get((plan, scale), self._sample_first)
                    self._sample_every[plan, scale] = min(every, SAMPLE_AT_LEAST)

    def _snapshot(self) -> Corrections:
        measured = {of: dict(row) for of, row in self.measured.items()}
        return Corrections(measured, self.times.estimate())

    def _read(self, records: Sequence[_Record]) -> dict[Slot, float]:
        """What this rank saw in ``records``; 0 where it saw nothing. The slots are the same on all
        ranks."""
        times: dict[Slot, list[float]] = {}
        most: dict[Slot, float] = {}
        for r in records:
            if r.memory:
                most |= {slot: max(v, most.get(slot, v)) for slot, v in self._memory(r).items()}
            else:
                for slot, values in self._times(r).items():
                    times.setdefault(slot, []).extend(values)
        return most | {slot: statistics.median(v or [0.0]) for slot, v in times.items()}

    def _times(self, record: _Record) -> dict[Slot, list[float]]:
        """Measured over predicted seconds of the blocks whose forward and backward were seen."""
        keys, scale = self._time_keys(record.plan), scale_of(record.workload)
        watch, parts = record.watch, dict[int, list[float]]()
        if watch is None:
            return {(TIME, key, scale): [] for key in keys}
        assert isinstance(watch.probe, Clock)
        planner, own = self.splits.of(record.plan, record.workload)
        ids, points = mark_ids(record.program), planner.points(record.plan)
        at = {number: i for i, of in enumerate(ids) for number in of}
        seconds = watch.probe.read()
        for span in find_spans(watch.marks):
            if watch.marks[span.last][0] != END:  # else its end was not seen
                parts.setdefault(at[span.block], []).append(
                    seconds[span.exit] - seconds[span.first]
                )
        costs = [of[point] for of, point in zip(planner.predicted_costs(own), points)]
        # Forward and backward.
        whole = {i: sum(s) for i, s in parts.items() if len(s) == 2 * len(ids[i])}
        blocks = range(len(planner.blocks))
        if planner.sharded and all(i in whole for i in blocks):
            told = caused_s([whole[i] for i in blocks], [costs[i] for i in blocks])
            whole |= zip(blocks, told)
        return {
            (TIME, key, scale): [whole[i] / costs[i].time_s for i in members if i in whole]
            for key, members in keys.items()
        }

    def _parts(self, records: Sequence[_Record]) -> dict[tuple[Key, int], TimeParts]:
        """What the predicted times of variants in ``records`` are made of, by scale."""
        found: dict[tuple[Key, int], TimeParts] = {}
        for r in records:
            planner, own = self.splits.of(r.plan, r.workload)
            costs, points = planner.predicted_costs(own), planner.points(r.plan)
            for key, (i, *_) in self._time_keys(r.plan).items():
                found[key, scale_of(r.workload)] = costs[i][points[i]].parts
        return found

    def _memory(self, record: _Record) -> dict[Slot, float]:
        """What the call held; 0 where it was not watched or had no backward."""
        keys, watch = self._keys(record.plan), record.watch
        scale, tokens = scale_of(record.workload), num_tokens(record.workload)
        slots: list[Slot] = [(quantity, key, scale) for quantity in RATIOS for key in keys]
        slots += [(quantity, None, tokens) for quantity in OF_REST]
        slots += [(quantity, None, 0) for quantity in CONSTANTS]
        found = dict.fromkeys(slots, 0.0)
        if watch is None or not any(what == GRAD for what, _ in watch.marks):
            return found
        probe = watch.probe
        assert isinstance(probe, DeviceMemory | SavedMemory)
        planner, own = self.splits.of(record.plan, record.workload)
        costs = planner.predicted_costs(own)
        ids, points = mark_ids(record.program), planner.points(record.plan)
        keeps = record.workload.keeps_gradients
        made = record.missing_bytes + planner.kept_bytes * keeps
        left = {n: of[p].left_bytes for of, p, ns in zip(costs, points, ids) for n in ns}
        held = memory_of(watch, probe.read(), left, made if isinstance(probe, DeviceMemory) else 0)
        for key, at in keys.items():
            cost, numbers = costs[at[0]][points[at[0]]], [i for k in at for i in ids[k]]
            saved = max(0.0, sum(held.saved_bytes[i] for i in numbers) / len(at))
            workspace = max(held.workspace_bytes[i] for i in numbers)
            if key[0] == HEAD:  # the last to save: what of it is saved and what is not is all one
                ratio = (saved + workspace) / max(1, cost.saved_bytes + cost.workspace_bytes)
                found[SAVED, key, scale] = found[WORKSPACE, key, scale] = ratio
            else:
                found[SAVED, key, scale] = saved / max(1, cost.saved_bytes)
                found[WORKSPACE, key, scale] = workspace / max(1, cost.workspace_bytes)
        found[REST_SAVED, None, tokens] = max(1.0, held.saved_bytes[-1])  # above 0: it was seen
        found[REST_WORKSPACE, None, tokens] = held.workspace_bytes[-1]
        if not keeps:  # what is kept may be more than predicted, and holds for these calls alone
            found[FLOOR, None, 0] = held.floor_bytes
            if isinstance(probe, DeviceMemory):
                found[STATIC, None, 0] = probe.first_bytes + record.missing_bytes
        return found


def _changed(quantity: str, of: Any, at: int, now: Corrections, used: Corrections) -> bool:
    """Whether a cost is known for the first time, or has become another one."""
    if quantity == TIME:
        if not (now.times.knows(of) and used.times.knows(of)):
            return now.times.knows(of)
        after, before = (c.times.ratio(of, at) for c in (now, used))
        return abs(after - before) > TIME_CHANGE * before
    if (quantity, of) not in now.measured:
        return False
    after, before = (c.value(quantity, of, at) for c in (now, used))
    return (quantity, of) not in used.measured or abs(after - before) > MEMORY_CHANGE * before


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Each of ``keys`` with all its places."""
    places: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return places


def _missing_gradients(args: Sequence[Any]) -> int:
    """Bytes of the gradients of the weights among ``args`` that are not there yet."""
    missing = (
        a for a in args if isinstance(a, torch.nn.Parameter) and a.requires_grad and a.grad is None
    )
    return sum(rows_here(a).nbytes for a in missing if not lies_on_host(a))
