"""A profile given to the backend: plans follow it, reports name it, ranks hold the same one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, RankPool
from tiny import Tiny, tokens

import paradyse
from paradyse.planning.costs import Machine
from paradyse.planning.machine import describe_device
from paradyse.planning.profile_file import Header, Measurement, append, present_versions
from paradyse.runtime.registry import captures_of
from paradyse.strategies import canonical_strategy
from paradyse.types import ATTENTION_STRATEGIES

HEADER = Header(
    versions=present_versions(),
    device=describe_device(torch.device("cpu")),
    num_ranks=2,
    dtype="float32",
    sharded=False,
    inner="eager",
    machine=asdict(Machine(1e11, 1e10, 1e-4, 1e9, capacity_bytes=7)),
)


def step(**options: Any) -> tuple[Any, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(Tiny(), backend="paradyse", options={"inner": "eager", **options})
    ids = tokens(2, 9)
    loss = compiled(ids, ids)
    loss.backward()
    return compiled, loss.item()


def structures() -> list[tuple[str, str]]:
    compiled, _ = step(plan="metp")
    return [
        (b.structure, b.kind)
        for c in captures_of(compiled)
        for g in c.graphs.values()
        for b in g.blocks
    ]


def planned(path: str) -> tuple[list[str], str, float, float]:
    """Strategies, the report, its limit in bytes, and the loss under a profile."""
    compiled, loss = step(cost_model=path, strategies=ATTENTION_STRATEGIES, splits=[])
    report = paradyse.explain(compiled, 2, 9)
    return list(report.plan.strategies), str(report), report.limit_bytes, loss


def disagreeing(paths: list[str]) -> None:
    step(cost_model=paths[dist.get_rank()])


def write(path: Path, blocks: list[tuple[str, str]], fastest: str, header: Header = HEADER) -> str:
    rows = {}
    for structure, kind in blocks:
        for s in ATTENTION_STRATEGIES:
            for n in (4, 8, 16, 32):
                taken = (1e-3 if s == fastest else 1.0) * n
                variant = canonical_strategy(kind, s)
                key = structure, variant, n
                if key not in rows or s == fastest:
                    rows[key] = Measurement(
                        structure, kind, variant, 2, n, True, "measured", taken, taken
                    )
    append(path, header, rows.values())
    return str(path)


def test_plans_follow_the_profile_and_reports_name_it(pool2: RankPool, tmp_path: Path) -> None:
    blocks = pool2.run(structures)[0]
    assert len(set(blocks)) == 2  # one attention and one MLP, of two layers
    losses = []
    for fastest in ("metp", "colossal_z"):
        path = write(tmp_path / f"{fastest}.jsonl", blocks, fastest)
        (strategies, text, limit, loss), other = pool2.run(planned, path)
        assert other[0] == strategies
        assert strategies[::2] == [fastest] * 2
        assert f"costs from the profile {path}" in text
        assert "  forest  " in text
        assert "running on" not in text
        assert limit > 2**20  # of this machine, not of the profile's
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_ranks_with_different_profiles_are_told(pool2: RankPool, tmp_path: Path) -> None:
    blocks = pool2.run(structures)[0]
    paths = [write(tmp_path / f"{s}.jsonl", blocks, s) for s in ("metp", "colossal_z")]
    text = "(?s)disagree on the profile .*copy of one file on every rank"
    with pytest.raises(RankFailure, match=text):
        pool2.run(disagreeing, paths)


def test_a_profile_of_other_ranks_or_another_model_is_refused(
    pool2: RankPool, tmp_path: Path
) -> None:
    wide = write(tmp_path / "wide.jsonl", [("a", "mlp")], "metp", replace(HEADER, num_ranks=8))
    other = write(tmp_path / "other.jsonl", [("a", "mlp")], "metp")
    for path, text in (
        (wide, "measure on 2 ranks: paradyse profile --ranks 2"),
        (other, "another model"),
    ):
        with pytest.raises(RankFailure, match=f"(?s){text}"):
            pool2.run(planned, path)
