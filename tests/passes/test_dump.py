"""Graphs as text: named dims, what is split, blocks; a file for every pass."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from pass_graphs import context, toy, toy_inputs, trace
from tiny import Tiny, tokens
from torch._dynamo.exc import BackendCompilerFailed

from paradyse.distributed.axis import SINGLE
from paradyse.passes.dump import readable
from paradyse.passes.pipeline import PASSES, run_passes
from paradyse.runtime.known_buffers import KnownBuffers


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


def dump_where_a_file_is(folder: str) -> tuple[str, str]:
    """What this rank hears of a folder that cannot be made, and of one that went later."""

    def compiled(dump: Path) -> Any:
        options = {"inner": "eager", "plan": "megatron_cz", "dump": dump}
        return torch.compile(Tiny(layers=1), backend="paradyse", options=options, dynamic=True)

    batch = tokens(2, 12), tokens(2, 12)
    with pytest.raises(BackendCompilerFailed) as early:
        compiled(Path(folder, "file", "dumps"))(*batch)
    torch._dynamo.reset()
    dump = Path(folder, "dumps")
    call = compiled(dump)
    call(*batch)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(dump)
        dump.touch()
    with pytest.raises(ValueError) as late:
        call(tokens(2, 14), tokens(2, 14))
    return str(early.value), str(late.value)


@pytest.mark.broad
def test_all_ranks_hear_that_dumps_cannot_be_written(tmp_path: Path, pool2: RankPool) -> None:
    (tmp_path / "file").touch()
    files = "file/dumps/00_retrace.txt", "dumps/plan_batch2_length14.txt"
    for texts in pool2.run(dump_where_a_file_is, str(tmp_path), timeout_s=60):
        for file, text in zip(files, texts, strict=True):
            assert f"option 'dump': {tmp_path / file} cannot be written" in text
            assert "give a folder that can be" in text


def dump_after_a_failure(folder: str) -> list[str]:
    """Files of plans, where the second rank failed at a length before it wrote, once."""
    options = {"inner": "eager", "plan": "megatron_cz", "dump": folder}
    call = torch.compile(Tiny(layers=1), backend="paradyse", options=options, dynamic=True)
    call(tokens(2, 12), tokens(2, 12))
    check, left = KnownBuffers.check, [1] if dist.get_rank() == 1 else []

    def fail_once(self: KnownBuffers, args: Any) -> None:
        if left and left.pop():
            raise ZeroDivisionError
        check(self, args)

    with patch.object(KnownBuffers, "check", fail_once):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            call(tokens(2, 14), tokens(2, 14))
        call(tokens(2, 14), tokens(2, 14))
    dist.barrier()
    return sorted(p.name for p in Path(folder).glob("plan_*"))


@pytest.mark.broad
def test_what_no_rank_has_written_all_write(tmp_path: Path, pool2: RankPool) -> None:
    names = [f"plan_batch2_length{n}.txt" for n in (12, 14)]
    assert pool2.run(dump_after_a_failure, str(tmp_path / "d"), timeout_s=60) == [names] * 2
