"""Plans on paper for weights of float32 under autocast: what blocks compute in, save and gather."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_dry_run import meta_model

from paradyse.cli.commands.plan import dtypes_on_paper
from paradyse.cli.main import main
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import DryRun, dry_run
from paradyse.offline.groups import ways_on_paper
from paradyse.offline.outlook import PaperCosts

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
TOKENS = 512
"""On a rank; what is saved of them outweighs weights."""


@pytest.fixture(scope="module")
def runs() -> dict[str, DryRun]:
    """A Llama on two ranks: as it is, in bfloat16, and under autocast with shards and without."""
    found = {}
    for name, dtype, cast, sharded in (
        ("wide", torch.float32, None, True),
        ("narrow", torch.bfloat16, None, True),
        ("cast", torch.float32, torch.bfloat16, True),
        ("whole", torch.float32, torch.bfloat16, False),
    ):
        model, batch = meta_model("llama")
        found[name] = dry_run(model.to(dtype), batch, 2, sharded, levers=(), autocast=cast)
    return found


@pytest.mark.broad
def test_a_step_has_both_dtypes(runs: dict[str, DryRun]) -> None:
    workload = runs["cast"].workload(1, 64, torch.bfloat16)
    assert (workload.dtype, workload.weight_dtype) == (torch.bfloat16, torch.float32)
    assert runs["wide"].workload(1, 64, torch.float32).weight_dtype is None


@pytest.mark.broad
def test_weights_at_rest_are_wide_and_what_blocks_save_is_between(runs: dict[str, DryRun]) -> None:
    assert runs["cast"].static_bytes == runs["wide"].static_bytes
    for i, block in enumerate(runs["cast"].blocks):
        for strategy in block.feasible():
            narrow, cast, wide = (
                runs[k].block(runs[k].blocks[i], strategy).at(TOKENS)[0]
                for k in ("narrow", "cast", "wide")
            )
            assert narrow < cast < wide, (block.name, strategy)


@pytest.mark.broad
def test_shards_are_gathered_as_blocks_read_them_and_whole_weights_are_copied(
    runs: dict[str, DryRun],
) -> None:
    for i, block in enumerate(runs["cast"].blocks):
        sizes = {k: run.block(run.blocks[i], "megatron_cz") for k, run in runs.items()}
        gathered, n = (
            {k: s.growth.gathered_bytes for k, s in sizes.items()},
            block.num_weight_elements,
        )
        assert gathered["wide"] == gathered["whole"] == 4 * n
        # norms are no products: they come, and are read, as they lie
        assert 2 * n <= gathered["cast"] <= 2 * n + 2 * block.hidden * 2
        copied = sizes["whole"].at(TOKENS)[0] - sizes["cast"].at(TOKENS)[0]
        assert 2 * n - 2 * block.hidden * 2 <= copied <= 2 * n


@pytest.mark.broad
def test_times_are_those_of_what_blocks_compute_in(runs: dict[str, DryRun]) -> None:
    cluster = read_cluster("a100-80gb")
    found = {}
    for name, dtype in (("narrow", "bfloat16"), ("cast", "bfloat16"), ("wide", "float32")):
        machine = machine_of(cluster, 2, getattr(torch, dtype))
        costs, run = PaperCosts(runs[name], machine), runs[name]
        workload = run.workload(1, 65536, getattr(torch, dtype))
        found[name] = sum(costs.cost(b, "megatron_cz", workload).time_s for b in run.blocks)
    assert found["narrow"] < found["cast"] < found["wide"]


@pytest.mark.broad
def test_groups_are_planned_for_both_dtypes() -> None:
    def run_of(degree: int) -> DryRun:
        model, batch = meta_model("llama")
        return dry_run(model, batch, degree, levers=(), autocast=torch.bfloat16)

    cluster = read_cluster("a100-80gb")
    runs = {degree: run_of(degree) for degree in (1, 2)}
    ways = ways_on_paper(runs.__getitem__, cluster, 2, torch.bfloat16, levers=())
    assert {way.degree for way in ways} == {1, 2}


def test_dtypes_of_weights_and_of_blocks() -> None:
    assert dtypes_on_paper(None, None) == ("bfloat16", torch.bfloat16)
    assert dtypes_on_paper("float32", None) == ("float32", torch.float32)
    assert dtypes_on_paper(None, "bfloat16") == ("float32", torch.bfloat16)
    for dtype in ("bfloat16", "float16", "float64"):
        with pytest.raises(ValueError, match=f"--dtype {dtype} has none: leave one of them out"):
            dtypes_on_paper(dtype, "bfloat16")


def test_it_is_said_and_refused_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = ["plan", "--model", str(tmp_path / "config.json"), "--autocast", "bfloat16"]
    assert main([*asked, "--gpus", "2", "--lengths", "128", "--levers", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "bfloat16 by autocast of float32, weights sharded" in found["setting"]
    assert (found["dtype"], found["weight_dtype"]) == ("bfloat16", "float32")
    assert main(asked) == 2
    assert "--autocast is for a cluster on paper" in capsys.readouterr().err


def test_one_device_has_nothing_to_gather(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = ["plan", "--model", str(tmp_path / "config.json"), "--gpus", "1", "--lengths", "128"]
    found = {}
    for how in ((), ("--weights", "replicated"), ("--weights", "sharded")):
        assert main([*asked, "--levers", "none", "--json", *how]) == 0
        found[how] = json.loads(capsys.readouterr().out)
    assert "weights replicated" in found[()]["setting"]
    assert len({json.dumps(f["forecasts"]) for f in found.values()}) == 1
