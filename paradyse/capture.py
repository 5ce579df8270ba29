"""From the graph that Dynamo hands to a backend to a program, for static and for symbolic captures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.config import Options
from paradyse.mesh import Axis
from paradyse.passes.pipeline import CaptureContext, run_passes
from paradyse.passes.retrace import retrace
from paradyse.program import Program
from paradyse.strategies.variant import SPLIT, WHOLE, Scope, VariantCache

log = logging.getLogger(__name__)

VARIANTS = VariantCache()
"""Registry of everything compiled in this process: a second capture finds what the first compiled."""


@dataclass(frozen=True)
class SizeSource:
    """Where a call's sizes are read: argument index and dim."""

    seq: tuple[int, int]
    batch: tuple[int, int] | None


def is_model_state(node: fx.Node, example: Any) -> bool:
    """Whether a placeholder is a parameter or a buffer, not data of the batch."""
    if isinstance(example, torch.nn.Parameter):
        return True
    if not isinstance(example, Tensor):
        return False
    name = str(node.target)
    return "_parameters_" in name or "_buffers_" in name or hasattr(example, "_dynamo_static_input_type")


def build_program(
    gm: fx.GraphModule, inputs: Sequence[Any], weights: Sequence[bool], options: Options, axis: Axis
) -> tuple[Program | None, CaptureContext]:
    """Run the passes on ``gm`` at the sizes of ``inputs``; None where there is nothing to switch.

    Args:
        inputs: per placeholder a tensor of the sizes to trace at, or a number.
        weights: per placeholder whether it is a parameter or a buffer.
    """
    ctx = CaptureContext(options, axis)
    traced = retrace(gm, list(inputs))
    for node, weight in zip((n for n in traced.graph.nodes if n.op == "placeholder"), weights, strict=True):
        node.meta["weight"] = weight
    run_passes(traced, ctx, options.dump)
    if ctx.seq is None:
        return None, ctx
    scope = Scope(ctx.names, ctx.seq, ctx.batch, axis, options.inner, VARIANTS)
    return Program(traced, ctx, scope), ctx


def find_sizes(program: Program) -> SizeSource | None:
    """Where B and S stand in the arguments; None where no argument shows the sequence length."""
    scope = program.scope
    found: dict[Any, tuple[int, int]] = {}
    for i, node in enumerate(program.placeholders):
        if isinstance(node.meta.get("val"), Tensor) and not node.meta.get("weight"):
            for d, dim in enumerate(scope.names.of(node)):
                if len(dim) == 1:
                    found.setdefault(dim[0], (i, d))
    if scope.seq not in found or (scope.batch is not None and scope.batch not in found):
        return None
    return SizeSource(found[scope.seq], found[scope.batch] if scope.batch is not None else None)


def sizes_of(source: SizeSource, args: Sequence[Any], axis: Axis) -> dict[str, int]:
    """The sizes of one call."""
    seq_len = args[source.seq[0]].shape[source.seq[1]]
    sizes = {WHOLE: seq_len}
    if axis.size > 1:
        sizes[SPLIT] = axis.layout(seq_len).local_len
    if source.batch is not None:
        sizes["B"] = args[source.batch[0]].shape[source.batch[1]]
    return sizes
