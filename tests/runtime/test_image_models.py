"""Images: patches are the tokens, of as many as each size of images has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import TOLERANCE, redraw
from plans import blocks_of, small_pieces

from paradyse.types import Plan

PATCH = 4
CLASSES = 5


def make_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = ViTConfig(
        **sizes, num_hidden_layers=1, image_size=4 * PATCH, patch_size=PATCH, num_labels=CLASSES
    )
    return redraw(ViTForImageClassification(config)).train()


@small_pieces()
def train_by_random_plans(steps: int) -> tuple[list[float], list[float], int]:
    """Losses by SGD of one process and under another plan at every step, for images of other sizes
    and numbers each time; and the captures."""
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    reference, model = make_vit(), make_vit()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, model)]
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    drawn, g = random.Random(4), torch.Generator().manual_seed(4)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        num, height, width = drawn.randint(2, 4), *drawn.sample(range(2, 9), 2)
        batch = {
            "pixel_values": torch.randn(num, 3, height * PATCH, width * PATCH, generator=g),
            "labels": torch.randint(CLASSES, (num,), generator=g),
        }
        if step:
            points = tuple(drawn.choice(b.points()) for b in blocks_of(compiled))
            current[0] = Plan(points)
        for call, optimizer, into in zip((reference, compiled), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = call(**batch, interpolate_pos_encoding=True).loss
            loss.backward()
            optimizer.step()
            into.append(loss.item())
    return *losses, sum(1 for _ in captures_of(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3])
def test_training_under_random_plans(p: int, ranks: Callable[[int], RankPool]) -> None:
    for want, got, captures in ranks(p).run(train_by_random_plans, 200, timeout_s=400):
        found, wanted = torch.tensor(got), torch.tensor(want)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[torch.float32], atol=0)
        assert captures <= 3, captures
