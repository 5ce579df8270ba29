"""A captured graph as a list of steps: pieces between blocks, and blocks whose strategy the plan
chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paradyse import comm
from paradyse.deferred import DeferredTensor
from paradyse.lower import Dims, dim_size
from paradyse.mesh import local_positions
from paradyse.passes.outline_blocks import Block
from paradyse.passes.pipeline import CaptureContext
from paradyse.pieces import Piece, is_weight, make_piece, run
from paradyse.strategies import build_variant
from paradyse.strategies.variant import (
    SPLIT,
    WHOLE,
    Scope,
    bind_factors,
    dropout_overrides,
    is_tensor,
    spec_dims,
)
from paradyse.strategies.zero import LocalPiece
from paradyse.token_ops import GatherTokens, ReduceGrad, SplitTokens, SumOverRanks
from paradyse.weights import Form, TakeWeights

aten = torch.ops.aten

EAGER_NODES = 4
"""Pieces of at most this many operators are not worth a compiled region (0.2 ms a step each)."""


@dataclass
class BlockStep:
    """One multi-variant node."""

    index: int
    block: Block
    piece: Piece
    block_id: int
    sides: tuple[fx.Node, ...]
    """Values inside the block that the graph returns, such as keys and values for a cache."""
    variants: dict[str, Any] = field(default_factory=dict)


@dataclass
class PieceStep:
    """A piece between blocks, on replicated or on split values."""

    piece: Piece
    split: bool
    body: Any = None
    eager: bool = False


@dataclass(frozen=True)
class StepConstants:
    """What depends only on the sizes and the plan: made once, reused while both last."""

    sizes: Mapping[str, int]
    strategies: tuple[str, ...]
    whole: Tensor
    local: Tensor
    batch: Tensor
    """[B], for its length alone."""
    infos: tuple[Tensor, ...]
    """Per block, and last for the pieces between blocks: int64 [2] = (S, block id)."""


class Program:
    """Executes the steps of one capture. Built once per capture; variants compile on first use."""

    def __init__(self, gm: fx.GraphModule, ctx: CaptureContext, scope: Scope):
        self.ctx, self.scope, self.axis = ctx, scope, ctx.axis
        nodes = list(gm.graph.nodes)
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        self.constants = {n: getattr(gm, str(n.target)) for n in nodes if n.op == "get_attr"}
        self.output = nodes[-1].args[0]
        self.has_dropout = any(
            n.target == aten.dropout.default
            or (n.target == torch.ops.paradyse.attention.default and _dropout_p(n) > 0)
            for n in nodes
        )
        self.device = next(n.meta["val"].device for n in self.placeholders if is_tensor(n))
        self.between_id = comm.register_block("between blocks")
        self.tails: dict[fx.Node, Piece] = {}
        self.steps = self._make_steps(nodes)
        self.block_steps = [s for s in self.steps if isinstance(s, BlockStep)]
        self.outer_weights = list(
            dict.fromkeys(
                n
                for s in self.steps
                if isinstance(s, PieceStep) and s.split
                for n in s.piece.inputs
                if is_weight(n)
            )
        )
        self._last_use = self._lifetimes()

    def _make_steps(self, nodes: list[fx.Node]) -> list[BlockStep | PieceStep]:
        ctx = self.ctx
        owner = {n: i for i, b in enumerate(ctx.blocks) for n in b.nodes}
        level: dict[fx.Node, tuple[int, int]] = {}
        loose: dict[tuple[int, int, bool], list[fx.Node]] = {}
        weight_only = {
            n for n in nodes if n.op == "placeholder" and is_weight(n) or n.op == "get_attr"
        }
        for node in nodes:
            if node.op != "call_function" or node in owner:
                continue
            if node.all_input_nodes and all(a in weight_only for a in node.all_input_nodes):
                if ctx.seq not in (f for d in _flat_dims(ctx, node) for f in d):
                    weight_only.add(node)  # part of whatever piece reads it
            at = (0, 0)
            split = node in ctx.split
            for a in node.all_input_nodes:
                if a in owner:
                    above = (owner[a] + 1, int(not split))
                elif a in level:
                    above = (
                        level[a][0],
                        level[a][1] + int((a in ctx.split) != split or a in ctx.partial),
                    )
                else:
                    continue
                at = max(at, above)
            level[node] = at
            loose.setdefault((*at, split), []).append(node)
        self._weight_only = weight_only
        if self.axis.size > 1:
            self._set_aside_tails(loose)
        read_by: dict[fx.Node, set[Any]] = {}
        unit = {n: ("block", i) for n, i in owner.items()} | {
            n: ("piece", k) for k, group in loose.items() for n in group
        }
        for node in nodes:
            for a in node.all_input_nodes:
                if unit.get(node) != unit.get(a):
                    read_by.setdefault(a, set()).add(unit.get(node, "output"))
        steps: list[tuple[tuple[int, int, int], BlockStep | PieceStep]] = []
        for (stage, sub, split), group in loose.items():
            outputs = [
                n
                for n in group
                if n in read_by and (n not in weight_only or "output" in read_by[n])
            ]
            outputs = [n for n in outputs if is_tensor(n)]
            if outputs:
                piece = self._closed_piece(f"piece_{stage}_{sub}", group, outputs)
                steps.append(((stage, 0, sub * 2 + int(split)), self._piece_step(piece, split)))
        for i, block in enumerate(ctx.blocks):
            sides = tuple(n for n in block.nodes if n in read_by and n is not block.output)
            outputs = [block.output, *(sides if self.axis.size == 1 else ())]
            piece = self._closed_piece(block.label, block.nodes, outputs)
            step = BlockStep(i, block, piece, comm.register_block(block.label), sides)
            steps.append(((i, 1, 0), step))
        return [s for _, s in sorted(steps, key=lambda item: item[0])]

    def _set_aside_tails(self, loose: dict[tuple[int, int, bool], list[fx.Node]]) -> None:
        """Take out of the pieces what only a deferred output needs."""
        tails = self.ctx.tails
        for group in loose.values():
            group[:] = [n for n in group if n not in tails]
        ordered = [n for n in self.placeholders[0].graph.nodes if n in tails]
        for node in self.output_nodes():
            if node in tails:
                self.tails[node] = make_piece("tail", _live(ordered, [node]), [node])

    def _closed_piece(
        self, name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Piece:
        """The piece of ``nodes`` and of what they read that is computed from weights alone."""
        members = dict.fromkeys(nodes)
        pulled: list[fx.Node] = []
        stack = [a for n in nodes for a in n.all_input_nodes]
        while stack:
            node = stack.pop()
            if node.op == "call_function" and node in self._weight_only and node not in members:
                members[node] = None
                pulled.append(node)
                stack += node.all_input_nodes
        order = {n: i for i, n in enumerate(pulled[:1] and list(pulled[0].graph.nodes))}
        ordered = sorted(pulled, key=order.__getitem__) if pulled else []
        live = _live([*ordered, *nodes], outputs)
        return make_piece(name, live, outputs)

    def _piece_step(self, piece: Piece, split: bool) -> PieceStep:
        split = split and self.axis.size > 1
        if len(piece.nodes) <= EAGER_NODES:
            return PieceStep(piece, split, eager=True)
        layout = SPLIT if split else WHOLE
        return PieceStep(piece, split, LocalPiece(self.scope, piece, layout, "between"))

    def _lifetimes(self) -> list[list[fx.Node]]:
        """Per step the values that no later step reads."""
        last: dict[fx.Node, int] = {}
        for i, step in enumerate(self.steps):
            for node in step.piece.inputs:
                last[node] = i
        returned = {
            *self.output_nodes(),
            *(n for piece in self.tails.values() for n in piece.inputs),
        }
        dead: list[list[fx.Node]] = [[] for _ in self.steps]
        for node, i in last.items():
            if node not in returned and node.op == "call_function":
                dead[i].append(node)
        return dead

    def output_nodes(self) -> list[fx.Node]:
        out: list[fx.Node] = []
        fx.map_arg(self.output, out.append)
        return out

    def constants_for(self, sizes: Mapping[str, int], strategies: tuple[str, ...]) -> StepConstants:
        layout = self.axis.layout(sizes[WHOLE])
        whole = torch.arange(sizes[WHOLE], device=self.device)
        local = (
            local_positions(layout, self.axis.rank, self.device) if self.axis.size > 1 else whole
        )
        ids = [*(s.block_id for s in self.block_steps), self.between_id]
        infos = tuple(torch.tensor([sizes[WHOLE], i]) for i in ids)
        batch = torch.empty(sizes.get("B", 1), device=self.device)
        return StepConstants(sizes, strategies, whole, local, batch, infos)

    def variant(self, step: BlockStep, strategy: str) -> Any:
        found = step.variants.get(strategy)
        if found is None:
            found = step.variants[strategy] = build_variant(
                self.scope, step.block, step.piece, strategy
            )
        return found

    def __call__(self, args: Sequence[Any], constants: StepConstants) -> Any:
        if torch.is_autocast_enabled(self.device.type):  # its casts are in the graph already
            with torch.autocast(self.device.type, enabled=False):
                return self._run(args, constants)
        return self._run(args, constants)

    def _run(self, args: Sequence[Any], constants: StepConstants) -> Any:
        frame = Frame(self, args, constants)
        for i, step in enumerate(self.steps):
            if isinstance(step, BlockStep):
                frame.run_block(step, constants.strategies[step.index])
            else:
                frame.run_piece(step)
            frame.free(self._last_use[i])
        return fx.map_arg(self.output, frame.result)


def _flat_dims(ctx: CaptureContext, node: fx.Node) -> Sequence[Any]:
    return ctx.names.of(node) if is_tensor(node) else ()


def _live(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes`` that ``outputs`` need."""
    needed = set(outputs)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [n for n in nodes if n in needed]


