"""The passes in their order, and what runs them: lint, timing, dumps."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from paradyse.distributed.axis import SINGLE, Axis
from paradyse.graph.factors import Dim, Factor, Length, Names, Product
from paradyse.passes.cut_later import cut_later
from paradyse.passes.dump import readable, write
from paradyse.passes.fold_attention import fold_attention
from paradyse.passes.fold_experts import fold_experts
from paradyse.passes.mixing_regions import MixingRegion
from paradyse.passes.name_dims import name_dims
from paradyse.passes.outline_blocks import Block, outline_blocks
from paradyse.passes.outline_head import Head, outline_head
from paradyse.passes.pad_labels import pad_labels
from paradyse.passes.part_joins import part_joins
from paradyse.passes.place_tokens import place_tokens
from paradyse.passes.recover_masks import recover_masks
from paradyse.passes.remove_mutation import remove_mutation
from paradyse.passes.retrace import drop_grad_mode, make_autocast_explicit
from paradyse.passes.simplify import drop_no_ops, merge_equals, unify_linears
from paradyse.passes.split_steps import Schedule, split_steps
from paradyse.passes.stage_sums import stage_sums
from paradyse.passes.unify_losses import unify_losses
from paradyse.torch_private import trace_structured

log = logging.getLogger(__name__)

PASSES: tuple[Callable[[fx.GraphModule, Any], int], ...] = (
    drop_grad_mode,
    remove_mutation,
    make_autocast_explicit,
    drop_no_ops,
    unify_linears,
    merge_equals,
    fold_attention,
    fold_experts,
    recover_masks,
    unify_losses,
    pad_labels,
    part_joins,
    stage_sums,
    cut_later,
    name_dims,
    place_tokens,
    outline_blocks,
    outline_head,
    split_steps,
)
"""All passes, in the order they run."""

if len({fn.__name__ for fn in PASSES}) < len(PASSES):
    raise ValueError("PASSES has two passes of one name")

OPTIONAL = tuple(
    fn.__name__
    for fn in (
        drop_no_ops,
        unify_linears,
        merge_equals,
        fold_attention,
        fold_experts,
        recover_masks,
        unify_losses,
        pad_labels,
        part_joins,
        stage_sums,
        cut_later,
        outline_blocks,
        outline_head,
    )
)
"""Names that ``passes_off`` may list: without these passes the result is slower, not wrong."""


@dataclass
class CaptureContext:
    """What passes share about one captured graph."""

    options: Any
    axis: Axis
    replicas: Axis = SINGLE
    """The data-parallel axis."""
    at_rest: str = ""
    """Which dim tokens are to lie split along, as ``Plan.split`` has it."""
    notes: list[str] = field(default_factory=list)
    lengths: Mapping[fx.Node, Mapping[int, Length | Product]] = field(default_factory=dict)
    """Arguments of operators that are numbers made of a size, where two traces told them apart."""
    names: Names = field(default_factory=Names)
    seqs: Mapping[Factor, Factor | None] = field(default_factory=dict)
    """The sequences whose tokens are split, that with the most work first, and the batch of each;
    ``seq`` and ``batch`` are those of the first."""
    unsplit: tuple[Factor, ...] = ()
    """Other dims of tokens: those that attention is over in turn, such as space beside time, and
    those that a block's split may be switched to."""
    seq: Factor | None = None
    batch: Factor | None = None
    sequences: Dim = ()
    """The batch dim of attention: ``batch``, and whatever else is in it."""
    split: dict[fx.Node, Factor] = field(default_factory=dict)
    """Values split along a sequence when there is more than one rank, and which."""
    partial: set[fx.Node] = field(default_factory=set)
    """Split values that are partial sums: their whole is the sum over ranks."""
    fills: dict[fx.Node, int] = field(default_factory=dict)
    """Replicated value -> what its rows past the end are when it is split (labels: the ignored
    index).
    """
    gathered: list[tuple[fx.Node, str]] = field(default_factory=list)
    """Operators computed on gathered tensors, and why."""
    whole_attention: set[fx.Node] = field(default_factory=set)
    """Attention that no block could be made of: computed on gathered tensors."""
    own_experts: dict[fx.Node, Factor] = field(default_factory=dict)
    """Operators on rows in the order of experts, which each rank sorts for its own tokens."""
    whole_experts: set[fx.Node] = field(default_factory=set)
    """The same where something sees that order: computed on gathered tensors."""
    mixing: list[MixingRegion] = field(default_factory=list)
    """What mixes tokens and is computed for all of them and a part of another dim."""
    mixed: dict[fx.Node, Factor] = field(default_factory=dict)
    """Their operators, and the sequence that what they give is split along."""
    blocks: list[Block] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    """What makes logits, and their losses."""
    tails: set[fx.Node] = field(default_factory=set)
    """Operators between the inside of a block and the graph's outputs: run when the output is
    read.
    """
    schedule: Schedule | None = None
    """The steps; None where there is no sequence to split."""
    pass_seconds: dict[str, float] = field(default_factory=dict)

    def note(self, message: str) -> None:
        """Keep ``message`` for ``explain`` and log it."""
        if message not in self.notes:
            self.notes.append(message)
            log.info("%s", message)


