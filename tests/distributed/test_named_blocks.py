"""A name has one id on an axis, whoever asks."""

from __future__ import annotations

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.named_blocks import NamedBlocks


def test_a_name_has_one_id() -> None:
    axis = Axis("an axis of a test", 1, 0)
    blocks = axis.session.of(NamedBlocks)
    first, second = blocks.id(axis, "layers.0.mlp"), blocks.id(axis, "layers.1.mlp")
    assert first != second
    assert blocks.id(axis, "layers.0.mlp") == first
    assert collectives.traffic(axis, second).name == "layers.1.mlp"
