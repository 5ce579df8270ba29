"""An attention's arguments by name: what is written is read again, what is not given is unset."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.types import MaskSpec


def nodes(*names: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(n) for n in names]


def test_the_fields_are_the_operators_arguments() -> None:
    names = [a.name for a in ATTENTION._schema.arguments]
    assert [f.name for f in fields(AttentionCall)] == names


def test_what_is_written_is_read_again() -> None:
    graph, (q, k, v, padding, bias) = nodes("q", "k", "v", "padding", "bias")
    call = AttentionCall(q, k, v, padding, bias=bias, left=4, chunk=8, scale=0.5, dropout_p=0.1)
    node = graph.call_function(ATTENTION, call.args)
    assert AttentionCall.of(node) == call
    assert (call.qkv, call.mask_nodes, call.masks) == (
        (q, k, v),
        [padding, bias],
        (padding, None, bias),
    )
    assert len(node.args) == 13 and call.rest == node.args[3:]


def test_arguments_by_keyword_and_missing_ones() -> None:
    graph, (q, k, v, ids) = nodes("q", "k", "v", "ids")
    node = graph.call_function(ATTENTION, (q, k, v), {"right": 0, "document_ids": ids})
    assert AttentionCall.of(node) == AttentionCall(q, k, v, document_ids=ids, right=0)
    with pytest.raises(ValueError, match=r"q calls q, not paradyse\.attention"):
        AttentionCall.of(q)


@pytest.mark.parametrize(
    ("rest", "mask"),
    [
        ((), MaskSpec()),
        ((None, None, None, None, -1, 0), MaskSpec(right=0)),
        ((None, None, None, None, 4, 0, -1), MaskSpec(left=4, right=0)),
        ((None, None, None, None, -1, -1, 8), MaskSpec(chunk=8)),
        (("padding", "documents"), MaskSpec(key_padding=True, documents=True)),
        ((None, None, (1, 4, 9, 9)), None),
        ((None, None, (1, 4, 1, 9)), MaskSpec(bias=True)),
        ((None, None, (4, 2, 9), None, -1, 0), MaskSpec(right=0, bias=True)),
    ],
)
def test_masks_by_position(rest: tuple[Any, ...], mask: MaskSpec | None) -> None:
    graph = fx.Graph()
    q, k, v = (graph.placeholder(n) for n in "qkv")
    given = [graph.placeholder(x) if isinstance(x, str) else x for x in rest]
    for i, shape in enumerate(given):
        if isinstance(shape, tuple):
            given[i] = graph.placeholder("bias")
            given[i].meta["val"] = torch.empty(shape)
    node = graph.call_function(ATTENTION, (q, k, v, *given))
    assert AttentionCall.of(node).mask_spec == mask


def test_only_dropout_needs_a_seed() -> None:
    seed = torch.tensor(3)
    assert AttentionCall(0, 1, 2, seed=1).seeded(seed).seed is None
    assert AttentionCall(0, 1, 2, dropout_p=0.1).seeded(seed).seed is seed


def test_a_call_runs() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    out, lse = AttentionCall(q, k, k, right=0, scale=8**-0.5).run()
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, k, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, want)
    short, _ = AttentionCall(q, k, k, scale=8**-0.5, info=torch.tensor([4, 0])).run()
    assert lse.shape == (1, 4, 6) and not short[:, :, 4:].any()
