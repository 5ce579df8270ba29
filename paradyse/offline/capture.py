"""The program of a model on the meta device, for one rank of ranks that do not exist."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from paradyse.config import Options
from paradyse.distributed.axis import SINGLE, Axis, resolve_axis
from paradyse.passes.retrace import InputLike
from paradyse.runtime.capture import (
    build_program,
    find_sizes,
    is_model_state,
    sizes_of,
    trace_inputs,
)
from paradyse.runtime.program import Program
from paradyse.runtime.weight_writes import take_writes
from paradyse.torch_private import keep_graphs_whole


@contextlib.contextmanager
def fake_world(num_ranks: int) -> Iterator[Axis]:
    """The sequence axis of rank 0 of ``num_ranks`` that do not exist: collectives do nothing."""
    if num_ranks == 1:
        yield SINGLE
        return
    from paradyse.torch_private import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield resolve_axis()
    finally:
        dist.destroy_process_group()


def capture_program(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    axis: Axis,
    at_rest: str = "",
    autocast: torch.dtype | None = None,
) -> Program:
    """The program of ``model``, as it is called with ``batch``, for one rank of ``axis``.

    Args:
        at_rest: which dim tokens lie split along, as ``Plan.split`` has it.
        autocast: to which ``torch.autocast`` casts, by the CPU's list of operators, as the graph is
            made for one; None: it is off.
    Raises:
        ValueError: the model cannot be called so, is not one graph, as where Dynamo cannot follow
            it, or nothing in it can be split.
    """
    found: list[tuple[Program | None, Sequence[str]]] = []
    options = Options(inner="aot_eager")

    graphs = 0

    def capture(gm: fx.GraphModule, examples: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        weights = [is_model_state(n, e) for n, e in zip(placeholders, examples, strict=True)]
        take_writes(gm, weights)  # they need no time
        traced = trace_inputs(placeholders, examples).values
        inputs = [replace(x, device=_CPU) if isinstance(x, InputLike) else x for x in traced]
        how = weights, options, axis, None, None, at_rest
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            program, ctx = build_program(_on_cpu(gm), inputs, *how)
        if program is not None:
            program.captured_at = sizes_of(find_sizes(program), examples, axis)
        found.append((program, ctx.notes))
        raise _Captured

    capture.__name__ = "paradyse"  # Dynamo traces as it does for the backend of that name
    keep_graphs_whole(capture.__name__)
    compiled = torch.compile(model, backend=capture, dynamic=True, fullgraph=True)
    try:
        compiled(**batch)
    except Exception as e:
        if not graphs:  # Dynamo gives the model's own error, or says what it cannot follow
            given = ", ".join(map(str, batch)) or "no arguments"
            raise ValueError(f"the model cannot be called with {given}: {_why(e)}") from e
        captured = isinstance(e.__cause__ or e, _Captured) or "_Captured" in str(e)
        if not (found and captured):
            raise
    program, notes = found[0] if found else (None, ["it computes no tensor"])
    if program is None:
        raise ValueError(f"nothing in the model's graph can be split: {'; '.join(notes)}")
    return program


def _why(error: Exception) -> str:
    """What ended the capture, and the way out: the model's own ``error``, as Dynamo tells of it, or
    what Dynamo cannot follow."""
    own = re.search(r"(?:raised exception|: got) (\w+\(.*\))$", str(error), re.MULTILINE)
    if own is not None:
        return f"{own[1]} (a Python file with make_model() and make_batch() may give another batch)"
    what = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return f"{what} (on paper it must be one graph: take out what Dynamo cannot follow)"


class _Captured(Exception):
    """Raised once the graph is known, so that nothing of it runs."""


_META, _CPU = torch.device("meta"), torch.device("cpu")


def _on_cpu(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` for tensors that claim to be on the CPU: parts of PyTorch do not know "meta"."""

    def moved(x: Any) -> Any:
        return _CPU if x in (_META, "meta") and isinstance(x, torch.device | str) else x

    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)
        if node.target is torch.histc:
            node.target = _count
    gm.recompile()
    return gm


def _count(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.histc`` of integers too, which a CPU computes of floating point numbers alone, as
    models on other devices count the tokens of each expert."""
    counts = torch.histc(x if x.is_floating_point() else x.float(), *args, **kwargs)
    return counts.to(x.dtype)
