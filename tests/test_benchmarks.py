"""The runner of the benchmarks, and what they conclude from their figures."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from paradyse.cli.drawing import svg_of
from paradyse.cli.launch import Rank
from paradyse.cli.pages import write_png

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SHARED = ("runner", "bounded", "contenders", "counterparts", "kernels_alone")
SHARED += ("attention_cases", "latte")
ITS_OWN = ("gpu_day",)  # test_gpu_day.py
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - {*SHARED, *ITS_OWN})


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the folder, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module


@pytest.fixture
def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A benchmark in this process, on one rank where it asks for ranks: its exit status."""
    runner = benchmark("runner")

    def run_ranks(target: str, size: int, given: Any, setting: Any, show: Any) -> list[Any]:
        rank = Rank(0, 1, "cpu", lambda line: show(0, line))
        return [runner.run_target(rank, **given)]

    def main(name: str, *flags: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        return benchmark(name).main()

    monkeypatch.setattr(runner, "run_ranks", run_ranks)
    return main


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_says_what_it_asks_and_how_to_run_it(
    run: Callable[..., int], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(name, "--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--quick" in text and f"python benchmarks/{name}.py" in text
    assert f"python benchmarks/{name}.py" in (FOLDER / "README.md").read_text()


def test_the_report_has_goals_machine_and_command(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("choice", "--tables", "1", "--report-only", "--out", str(tmp_path)) == 0
    text = (tmp_path / "choice.md").read_text()
    assert text.startswith("# choice\n\n1 random tables")
    assert "| 96 layers |" in text and "## Goals" in text and "## Machine" in text
    assert "choice --tables 1 --report-only --out" in text
    assert text.split("\n", 2)[2] == capsys.readouterr().out


def test_what_is_measured_is_written_before_the_table_is_complete(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = benchmark("runner").Report("x")
    report.add("A line.")
    report.draft(tmp_path, ["n", "s"], [["1", "2.5"]], "## Times")
    draft = (tmp_path / "x.md").read_text()
    assert draft.startswith("# x\n\nA line.\n\n## Times\n\n| n |   s |\n")
    assert "| 1 | 2.5 |" in draft and draft.endswith("\nNot complete.\n")
    report.draft(None, ["n", "s"], [["1", "2.5"]])
    report.table(["n", "s"], [["1", "2.5"], ["2", "3.5"]], "## Times")
    report.write(tmp_path, "one thread")
    text = (tmp_path / "x.md").read_text()
    assert "Not complete" not in text and text.count("## Times") == 1 and "| 2 | 3.5 |" in text
    assert capsys.readouterr().out == text.removeprefix("# x\n\n")


def test_a_missed_goal_is_the_exit_status_unless_only_the_report_is_wanted(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = benchmark("runner")
    for flags, status in (([], 1), (["--report-only"], 0), (["--quick"], 0)):
        monkeypatch.setattr(sys, "argv", ["x", *flags, "--out", str(tmp_path)])
        bench = runner.Benchmark("x", "doc", {"runs": 1}, runs=7, lengths=(1, 2))
        assert bench.args.runs == (1 if "--quick" in flags else 7)
        bench.at_least("a", 2.0, 1.0)
        bench.at_most("b", 2.0, 1.0)
        assert bench.finish("one thread") == status
    assert "- b: 2.00, goal at most 1: **missed**" in (tmp_path / "x.md").read_text()


def test_contenders_take_turns_and_what_warms_up_is_not_kept(benchmark: Any) -> None:
    calls: list[tuple[str, int]] = []
    turns = {n: (lambda s, n=n: calls.append((n, s)) or len(calls)) for n in "abc"}
    found = benchmark("runner").take_turns(turns, [8, 16], range(-1, 9))
    assert len(calls) == 10 * 2 * 3 and {len(f[8]) for f in found.values()} == {9}
    assert min(found["a"][8]) > 6
    turns_taken = ["".join(name for name, _ in calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert {first for first, *_ in turns_taken} == set("abc")  # each goes first now and then
    assert all(any(pair in t for t in turns_taken) for pair in ("ab", "ba", "bc", "cb"))


def test_a_fresh_process_has_the_environment_that_it_was_given(benchmark: Any) -> None:
    assert benchmark("runner").alone(os.getenv, "PARADYSE_TEST", PARADYSE_TEST="x") == "x"
    assert "PARADYSE_TEST" not in os.environ


def test_a_fresh_process_does_not_outlive_a_call_that_is_cut_off(benchmark: Any) -> None:
    def cut_off(*_: Any) -> None:
        raise TimeoutError

    alone, others = benchmark("runner").alone, {*multiprocessing.active_children()}
    before = signal.signal(signal.SIGALRM, cut_off)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            alone(time.sleep, 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert 1.5 < time.monotonic() - begin < 30
    assert {*multiprocessing.active_children()} == others and all(p.is_alive() for p in others)


def test_tiles_that_are_tried_fit_registers_and_shared_memory(benchmark: Any) -> None:
    sweep = benchmark("tile_sweep")
    for kernel, width in itertools.product(sweep.KERNELS, (64, 128)):
        found = sweep.grid(kernel, width, 2)
        assert 10 < len(found) < 60 and len(set(found)) == len(found)
    held = {c.block_n for c in sweep.grid("keys", 128, 2)}
    assert held <= {64, 128}  # with 256 keys of both sums no thread has registers


def test_a_contender_that_is_wrong_is_not_timed(benchmark: Any) -> None:
    contenders = benchmark("contenders")
    model, same, other = (contenders.Contender(contenders.llama(1, 64)) for _ in range(3))
    same.check("same", model, 9)
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.1)
    with pytest.raises(SystemExit, match="not timed: other at 9 tokens"):
        other.check("other", model, 9)
    assert model.time_s(9) > 0
    with torch.no_grad():
        next(model.model.parameters()).mul_(1.1)
    with pytest.raises(SystemExit, match="not timed: a later one of 9 tokens"):
        model.time_s(9)


def measured(rank: Rank, args: Namespace) -> dict[str, list[float]]:
    """What a benchmark runs on its ranks."""
    rank.send("measured")
    return {"runs": [float(rank.size)] * args.runs}


def test_a_benchmark_on_ranks_measures_and_reports(
    benchmark: Any, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--quick"])
    bench = benchmark("runner").Benchmark("x", "doc", {"runs": 3}, runs=7, ranks=2, inner="eager")
    found = bench.on_ranks(measured)
    bench.table(["of", "runs"], [[bench.ranks, str(found["runs"])]])
    assert bench.finish() == 0
    out, err = capsys.readouterr()
    assert err == "measured\n" and "two processes of one thread" in out
    assert "| two ranks, gloo, inner=eager | [1.0, 1.0, 1.0] |" in out


def around(value: float, share: float = 0.01, count: int = 11, seed: int = 0) -> list[float]:
    rng = random.Random(f"{value} {seed}")
    return [value * (1 + share * rng.gauss(0, 1)) for _ in range(count)]


def test_what_chance_gives_is_noise_and_a_real_difference_is_not(benchmark: Any) -> None:
    noise = benchmark("runner")
    chance = [
        noise.is_noise([random.Random(f"{i} {j}").gauss(0, 1) for j in range(15)])
        for i in range(200)
    ]
    assert 0.9 <= sum(chance) / len(chance) <= 0.99
    assert not noise.is_noise([1 + random.Random(i).gauss(0, 0.5) for i in range(15)])
    assert noise.noise_of([1.0, -2.0, 3.0], 0.99) > noise.noise_of([1.0, -2.0, 3.0], 0.5)


def times_of(curves: dict[str, Any], lengths: tuple[int, ...]) -> Any:
    return {
        c: {n: around(f(n), seed=i) for n in lengths} for i, (c, f) in enumerate(curves.items())
    }


def test_crossings_are_where_curves_meet_and_only_where_noise_lets_one_tell(benchmark: Any) -> None:
    one_layer = benchmark("one_layer")
    lengths = (64, 128, 256, 512, 1024, 2048)
    curves = {"metp": lambda n: 1e-2 + 1e-5 * n, "ulysses_z": lambda n: 5e-3 + 2e-5 * n}
    times = times_of(curves, lengths)
    (found,) = one_layer.crossings_of("metp", "ulysses_z", times)
    assert (found.before, found.after) == ("ulysses_z", "metp")
    assert found.at == pytest.approx(500, rel=0.15)
    assert found.time_s == pytest.approx(1.5e-2, rel=0.05)
    equal = times_of({"metp": lambda n: n, "ulysses_z": lambda n: n}, lengths)
    assert not one_layer.crossings_of("metp", "ulysses_z", equal)


@pytest.mark.broad
def test_crossings_are_marked_in_the_picture(benchmark: Any, tmp_path: Path) -> None:
    one_layer = benchmark("one_layer")
    names = one_layer.ALONG_SEQUENCE
    slow = {n: (lambda s: 1.0 + s) for n in names}
    curves = slow | {names[0]: lambda n: 1e-2 + 1e-5 * n, names[1]: lambda n: 5e-3 + 2e-5 * n}
    times = times_of(curves, (64, 256, 1024))
    crossings = one_layer.crossings_of(names[0], names[1], times)
    page = one_layer.page_of("one layer", times, crossings)
    assert [text for *_, text in page.charts[0].marks] == [f"{crossings[0].at:,.0f}"]
    assert f">{crossings[0].at:,.0f}</text>" in svg_of(page.charts[0])
    assert write_png(tmp_path / "a.png", page) and (tmp_path / "a.png").stat().st_size > 10_000


def test_strategies_and_rivals_are_drawn_apart_each_beside_auto(benchmark: Any) -> None:
    peers = benchmark("peers")
    names = (peers.RING, "metp", peers.AUTO)
    times = {name: {512: 2.0 + i, 128: 1.0 + i} for i, name in enumerate(names)}
    ours, theirs = peers.page_of("peers", times).charts
    assert [line.name for line in ours.lines] == ["metp", peers.AUTO]
    assert [line.name for line in theirs.lines] == [peers.AUTO, peers.RING]
    assert theirs.lines[1].points == ((128, 1.0, True), (512, 2.0, True))
    without = peers.page_of("no auto", {"metp": times["metp"]})
    assert [c.title for c in without.drawn_charts()] == [ours.title]


def test_a_slower_or_larger_step_after_a_switch_is_beyond_the_noise(benchmark: Any) -> None:
    switch_cost = benchmark("switch_cost")

    def samples(slower: float, more: int) -> Any:
        same = around(0.1, count=40)
        off = around(slower, count=40, seed=1)
        seconds = [(s * d, s) for s, d in zip(same, off)]
        return switch_cost.Samples(seconds, [(1000 + more, n) for n in (990, 1000, 1000, 1010)])

    assert switch_cost.rows_of({(64, "metp"): samples(1.0, 0)})[1] == 0
    assert switch_cost.rows_of({(64, "metp"): samples(1.05, 0)})[1] == 1
    assert switch_cost.rows_of({(64, "metp"): samples(1.0, 100)})[1] == 1


def test_what_a_layer_costs_the_host_is_told_from_what_a_step_does(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_time = benchmark("host_time")
    args = Namespace(layers=(2, 6), lengths=(16,), hidden=64, runs=1, inner="eager")
    taken = {n: host_time.Taken(3.0 + n, 1.0 + 2 * n, 9.0) for n in args.layers}
    times = {("eager", n): {16: [taken[n]] * 3} for n in args.layers}
    assert host_time.rows_of(times, args) == {("eager", 16): (1.0, 2.0, 4.0, 9.0)}
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(host_time, "FUSE_AFTER", 0)
    args = Namespace(**vars(args) | {"layers": (1,)})
    found = host_time.in_one_process(args)
    assert {key: [len(of[16]), of[16][0].step_s > 0] for key, of in found.items()} == {
        ("eager", 1): [1, True],
        ("paradyse", 1): [1, True],
    }
