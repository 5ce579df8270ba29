"""A captured graph as data: its steps, their variants, and what depends on sizes and plan alone.

A ``frame.Frame`` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.axis import local_positions
from paradyse.distributed.session import Recent
from paradyse.graph.factors import size_of
from paradyse.graph.subgraph import cast_of, is_tensor
from paradyse.passes.pipeline import CaptureContext
from paradyse.passes.split_steps import BlockStep, HeadStep, LookUpStep, Step
from paradyse.runtime.known_buffers import KnownBuffers
from paradyse.runtime.runs import Runs
from paradyse.strategies import build_head, build_variant
from paradyse.strategies.base import SPLIT, WHOLE, Common, Scope, bind_factors
from paradyse.strategies.local import LocalPiece
from paradyse.strategies.look_up import LookUpPiece
from paradyse.types import Point
from paradyse.weights.layout import ShardLayout
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.unshard import fits


@dataclass(frozen=True)
class StepConstants:
    """What depends only on the sizes and the plan: made once, reused while both last."""

    sizes: Mapping[str, int]
    """"S", on more than one rank "s", and the letters of ``Scope.beside``."""
    strategies: tuple[str, ...]
    """Per block, a strategy and its levers."""
    whole: Tensor
    """[S], all positions."""
    local: Tensor
    """[s], the positions that the rank holds."""
    beside: Tensor
    """[B, ..], of which only the shape is read: the sizes of ``Scope.beside``."""
    infos: tuple[Tensor, ...]
    """Per block, and last for the pieces between blocks: int64 [2] = (S, block id)."""
    no_seed: Tensor
    """[], the seed of a call that draws no random numbers."""
    head: str = ""
    """The levers of the head (``Plan.head``)."""
    together: bool = False
    """Whether the plan is used so often that blocks in a row run as one (``Runs``)."""

    def common(self, step: Step, seed: Tensor) -> Common:
        """``StepContext.common`` of ``step``, with the ``seed`` [] of its dropout."""
        return self.whole, self.local, self.beside, self.infos[step.index], seed

    def strategy(self, step: Step) -> str:
        """The strategy of ``step``; of a piece between blocks those levers of the head that change
        how it is computed."""
        if isinstance(step, BlockStep):
            return self.strategies[step.index]
        return step.levers(self.head)


class Program:
    """The steps of one capture. Built once per capture; variants are built on first use.

    Args:
        gm: the graph after all passes.
        ctx: what the passes found out, the schedule with it.
        scope: what all variants share.
    """

    def __init__(self, gm: fx.GraphModule, ctx: CaptureContext, scope: Scope):
        assert ctx.schedule is not None
        self.ctx, self.scope, self.axis, self.replicas = ctx, scope, ctx.axis, ctx.replicas
        self.schedule = ctx.schedule
        self.steps, self.block_steps = self.schedule.steps, self.schedule.block_steps
        nodes = list(gm.graph.nodes)
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        self.known_buffers = KnownBuffers(self.placeholders)
        self.constants = {n: getattr(gm, str(n.target)) for n in nodes if n.op == "get_attr"}
        self.output = nodes[-1].args[0]
        self.device = next(n.meta["val"].device for n in self.placeholders if is_tensor(n))
        self.variants: dict[int, dict[str, Any]] = {s.position: {} for s in self.steps}
        """Position of a step -> strategy -> what computes it, as far as it was asked for."""
        self._casts: dict[tuple[int, fx.Node], torch.dtype | None] = {}
        self._constants: Recent[Any, StepConstants] = Recent()
        self._gathers: dict[tuple[int, str], tuple[list[ShardLayout], list[fx.Node]]] = {}
        self.runs = Runs(self.schedule, scope, self.variant)

    def num_sequences(self, sizes: Mapping[str, int]) -> int:
        """Of a call of these ``sizes``: the batch, times what else is in attention's batch dim."""
        return int(size_of(self.ctx.sequences, bind_factors(self.scope, WHOLE, sizes)))

    def variant(self, step: Step, strategy: str) -> Any:
        """What computes ``step`` by ``strategy`` ("" for a piece): ``StepContext`` -> outputs."""
        known = self.variants[step.position]
        if strategy not in known:
            if (same := Point.parse(strategy).variant) != strategy:
                known[strategy] = self.variant(step, same)
            elif isinstance(step, BlockStep):
                known[strategy] = build_variant(self.scope, step.block, step.piece, strategy)
            elif isinstance(step, HeadStep) and strategy:
                known[strategy] = build_head(self.scope, step.head, step.closed, strategy)
            elif isinstance(step, LookUpStep) and strategy:
                known[strategy] = LookUpPiece(self.scope, step.piece, step.look_ups, step.eager)
            else:
                layout = SPLIT if step.split else WHOLE
                known[strategy] = LocalPiece(
                    self.scope, step.piece, layout, "between", eager=step.eager
                )
        return known[strategy]

    def gathers(self, step: Step, strategy: str, weights: Mapping[fx.Node, Any]) -> list[fx.Node]:
        """The sharded ones among ``weights`` that ``step`` under ``strategy`` takes in another form
        than they lie in.

        It follows from the variant and the layouts at rest, and is made anew if those change.
        """
        uses = [
            (n, form)
            for n, form in self.variant(step, strategy).uses
            if isinstance(weights[n], ShardedTensor)
        ]
        layouts = [weights[n].placement for n, _ in uses]
        known, nodes = self._gathers.get((step.position, strategy), ([], []))
        if known != layouts:
            nodes = list(dict.fromkeys(n for n, form in uses if not fits(weights[n], form)))
            self._gathers[step.position, strategy] = layouts, nodes
        return nodes

    def cast(self, step: Step, weight: fx.Node) -> torch.dtype | None:
        """The dtype that ``weight`` may be gathered in for ``step``; None: its own."""
        key = step.position, weight
        if key not in self._casts:
            self._casts[key] = cast_of(step.piece, weight)
        return self._casts[key]

    def constants_for(
        self, sizes: Mapping[str, int], strategies: tuple[str, ...], head: str = ""
    ) -> StepConstants:
        """What calls of these ``sizes`` ("B", "S", "s") share under the plan ``strategies`` and
        ``head``; the tensors do not depend on the plan."""
        key = tuple(sizes.items())
        if key not in self._constants:
            self._constants[key] = self.make_constants(sizes)
        return replace(self._constants[key], strategies=strategies, head=head)

    def make_constants(self, sizes: Mapping[str, int]) -> StepConstants:
        """The same of ``sizes`` without a plan, made anew."""
        seq_len, device = sizes[WHOLE], self.device
        whole = torch.arange(seq_len, device=device)
        local = whole
        if self.axis.size > 1:
            local = local_positions(self.axis.layout(seq_len), self.axis.rank, device)
        ids = [*(s.block_id for s in self.block_steps), self.schedule.between_id]
        infos = tuple(torch.tensor([seq_len, i]) for i in ids)
        shape = [sizes.get(letter, f.size) for letter, f in self.scope.beside.items()]
        beside = torch.empty((), device=device).expand(shape or [1])
        no_seed = torch.zeros((), dtype=torch.int64, device=device)
        return StepConstants(sizes, (), whole, local, beside, infos, no_seed)
