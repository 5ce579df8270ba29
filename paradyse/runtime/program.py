"""A captured graph as data: its steps, their variants, and what depends on sizes and plan alone.

A ``frame.Frame`` executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis, GroupMesh, everyone_of, local_positions
from paradyse.distributed.session import Recent
from paradyse.graph.factors import Factor, size_of
from paradyse.graph.subgraph import Piece, cast_of, device_of, is_tensor, is_weight
from paradyse.passes.pipeline import CaptureContext
from paradyse.passes.split_steps import BlockStep, HeadStep, LookUpStep, MixingStep, Step
from paradyse.runtime.known_buffers import KnownBuffers
from paradyse.runtime.runs import Runs
from paradyse.runtime.shown_keys import ShownKeys
from paradyse.strategies import build_head, build_variant
from paradyse.strategies.base import SPLIT, WHOLE, Common, Scope, bind_factors
from paradyse.strategies.dsp import SwitchedPiece
from paradyse.strategies.local import LocalPiece
from paradyse.strategies.look_up import LookUpPiece
from paradyse.types import REPLICATED, Point
from paradyse.weights.layout import ShardLayout
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.unshard import fits
from paradyse.weights.weight_numbers import WeightNumbers


@dataclass(frozen=True)
class ScopeConstants:
    """What the steps of one scope share in calls of the same sizes."""

    sizes: Mapping[str, int]
    """"S", on more than one rank "s", and the letters of ``Scope.marked``."""
    whole: Tensor
    """[S], all positions."""
    local: Tensor
    """[s], the positions that the rank holds."""
    beside: Tensor
    """[B, ..], of which only the shape is read: the sizes of ``Scope.marked``."""


@dataclass(frozen=True)
class StepConstants:
    """What depends only on the sizes and the plan: made once, reused while both last."""

    sizes: Mapping[str, int]
    """Of the first scope: "S", on more than one rank "s", and the letters of ``Scope.beside``."""
    strategies: tuple[str, ...]
    """Per block, a strategy and its levers."""
    scopes: tuple[ScopeConstants, ...]
    """Per step."""
    infos: tuple[Tensor, ...]
    """Per step, on the CPU: ``info`` of ``Common``."""
    no_seed: Tensor
    """[], the seed of a call that draws no random numbers."""
    head: str = ""
    """The levers of the head (``Plan.head``)."""
    together: bool = False
    """Whether the plan is used so often that blocks in a row run as one (``Runs``)."""

    def common(self, step: Step, seed: Tensor) -> Common:
        """``StepContext.common`` of ``step``, with the ``seed`` [] of its dropout."""
        at = self.scopes[step.position]
        return at.whole, at.local, at.beside, self.infos[step.position], seed

    def strategy(self, step: Step) -> str:
        """The strategy of ``step``; of a piece between blocks those levers of the head that change
        how it is computed."""
        if isinstance(step, BlockStep):
            return self.strategies[step.index]
        return step.levers("" if self.head == REPLICATED else self.head)


class Program:
    """The steps of one capture split along one dim; variants are built on first use.

    Args:
        gm: the graph after all passes.
        ctx: what the passes found out, the schedule with it.
        scope: what all variants share whose tokens are of the first sequence.
        ranks: where it is for one rank, those that each compute it at the same time, with the same
            inputs, and train the same weights; None: those of its own axis.
    """

    def __init__(
        self, gm: fx.GraphModule, ctx: CaptureContext, scope: Scope, ranks: Axis | None = None
    ):
        assert ctx.schedule is not None
        self.ctx, self.scope, self.axis, self.replicas = ctx, scope, ctx.axis, ctx.replicas
        self.ranks, self.alone = self.axis, ranks is not None
        """The ranks that train together."""
        mesh = ctx.options.mesh
        self.everyone, self.in_group = everyone_of(self.axis, mesh), isinstance(mesh, GroupMesh)
        """The ranks over which weights lie, of other groups too; and whether there are others."""
        if ranks is not None:
            self.ranks = self.replicas = ranks
        self._scopes: dict[tuple[Factor, Factor | None], Scope] = {(scope.seq, None): scope}
        letters, self.unsplit = scope.labels(WHOLE).of, list[Factor]()
        """Other dims of tokens; of those of equal size that no call can change the first."""
        self._same_as: dict[Factor, Factor] = {}
        for f in ctx.unsplit:
            fixed = (g for g in self.unsplit if {f, g}.isdisjoint(letters) and f.size == g.size)
            self._same_as[f] = next(fixed, f)
            self.unsplit += [f] * (self._same_as[f] is f)
        self.schedule = ctx.schedule
        self.steps, self.block_steps = self.schedule.steps, self.schedule.block_steps
        nodes = list(gm.graph.nodes)
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        self.weight_nodes = [n for n in self.placeholders if is_weight(n)]
        tensors = [n for n in self.placeholders if is_tensor(n)]
        self.index_nodes = [n for n in tensors if not n.meta["val"].dtype.is_floating_point]
        """Ids, masks, positions: placeholders of whole numbers and truth values."""
        self.captured_at: Mapping[str, int] = {}
        """Sizes by letter of a call that it was captured for; empty where none is known."""
        self.known_buffers = KnownBuffers(self.placeholders)
        self.shown_keys = ShownKeys(self.placeholders)
        self.constants = {n: getattr(gm, str(n.target)) for n in nodes if n.op == "get_attr"}
        self.output = nodes[-1].args[0]
        self.device = device_of(self.placeholders)
        self.variants: dict[int, dict[str, Any]] = {s.position: {} for s in self.steps}
        """Position of a step -> strategy -> what computes it, as far as it was asked for."""
        self._late: dict[fx.Node, LocalPiece] = {}
        """What computes values that wait until they are read, as far as it was asked for."""
        self._casts: dict[tuple[int, fx.Node], torch.dtype | None] = {}
        self._constants: Recent[Any, StepConstants] = Recent()
        self._gathers: dict[tuple[int, str], tuple[list[ShardLayout], list[fx.Node]]] = {}
        self.runs = Runs(self.schedule, scope.inner, self.scope_of, self.variant)

    def scope_along(self, seq: Factor, keys: Factor | None = None) -> Scope:
        """The scope of steps whose tokens are of ``seq``, and their keys of ``keys`` if those are
        of another sequence."""
        if (seq, keys) not in self._scopes:
            batch = self.ctx.seqs[seq]
            varying = (self.scope.seq, self.scope.batch, *self.scope.others)
            others = tuple(f for f in varying if f is not None and f not in (seq, batch))
            self._scopes[seq, keys] = replace(
                self.scope, seq=seq, batch=batch, others=others, keys=keys
            )
        return self._scopes[seq, keys]

    def scope_of(self, step: Step) -> Scope:
        """The scope of ``step``; of replicated values that of the first sequence."""
        return self.scope_along(step.seq or self.scope.seq, step.keys)

    def sizes_in(self, scope: Scope, sizes: Mapping[str, int]) -> dict[str, int]:
        """``sizes`` of a call, which have the letters of the first scope, by those of ``scope``."""
        of = {f: sizes[letter] for letter, f in self.scope.beside.items() if letter in sizes}
        of[self.scope.seq] = sizes[WHOLE]
        found = {WHOLE: of[scope.seq]}
        found |= {letter: of[f] for letter, f in scope.beside.items() if f in of}
        if self.axis.size > 1:
            found[SPLIT] = self.axis.layout(found[WHOLE]).local_len
            if scope.keys is not None:
                layout = self.axis.layout(of[scope.keys])
                found[scope.keys_at[SPLIT]] = layout.local_len
        return found

    def number_of(self, factor: Factor | None) -> int | None:
        """``BlockSpec.sequence`` for the tokens of ``factor``; None where it is none of these."""
        order = [*self.ctx.seqs, *self.unsplit]
        found = self._same_as.get(factor, factor) if factor is not None else None
        return order.index(found) if found in order else None

    def num_sequences(self, sizes: Mapping[str, int]) -> int:
        """Of a call of these ``sizes``: the batch, times what else is in attention's batch dim."""
        return int(size_of(self.ctx.sequences, bind_factors(self.scope, WHOLE, sizes)))

    def other_lengths(self, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of the sequences beside the first, then of other dims of its tokens, in a
        call of these ``sizes``."""
        own = (self.sizes_in(self.scope_along(f), sizes) for f in list(self.ctx.seqs)[1:])
        beside = tuple((of.get("B", 1), of[WHOLE]) for of in own)
        if not self.unsplit:
            return beside
        tokens = self.num_sequences(sizes) * sizes[WHOLE]
        factors = bind_factors(self.scope, WHOLE, sizes)
        lengths = [int(size_of((f,), factors)) for f in self.unsplit]
        return (*beside, *((max(1, tokens // n), n) for n in lengths))

    def variant(self, step: Step, strategy: str) -> Any:
        """What computes ``step`` by ``strategy`` ("" for a piece): ``StepContext`` -> outputs."""
        known, scope = self.variants[step.position], self.scope_of(step)
        if strategy not in known:
            if (same := Point.parse(strategy).variant) != strategy:
                known[strategy] = self.variant(step, same)
            elif isinstance(step, BlockStep):
                known[strategy] = build_variant(scope, step.block, step.piece, strategy)
            elif isinstance(step, HeadStep) and strategy:
                known[strategy] = build_head(scope, step.head, step.closed, strategy)
            elif isinstance(step, MixingStep):
                known[strategy] = SwitchedPiece(scope, step.piece, None, step.over)
            elif isinstance(step, LookUpStep) and strategy:
                known[strategy] = LookUpPiece(scope, step.piece, step.look_ups, step.eager)
            else:
                layout = SPLIT if step.split else WHOLE
                known[strategy] = LocalPiece(scope, step.piece, layout, "between", eager=step.eager)
        return known[strategy]

    def late(self, node: fx.Node, piece: Piece, step: Step | None = None) -> LocalPiece:
        """What computes ``node`` if it is read.

        Args:
            piece: gives it, ``BlockStep.late`` or ``Schedule.tails``.
            step: whose inputs it is computed from; None: from whole values.
        """
        if node not in self._late:
            name, scope = ("tail", self.scope) if step is None else ("side", self.scope_of(step))
            layout = WHOLE if step is None or self.axis.size == 1 else SPLIT
            self._late[node] = LocalPiece(scope, piece, layout, name, eager=True)
        return self._late[node]

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
            if self.in_group:  # strategies, and graphs on other numbers of ranks, name them anyhow
                numbers = self.everyone.session.of(WeightNumbers)
                nodes.sort(key=lambda n: numbers[weights[n]])
            self._gathers[step.position, strategy] = layouts, nodes
        return nodes

    def read_again(self, step: Step, strategy: str, nodes: Sequence[fx.Node]) -> list[int]:
        """Which of ``nodes``, the weights gathered for ``step`` under ``strategy``, backward reads,
        and so gathers again. In a group they do not depend on the strategy."""
        if self.in_group and isinstance(step, BlockStep):
            return list(range(len(nodes)))
        variant = self.variant(step, "" if self.in_group else strategy)
        unread = getattr(variant, "unread", ())  # weights of a head by tiles
        return [i for i, n in enumerate(nodes) if n not in unread]

    def gathering_order(self, strategy: Callable[[Step], str], args: Sequence[Any]) -> list[Any]:
        """What decides which messages of weights a call in a group sends, and in which order: for
        each step the numbers of what it gathers, the dtypes, and what backward gathers again.

        Args:
            strategy: of a step.
            args: of the call, in the order of placeholders.
        """
        numbers, found = self.everyone.session.of(WeightNumbers), []
        weights = dict(zip(self.placeholders, args, strict=True))
        for step in self.steps:
            nodes = self.gathers(step, strategy(step), weights)
            if nodes:
                again = self.read_again(step, strategy(step), nodes)
                casts = [str(self.cast(step, n)) for n in nodes]
                found.append(([numbers[weights[n]] for n in nodes], casts, again))
        return found

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
        made: dict[tuple[Factor, Factor | None], ScopeConstants] = {}
        known: dict[tuple[int, ...], Tensor] = {}
        scopes, infos = [], []
        for step in self.steps:
            scope = self.scope_of(step)
            key = scope.seq, scope.keys
            if key not in made:
                made[key] = self._make_scope(scope, self.sizes_in(scope, sizes))
            scopes.append(made[key])
            keys = (scope.keys_at[WHOLE],) if scope.keys is not None else ()
            info = made[key].sizes[WHOLE], step.block_id, *(made[key].sizes[x] for x in keys)
            infos.append(known.setdefault(info, torch.tensor(info)))
        no_seed = torch.zeros((), dtype=torch.int64, device=self.device)
        return StepConstants(sizes, (), tuple(scopes), tuple(infos), no_seed)

    def _make_scope(self, scope: Scope, sizes: Mapping[str, int]) -> ScopeConstants:
        """Of ``scope``, in calls of these ``sizes`` in its own letters."""
        seq_len, device = sizes[WHOLE], self.device
        whole = torch.arange(seq_len, device=device)
        local = whole
        if self.axis.size > 1:
            local = local_positions(self.axis.layout(seq_len), self.axis.rank, device)
        traced = {letter: f.size for letter, f in scope.beside.items()} | dict(sizes)
        shape = [traced[letter] for letter in scope.marked]
        beside = torch.empty((), device=device).expand(shape or [1])
        return ScopeConstants(sizes, whole, local, beside)
