"""What planner and reports are told of a program's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch import fx

from paradyse.runtime.describe import describe_blocks, describe_masks, mask_of
from paradyse.runtime.registry import captures_of
from paradyse.types import MaskSpec


def test_blocks_of_a_model() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Tiny(), backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7))
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    blocks = describe_blocks(graph.program)
    assert blocks == graph.blocks
    assert [b.name for b in blocks] == [
        f"layers.{i}.{kind}" for i in range(2) for kind in ("attention", "mlp")
    ]
    attention, mlp = blocks[:2]
    assert (attention.hidden, attention.num_heads, attention.head_dim) == (32, 4, 8)
    assert attention.num_kv_heads == 4 and attention.intermediate == 0
    assert attention.num_split_weight_elements == 4 * 32 * 32
    assert mlp.intermediate == 128 and mlp.mask is None
    assert mlp.num_weight_elements == 2 * 32 * 128 + 128 + 32 + 2 * 32
    assert describe_masks(blocks) == "causal"


@pytest.mark.parametrize(
    ("rest", "mask"),
    [
        ((), MaskSpec()),
        ((None, None, None, None, -1, 0), MaskSpec(right=0)),
        ((None, None, None, None, 4, 0, -1), MaskSpec(left=4, right=0)),
        ((None, None, None, None, -1, -1, 8), MaskSpec(chunk=8)),
        (("padding", "documents"), MaskSpec(key_padding=True, documents=True)),
        ((None, None, "bias"), None),
    ],
)
def test_masks_as_people_read_them(rest: tuple[Any, ...], mask: MaskSpec | None) -> None:
    graph = fx.Graph()
    q, k, v = (graph.placeholder(n) for n in "qkv")
    given = [graph.placeholder(x) if isinstance(x, str) else x for x in rest]
    node = graph.call_function(torch.ops.paradyse.attention.default, (q, k, v, *given))
    assert mask_of(node) == mask