def _dropout_p(attention: fx.Node) -> float:
    return float(attention.args[11]) if len(attention.args) > 11 else 0.0


class Frame:
    """Values of one call, in the layouts asked for."""

    def __init__(self, program: Program, args: Sequence[Any], constants: StepConstants):
        self.program, self.constants = program, constants
        self.axis = program.axis
        self.ctx = program.ctx
        self.sizes = constants.sizes
        self.env: dict[fx.Node, Any] = dict(zip(program.placeholders, args, strict=True))
        self.env.update(program.constants)
        self.forms: dict[tuple[fx.Node, str], Any] = {}
        n = len(program.block_steps) + 1
        if program.has_dropout:
            drawn = torch.randint(2**62, (n,)).to(program.device)
            self.seeds: Sequence[Tensor] = drawn.unbind(0)
        else:
            self.seeds = [_zero(program.device)] * n
        self.step_id = program.between_id
        self.common: Any = ()
        self._outer: dict[fx.Node, Tensor] | None = None

    def _at(self, index: int, block_id: int) -> None:
        c = self.constants
        self.step_id = block_id
        self.common = (c.whole, c.local, c.batch, c.infos[index], self.seeds[index])

    def free(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self.env.pop(node, None)
            self.forms.pop((node, SPLIT), None)
            self.forms.pop((node, WHOLE), None)
            self.forms.pop((node, "replicated"), None)

    def get(self, node: fx.Node, layout: str) -> Any:
        """``node`` for use in a piece on split tokens (or on one rank), in ``layout``."""
        value = self.env.get(node)
        if self.axis.size == 1 or not isinstance(value, Tensor):
            return value
        if (node in self.ctx.split and node.op != "placeholder") and layout == SPLIT:
            return value
        key = (node, layout)
        if key not in self.forms:
            self.forms[key] = self._convert(node, value, layout)
        return self.forms[key]

    def _convert(self, node: fx.Node, value: Tensor, layout: str) -> Tensor:
        dims = spec_dims(self.program.scope, node, WHOLE)
        if layout == WHOLE or not any(WHOLE in d for d in dims):
            # whole, but used for a part of the work: its gradient is a part too
            return (
                ReduceGrad.apply(value, self.axis, self.step_id) if value.requires_grad else value
            )
        fill = self.ctx.fills.get(node)
        return _on_sequence(
            value,
            dims,
            self.sizes,
            lambda x, dim: SplitTokens.apply(x, dim, self.axis, self.step_id, fill),
        )

    def replicated(self, node: fx.Node) -> Any:
        """``node`` whole on every rank, for use in work that every rank repeats."""
        value = self.env[node]
        if node not in self.ctx.split or self.axis.size == 1 or node.op == "placeholder":
            return value
        key = (node, "replicated")
        if key not in self.forms:
            if node in self.ctx.partial:
                self.forms[key] = SumOverRanks.apply(value, self.axis, self.program.between_id)
            else:
                self.forms[key] = self._gather(node, value)
        return self.forms[key]

    def _gather(self, node: fx.Node, value: Tensor) -> Tensor:
        dims = spec_dims(self.program.scope, node, WHOLE)
        local = {**self.sizes, WHOLE: self.sizes[SPLIT]}
        where = (self.sizes[WHOLE], self.axis, self.program.between_id)
        return _on_sequence(value, dims, local, lambda x, dim: GatherTokens.apply(x, dim, *where))

    def weights(self, nodes: Sequence[fx.Node], forms: Sequence[Form]) -> tuple[Tensor, ...]:
        """The block's weights in ``forms``; their gradients are summed over ranks in one
        message.
        """
        tensors = [self.env[n] for n in nodes]
        if self.axis.size == 1 or not tensors:
            return tuple(tensors)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return tuple(
                t if form is None else form.take(t, self.axis.rank)
                for t, form in zip(tensors, forms, strict=True)
            )
        taken: tuple[Tensor, ...] = TakeWeights.apply(self.axis, self.step_id, forms, *tensors)
        return taken

    def run_block(self, step: BlockStep, strategy: str) -> None:
        comm.traffic(step.block_id).strategy = strategy
        self._at(step.index, step.block_id)
        if step.sides and self.axis.size > 1:
            for node in step.sides:
                self.env[node] = self._side(step, node)
        outputs = self.program.variant(step, strategy)(self)
        for node, value in zip(step.piece.outputs, outputs, strict=True):
            self.env[node] = value

    def run_piece(self, step: PieceStep) -> None:
        self._at(len(self.constants.infos) - 1, self.program.between_id)
        if step.eager:
            get = (lambda n: self.get(n, SPLIT)) if step.split else self.replicated
            if step.split:
                get = self._split_or_outer_weight
            outputs = self._interpret(
                step.piece, [get(n) for n in step.piece.inputs], SPLIT if step.split else WHOLE
            )
        elif step.split:
            outputs = step.body(self, [self._outer_weight(n) for n in step.body.weight_nodes])
        else:
            outputs = step.body(_Replicated(self), [self.env[n] for n in step.body.weight_nodes])
        for node, value in zip(step.piece.outputs, outputs, strict=True):
            self.env[node] = value

    def _split_or_outer_weight(self, node: fx.Node) -> Any:
        return self._outer_weight(node) if is_weight(node) else self.get(node, SPLIT)

    def _outer_weight(self, node: fx.Node) -> Tensor:
        if self._outer is None:
            nodes = self.program.outer_weights
            self._outer = dict(zip(nodes, self.weights(nodes, [None] * len(nodes)), strict=True))
        return self._outer[node]

    def _interpret(self, piece: Piece, values: Sequence[Any], layout: str) -> tuple[Any, ...]:
        scope = self.program.scope
        sizes = dict(self.sizes)
        overrides = dropout_overrides(scope, piece.nodes, layout, sizes, self.common)
        return run(piece, values, scope.names, bind_factors(scope, layout, sizes), overrides)

    def _side(self, step: BlockStep, node: fx.Node) -> DeferredTensor:
        """A value inside a block, recomputed from the block's inputs if it is ever read."""
        piece = make_piece(f"{step.piece.name} side", _live(step.piece.nodes, [node]), [node])
        common, step_id = self.common, step.block_id
        inputs = [self.env[n] if is_weight(n) else self.get(n, SPLIT) for n in piece.inputs]
        grad = torch.is_grad_enabled()

        def compute() -> Tensor:
            self.common, self.step_id = common, step_id
            with torch.set_grad_enabled(grad):
                taken = [
                    ReduceGrad.apply(x, self.axis, step_id)
                    if is_weight(n) and grad and x.requires_grad
                    else x
                    for n, x in zip(piece.inputs, inputs, strict=True)
                ]
                (value,) = self._interpret(piece, taken, SPLIT)
                return self._gather(node, value)

        return self._deferred(node, compute)

    def _tail(self, node: fx.Node, piece: Piece) -> DeferredTensor:
        """An output made from the inside of blocks, on whole values, if it is ever read."""
        values = [self.env[n] for n in piece.inputs]

        def compute() -> Tensor:
            whole = [
                self._gather(n, v)
                if n in self.ctx.split and not isinstance(v, DeferredTensor)
                else v
                for n, v in zip(piece.inputs, values, strict=True)
            ]
            (out,) = self._interpret(piece, whole, WHOLE)
            return out

        return self._deferred(node, compute)

    def _deferred(self, node: fx.Node, compute: Callable[[], Tensor]) -> DeferredTensor:
        val = node.meta["val"]
        shape = tuple(dim_size(d, self.sizes) for d in spec_dims(self.program.scope, node, WHOLE))
        out: DeferredTensor = DeferredTensor(compute, shape, val.dtype, val.device)
        return out

    def result(self, node: fx.Node) -> Any:
        """``node`` as an output of the program."""
        if node in self.program.tails:
            return self._tail(node, self.program.tails[node])
        value = self.env[node]
        if self.axis.size == 1 or node not in self.ctx.split or isinstance(value, DeferredTensor):
            return value
        if node in self.ctx.partial or node.op == "placeholder":
            return self.replicated(node)
        grad = torch.is_grad_enabled()

        def compute() -> Tensor:
            with torch.set_grad_enabled(grad):
                return self._gather(node, value)

        return self._deferred(node, compute)


class _Replicated:
    """A frame seen by a piece that every rank repeats on whole values."""

    def __init__(self, frame: Frame):
        self.sizes, self.common, self.get = (
            frame.sizes,
            frame.common,
            lambda n, layout: frame.replicated(n),
        )


_ZEROS: dict[torch.device, Tensor] = {}


def _zero(device: torch.device) -> Tensor:
    if device not in _ZEROS:
        _ZEROS[device] = torch.zeros((), dtype=torch.int64, device=device)
    return _ZEROS[device]


def _on_sequence(
    x: Tensor,
    dims: Dims,
    sizes: Mapping[str, int],
    fn: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Apply ``fn(x, dim)`` to the sequence dim of ``x``, apart from others merged into the same
    dim.

    Args:
        dims: per dim of x its factors, the sequence as "S". sizes: their sizes in ``x``.
    """
    at = next(i for i, d in enumerate(dims) if WHOLE in d)
    if len(dims[at]) == 1:
        return fn(x, at)
    inner = [dim_size((f,), sizes) for f in dims[at]]
    apart = x.reshape([*x.shape[:at], *inner, *x.shape[at + 1 :]])
    out = fn(apart, at + dims[at].index(WHOLE))
    return out.reshape([*x.shape[:at], -1, *x.shape[at + 1 :]])
