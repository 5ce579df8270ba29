"""Batches of mixed lengths, planned one ahead: each rank gets its share of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import Axis, check_group, device_of, resolve_axis
from paradyse.distributed.together import Together
from paradyse.mixed.ahead import Ahead
from paradyse.mixed.group_meshes import GroupMeshes
from paradyse.mixed.learnt_ways import LearntWays
from paradyse.mixed.sources import Batch, Data, Dataset, Loader, Source
from paradyse.mixed.step_plan import static_steps
from paradyse.mixed.step_reports import MixedReport, reports_of
from paradyse.mixed.ways import StepPlan, Way
from paradyse.mixed.ways_file import read_ways
from paradyse.token_scores import IGNORED


@dataclass(frozen=True)
class Share:
    """What a rank does in one micro-batch, with the other ranks of its group."""

    ranks: range
    """The group."""
    calls: tuple[dict[str, Tensor], ...]
    """Keyword arguments of a call of the model each, equal on all ranks of the group."""
    num_targets: tuple[int, ...]
    """Labels of each call that its loss is the mean over; at least one."""
    seeds: tuple[int, ...]
    """Of each call's random numbers: they depend on the step and on the sequences in it."""
    group: int = -1
    """The group's number among those of the step's plan; -1: it stands in none."""
    idle: tuple[dict[str, Tensor], ...] = ()
    """Calls of this rank by itself that count for nothing, behind ``calls``: with sharded weights
    every rank takes part in the messages of as many calls as the group with the most."""