def run_passes(gm: fx.GraphModule, ctx: CaptureContext, dump: str | None = None) -> None:
    """Run ``PASSES`` on ``gm`` in place.

    Args:
        dump: folder for the graph before the first and after every pass; the first rank writes.
    Raises:
        ValueError: the folder cannot be written.
    """
    off = set(ctx.options.passes_off)
    folder = Path(dump) if dump and ctx.axis.rank == 0 else None
    if folder is not None:
        write(folder, "00_retrace.txt", readable(gm, ctx))
    for i, fn in enumerate(PASSES, 1):
        name = fn.__name__
        if name in off:
            continue
        start = time.perf_counter()
        count = fn(gm, ctx)
        gm.graph.lint()
        gm.recompile()
        ctx.pass_seconds[name] = time.perf_counter() - start
        log.debug("pass %s: %d rewrites in %.3f s", name, count, ctx.pass_seconds[name])
        if folder is not None or log.isEnabledFor(logging.DEBUG):
            text = f"# {count} rewrites\n{readable(gm, ctx)}"
            artifact = {"name": f"paradyse_{i:02d}_{name}", "encoding": "string"}
            trace_structured("artifact", lambda a=artifact: a, payload_fn=lambda t=text: t)
            if folder is not None:
                write(folder, f"{i:02d}_{name}.txt", text)
    _report_gathered(ctx)


def gathered_notes(ctx: CaptureContext) -> dict[fx.Node, str]:
    """What is computed with all tokens -> where and why, in words; the operators of a region that
    has a part of another dim share a note."""
    found = {}
    for node, why in ctx.gathered:
        if node not in ctx.tails:
            found[node] = f"{node.target} runs on gathered tensors{_where(node)}: {why}"
    for region in ctx.mixing:
        first, size = region.nodes[0], region.over.size
        more = f" and {len(region.nodes) - 1} more operators" if len(region.nodes) > 1 else ""
        what = "sequences" if region.over is ctx.batch else f"{size} heads or channels"
        note = f"{first.target}{more}{_where(first)}: all tokens, for a part of the {what}"
        found.update(dict.fromkeys(region.nodes, note))
    return found


def _report_gathered(ctx: CaptureContext) -> None:
    for node, why in ctx.gathered:
        if node in ctx.tails or ctx.options.on_unsupported != "error" or ctx.axis.size == 1:
            continue
        where = node.meta.get("module", "top level")
        raise NotImplementedError(
            f"cannot split {node.target} ({where}) along the sequence: {why}. "
            'on_unsupported="gather" computes it on gathered tensors instead, exactly but slowly.'
        )
    for note in gathered_notes(ctx).values():
        ctx.note(note)


def _where(node: fx.Node) -> str:
    """The module of ``node`` with * in place of numbers, so that layers read alike."""
    module = node.meta.get("module")
    return "" if module is None else " in " + re.sub(r"\b\d+\b", "*", module)
