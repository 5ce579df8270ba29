"""Graphs as text for people: one line a node, with named dims, placement and block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx


def readable(gm: fx.GraphModule, ctx: Any) -> str:
    """``gm`` as text. Dims show B, S for batch and sequence; ``/p`` marks what is split over
    ranks.
    """
    others = [(f, f"S{i}") for i, f in enumerate((*ctx.seqs, *ctx.unsplit)) if i]
    named = [(ctx.seq, "S"), *others, (ctx.batch, "B")]
    letters = {f: name for f, name in named if f is not None}
    block_of = {n: b.label for b in ctx.blocks for n in b.nodes}
    block_of |= {n: "head" for head in ctx.heads for n in head.nodes}
    lines = [f"# sequence axis: {ctx.axis.size} rank{'s' * (ctx.axis.size > 1)}"]
    previous = None
    for node in gm.graph.nodes:
        block = block_of.get(node)
        if block != previous:
            lines.append(f"# {block or 'between blocks'}")
            previous = block
        lines.append(_line(node, ctx, letters))
    for step in ctx.schedule.steps if ctx.schedule is not None else ():
        kind = "block" if step.index >= 0 else "on split" if step.split else "on replicated"
        reads, gives = (", ".join(map(str, x)) for x in (step.piece.inputs, step.piece.outputs))
        lines.append(f"# step {step.position}, {kind}: {step.piece.name}({reads}) -> {gives}")
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, text: str) -> None:
    """Write ``text`` to the file ``name`` of the ``folder`` for dumps, which is made if need be.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    except OSError as e:
        raise ValueError(
            f"option 'dump': {folder / name} cannot be written ({e}); give a folder that can be"
        ) from e


def _part(dim: str, own: str, num_ranks: int) -> str:
    return f"{dim}/{num_ranks}" if dim == own else dim


def _line(node: fx.Node, ctx: Any, letters: dict[Any, str]) -> str:
    val = node.meta.get("val")
    shape = ""
    if isinstance(val, torch.Tensor):
        dims = [str(n) for n in val.shape]
        if node in ctx.names.dims and letters:
            dims = [
                "*".join(letters.get(f, str(f.size)) for f in d) or "1" for d in ctx.names.of(node)
            ]
        if node in ctx.split and ctx.axis.size > 1:
            own = letters[ctx.split[node]]
            dims = ["*".join(_part(x, own, ctx.axis.size) for x in d.split("*")) for d in dims]
        shape = f": {str(val.dtype).removeprefix('torch.')}[{', '.join(dims)}]"
    if node.op == "placeholder":
        return (
            f"{node.name}{shape} = {'weight' if node.meta.get('weight') else 'input'} {node.target}"
        )
    if node.op == "output":
        return f"return {node.args[0]}"
    target = getattr(node.target, "__name__", str(node.target))
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    module = node.meta.get("module", "")
    return f"    {node.name}{shape} = {target}({args})" + (f"  # {module}" if module else "")
