"""Ways as they are measured: times of the model's own steps, gradients as they were."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool
from models import make_model
from test_training import dataset_of

import paradyse
from paradyse.mixed.measured_ways import _joined, way_through
from paradyse.mixed.ways import Way


def test_a_way_gives_back_what_was_measured() -> None:
    lengths, times = [64, 256, 1024], [0.030, 0.060, 0.300]
    way = way_through(2, 1024, lengths, times)
    assert way.fixed_s == pytest.approx(0.020)
    for n, t in zip(lengths, times, strict=True):
        assert way.group_s([n]) == pytest.approx(t)


@pytest.mark.parametrize("times", [[0.03], [0.03, 0.02], [0.01, 0.9]])
def test_noise_gives_no_times_below_zero(times: list[float]) -> None:
    way = way_through(1, 128, [64, 128][: len(times)], times)
    assert 0 <= way.fixed_s <= min(times)


def test_gradients_are_kept_where_measuring_fails() -> None:
    model = make_model("llama", num_hidden_layers=1)
    mixed = paradyse.MixedModel(model, {"inner": "eager", "plan": "megatron_cz"})
    kept = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = kept
    data = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}]
    with pytest.raises(ValueError, match="no label that is a target"):
        paradyse.measure_ways(mixed, data, tokens_per_rank=20, lengths=[6])
    assert next(model.parameters()).grad is kept
    with pytest.raises(ValueError, match="a dataset without sequences"):
        paradyse.measure_ways(mixed, [], tokens_per_rank=20)


def test_no_sequence_is_longer_than_the_model_has_positions_for() -> None:
    model = make_model("gpt2", n_positions=24, n_layer=1)
    mixed = paradyse.MixedModel(model, {"inner": "eager", "plan": "megatron_cz"})
    (way,) = paradyse.measure_ways(
        mixed, dataset_of([7, 5]), tokens_per_rank=40, lengths=[6, 30], repeats=1
    )
    assert list(way.lengths) == [6, 24] and way.max_tokens == 40


def measured() -> list[Way]:
    model = make_model("llama", num_hidden_layers=1)
    mixed = paradyse.MixedModel(model, {"inner": "eager", "plan": "megatron_cz"})
    kept = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = kept
    ways = paradyse.measure_ways(
        mixed, dataset_of([7, 5]), tokens_per_rank=20, lengths=[6, 30], repeats=1
    )
    grads = [p.grad for p in model.parameters()]
    assert grads[0] is kept and bool((kept == 1).all())
    assert all(g is None for g in grads[1:])
    with pytest.raises(ValueError, match="give 1 to 2"):
        paradyse.measure_ways(mixed, dataset_of([7]), tokens_per_rank=20, degrees=[3])
    with pytest.raises(ValueError, match="tokens_per_rank=1"):
        paradyse.measure_ways(mixed, dataset_of([7]), tokens_per_rank=1)
    return ways


@pytest.mark.slow
def test_all_ranks_measure_the_same(pool2: RankPool) -> None:
    first, second = pool2.run(measured)
    assert first == second
    assert [(w.degree, w.max_tokens, w.lengths) for w in first] == [
        (1, 20, (6, 20)),
        (2, 40, (6, 30, 40)),
    ]
    assert all(w.times_s[-1] + w.fixed_s > 0 for w in first)


def test_what_is_measured_has_targets() -> None:
    """Also where samples begin with a prompt that is longer than what is measured."""
    sample = {"input_ids": torch.arange(20), "labels": torch.full((20,), -100)}
    sample["labels"][15:] = 3
    for length, targets in ((8, 7), (18, 3)):
        joined = _joined([sample], length)
        assert len(joined["labels"]) == length
        assert int((joined["labels"][1:] != -100).sum()) == targets
