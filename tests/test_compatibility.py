"""The table of families: a few of them in turn, and what becomes of its rows."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
from compatibility import Result, crash, pools_of, read, try_family, try_settings, write
from family_settings import MASKS
from family_table import FAMILIES
from harness import RankError, RankFailure, RankPool
from plans import PLANS
from small_models import batch_of, make

ALWAYS = {
    "bart": ("6 attention, 4 mlp", "1 2 2"),
    "vit": ("2 attention, 2 mlp", "1 2 2"),
    "bert-choices": ("2 attention, 2 mlp", "1 2 2"),
    "clip": ("4 attention, 4 mlp", "1 2 2"),
}
"""Family -> its blocks and programs. Two sequences in one graph, patches, a batch of two dims."""

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"


def of_the_day() -> str:
    """One of the families that the document calls exact, another one every day."""
    exact = [name for name, row in read(DOCUMENT).items() if not row.exact.startswith("**")]
    return exact[datetime.date.today().toordinal() % len(exact)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALWAYS)
def test_blocks_and_programs_are_found(name: str, pool2: RankPool) -> None:
    row = try_family(pool2, name, ("auto",), 120)
    assert (row.exact, row.blocks, row.programs) == ("auto", *ALWAYS[name]), row.line()


@pytest.mark.broad
def test_the_family_of_the_day_is_as_the_document_says(pool2: RankPool) -> None:
    name = of_the_day()
    known = read(DOCUMENT)[name]
    row = try_family(pool2, name, ("auto",) if known.exact == "auto" else PLANS, 240)
    assert (row.exact, row.blocks) == (known.exact, known.blocks), row.line()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpt", "bloom", "t5", "clip", "gemma3n", "funnel"])
def test_compiled_blocks_are_exact(name: str, pool2: RankPool) -> None:
    """What is sliced from tables may be strided, of which a compiled block has to be told. Backward
    of Gemma3n takes a length for a constant; Funnel has means over windows beyond the edge."""
    row = try_family(pool2, name, ("colossal_z", "megatron_ts"), 400, "inductor")
    assert row.exact == "all strategies", row.line()


@pytest.mark.slow
def test_every_strategy_is_exact_where_two_sequences_are_split(pool2: RankPool) -> None:
    row = try_family(pool2, "bart", PLANS, 240)
    assert row.exact == "all strategies", row.line()


@pytest.mark.slow
def test_settings_of_a_family() -> None:
    """Masks that it has are found and exact, on one to four ranks, whole and sharded."""
    with pools_of((1, 2, 4)) as pools:
        assert try_settings(pools, "qwen3", 120) == "plain, padded, packed"
        assert try_settings(pools, "vit", 120) == "plain"


def test_masks_are_as_the_family_has_them() -> None:
    for name, masks in {"qwen3": 3, "bert": 2, "bart": 2, "vit": 1, "mamba": 2}.items():
        row, g = FAMILIES[name], torch.Generator().manual_seed(0)
        model = make(row)
        plain = batch_of(row, model, 13)
        changed = {k: change(model, plain, g) for k, change in MASKS.items()}
        assert sum(b is not None for b in changed.values()) == masks, name
        if padded := changed["padded"]:
            real = padded["attention_mask"].bool()
            assert not real.all(-1).any() and real[:, -1].all() == (name in ("qwen3", "mamba"))
        if packed := changed["packed"]:
            assert (packed["position_ids"] == 0).sum(-1).min() > 1


def test_the_document_has_rows_of_known_families_only() -> None:
    rows = read(DOCUMENT)
    assert len(rows) >= 90 and sum(row.is_all_blocks for row in rows.values()) >= 80
    assert all(row.model == FAMILIES[name].cls for name, row in rows.items())


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        Result(
            "t5",
            "T5ForConditionalGeneration",
            "auto",
            "2 attention",
            "4",
            "1 2 2",
            "plain",
            "a | b",
        ),
        Result("llama", "LlamaForCausalLM", "**crash**: no", "", "", "", "", ""),
    ]
    write(tmp_path / "table.md", rows)
    found = read(tmp_path / "table.md")
    assert list(found) == ["llama", "t5"]
    assert found["t5"].notes == "a / b" and found["llama"] == rows[1]
    assert "2 of" in (tmp_path / "table.md").read_text()
    assert read(tmp_path / "none.md") == {}


def test_a_crash_is_one_line() -> None:
    assert crash(RankFailure("", {}, True)) == "no result in time"
    assert crash(RankFailure("", {}, False)) == "a rank died"
    for text in ("no", "backend='paradyse' raised:\nno\nmore", "no\nError"):
        error = RankError("ValueError", text, "")
        assert crash(RankFailure("", {1: error}, False)) == "ValueError: no"


@pytest.mark.parametrize("name", ["vit", "bart", "bert-choices"])
def test_small_models_are_small_and_alike_on_every_rank(name: str) -> None:
    row = FAMILIES[name]
    one, other = make(row), make(row)
    assert sum(p.numel() for p in one.parameters()) < 100_000
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    first, again = batch_of(row, one, 13), batch_of(row, one, 13)
    assert first.keys() == again.keys() and "labels" in first
