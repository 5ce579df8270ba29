"""What the benchmarks conclude from their figures: noise, crossings, rows beyond the noise."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paradyse.cli.charts import svg_of, write_png


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the folder, by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    return import_module


def around(value: float, share: float = 0.01, count: int = 11, seed: int = 0) -> list[float]:
    rng = random.Random(f"{value} {seed}")
    return [value * (1 + share * rng.gauss(0, 1)) for _ in range(count)]


def test_what_chance_gives_is_noise_and_a_real_difference_is_not(benchmark: Any) -> None:
    noise = benchmark("noise")
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


def test_crossings_are_marked_in_the_picture(benchmark: Any, tmp_path: Path) -> None:
    one_layer = benchmark("one_layer")
    names = one_layer.ATTENTION_STRATEGIES
    slow = {n: (lambda s: 1.0 + s) for n in names}
    curves = slow | {names[0]: lambda n: 1e-2 + 1e-5 * n, names[1]: lambda n: 5e-3 + 2e-5 * n}
    times = times_of(curves, (64, 256, 1024))
    crossings = one_layer.crossings_of(names[0], names[1], times)
    page = one_layer.page_of("one layer", times, crossings)
    assert [text for *_, text in page.charts[0].marks] == [f"{crossings[0].at:,.0f}"]
    assert svg_of(page.charts[0]).count("<circle") == 1
    assert write_png(tmp_path / "a.png", page) and (tmp_path / "a.png").stat().st_size > 10_000


def test_a_slower_or_larger_step_after_a_switch_is_beyond_the_noise(benchmark: Any) -> None:
    switch_cost = benchmark("switch_cost")

    def samples(slower: float, more: int) -> Any:
        same = around(0.1, count=40)
        after = [s * slower * d for s, d in zip(same, around(1.0, count=40, seed=1))]
        return switch_cost.Samples(after, same, [1000 + more] * 4, [990, 1000, 1000, 1010])

    assert switch_cost.rows_of({(64, "metp"): samples(1.0, 0)})[1] == 0
    assert switch_cost.rows_of({(64, "metp"): samples(1.05, 0)})[1] == 1
    assert switch_cost.rows_of({(64, "metp"): samples(1.0, 100)})[1] == 1
