"""The parts of a peak are those of the moment when most is held, and add up to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_planner import LONG, explained, model, planner

from paradyse.planning.breakdown import break_down
from paradyse.planning.costs import NOTHING, BlockCost
from paradyse.planning.solver import Choices
from paradyse.types import HEAD, HeadSpec


def choices_of(rng: random.Random, num_blocks: int) -> Choices:
    def cost() -> BlockCost:
        return BlockCost(1.0, rng.randrange(50), rng.randrange(200), 0, rng.randrange(20))

    costs = [{"metp": cost()} for _ in range(num_blocks)]
    rest = BlockCost(0.0, rng.randrange(20), rng.randrange(400), 0)
    floor, margin = rng.choice((0, 10**4)), rng.choice((0.0, 0.02))
    return Choices([("metp",)] * num_blocks, costs, rest, rng.randrange(99), floor, margin, 7)


@pytest.mark.parametrize("seed", range(40))
def test_parts_add_up_to_the_peak(seed: int) -> None:
    rng = random.Random(seed)
    choices = choices_of(rng, rng.randrange(6))
    points = ["metp"] * len(choices.names)
    parts = break_down(choices, points, ["mlp"] * len(points))
    assert sum(n for _, n in parts) == choices.peak(points)
    assert all(n > 0 for _, n in parts[2:]) and len(dict(parts)) == len(parts)


def test_the_parts_are_of_the_moment_when_most_is_held() -> None:
    early, late = BlockCost(1.0, 10, 100, 0, 4), BlockCost(1.0, 30, 5, 0, 2)
    names = [("metp+recompute",), ("ulysses_z",), ("",)]
    costs = [{name: c} for (name,), c in zip(names, (early, late, late), strict=True)]
    choices = Choices(names, costs, NOTHING, 1000, 0, 0.0, 0)
    points, kinds = [name for (name,) in names], ["mlp", "attention", HEAD]
    assert dict(break_down(choices, points, kinds)) == {
        "weights, gradients, optimizer": 1000,
        "saved by 1 x mlp, metp with recompute": 10,
        "left to the end: gradients of whole weights, tokens of late logits": 4,
        "workspace of mlp, metp with recompute": 100,
    }
    at_end = replace(choices, rest=BlockCost(0.0, 3, 90, 0))
    assert dict(break_down(at_end, points, kinds)) == {
        "weights, gradients, optimizer": 1000,
        "saved by 1 x mlp, metp with recompute": 10,
        "saved by 1 x attention, ulysses_z": 30,
        "saved by 1 x head": 30,
        "kept for all blocks, of what is in no block": 3,
        "workspace of what is in no block": 90,
    }


def test_explain_shows_the_parts_of_the_peak() -> None:
    p = planner(blocks=model(layers=2), head=HeadSpec(1024, 32_768), memory_limit=2**40)
    report = explained(p, LONG)
    assert sum(n for _, n in report.held) == report.peak_bytes
    assert "held at the peak" in str(report) and "workspace of" in str(report)
