"""A captured graph as a list of steps: pieces between blocks, and blocks whose strategy the plan
chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed import collectives
from paradyse.distributed.axis import local_positions
from paradyse.graph.subgraph import Piece, is_weight, live_nodes, make_piece
from paradyse.passes.outline_blocks import Block
from paradyse.passes.pipeline import CaptureContext
from paradyse.runtime.frame import Frame
from paradyse.strategies import build_variant
from paradyse.strategies.base import (
    SPLIT,
    WHOLE,
    Scope,
    is_tensor,
)
from paradyse.strategies.local import LocalPiece

aten = torch.ops.aten

EAGER_NODES = 4
"""Pieces of at most this many operators are not worth a compiled region (0.2 ms a step each)."""

EAGER_INDEX_NODES = 32
"""The same where nothing has a gradient: positions, rotary tables, shifted labels."""


@dataclass
class BlockStep:
    """One multi-variant node."""

    index: int
    block: Block
    piece: Piece
    block_id: int
    sides: tuple[fx.Node, ...]
    """Values inside the block that the graph returns, such as keys and values for a cache."""
    recompute: bool = False
    """Nothing inside is kept for backward: the user asked for activation checkpointing."""
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
        self.ctx, self.scope, self.axis, self.replicas = ctx, scope, ctx.axis, ctx.replicas
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
        self.between_id = collectives.register_block("between blocks")
        self.tails: dict[fx.Node, Piece] = {}
        self.make_frame: Callable[..., Frame] = Frame
        """What runs the steps of a call; one that also watches them while they are profiled."""
        self.steps = self._make_steps(nodes)
        self.block_steps = [s for s in self.steps if isinstance(s, BlockStep)]
        self.weight_owners = self._weight_owners()
        self._last_use = self._lifetimes()
        self.fetches: dict[tuple[int, str], list[fx.Node]] = {}
        """(Step, strategy) -> the sharded weights that it gathered when it last ran."""

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
            again = any(n.meta.get("recompute") for n in block.nodes)
            step = BlockStep(i, block, piece, collectives.register_block(block.label), sides, again)
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
                self.tails[node] = make_piece("tail", live_nodes(ordered, [node]), [node])

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
        live = live_nodes([*ordered, *nodes], outputs)
        return make_piece(name, live, outputs)

    def _piece_step(self, piece: Piece, split: bool) -> PieceStep:
        split = split and self.axis.size > 1
        metas = (n.meta.get("tensor_meta") for n in piece.inputs)
        grads = any(getattr(m, "requires_grad", False) for m in metas)
        if len(piece.nodes) <= (EAGER_NODES if grads else EAGER_INDEX_NODES):
            return PieceStep(piece, split, eager=True)
        layout = SPLIT if split else WHOLE
        return PieceStep(piece, split, LocalPiece(self.scope, piece, layout, "between"))

    def _weight_owners(self) -> dict[fx.Node, int]:
        """Weights used for a part of the work -> id of the block that is booked their gradients."""
        owners: dict[fx.Node, int] = {}
        for step in self.steps:
            if isinstance(step, BlockStep) or step.split:
                owner = step.block_id if isinstance(step, BlockStep) else self.between_id
                for node in step.piece.inputs:
                    if is_weight(node):
                        owners.setdefault(node, owner)
        return owners

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

    def step_key(self, position: int, strategies: Sequence[str]) -> tuple[int, str]:
        """Key of ``fetches``."""
        step = self.steps[position]
        return position, strategies[step.index] if isinstance(step, BlockStep) else ""

    def __call__(self, args: Sequence[Any], constants: StepConstants) -> Any:
        if torch.is_autocast_enabled(self.device.type):  # its casts are in the graph already
            with torch.autocast(self.device.type, enabled=False):
                return self._run(args, constants)
        return self._run(args, constants)

    def _run(self, args: Sequence[Any], constants: StepConstants) -> Any:
        frame = self.make_frame(self, args, constants)
        averages = self.replicas.size > 1 and torch.is_grad_enabled()
        for i, step in enumerate(self.steps):
            frame.position = i
            if averages:  # the next step's too: they are fetched while this one runs
                frame.join_replicas(i)
                frame.join_replicas(i + 1)
            if isinstance(step, BlockStep):
                frame.run_block(step, constants.strategies[step.index])
            else:
                frame.run_piece(step)
            frame.free(self._last_use[i])
        frame.position = None
        return fx.map_arg(self.output, frame.result)


def _flat_dims(ctx: CaptureContext, node: fx.Node) -> Sequence[Any]:
    return ctx.names.of(node) if is_tensor(node) else ()


def _dropout_p(attention: fx.Node) -> float:
    return float(attention.args[12]) if len(attention.args) > 12 else 0.0
