"""Regions of a profile: named by words, and nothing where no profiler is on."""

from __future__ import annotations

from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile

from paradyse.distributed.regions import WAIT, region


def test_a_region_is_nothing_without_a_profiler() -> None:
    with patch("paradyse.distributed.regions.record_function") as record:
        with region("wait", "all_gather"):
            pass
    assert not record.called


def test_words_that_are_empty_are_left_out() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        with region(WAIT, "all_gather", "", "layers.0.mlp", "metp"):
            pass
    assert [e.name for e in found.events()] == ["wait all_gather layers.0.mlp metp"]
