"""Split steps: the graph as what runs one after the other, blocks and the pieces between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import fx

from paradyse.distributed import collectives
from paradyse.graph.dropouts import first_place, has_dropout
from paradyse.graph.factors import Factor
from paradyse.graph.rules import argument
from paradyse.graph.subgraph import (
    Piece,
    draws,
    has_gradient,
    is_tensor,
    is_weight,
    live_nodes,
    make_piece,
)
from paradyse.passes.outline_blocks import Block
from paradyse.passes.outline_head import Head
from paradyse.strategies.base import EAGER_NODES
from paradyse.types import VOCABULARY

aten = torch.ops.aten

EAGER_INDEX_NODES = 32
"""``EAGER_NODES`` where nothing has a gradient: positions, rotary tables, shifted labels."""


@dataclass(frozen=True, eq=False)
class BlockStep:
    """A block, which is computed by the strategy that the plan names."""

    position: int
    """In the order of steps."""
    index: int
    """In the order of blocks."""
    block: Block
    piece: Piece
    block_id: int
    """What its messages are booked to."""
    sides: Mapping[fx.Node, Piece]
    """On more than one rank: values inside the block that the graph returns, such as keys and
    values for a cache, and how each is computed again from the block's inputs."""
    recompute: bool
    """Nothing inside is kept for backward: the user asked for activation checkpointing."""
    split: ClassVar[bool] = True

    @property
    def seq(self) -> Factor | None:
        """The sequence of its tokens."""
        return self.block.seq

    @property
    def keys(self) -> Factor | None:
        """That of the keys of its attention, where it is another one."""
        return self.block.keys

    def gives(self, strategy: str) -> Piece:
        """What is computed at once under ``strategy``."""
        return self.piece

    def late(self, strategy: str) -> Mapping[fx.Node, Piece]:
        """What is computed under ``strategy`` if it is read, and how."""
        return self.sides


@dataclass(frozen=True, eq=False)
class PieceStep:
    """A piece between blocks, on replicated or on split values."""

    position: int
    piece: Piece
    block_id: int
    split: bool
    eager: bool
    """Run operator by operator: too small to compile."""
    seq: Factor | None
    """The sequence whose tokens its values have; None where they are replicated."""
    keys: ClassVar[None] = None
    index: ClassVar[int] = -1
    """Of what belongs to it where there is one of each block and a last one for all pieces."""
    recompute: ClassVar[bool] = False

    def levers(self, head: str) -> str:
        """Those of ``head``, which ``Plan.head`` has, that change how it is computed."""
        return ""

    def gives(self, strategy: str) -> Piece:
        """As ``BlockStep.gives``; the ``strategy`` of a head is its levers."""
        return self.piece

    def late(self, strategy: str) -> Mapping[fx.Node, Piece]:
        """As ``BlockStep.late``; the ``strategy`` of a head is its levers."""
        return {}


@dataclass(frozen=True, eq=False)
class HeadStep(PieceStep):
    """The piece that makes logits and sums up losses; under levers it gives the sums alone."""

    head: Head
    closed: Piece
    """Without logits among its outputs."""
    logits: Mapping[fx.Node, Piece]
    """Those that the graph returns, and how each is computed from what the piece reads."""

    def levers(self, head: str) -> str:
        """As ``PieceStep.levers``, of ``head``."""
        return head

    def gives(self, strategy: str) -> Piece:
        """As ``PieceStep.gives``, under the levers ``strategy``."""
        return self.closed if strategy else self.piece

    def late(self, strategy: str) -> Mapping[fx.Node, Piece]:
        """As ``PieceStep.late``, under the levers ``strategy``."""
        return self.logits if strategy else {}


@dataclass(frozen=True, eq=False)
class LookUpStep(PieceStep):
    """A piece that looks tokens up in tables of as many rows as a head has words."""

    look_ups: tuple[fx.Node, ...]
    """The operators ``embedding``, whose ids are read from outside."""

    def levers(self, head: str) -> str:
        """As ``PieceStep.levers``, of ``head``."""
        return VOCABULARY if VOCABULARY in head.split("+") else ""


