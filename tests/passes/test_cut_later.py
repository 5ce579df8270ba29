"""Tokens are cut off from narrow values, not from wide ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import attend, context, run, trace
from torch import Tensor, fx
from torch.nn import functional as F

from paradyse.passes.cut_later import cut_later

Ends = Callable[[Tensor, Tensor, Tensor], Any]
"""Of logits [2, 6, V], labels [2, 6] and others' logits."""
WORDS = 40


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    y, z = torch.randn(2, 2, 6, WORDS, dtype=torch.float64)
    return y.requires_grad_(), torch.randint(WORDS, (2, 6)), z


def tokens_log_p(y: Tensor, t: Tensor) -> Tensor:
    return y[:, :-1].log_softmax(-1).gather(-1, t[:, 1:, None]).squeeze(-1)


LATER: dict[str, Ends] = {
    "log likelihood": lambda y, t, z: tokens_log_p(y, t),
    "at the start": lambda y, t, z: y[:, 2:].softmax(-1).amax(-1),
    "at both ends": lambda y, t, z: (y[:, 1:-1] * 2).logsumexp(-1),
    "two cuts in turn": lambda y, t, z: y[:, 1:][:, :-1].logsumexp(-1),
    "flattened": lambda y, t, z: F.cross_entropy(
        y[:, :-1].reshape(-1, WORDS), t[:, 1:].reshape(-1), reduction="none"
    ),
    "two, cut alike": lambda y, t, z: (y[:, :-1] - z[:, :-1]).square().sum(-1),
    "one, cut otherwise": lambda y, t, z: (y[:, :-1] * z[:, 1:]).sum(-1),
    "by mask": lambda y, t, z: y[:, :-1].masked_fill((t[:, 1:] > 9)[..., None], 0.0).sum(-1),
    "several of it": lambda y, t, z: (y[:, :-1].argmax(-1), y[:, :-1].exp().sum(-1)),
    "batch by batch": lambda y, t, z: torch.stack([r.logsumexp(-1) for r in y[:, :-1]]),
    "over last dims": lambda y, t, z: y.transpose(1, 2)[..., :-1].exp().sum(1),
    "by two linears": lambda y, t, z: (y[:, :-1] @ z[0, 0, :, None]).squeeze(-1),
}


def gradients(gm: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    found = gm(*inputs)
    parts = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    return found, torch.autograd.grad(sum(x.square().sum() for x in parts), inputs[0])


@pytest.mark.parametrize("name", LATER)
def test_what_is_wide_has_all_tokens(name: str) -> None:
    inputs, fn = arguments(), LATER[name]
    gm = trace(fn, *inputs)
    assert cut_later(gm, context()) >= 1
    run(gm, *inputs)
    torch.testing.assert_close(gradients(gm, inputs), gradients(fn, inputs))
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.slice.Tensor:
            source, value = node.args[0].meta["val"], node.meta["val"]
            wide = value.is_floating_point() and value.numel() > 12 * 2
            given = node.args[0].op == "placeholder"  # as it was given, cut and padded
            assert not wide or source.shape == value.shape or given and "otherwise" in name
    check_values(gm, inputs)


def check_values(gm: Any, inputs: tuple[Tensor, ...]) -> None:
    """What nodes say of their values is so."""

    class Checked(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            if isinstance(found, Tensor) and n.op != "output":
                val = n.meta["val"]
                assert (found.shape, found.dtype) == (val.shape, val.dtype), n
            return found

    Checked(gm).run(*inputs)


STAY: dict[str, Ends] = {
    "returned": lambda y, t, z: y[:, :-1],
    "as wide": lambda y, t, z: y[:, :-1].tanh(),
    "partly as wide": lambda y, t, z: [(x.tanh(), x.sum(-1)) for x in [y[:, :-1]]][0],
    "mixed": lambda y, t, z: y[:, :-1].cumsum(1).sum(-1),
    "of cosines": lambda y, t, z: y[:, :-1].acosh().sum(-1),
    "random": lambda y, t, z: F.dropout(y[:, :-1]).sum((1, 2)),
    "every other": lambda y, t, z: y[:, ::2].sum(-1),
    "from the end": lambda y, t, z: y[:, -3:].sum(-1),
    "attended": lambda y, t, z: attend(*[y[:, None, :-1]] * 3).sum(-1),
    "infinite where cut": lambda y, t, z: y.masked_fill(torch.arange(6)[:, None] > 4, -torch.inf)[
        :, :-1
    ].logsumexp(-1),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str) -> None:
    gm = trace(STAY[name], *arguments())
    before = str(gm.graph)
    assert cut_later(gm, context()) == 0 and str(gm.graph) == before


DANGERS: dict[str, Ends] = {
    "logarithm of zeros": lambda y, t, z: F.kl_div(y[:, :-1], z[:, 1:].exp(), reduction="none").sum(
        -1
    ),
    "logarithm": lambda y, t, z: (y[:, :-1] * z[:, 1:] + 1e-3).square().log().sum(-1),
    "no sum": lambda y, t, z: (y[:, :-1] * z[:, 1:]).square().log().sum(-1),
    "root": lambda y, t, z: (
        (y[:, :-1] - y[:, :-1].amin(-1, True) * z[:, 1:]).square().sqrt().sum(-1)
    ),
    "root at the end": lambda y, t, z: y[:, :-1].square().sqrt().sum(-1),
    "power": lambda y, t, z: (y[:, :-1] ** 2 * z[:, 1:] ** 2).pow(0.3).sum(-1),
    "divided": lambda y, t, z: (y[:, :-1] / (t[:, 1:, None] + 1)).sum(-1),
    "divided by cut ones": lambda y, t, z: (y[:, :-1] / z[:, 1:]).sum(-1),
    "reciprocal": lambda y, t, z: (z[:, :-1] / (y[:, :-1] * z[:, 1:])).sum(-1),
    "whole numbers": lambda y, t, z: ((y[:, :-1] * 9) % (t[:, 1:, None] + 1)).sum(-1),
    "deviation": lambda y, t, z: (y[:, :-1] * z[:, 1:]).std(-1),
    "angle": lambda y, t, z: torch.atan2(y[:, :-1] * z[:, 1:], z[:, :-1] * z[:, 1:]).sum(-1),
    "times a weight": lambda y, t, z: ((y[:, :-1] * z[:, 1:]).square().log() * z[0, 0]).sum(-1),
    "flattened": lambda y, t, z: (y[:, :-1] * z[:, 1:]).square().reshape(-1, WORDS).log().sum(-1),
    "in halves": lambda y, t, z: (y[:, :-1].float() * z[:, 1:].float()).square().log().sum(-1),
}


@pytest.mark.parametrize("name", DANGERS)
def test_rows_that_are_cut_off_are_no_danger(name: str) -> None:
    """Whatever they hold: of an infinite loss nothing is left."""
    y, t, z = arguments()
    with torch.no_grad():
        y[:, -1] = 0
        z.abs_()
        t[:, 0] = -1
    inputs, fn = (y, t, z.requires_grad_()), DANGERS[name]
    gm = trace(fn, *inputs)
    assert cut_later(gm, context()) >= 1
    check_values(gm, inputs)
    got, want = [run(gm, *inputs)], [fn(*inputs)]
    for found in (got, want):
        found += torch.autograd.grad(found[0].square().sum(), (y, z), materialize_grads=True)
    assert all(x.isfinite().all() for x in want)
    torch.testing.assert_close(got, want)
