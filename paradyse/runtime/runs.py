"""Runs: blocks in a row that a frame computes as one compiled piece, once their plan is used often.

A block costs the host a fraction of a millisecond whatever it computes: a call of a compiled
function, and a node in autograd's graph with a second call in backward. Where the sequence is short
that is most of a step. Runs are compiled late, so that the first steps wait for nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx

from paradyse.distributed import collectives
from paradyse.distributed.session import Recent
from paradyse.graph.dropouts import has_dropout
from paradyse.passes.split_steps import BlockStep, Schedule, Step
from paradyse.strategies.base import SPLIT, WHOLE, Common, PieceVariant, Scope, StepContext
from paradyse.strategies.fused import FusedPiece, Member
from paradyse.types import Plan, Point

RUN_BLOCKS = 8
"""Blocks of a run at most: the inner compiler takes as much longer as a run is longer, and the cost
of a region is shared by as many blocks."""

FUSE_AFTER = 16
"""Calls under one plan before its runs are compiled."""

FUSED_TOKENS = 4096
"""Tokens of a rank up to which blocks run together. Beyond, the device has work for longer than the
host takes."""


class Uses:
    """How often each plan was used, by the model as a whole: ranks may have captured it at other
    calls than the rest, and send messages in another order where they run blocks together."""

    def __init__(self) -> None:
        self._count: Recent[Plan, int] = Recent()

    def add(self, plan: Plan) -> bool:
        """Whether ``plan``, which is used once more, was used often before."""
        often = self.often(plan)
        self._count[plan] = self._count.get(plan, 0) + 1
        return often

    def forget(self) -> None:
        """Count anew."""
        self._count.clear()

    def often(self, plan: Plan) -> bool:
        """Whether ``plan`` was used ``FUSE_AFTER`` times."""
        return self._count.get(plan, 0) >= FUSE_AFTER


class Run:
    """Consecutive blocks under one plan, as one compiled piece.

    Args:
        scope: what all variants of the capture share.
        steps: the blocks.
        members: what computes each.
        outputs: what is read of them afterwards.
    """

    def __init__(
        self,
        scope: Scope,
        steps: Sequence[BlockStep],
        members: Sequence[Member],
        outputs: Sequence[fx.Node],
    ):
        self.scope, self.steps, self.members, self.outputs = scope, steps, members, outputs
        name = f"{steps[0].block.label} to {steps[-1].block.label}"
        self.block_id = collectives.register_block(scope.axis, name)
        """What errors call it by."""
        self._fused: FusedPiece | None = None

    def __call__(self, contexts: Sequence[StepContext]) -> Any:
        """``outputs``, by the ``contexts`` of its steps."""
        if self._fused is None:
            self._fused = FusedPiece(self.scope, self.members, self.outputs, contexts)
        return self._fused(contexts)

    @property
    def is_made(self) -> bool:
        """Whether it has computed something."""
        return self._fused is not None

    def on_values(
        self, values: Mapping[fx.Node, Any], steps: Sequence[Common], sizes: Mapping[str, int]
    ) -> Any:
        """``outputs`` on one rank: see ``FusedPiece.on_values`` of ``values``, ``steps`` and
        ``sizes``."""
        assert self._fused is not None
        return self._fused.on_values(values, steps, sizes)


Unit = Step | Run
"""What a frame computes at a time."""


class Runs:
    """The units of a program under plans that are used often.

    Args:
        schedule: the steps.
        inner: the compiler's name.
        scope_of: what all variants share that may compute a step.
        variant: what computes a step by a strategy.
    """

    def __init__(
        self,
        schedule: Schedule,
        inner: str,
        scope_of: Callable[[Step], Scope],
        variant: Callable[[Step, str], Any],
    ) -> None:
        self.schedule, self.inner, self._scope_of, self._variant = (
            schedule,
            inner,
            scope_of,
            variant,
        )
        self._units: Recent[tuple[Any, ...], Sequence[Unit]] = Recent()

    def units(
        self,
        strategies: tuple[str, ...],
        sizes: Mapping[str, int],
        sums: frozenset[int] = frozenset(),
        apart: frozenset[int] = frozenset(),
    ) -> Sequence[Unit]:
        """The steps of a call, in order, those together that run as one.

        Args:
            strategies: per block, a strategy and its levers.
            sizes: "B", "S" and, on more than one rank, "s", of the first sequence.
            sums: positions of the steps after whose backward gradients are sent. None is inside a
                run, all of whose gradients are there at once: backward goes on meanwhile.
            apart: positions of the steps that run by themselves, such as those that gather weights:
                a run would hold those of all its blocks.
        """
        if self.inner == "eager" or len(strategies) < 2:
            return self.schedule.steps
        if sizes.get("B", 1) * sizes.get(SPLIT, sizes[WHOLE]) > FUSED_TOKENS:
            return self.schedule.steps
        key = strategies, sums, apart
        if key not in self._units:
            self._units[key] = self._fused(*key)
        return self._units[key]

    def _fused(
        self, strategies: tuple[str, ...], sums: Collection[int], apart: Collection[int]
    ) -> list[Unit]:
        units: list[Unit] = []
        run: dict[BlockStep, Member] = {}

        def end_run() -> None:
            units.extend([self._run(run)] if len(run) > 1 else run)
            run.clear()

        for step in self.schedule.steps:
            member = None if step.position in apart else self._member(step, strategies)
            ends = len(run) == RUN_BLOCKS or step.position in sums
            if ends or not self._goes_on(run, step, strategies):
                end_run()
            if isinstance(step, BlockStep) and member is not None:
                run[step] = member
            else:
                end_run()
                units.append(step)
        end_run()
        return units

    def _member(self, step: Step, strategies: tuple[str, ...]) -> Member | None:
        """What computes ``step`` in a run; None where it runs by itself: it is no block, or has
        levers, or its strategy is more than one compiled piece."""
        if not isinstance(step, BlockStep) or step.recompute:
            return None
        if Point.parse(strategies[step.index]).levers:
            return None
        variant = self._variant(step, strategies[step.index])
        if not isinstance(variant, PieceVariant) or variant.lowered.eager:
            return None
        placed = self._scope_of(step).axis.size > 1 or has_dropout(step.piece)
        return Member(variant, step.piece.outputs, placed)

    def _run(self, members: Mapping[BlockStep, Member]) -> Run:
        steps = list(members)
        freed = {n for s in steps for n in self.schedule.freed[s.position]}
        freed -= {n for s in steps for piece in s.sides.values() for n in piece.inputs}
        outputs = [n for m in members.values() for n in m.outputs if n not in freed]
        return Run(self._scope_of(steps[0]), steps, list(members.values()), outputs)

    def _goes_on(self, run: Collection[BlockStep], step: Step, strategies: tuple[str, ...]) -> bool:
        """Whether ``step`` has the strategy of the blocks of its kind in ``run``, so that runs of
        many layers are alike, and their tokens and keys."""
        if not isinstance(step, BlockStep):
            return False
        alike = (strategies[s.index] for s in run if s.block.kind == step.block.kind)
        same = all(strategy == strategies[step.index] for strategy in alike)
        return same and all(self._scope_of(s) is self._scope_of(step) for s in run)
