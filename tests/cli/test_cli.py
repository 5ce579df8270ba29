"""The command line: help, errors for people, and each command from end to end, small."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paradyse.cli import launch, rank_jobs
from paradyse.cli import main as cli
from paradyse.cli.commands import demo, doctor
from paradyse.cli.commands.demo import pick_files
from paradyse.cli.corpus import TextFile, length_ranges
from paradyse.cli.launch import ALLOCATOR_VARIABLES, num_cores
from paradyse.cli.rank_jobs import StepDone
from paradyse.cli.replay import Phase, describe_plan
from paradyse.cli.results import Record
from paradyse.cli.screen import Screen, make_console
from paradyse.mixed.ways_file import read_ways
from paradyse.types import ALONG_SEQUENCE, ATTENTION_STRATEGIES, REPLICATED

TINY = ["--layers", "1", "--hidden", "64", "--inner", "aot_eager"]


def shell(*args: str) -> tuple[int, str]:
    """Exit code and everything written, by a fresh process as from a shell."""
    done = subprocess.run(
        [sys.executable, "-m", "paradyse.cli.main", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def run(*args: str) -> tuple[int, str]:
    """Exit code and everything written, in this process; its ranks are processes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(args)
    return code, out.getvalue()


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """What is started inside has no other core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 6000}
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    return str(path)


@pytest.mark.parametrize("command", [c[0] for c in cli.COMMANDS])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main([command, "--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  paradyse {command}" in text


@pytest.mark.parametrize(("name", "example"), [(c[0], c[2]) for c in cli.COMMANDS])
def test_the_example_in_the_help_parses(name: str, example: str) -> None:
    assert cli.make_parser().parse_args(example.split()[1:]).command == name


def test_help_is_immediate() -> None:
    code = "import sys, paradyse.cli.main as c; c.make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_says_what_bench_compares(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    others = set(ATTENTION_STRATEGIES) - set(ALONG_SEQUENCE)
    assert f"auto with (default: all but {' and '.join(others)})" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_demo_trains_compares_and_checks() -> None:
    code, out = run("demo", "--steps", "4", "--cap", "256", "--rounds", "1", *TINY)
    assert code == 0, out
    assert "step 4/4" in out
    assert "ok: losses of 2 ranks against one process" in out
    header = next(line for line in out.splitlines() if line.startswith("length "))
    assert set(ALONG_SEQUENCE) <= set(header.split())


@pytest.mark.slow
def test_plan_explains_each_length(config: str) -> None:
    code, out = run("plan", "--model", config, "--lengths", "64,4096")
    assert code == 0, out
    assert "batch 1 x 64 tokens" in out and "batch 1 x 4096 tokens" in out
    assert out.count("chosen") >= 2


def test_one_length_that_does_not_fit_leaves_the_plans_of_others(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(args: Any, function: str, arguments: dict[str, Any]) -> list[Any]:
        return [rank_jobs.plan(SimpleNamespace(device="cpu"), **arguments)]

    monkeypatch.setattr(launch, "run_as_asked", here)
    asked = ["plan", "--model", config, "--memory-limit", "4MB", "--json", "--lengths"]
    assert cli.main([*asked, "16,4096"]) == 0
    found, told = capsys.readouterr()
    assert [p["workload"]["seq_len"] for p in json.loads(found)["plans"]] == [16]
    assert json.loads(found)["too_long"].keys() == {"4096"}
    assert "4,096 tokens: no plan fits for batch 1 x 4096 tokens" in told
    assert cli.main([*asked, "4096"]) == 2
    assert "no plan fits for batch 1 x 4096 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_ranks_refuse_is_told_in_a_line(config: str) -> None:
    few = ["--layers", "1", "--lengths", "64"]
    code, out = run("plan", "--model", config, *few, "--memory-limit", "1")
    assert code == 2 and "Traceback" not in out, out
    assert out.startswith("paradyse plan: no plan fits") and len(out.splitlines()) == 1


@pytest.mark.slow
def test_plan_of_mixed_lengths_writes_ways_to_train_with(config: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("30000 " + "700 90 " * 10 + "5000")
    few = ["--layers", "1", "--levers", "none", "--batch", "10", "--cut", "20000"]
    few += ["--lengths-from", str(tmp_path / "lengths.txt"), "--out", str(tmp_path / "plans")]
    few += ["--weights", "replicated", "--gpus", "2", "--device", "a100-40gb"]
    code, out = run("plan", "--model", config, *few)
    assert code == 0, out
    for part in ("2 batches of 10", "degree 2 for all", "groups of different degree", "20,000"):
        assert part in out
    assert 'class="chart"' in (tmp_path / "plans" / "plan.html").read_text()
    ways, weights = read_ways(tmp_path / "plans" / "ways.json")
    assert weights == REPLICATED
    assert {w.degree for w in ways} == {1, 2}


def test_bench_on_one_rank_has_no_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--ranks", "1", "--strategies", "metp"]) == 2
    assert "--strategies share work among ranks: give --ranks 2" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_writes_time_plan_and_memory_of_every_run(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("300  # a comment\n24\n")
    few = ["--lengths", str(tmp_path / "lengths.txt"), "--strategies", "megatron_cz,metp"]
    few += ["--rounds", "2", "--csv", str(tmp_path / "t.csv"), "--out", str(tmp_path / "charts")]
    code, out = run("bench", *few, *TINY, "--inner", "eager")
    assert code == 0, out
    page = (tmp_path / "charts" / "bench.html").read_text()
    assert page.count('class="chart"') >= 4 and "metp" in page
    for part in ("Time of all sequences", "Peak memory", "attention blocks under auto"):
        assert part in page
    assert (tmp_path / "charts" / "bench.png").stat().st_size > 10_000
    text = (tmp_path / "t.csv").read_text()
    assert text == (tmp_path / "charts" / "bench.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2 * 2 * 3
    assert {r["choice"] for r in rows} == {"auto", "megatron_cz", "metp"}
    assert all(r["plan"] and int(r["peak_bytes"]) > 0 for r in rows)
    for name in ("megatron_cz", "metp"):
        of = {r["num_tokens"]: r for r in rows if r["choice"] == name}
        short, long = of["24"], of["300"]
        assert short["cumulative_s"] == short["median_s"]
        total_s = float(short["median_s"]) + float(long["median_s"])
        assert float(long["cumulative_s"]) == pytest.approx(total_s, abs=2e-6)
        assert int(long["peak_bytes"]) > int(short["peak_bytes"])


def shortest_profile(config: str, path: Path) -> list[str]:
    few = ["--lengths", "16:32:2", "--strategies", "megatron_ts", "--repeats", "1"]
    return [*few, "--inner", "eager", "--model", config, "--layers", "1", "--out", str(path)]


@pytest.mark.slow
def test_profile_measures(config: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    code, out = run("profile", *shortest_profile(config, path))
    assert code == 0, out
    assert ("ranks share" in out) == (num_cores() < 2)
    assert "0/2  16 tokens, megatron_ts" in out and "2/2  done" in out
    assert "fastest strategy of a block, batch 1, 2 ranks" in out
    setting, *rows = map(json.loads, path.read_text().splitlines())
    assert setting["num_ranks"] == 2 and setting["machine"]["matmul_flops"] > 0
    assert {(r["kind"], r["seq_len"]) for r in rows} == {
        (kind, n) for kind in ("attention", "mlp", "head", "rest") for n in (16, 32)
    }


@pytest.mark.slow
def test_profile_goes_on_and_says_what_spoils_it(config: str, tmp_path: Path) -> None:
    few = shortest_profile(config, tmp_path / "profile.jsonl")
    assert run("profile", *few)[0] == 0
    with on_one_core():
        code, out = run("profile", *few, "--dtype", "float64")
    assert code == 2 and "another file" in out
    assert "2 ranks share 1 core:" in out


@pytest.mark.slow
def test_doctor_finds_all_that_is_needed() -> None:
    code, out = shell("doctor")
    assert code == 0, out
    assert "an all-reduce works" in out and "paradyse.backend:paradyse" in out


def test_doctor_tells_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._compiler,))
    assert cli.main(["doctor"]) == 1
    assert "apt-get install g++" in capsys.readouterr().out


def test_doctor_has_a_clone_installed_from_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is on no index."""

    def version(name: str) -> str:
        if name in ("paradyse", "torch"):
            raise PackageNotFoundError(name)
        return "9.0"

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[1:3])
    assert cli.main(["doctor"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "imported from a folder, not installed: pip install -e . in the checkout" in told
    assert "pip install torch" in told and "pip install paradyse" not in told


@pytest.mark.parametrize(
    ("asked", "there", "problem"),
    [
        (None, "g++", ""),
        ("clang++", "clang++", ""),
        (None, "clang++", "inductor calls 'g++' and no other: apt-get install g++, or set CXX"),
        ("/no/g++", "g++", "inductor calls '/no/g++' and no other: set CXX to one that is there"),
        ("", "g++", "set CXX to one that is there, or unset it"),
    ],
)
def test_doctor_looks_for_the_compiler_that_inductor_calls(
    asked: str | None, there: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "COMPILER", "g++")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == there else None)
    monkeypatch.delenv("CXX", raising=False)
    if asked is not None:
        monkeypatch.setenv("CXX", asked)
    found = doctor._compiler()
    assert problem in found.problem and bool(problem) == bool(found.problem)
    assert problem or found.found == f"/bin/{there}"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, "export PYTORCH_ALLOC_CONF=expandable_segments:True before torchrun"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "expandable_segments:True before torchrun"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ""),
    ],
)
def test_doctor_advises_what_lengths_that_vary_need(
    settings: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    advice = doctor._allocator().advice
    assert found in advice and bool(found) == bool(advice)


def file_of(num_tokens: int) -> TextFile:
    return TextFile(f"/{num_tokens}", str(num_tokens), num_tokens)


def test_replayed_files_are_of_every_range_and_of_different_lengths() -> None:
    files = [file_of(n) for n in (3, 900, 900, 950, 1000, 40)]
    ranges = length_ranges(1024)
    picked = pick_files(files, ranges, 2)
    assert len({files[i].num_tokens for i in picked}) == len(picked)
    for r in ranges:
        inside = {f.num_tokens for f in files if f.num_tokens in r}
        assert sum(files[i].num_tokens in r for i in picked) == min(2, len(inside))


def done(step: int, loss: float) -> StepDone:
    return StepDone(step, "a.py", 100, "metp,metp", loss, 0.5, 2**20)


def test_losses_that_differ_fail_the_demo() -> None:
    args = cli.make_parser().parse_args(["demo", "--steps", "2"])
    console = Console(file=io.StringIO(), width=200)
    ours, alone = [done(0, 5.0), done(1, 4.0)], [done(0, 5.0), done(1, 4.001)]
    assert demo._check_losses(console, args, ours, ours)
    assert not demo._check_losses(console, args, ours, alone)
    assert demo._check_losses(console, args, ours, alone[:1])
    assert not demo._check_losses(console, args, ours[:1], alone)
    assert not demo._check_losses(console, args, [ours[0], done(1, float("nan"))], ours)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED: losses of 2 ranks" in text and "2.5e-04 over 2 steps" in text
    assert "over the first 1 step " in text


def test_names_that_are_no_text_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has the name of a file that is no UTF-8."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "utf-8", errors="strict"))
    Screen(make_console(), 3).step(replace(done(0, 5.0), name="caf\udce9.txt"))
    assert written.getvalue().decode().endswith("caf?.txt\n")


def test_a_terminal_shows_steps_live() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    record = Record()
    with Screen(console, 2) as screen:
        record.hear(screen, Phase("training", 2))
        record.hear(screen, done(0, 5.0))
        console.print(screen._render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("training", "1/2", "100", "metp", "5.0000", "200", "1.0 MiB", "a.py"):
        assert part in text


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("megatron_ts,megatron_ts", "megatron_ts"),
        ("ulysses_z,megatron_cz,ulysses_z,colossal_z", "ulysses_z"),
        ("ulysses_z,megatron_ts", "attention ulysses_z, mlp megatron_ts"),
        (
            "metp,megatron_ts,megatron_cz,megatron_ts",
            "attention 1 metp, 1 megatron_cz, mlp megatron_ts",
        ),
        ("", ""),
    ],
)
def test_plans_in_words(key: str, text: str) -> None:
    assert describe_plan(key, ["attention", "mlp"] * 2) == text
