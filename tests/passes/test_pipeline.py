"""Passes run in their order, each timed; one that is off does not run."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from pass_graphs import context, run, toy, toy_inputs, trace

from paradyse.passes.pipeline import OPTIONAL, PASSES, run_passes

NAMES = [fn.__name__ for fn in PASSES]
WEIGHTS = 7
"""Inputs of the toy that are parameters."""


def test_passes_run_in_their_order_and_leave_the_loss_as_it_was() -> None:
    inputs, ctx = toy_inputs(), context()
    gm = trace(toy, *inputs, weights=WEIGHTS)
    run_passes(gm, ctx)
    assert list(ctx.pass_seconds) == NAMES and all(s > 0 for s in ctx.pass_seconds.values())
    assert [b.kind for b in ctx.blocks] == ["attention", "mlp"]
    torch.testing.assert_close(run(gm, *inputs), toy(*inputs))


def test_a_pass_that_is_off_does_not_run() -> None:
    assert set(OPTIONAL) < set(NAMES)
    inputs, ctx = toy_inputs(), context()
    ctx.options = SimpleNamespace(passes_off=("outline_blocks",), on_unsupported="gather")
    gm = trace(toy, *inputs, weights=WEIGHTS)
    run_passes(gm, ctx)
    assert list(ctx.pass_seconds) == [n for n in NAMES if n != "outline_blocks"]
    assert not ctx.blocks
    torch.testing.assert_close(run(gm, *inputs), toy(*inputs))
