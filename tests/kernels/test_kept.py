"""Tensors that calls share: made once, let go of when they are stale or too many."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paradyse.kernels import kept
from paradyse.kernels.kept import Kept


class Maker:
    """Makes tensors of 16 bytes, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Tensor:
        self.made += 1
        return torch.full((4,), float(self.made))


@pytest.fixture
def make() -> Maker:
    return Maker()


def test_a_value_is_made_once_for_its_key(make: Maker) -> None:
    cache = Kept()
    first = cache.get("a", make)
    assert cache.get("a", make) is first and cache.get("b", make) is not first
    assert make.made == 2


def test_the_oldest_go_when_there_are_too_many_bytes(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 48)
    cache = Kept()
    for key in "abcad":  # a is read again before d comes
        cache.get(key, make)
    assert make.made == 4
    for key in "acd":
        cache.get(key, make)
    assert make.made == 4, "three fit"
    cache.get("b", make)
    assert make.made == 5
    assert torch.equal(cache.get("large", lambda: torch.ones(99)), torch.ones(99))
    cache.get("large", make)
    assert make.made == 5, "the last is kept, however large"


def test_more_entries_than_any_fixed_number_stay(make: Maker) -> None:
    """A ring of p ranks asks for p of them in every layer."""
    cache = Kept()
    for _ in range(2):
        for step in range(200):
            cache.get(step, make)
    assert make.made == 200


def test_what_was_made_of_a_tensor_goes_with_it_and_with_what_is_in_it(make: Maker) -> None:
    cache, ids = Kept(), torch.zeros(3)
    for _ in range(2):
        cache.get_of("a", (None, ids), make)
    assert make.made == 1
    ids[0] = 1
    cache.get_of("a", (None, ids), make)
    cache.get_of("a", (None, torch.zeros(3)), make)
    assert make.made == 3
    del ids
    gc.collect()
    assert not cache._found, "nothing outlives its tensors"


def test_a_tensor_that_is_written_to_in_every_step_has_one_value(make: Maker) -> None:
    """As where a loader fills the same memory again and again."""
    cache, ids = Kept(), torch.zeros(3)
    for step in range(5):
        ids.fill_(step)
        for _ in range(2):
            assert cache.get_of("a", (ids,), make)[0] == step + 1
    assert len(cache._found) == 1 and cache._num_bytes == 16
    assert weakref.getweakrefcount(ids) == 1
    cache.clear()
    assert cache._num_bytes == 0 and weakref.getweakrefcount(ids) == 0


def test_what_inference_mode_made_is_not_kept(make: Maker) -> None:
    cache = Kept()
    with torch.inference_mode():
        ids = torch.zeros(3)
        assert not cache.get("a", make).is_inference(), "training may read it later"
    for _ in range(2):
        cache.get_of("b", (ids,), make)
    assert make.made == 3


def test_tensors_without_memory_are_not_kept(make: Maker) -> None:
    cache = Kept()
    with FakeTensorMode():
        cache.get("a", make)
    assert type(cache.get("a", make)) is Tensor and make.made == 2
