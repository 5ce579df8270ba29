"""Regions of a trace: there with a profiler, and free without."""

from __future__ import annotations

from unittest.mock import patch

import torch

from paradyse.distributed.regions import WAIT, region


def test_a_region_is_nothing_without_a_profiler() -> None:
    with patch("paradyse.distributed.regions.record_function") as record:
        with region(WAIT, "all_gather"), region("layers.0.mlp"):
            pass
    assert not record.called


def test_a_profile_has_it_by_its_words() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with region("layers.0.mlp", ""), region(WAIT, "all_gather", "", "layers.0.mlp"):
            torch.ones(2).exp()
    names = {event.name for event in profile.events()}
    assert {"layers.0.mlp", "wait all_gather layers.0.mlp"} <= names