@dataclass
class MixedStep:
    """A batch, as this rank sees it."""

    plan: StepPlan
    """Of all ranks."""
    indices: tuple[int, ...]
    """Of the batch's sequences: into the dataset, or their numbers among those of an epoch."""
    shares: tuple[Share, ...]
    """Of this rank, one for each micro-batch; without ``calls`` where it has nothing to do."""
    num_targets: int
    """Labels of the whole batch that its loss is the mean over."""
    loss: Tensor | None = None
    """The mean over all of them, once the step's gradients have been summed."""
    weights: str = ""
    """How weights lie at rest by the file of ways; "": there is none, or they may lie anyhow."""
    lengths: tuple[int, ...] = ()
    """Tokens of each of ``indices``."""
    ways: tuple[Way, ...] = ()
    """Of groups, that it was planned by."""
    report: MixedReport | None = None
    """What each group did and took, once the step's gradients have been summed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(self.lengths)


class MixedBatches:
    """Batches of about as many tokens each, whose sequences keep their lengths: nothing is padded.

    ``MixedBatches(loader, ways=ways)`` takes the batches that a loader gives: lists of samples, or
    padded or packed ones, which ``sequences_of`` takes apart. Every rank goes through the loader,
    and has to be given the same batches.

    The first rank plans (``plan_step``), in a process of its own while the batch before trains, and
    tells the others. Every pass over it is an epoch of its own order. Of the last sequences of an
    epoch, which are fewer, a smaller batch is made.

    Args:
        dataset: with a length, and for each index a dict of "input_ids" [S] int64 and, if they are
            others, "labels" [S] int64; padding by "attention_mask" is cut off. The first rank reads
            all sequences for their lengths, each rank those that it computes. Without
            ``tokens_per_step``: a loader of batches.
        tokens_per_step: of all sequences of a batch together, at most, unless one alone has more.
            None: as many as are in each of the loader's batches.
        ways: what groups can do, or the path of a file of ways (``paradyse plan --lengths-from``),
            made for weights that lie as those of the model. Degrees may be any number of ranks up
            to all.
        causal: labels are shifted by the model: a token's is that of the next one. Sequences that
            are packed have the first label ignored.
        pack: sequences of a group are one call [1, S], told apart by "position_ids"; else each
            length is one [B, S], for models that do not find documents in positions.
        apart: each sequence is a call of its own. What dropout drops of it is then a function of
            ``seed``, the step and the sequence alone, whatever group computes it; short sequences
            take longer so. Else it also depends on what is in one call with it.
        shuffle: whether each epoch has another order; else the dataset's. A loader has its own.
        seed: of the order, and of dropout.
        limit_s: seconds for each plan.
        learn: correct ``ways`` by what groups take while the model trains. Plans then depend on
            this machine's times; losses and gradients do not.
    Raises:
        ValueError: the dataset has no length, a number makes no sense, a file has no ways, or none
            has a degree that the ranks can have.

    Example:

        batches = paradyse.MixedBatches(dataset, tokens_per_step=1 << 20, ways=ways)
        groups = paradyse.MixedModel(model)
        for step in batches:
            for loss in groups.losses(step):  # this rank's micro-batches
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        dataset: Data | Iterable[Any],
        *,
        tokens_per_step: int | None = None,
        ways: Sequence[Way] | str | Path,
        causal: bool = True,
        pack: bool = True,
        apart: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        limit_s: float = 5.0,
        learn: bool = True,
    ):
        self.dataset = dataset
        self._source: Source = (
            Loader(dataset)
            if tokens_per_step is None
            else Dataset(dataset, tokens_per_step, shuffle, seed)
        )
        self.causal, self.pack, self.apart = causal, pack, apart
        self.seed = seed
        self.limit_s = limit_s
        check_group("MixedBatches")
        self._axis = resolve_axis()
        size, self.weights = self._axis.size, ""
        if isinstance(ways, str | Path):
            ways, self.weights = read_ways(ways)
        self._learnt = LearntWays([way for way in ways if way.degree <= size])
        if not self.ways:
            raise ValueError(
                f"no way for groups of up to {size} ranks among {len(ways)}: give at least one"
            )
        self.learn = learn
        self._epoch, self._passed_over = 0, 0
        """The next pass over it, and how many batches it leaves out at its beginning."""
        self._next = 0, 0
        """The epoch and the number in it of the batch behind the last one that was given."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """What groups can do, as far as it is known by now: the next plan but one goes by it."""
        return self._learnt.ways

    def state_dict(self) -> dict[str, Any]:
        """How far it has come, in numbers to be saved with the model: the batch that comes behind
        the last one that was given. It is equal on all ranks."""
        epoch, batch = self._next
        return {"epoch": epoch, "batch": batch, **self._source.facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on where another one was when it gave ``state``, whatever the number
        of ranks. Call it on every rank. A loader is read from its beginning: it has to give what it
        gave in that epoch.

        Raises:
            ValueError: it is no ``state``, or one of batches in another order.
        """
        for name in "epoch", "batch":
            n = state.get(name)
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise ValueError(f"{name}={n!r}: give what state_dict() of MixedBatches gave")
        for name, own in self._source.facts.items():
            if state.get(name) != own:
                raise ValueError(
                    f"{name}={own!r}, but the state is of batches of {name}={state.get(name)!r}, "
                    "which are others: make MixedBatches as it was"
                )
        self._epoch, self._passed_over = self._next = state["epoch"], state["batch"]

    def __iter__(self) -> Iterator[MixedStep]:
        """The batches of the next epoch. Go through them on every rank alike.

        Raises:
            ValueError: on every rank, where a sequence is empty, fits no group, a batch has
                nothing to learn from, or ranks have loaded different states.
        """
        epoch, self._epoch = self._epoch, self._epoch + 1
        first, self._passed_over = self._passed_over, 0
        self._next = epoch, first
        together = Together(self._axis, f"epoch {epoch} of MixedBatches")
        together.compare({"the first batch": first})
        batches = self._source.batches(epoch)
        reads = together.is_first or self._source.is_read_by_all
        together.each(lambda: self._pass_over(batches, first) if reads else None)
        planned = self._planned(batches) if together.is_first else None
        follows = reads and not together.is_first
        try:
            for number in count(first):
                told = together.first(lambda: next(planned, None) if planned else None)
                if told is None:
                    self._next = epoch + 1, 0
                    return
                batch, plan, ways = told
                read = (lambda: next(batches, None)) if follows else None
                step = self._step(together, batch, plan, ways, number, read)
                self._next = epoch, number + 1
                yield step
                self._source.forget(step.indices)
                if self.learn and step.report is not None:
                    self._learnt.add(step.report)
        finally:
            if planned is not None:
                planned.close()
            batches.close()

    def _pass_over(self, batches: Iterator[Batch], num: int) -> None:
        """Leave out the next ``num`` of ``batches``."""
        for number in range(num):
            batch = next(batches, None)
            if batch is None:
                raise ValueError(
                    f"{number} batches in this epoch, but the state is of {num} batches that were "
                    "given: give the same data"
                )
            self._source.forget(batch[0])

    def arranged(self, plan: StepPlan, indices: Sequence[int], lengths: Sequence[int]) -> MixedStep:
        """A step by a ``plan`` of one's own. Call it on every rank alike.

        Args:
            indices: into the dataset, of the batch's sequences.
            lengths: tokens of each.
        Raises:
            ValueError: on every rank, where there is nothing to learn from.
        """
        together = Together(self._axis, "arranging a step of MixedBatches")
        batch = tuple(indices), tuple(lengths)
        return self._step(together, batch, plan, self.ways, 0)

    def explain(self, step: MixedStep) -> MixedReport:
        """Which sequences of ``step`` go where and what that is to take, with what it took where
        the step is over, beside one degree for all groups. Any rank may ask by itself."""
        report = step.report or MixedReport(
            tuple(reports_of(step.plan, step.indices, step.lengths)), step.plan.time_s
        )
        static = static_steps(step.lengths, step.ways, self._axis.size)
        return replace(report, static_s={d: plan.time_s for d, plan in static.items()})

    def _planned(self, batches: Iterator[Batch]) -> Any:
        """On the first rank: each of ``batches`` with its plan and the ways of it; the next one is
        planned meanwhile."""
        with Ahead(self.ways, self._axis.size, self.limit_s) as ahead:
            waiting, ways = list[tuple[Batch, tuple[Way, ...]]](), self.ways
            for batch in batches:
                if self.ways is not ways:
                    ways = self.ways
                    ahead.use(ways)
                ahead.ask(batch[1])
                waiting.append((batch, ways))
                if len(waiting) > 1:
                    of, by = waiting.pop(0)
                    yield of, ahead.take(), by
            for of, by in waiting:
                yield of, ahead.take(), by

    def _sequence(self, number: int) -> dict[str, Tensor]:
        """Tokens and labels of sequence ``number``; the first label of a causal one is no target,
        as other sequences may be packed before it."""
        sequence = self._source.sequence(number)
        if self.causal:
            labels = sequence["labels"].clone()
            labels[0] = IGNORED
            sequence = {**sequence, "labels": labels}
        return sequence

    def _step(
        self,
        together: Together,
        batch: Batch,
        plan: StepPlan,
        ways: tuple[Way, ...],
        number: int,
        follow: Callable[[], Batch | None] | None = None,
    ) -> MixedStep:
        """Step ``number`` of an epoch; ``follow`` reads ``batch`` here, where all ranks do."""
        indices, lengths = batch
        if self._axis.size > 1:
            of_all = (g.ranks for micro in plan.micro_batches for g in micro.groups)
            self._axis.session.of(GroupMeshes).make(of_all, self._axis)
        mine, idle = list[Share](), list[dict[str, Tensor]]()

        def read() -> tuple[int, list[int], int]:
            if follow is not None and follow() != batch:
                raise ValueError(f"batch {number} of this rank is another than the first rank's")
            mine.extend(self._shares(batch, plan, number))
            idle.extend(self._idle(indices))
            firsts = [s for s in mine if s.ranks.start == self._axis.rank]
            counted = sum(sum(s.num_targets) for s in firsts)
            return counted, [len(s.calls) for s in mine], self._source.checksum(indices)

        counted, num_calls, checksums = zip(*together.each(read), strict=True)
        others = [rank for rank, found in enumerate(checksums) if found != checksums[0]]
        if others:
            raise ValueError(
                f"batch {number} has other tokens on ranks {others} than on the first: give all "
                "ranks the same batches, such as by a loader with a generator of one seed"
            )
        if not sum(counted):
            raise ValueError(
                f"the batch of sequences {indices[:8]}... has no label that is a target: give "
                "longer sequences, more labels, or more tokens_per_step"
            )
        most = [max(numbers) for numbers in zip(*num_calls, strict=True)]
        shares = tuple(
            replace(s, idle=(*idle,) * (n - len(s.calls))) for s, n in zip(mine, most, strict=True)
        )
        return MixedStep(plan, indices, shares, sum(counted), None, self.weights, lengths, ways)

    def _shares(self, batch: Batch, plan: StepPlan, number: int) -> list[Share]:
        """This rank's of each micro-batch, before others are told how many calls it has."""
        indices, lengths = batch
        found, rank, numbers = list[Share](), self._axis.rank, count()
        for micro in plan.micro_batches:
            share = Share(range(rank, rank + 1), (), (), ())
            for g, n in zip(micro.groups, numbers):  # in this order: the end takes no number
                if rank not in g.ranks:
                    continue
                calls, seeds = [], []
                read = {indices[i]: self._sequence(indices[i]) for i in g.sequences}
                for i in g.sequences:
                    if (here := len(read[indices[i]]["input_ids"])) != lengths[i]:
                        raise ValueError(
                            f"sequence {indices[i]} of this rank's dataset has {here} tokens, and "
                            f"{lengths[i]} on the first rank: give all ranks the same sequences in "
                            "the same order, such as by a shuffle with a seed"
                        )
                for of in self._together(read):
                    calls.append(self._call([read[i] for i in of]))
                    seeded = random.Random(f"{self.seed} {self._epoch} {number} {of}")
                    seeds.append(seeded.getrandbits(62))
                targets = tuple(int((c["labels"] != IGNORED).sum()) for c in calls)
                if calls:
                    share = Share(g.ranks, tuple(calls), targets, tuple(seeds), n)
            found.append(share)
        return found

    def _idle(self, indices: tuple[int, ...]) -> list[dict[str, Tensor]]:
        """Arguments of the call that stands for none: a token twice, with a target twice, which
        may be no token; of the first sequence that has one."""
        for index in indices:
            sequence = self._sequence(index)
            (targets,) = (sequence["labels"] != IGNORED).nonzero(as_tuple=True)
            if len(targets):
                at = targets[:1].repeat(2)
                return [self._call([{name: x[at] for name, x in sequence.items()}])]
        return []

    def _together(self, sequences: Mapping[int, dict[str, Tensor]]) -> list[list[int]]:
        """Of ``sequences``, by their index into the dataset, those of each call of the model;
        without those that have no target."""
        labels = {i: s["labels"] for i, s in sequences.items()}
        kept = [i for i, of in labels.items() if bool((of != IGNORED).any())]
        if self.apart:
            return [[i] for i in kept]
        if self.pack:
            return [kept] if kept else []
        by_length: dict[int, list[int]] = {}
        for i in kept:
            by_length.setdefault(len(labels[i]), []).append(i)
        return list(by_length.values())

    def _call(self, sequences: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Arguments of the model for ``sequences``, which it computes together."""
        if self.pack:
            call = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
            places = [torch.arange(len(s["input_ids"])) for s in sequences]
            call["position_ids"] = torch.cat(places)
            call = {name: x.unsqueeze(0) for name, x in call.items()}
        else:
            call = {name: torch.stack([s[name] for s in sequences]) for name in sequences[0]}
        if call["input_ids"].shape[1] == 1:
            call = _with_another_token(call, self.pack)
        return {name: x.to(_device(self._axis)) for name, x in call.items()}


def _with_another_token(call: dict[str, Tensor], pack: bool) -> dict[str, Tensor]:
    """``call`` of one token a sequence, which nothing could share, with one more that no token sees
    and that is no target: packed, a sequence of its own; else padding."""
    more = {name: x.repeat(1, 2) for name, x in call.items()}
    more["labels"][:, 1] = IGNORED
    if not pack:
        more["attention_mask"] = torch.tensor([[1, 0]]).expand(more["labels"].shape).contiguous()
    return more


def _device(axis: Axis) -> torch.device:
    return device_of(axis.group)