@dataclass(frozen=True, eq=False)
class MixingStep(PieceStep):
    """A piece that mixes tokens, computed with all of them and a part of another dim."""

    over: Factor
    """That dim."""


Step = BlockStep | PieceStep


def input_of(steps: Sequence[Step], step: Step) -> fx.Node | None:
    """What the attention right before ``step``, one of ``steps``, gives to it, if it is an MLP."""
    before = steps[step.position - 1] if step.position else None
    if not isinstance(step, BlockStep) or not isinstance(before, BlockStep):
        return None
    is_pair = (before.block.kind, step.block.kind) == ("attention", "mlp")
    output = before.block.output
    return output if is_pair and output in step.piece.inputs else None


def _before_alias(node: fx.Node) -> fx.Node:
    """The weight that ``node`` is another name of, which strategies may take a part of as well
    (``place_tokens`` makes them); of others ``node``."""
    while node.target == aten.alias.default:
        (node,) = node.all_input_nodes
    return node


_Unit = tuple[int, bool, int, int, int]
"""What a step is made of, and when it runs: number of blocks before it, whether it is one itself,
changes of layout since, number of the head if it is one (of what mixes tokens: counted on from
these), of the sequence that its values are split along (0: of none)."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a graph, in order, and what follows from them."""

    steps: tuple[Step, ...]
    tails: Mapping[fx.Node, Piece]
    """Outputs that nothing computes before they are read, made from the inside of blocks."""
    returned: tuple[fx.Node, ...]
    """The graph's outputs."""
    between_id: int
    """What messages of no block are booked to."""

    @cached_property
    def block_steps(self) -> tuple[BlockStep, ...]:
        return tuple(s for s in self.steps if isinstance(s, BlockStep))

    @cached_property
    def has_dropout(self) -> bool:
        """Whether a call drops out elements."""
        return any(map(has_dropout, [*(s.piece for s in self.steps), *self.tails.values()]))

    @cached_property
    def is_random(self) -> bool:
        """Whether a call draws random numbers, in whatever way."""
        return self.has_dropout or self.draws

    @cached_property
    def draws(self) -> bool:
        """Whether a call draws random numbers other than those of dropout, whose seeds are made on
        the host."""
        pieces = [*(s.piece for s in self.steps), *self.tails.values()]
        return any(draws(n) for piece in pieces for n in piece.nodes)

    @cached_property
    def seed_of(self) -> tuple[int, ...]:
        """Per step the place of its seed: a block's is its own, and behind those of all blocks, a
        piece has that of its first one among the graph's. So pieces drop other elements than each
        other, and the same however many ranks there are."""
        num, places = len(self.block_steps), list[int]()
        for step in self.steps:
            own = step.index if isinstance(step, BlockStep) else None
            places.append(num + first_place(step.piece.nodes) if own is None else own)
        return tuple(places)

    @cached_property
    def first_readers(self) -> dict[fx.Node, Step]:
        """Weights used for a part of the work -> the first step that does so, whose block is booked
        their gradients."""
        readers: dict[fx.Node, Step] = {}
        for step in self.steps:
            for node in map(_before_alias, step.piece.inputs if step.split else ()):
                if is_weight(node):
                    readers.setdefault(node, step)
        return readers

    @cached_property
    def freed(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Per step the values that no later step reads."""
        last = {n: step.position for step in self.steps for n in step.piece.inputs}
        kept = {*self.returned, *(n for piece in self.tails.values() for n in piece.inputs)}
        out: list[list[fx.Node]] = [[] for _ in self.steps]
        for node, position in last.items():
            if node.op == "call_function" and node not in kept:
                out[position].append(node)
        return tuple(map(tuple, out))


def split_steps(gm: fx.GraphModule, ctx: Any) -> int:
    """Give every operator of ``gm`` a step, in an order in which all is there that a step reads.

    before: x = embedding(w, ids); y = <block 0>(x); z = <block 1>(y); loss = f(norm(z), labels)
    after:  ctx.schedule = (piece on split values, block 0, block 1, head, ..)
    A piece holds the operators behind the same block whose values have the same layout, with as
    many changes of layout before them. What is computed from weights alone is part of every piece
    that reads it; what only outputs need of the inside of a block is in none (``Schedule.tails``).
    Refuses a graph without a sequence: there is no schedule.
    """
    ctx.schedule = None
    if ctx.seq is None:
        return 0
    nodes = list(gm.graph.nodes)
    returned = tuple(nodes[-1].all_input_nodes)
    aside = ctx.tails if ctx.axis.size > 1 else set()
    fixed = _from_weights(nodes, ctx)
    unit = {n: key for n, key in _levels(nodes, ctx, fixed).items() if n not in aside}
    read = set()
    for node in nodes:
        for a in node.all_input_nodes:
            strange = unit.get(node) != unit.get(a)
            if strange and (a not in fixed or node not in unit) and is_tensor(a):
                read.add(a)
    groups: dict[_Unit, list[fx.Node]] = {}
    for node in nodes:
        if node in unit:
            groups.setdefault(unit[node], []).append(node)
    between_id = collectives.register_block(ctx.axis, "between blocks")
    order = {n: i for i, n in enumerate(nodes)}
    steps: list[Step] = []
    seqs = (None, *ctx.seqs)
    for (stage, is_block, sub, head, along), group in sorted(groups.items()):
        outputs = [n for n in group if n in read]
        if is_block:
            block = ctx.blocks[stage]
            sides = [n for n in outputs if n is not block.output]
            outputs = [block.output, *(sides if ctx.axis.size == 1 else ())]
            piece = _closed_piece(block.label, group, outputs, fixed, order)
            block_id = collectives.register_block(ctx.axis, block.label)
            again = any(n.meta.get("recompute") for n in group)
            pieces = {n: _side(piece, n) for n in sides if ctx.axis.size > 1}
            steps.append(BlockStep(len(steps), stage, block, piece, block_id, pieces, again))
        elif outputs:
            name = f"head_{head}" if head else f"piece_{stage}_{sub}"
            name = f"mixing_{stage}_{sub}" if head > len(ctx.heads) else name
            piece = _closed_piece(name, group, outputs, fixed, order)
            split = along > 0 and ctx.axis.size > 1
            common = len(steps), piece, between_id, split, _is_small(piece), seqs[along]
            look_ups = _look_ups(piece, ctx) if split else ()
            if head > len(ctx.heads):
                steps.append(MixingStep(*common, ctx.mixing[head - 1 - len(ctx.heads)].over))
            elif head:
                steps.append(_head_step(ctx.heads[head - 1], common))
            elif look_ups:
                steps.append(LookUpStep(*common, look_ups))
            else:
                steps.append(PieceStep(*common))
    late = [n for n in nodes if n in aside]
    tails = {n: make_piece("tail", live_nodes(late, [n]), [n]) for n in returned if n in aside}
    ctx.schedule = Schedule(tuple(steps), tails, returned, between_id)
    return len(steps)


def _levels(nodes: Sequence[fx.Node], ctx: Any, fixed: nx.DiGraph) -> dict[fx.Node, _Unit]:
    """The unit of every operator: outside blocks the first one that its inputs allow, and for what
    draws random numbers not before what the model draws earlier. What is ``fixed`` is at hand
    everywhere."""
    number = {f: i for i, f in enumerate(ctx.seqs, 1)}
    drawn = 0, False, 0, 0, 0
    found: dict[fx.Node, _Unit] = {
        n: (i, True, 0, 0, number[block.seq])
        for i, block in enumerate(ctx.blocks)
        for n in block.nodes
    }
    groups = [*(head.nodes for head in ctx.heads), *(region.nodes for region in ctx.mixing)]
    heads = {n: i for i, group in enumerate(groups, 1) for n in group}
    for node in nodes:
        if node.op != "call_function" or node in found:
            continue
        split = number[ctx.split[node]] if node in ctx.split else 0
        head, level = heads.get(node, 0), (0, 0)
        members = groups[head - 1] if head else (node,)
        for a in (a for n in members for a in n.all_input_nodes):
            if a in found and a not in fixed:
                stage, is_block, sub, a_head, a_split = found[a]
                changed = split != a_split or (a in ctx.partial and not is_block)
                changed |= head != a_head and max(head, a_head) > len(ctx.heads)
                level = max(level, (stage + is_block, sub + changed))
        unit = level[0], False, level[1], head, split
        if draws(node):
            unit = _drawn_behind(node, unit, drawn, found)
            drawn = max(drawn, unit)
        found.update(dict.fromkeys(members, unit))
    return found


def _drawn_behind(node: fx.Node, unit: _Unit, last: _Unit, found: Mapping[fx.Node, _Unit]) -> _Unit:
    """The unit of ``node``, which draws random numbers, such that it is not before ``last``, that
    of what the model draws before; its own, ``unit``, where something that is ``found`` already
    needs it earlier."""
    if unit >= last:
        return unit
    own = unit[3:]
    later = last[0], False, last[2] + (own < last[3:]), *own
    readers = set[fx.Node]()
    follow = [node]
    while follow:
        new = set(follow.pop().users) - readers
        readers |= new
        follow += new
    return later if all(later < found[n] for n in readers if n in found) else unit


def _from_weights(nodes: Sequence[fx.Node], ctx: Any) -> nx.DiGraph:
    """Operators outside blocks that read weights alone and do not know the length, with the edges
    between them."""
    inside = {n for block in ctx.blocks for n in block.nodes}
    weights = {n for n in nodes if is_weight(n)}
    found = nx.DiGraph()
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or node in inside or not inputs:
            continue
        dims = ctx.names.of(node) if is_tensor(node) else ()
        known = all(a in weights or a in found for a in inputs)
        known &= not draws(node)  # once for all that read it
        if known and not any(f in d for d in dims for f in ctx.seqs):
            found.add_node(node)
            found.add_edges_from((a, node) for a in inputs if a in found)
    return found


def _closed_piece(
    name: str,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    fixed: nx.DiGraph,
    order: Mapping[fx.Node, int],
) -> Piece:
    """The piece of ``nodes`` and of what they read that is computed from weights alone."""
    members = set(nodes)
    for a in {a for n in nodes for a in n.all_input_nodes if a in fixed}:
        members |= {a, *nx.ancestors(fixed, a)}
    return make_piece(name, live_nodes(sorted(members, key=order.__getitem__), outputs), outputs)


def _head_step(head: Head, common: tuple[int, Piece, int, bool, bool, Factor | None]) -> HeadStep:
    """The step of ``head``; ``common`` are the fields of its ``PieceStep``."""
    piece = common[1]
    sums = [n for n in piece.outputs if n not in head.logits]
    closed = make_piece(piece.name, live_nodes(piece.nodes, sums), sums)
    sides = {n: _side(piece, n) for n in piece.outputs if n in head.logits}
    return HeadStep(*common, head, closed, sides)


def _look_ups(piece: Piece, ctx: Any) -> tuple[fx.Node, ...]:
    """The look-ups in ``piece`` that ranks can share by rows, as they do the words of heads."""
    sizes = {n.args[1].meta["val"].shape[0] for head in ctx.heads for n in head.linears}
    found = []
    for node in piece.nodes:
        if node.target != aten.embedding.default or not is_weight(node.args[0]):
            continue
        if node.args[0].meta["val"].shape[0] not in sizes:
            continue
        why = ""
        if node.args[1] in piece.nodes:
            why = "its ids are computed beside it"
        elif any(argument(node, name) for name in ("scale_grad_by_freq", "sparse")):
            why = "its gradient is sparse or scaled by frequency"
        if why:
            ctx.note(f"the table of {node} is needed whole: {why}")
        else:
            found.append(node)
    return tuple(found)


def _side(piece: Piece, node: fx.Node) -> Piece:
    return make_piece(f"{piece.name} side", live_nodes(piece.nodes, [node]), [node])


def _is_small(piece: Piece) -> bool:
    grads = any(map(has_gradient, piece.inputs))
    return len(piece.nodes) <= (EAGER_NODES if grads else EAGER_INDEX_NODES)
