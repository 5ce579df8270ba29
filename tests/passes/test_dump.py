"""Graphs as text: named dims, what is split, blocks; a file for every pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pass_graphs import context, toy, toy_inputs, trace

from paradyse.distributed.axis import SINGLE
from paradyse.passes.dump import readable
from paradyse.passes.pipeline import PASSES, run_passes


def test_a_line_has_dims_by_name_and_stands_in_its_block(tmp_path: Path) -> None:
    gm, ctx = trace(toy, *toy_inputs(), weights=7), context()
    run_passes(gm, ctx, str(tmp_path))
    text = readable(gm, ctx)
    assert text.startswith("# sequence axis: 1 rank\n")
    for part in ("# layers.0.attention\n", "# layers.0.mlp\n", ": float32[B, S, 8]", " = weight "):
        assert part in text, part
    ctx.axis = replace(SINGLE, size=2)
    assert ": float32[B, S/2, 8]" in readable(gm, ctx)

    names = [f"{i:02d}_{fn.__name__}.txt" for i, fn in enumerate(PASSES, 1)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00_retrace.txt", *names]
    assert (tmp_path / names[-1]).read_text().endswith(text)
