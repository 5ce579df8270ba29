"""What is split along the sequence, and the loss over split tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import attend, context, operators, run, toy, toy_inputs, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.distributed.axis import Axis
from paradyse.passes.name_dims import name_dims
from paradyse.passes.place_tokens import UNJOINED, place_tokens

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


def patches(x: Tensor, w: Tensor, first: Tensor, table: Tensor, *linears: Tensor) -> Tensor:
    """Of an image, behind a learned token, with a learned position for each."""
    x = F.conv2d(x, w, stride=2).flatten(2).transpose(1, 2)
    x = torch.cat([first.expand(len(x), -1, -1), x], 1) + table
    q = F.linear(x, linears[0])[:, None]
    return F.linear(attend(q, q, q)[:, 0], linears[1])[:, 0]


def test_patches_are_split_before_the_first_attention() -> None:
    weights = [(8, 3, 2, 2), (1, 1, 8), (1, 13, 8), (8, 8), (8, 8), (1,), (1,)]
    inputs = [torch.randn(2, 3, 6, 8), *map(torch.randn, weights)]
    ctx, gm, _ = placed(patches, inputs)
    assert ctx.seq.size == 13 and not ctx.notes
    at = {n.name: n for n in gm.graph.nodes}
    assert {"add", "linear", "linear_1"} <= names(ctx.split)
    assert not {"cat", "alias_default", "select_1"} & names(ctx.split)
    assert at["add"].all_input_nodes == [at["cat"], at["alias_default"]]
    assert [str(n.target) for n, _ in ctx.gathered] == ["aten.select.int"]
    assert place_tokens(gm, ctx) == len(ctx.split)  # again: nothing is read twice over
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)) == 1
    torch.testing.assert_close(run(gm, *inputs), patches(*inputs))


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


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y: F.cross_entropy(x, y, torch.linspace(0.5, 2, 11)),
    "probabilities": lambda x, y: F.cross_entropy(x, torch.eye(11)[y] * 0.9),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_a_sum_over_rows(name: str) -> None:
    inputs = toy_inputs()
    ctx, gm, _ = placed(with_loss(LOSSES[name]), inputs, replicas=TWO)
    assert operators(gm)["loss_sums"] == operators(gm)["sum_over_replicas"] == 1
    assert not ctx.notes and not ctx.gathered
    (fill,) = ctx.fills.items()
    assert fill[1] == (0 if name == "probabilities" else -100)
    _, gm, _ = placed(with_loss(LOSSES[name]), inputs)
    torch.testing.assert_close(run(gm, *inputs), with_loss(LOSSES[name])(*inputs))


def test_losses_of_single_rows_are_split() -> None:
    fn = with_loss(lambda x, y: F.cross_entropy(x, y, reduction="none"))
    ctx, gm, _ = placed(fn, toy_inputs(), replicas=TWO)
    (loss,) = [n for n in gm.graph.nodes if "cross_entropy" in n.name]
    assert loss in ctx.split and loss not in ctx.partial and not ctx.notes


def test_a_mean_of_what_is_gathered_is_not_joined_and_says_so() -> None:
    fn = with_loss(lambda x, y: F.cross_entropy(x.cumsum(0), y))
    ctx, gm, _ = placed(fn, toy_inputs(), replicas=TWO)
    assert operators(gm)["cross_entropy_loss"] == 1 and ctx.notes == [UNJOINED]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_has_the_dtype_of_its_logits(dtype: torch.dtype) -> None:
    fn = with_loss(lambda x, y: F.cross_entropy(x.to(dtype), y))
    _, gm, _ = placed(fn, toy_inputs())
    loss = run(gm, *toy_inputs())
    assert loss.dtype == dtype, "as one process gives it"
