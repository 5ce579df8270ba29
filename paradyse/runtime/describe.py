"""What planner and reports need to know of a program's blocks and its head."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.subgraph import ONE, Labels, is_weight, structure
from paradyse.passes.split_steps import BlockStep, HeadStep, LookUpStep, input_of
from paradyse.runtime.program import Program
from paradyse.strategies import infeasible_reasons, refused_by_head, refused_levers
from paradyse.strategies.base import WHOLE
from paradyse.strategies.groups.rest_layout import rest_layouts
from paradyse.types import BlockSpec, HeadSpec


def describe_blocks(program: Program) -> tuple[BlockSpec, ...]:
    """One ``BlockSpec`` per block of ``program``, in the order of computation."""
    return tuple(_describe(program, step) for step in program.block_steps)


def describe_head(program: Program) -> HeadSpec | None:
    """The widest head of ``program``; None where it has none that levers can be applied to."""
    steps = [s for s in program.steps if isinstance(s, HeadStep)]
    weights = [linear.args[1] for s in steps for linear in s.head.linears]
    if not weights:
        return None
    widest = max(weights, key=lambda n: n.meta["val"].shape[0])
    vocabulary, hidden = widest.meta["val"].shape
    refused: dict[str, str] = {}
    for s in steps:
        refused |= refused_by_head(program.scope_of(s), s.head, s.closed)
    tables = {n.args[0] for s in program.steps if isinstance(s, LookUpStep) for n in s.look_ups}
    num_looked_up = sum(n.meta["val"].numel() for n in tables)
    returned = any(s.logits for s in steps)
    return HeadSpec(hidden, vocabulary, refused, num_looked_up, returned)


def computed_in(program: Program) -> torch.dtype | None:
    """The dtype of what blocks of ``program`` compute, of the first one, which under autocast is
    not that of weights; None where it has no block."""
    for step in program.block_steps:
        dtype: torch.dtype = step.block.down.meta["val"].dtype
        return dtype
    return None


def describe_masks(blocks: Sequence[BlockSpec]) -> str:
    """The kinds of masks among ``blocks``, as text."""
    kinds = {str(b.mask) if b.mask else "dense" for b in blocks if b.kind == "attention"}
    return "; ".join(sorted(kinds))


def _describe(program: Program, step: BlockStep) -> BlockSpec:
    block, scope = step.block, program.scope_of(step)
    over, switch = program.number_of(block.over), program.number_of(block.switch)
    weights = [n for n in step.piece.inputs if is_weight(n)]
    at_rest = rest_layouts(scope, block)
    split = {_weight_of(n.args[1]) for n in (*block.up, *block.downs)}
    split |= at_rest.keys() & {x for n in block.up for x in n.args[2:3]}  # their biases
    gathered = [w for w in weights if w not in split or w not in at_rest]
    alone = not program.in_group and program.replicas.size == 1
    down = block.down.args[1].meta["val"]
    heads = kv_heads = head_dim = num_experts = experts_per_token = 0
    if block.experts is not None:
        num_experts, intermediate, hidden = down.shape
        experts_per_token = max((n.args[3] for n in block.experts.takes), default=1)
    else:
        hidden, intermediate = down.shape
    call = AttentionCall.of(block.attention) if block.attention is not None else None
    if call is not None:
        q, k = call.q.meta["val"].shape, call.k.meta["val"].shape
        heads, kv_heads, head_dim, intermediate = q[1], k[1], q[3], 0
    labels = scope.labels(WHOLE).of.items()
    # A graph that was traced with a batch of one has no factor for it, and is of the same blocks;
    # so is one to which numbers such as a norm's epsilon are inputs (``dynamic=True``).
    of_one = Labels({f: ONE if letter == "B" else letter for f, letter in labels})
    text = structure(step.piece, scope.names, of_one, numbers=True)
    return BlockSpec(
        name=block.label,
        kind=block.kind,
        layer=block.layer,
        structure=f"{zlib.crc32(text.encode()):08x}",
        infeasible=infeasible_reasons(scope, block),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_weight_elements=_elements(weights),
        num_split_weight_elements=_elements(split),
        num_shared_weight_elements=_elements(split.difference(at_rest)),
        shares_vectors=alone and all(w.meta["val"].ndim < 2 for w in gathered),
        mask=call.mask_spec if call is not None else None,
        refused_levers=refused_levers(scope, block),
        recompute=step.recompute,
        follows=input_of(program.steps, step) is not None,
        sequence=program.number_of(step.seq) or 0,
        keys=program.number_of(step.keys),
        over=-1 if block.apart and over is None else over,
        switch=-1 if block.switch is not None and switch is None else switch,
    )


def _weight_of(value: fx.Node) -> fx.Node:
    """The weight of which ``value`` is a cast or a transpose, or itself."""
    while value.args and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def _elements(weights: Iterable[fx.Node]) -> int:
    return sum(w.meta["val"].numel() for w in weights)
