"""Sums over words come before those over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import attend, context, trace
from test_cut_later import Ends, arguments, check_values, gradients
from torch import Tensor

from paradyse.passes.stage_sums import stage_sums


def streamed(end: Ends) -> Callable[..., Any]:
    """``end`` of the logits behind attention, which says what tokens are."""

    def fn(y: Tensor, t: Tensor, z: Tensor) -> Any:
        q = y[:, None]
        return end(y + attend(q, q, q)[:, 0], t, z)

    return fn


STAGED: dict[str, Ends] = {
    "all": lambda y, t, z: y.square().sum(),
    "mean": lambda y, t, z: (y * z).mean(),
    "dims": lambda y, t, z: y.mean((1, 2)),
    "kept": lambda y, t, z: y.sum((-2, -1), keepdim=True),
    "flattened": lambda y, t, z: y.flatten(0, 1).mean((0, 1)),
    "half": lambda y, t, z: y.bfloat16().sum(),
    "cut": lambda y, t, z: y[:, :-1].square().mean(),
}


@pytest.mark.parametrize("name", STAGED)
def test_words_are_summed_up_first(name: str) -> None:
    inputs, fn = arguments(), streamed(STAGED[name])
    gm = trace(fn, *inputs)
    assert stage_sums(gm, context()) == 1
    near = {"rtol": 2**-8, "atol": 1e-3} if name == "half" else {}
    torch.testing.assert_close(gradients(gm, inputs), gradients(fn, inputs), **near)
    check_values(gm, inputs)
    sums = [n for n in gm.graph.nodes if n.name.startswith(("sum", "mean"))]
    assert len(sums) == 2 and sums[1].args[0] is sums[0]
    assert sums[0].meta["val"].shape[-1] == 1 and sums[0].meta["val"].numel() in (10, 12)
    if name == "half":
        assert [n.meta["val"].dtype for n in sums] == [torch.float32] * 2


@pytest.mark.parametrize(
    "end",
    [
        lambda y, t, z: y.sum(-1),
        lambda y, t, z: y.sum(1),
        lambda y, t, z: y.sum((0, 1)),
        lambda y, t, z: y.amax(-1).sum(),
        lambda y, t, z: y.relu().amax((1, 2)),
        lambda y, t, z: y.logsumexp((1, 2)),  # of a token that is masked out it has no gradient
        lambda y, t, z: (t > 3).sum(),
    ],
)
def test_sums_over_words_or_tokens_alone_stay(end: Ends) -> None:
    gm = trace(streamed(end), *arguments())
    before = str(gm.graph)
    assert stage_sums(gm, context()) == 0 and str(gm.graph) == before
