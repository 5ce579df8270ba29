"""What is split along the sequence, and the loss over split tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, operators, run, toy, toy_inputs, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.distributed.axis import Axis
from paradyse.passes.name_dims import name_dims
from paradyse.passes.place_tokens import UNJOINED, loss_sums, place_tokens

TWO = Axis("replicas of a test", 2, 0)


def placed(fn: Callable[..., Any], inputs: list[Tensor], **options: Any) -> tuple[Any, Any, int]:
    ctx, gm = context(**options), trace(fn, *inputs, weights=7)
    name_dims(gm, ctx)
    return ctx, gm, place_tokens(gm, ctx)


def names(nodes: Any) -> set[str]:
    return {n.name for n in nodes}


def test_all_between_the_embedding_and_the_loss_is_split() -> None:
    inputs = toy_inputs()
    before = operators(trace(toy, *inputs, weights=7))
    ctx, gm, count = placed(toy, inputs)
    after = operators(gm)
    assert before - after == {"cross_entropy_loss": 1}
    assert after - before == {"loss_sums": 1, "select": 2, "div": 1}
    replicated = [n for n in gm.graph.nodes if n.op == "call_function" and n not in ctx.split]
    assert names(replicated) == {"flatten_1", "select_int", "select_int_1", "div_tensor"}
    assert count == len(ctx.split) and names(ctx.partial) == {"loss_sums"}
    assert {n.name: fill for n, fill in ctx.fills.items()} == {"flatten_1": -100}
    assert not ctx.gathered and not ctx.notes
    torch.testing.assert_close(run(gm, *inputs), toy(*inputs))


def test_replicas_add_up_their_sums_before_they_divide() -> None:
    _, gm, _ = placed(toy, toy_inputs(), replicas=TWO)
    (loss,) = [n for n in gm.graph.nodes if n.name.startswith("loss_sums")]
    assert [u.name for u in loss.users] == ["sum_over_replicas_default"]


def with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """The toy with another loss."""

    def fn(ids: Tensor, labels: Tensor, embed: Tensor, norm: Tensor, *linears: Tensor) -> Tensor:
        q = F.embedding(ids, embed)[:, None]
        none = (None, None, None, None)
        o = torch.ops.paradyse.attention(q, q, q, *none, -1, 0, -1, 0.5, 0.0, 0.0)[0]
        return loss(F.linear(o[:, 0], linears[4]).flatten(0, 1), labels.flatten())

    return fn


def test_a_sum_is_not_divided() -> None:
    fn = with_loss(lambda x, y: F.cross_entropy(x, y, reduction="sum", ignore_index=3))
    ctx, gm, _ = placed(fn, toy_inputs(), replicas=TWO)
    assert operators(gm)["div"] == 0 and list(ctx.fills.values()) == [3]
    assert not [n for n in gm.graph.nodes if "replicas" in n.name]


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"weight": torch.ones(11)}, {"reduction": "none"}]
)
def test_other_losses_are_gathered_and_say_so(options: dict[str, Any]) -> None:
    fn = with_loss(lambda x, y: F.cross_entropy(x, y, **options))
    ctx, gm, _ = placed(fn, toy_inputs(), replicas=TWO)
    assert operators(gm)["cross_entropy_loss"] == 1 and ctx.notes == [UNJOINED]
    assert "cross_entropy_loss" in [str(n.target).split(".")[1] for n, _ in ctx.gathered]


def test_what_mixes_tokens_is_gathered_with_the_reason() -> None:
    fn = with_loss(lambda x, y: torch.fft.fft(x.cumsum(0).view(2, 5, 11), dim=1).real.sum())
    ctx, _, _ = placed(fn, toy_inputs())
    reasons = [why for _, why in ctx.gathered]
    assert reasons == ["aten.cumsum.default mixes tokens"]  # the rest is whole already


def test_embeddings_that_are_given_are_split_and_numbers_per_token_are_not() -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        q = x[:, None] * weight[:, None, :, None]
        none = (None, None, None, None)
        return torch.ops.paradyse.attention(q, q, q, *none, -1, 0, -1, 0.5, 0.0, 0.0)[0]

    ctx, gm = context(), trace(fn, torch.randn(2, 5, 8), torch.randn(2, 5))
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    given = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert [n in ctx.split for n in given] == [True, False]


def test_sums_of_parts_add_up_to_the_mean() -> None:
    logits, labels = torch.randn(7, 5), torch.tensor([0, 1, -100, 4, 2, -100, 3])
    parts = [loss_sums(logits[a:b], labels[a:b], -100) for a, b in ((0, 3), (3, 7), (7, 7))]
    total, count = sum(parts)
    torch.testing.assert_close(total / count, F.cross_entropy(logits, labels))
    assert count == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_sums_and_counts_of_narrow_logits_neither_overflow_nor_round(
    dtype: torch.dtype,
) -> None:
    logits, labels = torch.randn(20_001, 50).to(dtype), torch.randint(50, (20_001,))
    total, count = loss_sums(logits, labels, -100)
    assert count == 20_001
    expected = F.cross_entropy(logits.double(), labels, reduction="sum")
    torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=0)
    fn = with_loss(lambda x, y: F.cross_entropy(x.to(dtype), y))
    _, gm, _ = placed(fn, toy_inputs())
    loss = run(gm, *toy_inputs())
    assert loss.dtype == dtype, "as one process gives it"


def test_double_precision_sums_stay_double() -> None:
    logits, labels = torch.randn(5, 3).double(), torch.randint(3, (5,))
    assert loss_sums(logits, labels, -100).dtype == torch.float64
