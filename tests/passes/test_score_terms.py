"""Scores as models write them out, taken to pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import trace
from torch import Tensor

from paradyse.passes.score_terms import Scores, Term, match_scores

Q, K = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 4, 5)
BIAS, HIDES, SINKS = torch.zeros(3, 5, 5), torch.zeros(5, 5, dtype=torch.bool), torch.zeros(3)
LOW = torch.finfo(torch.float32).min


def scores_of(write: Callable[..., Tensor]) -> tuple[Scores | None, list[str]]:
    """What is found of ``write(q, k, bias, hides, sinks)``, and the inputs in order."""
    gm = trace(write, Q, K, BIAS, HIDES, SINKS, weights=1)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    return match_scores(output.args[0]), [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def with_column(scores: Tensor, sinks: Tensor) -> Tensor:
    column = sinks.reshape(1, 3, 1, 1).expand(2, 3, 5, 1)
    both = torch.cat([scores, column], -1)
    return both - both.max(-1, keepdim=True).values


WRITTEN: dict[str, tuple[Callable[..., Tensor], Scores]] = {
    "numbers": (lambda q, k, b, h, s: (q @ k) * 0.5 / 2, Scores("q", "k", 0.25)),
    "upcast": (lambda q, k, b, h, s: (q @ k).double().float() / 8, Scores("q", "k", 0.125)),
    "cap": (
        lambda q, k, b, h, s: torch.tanh((q @ k) * 0.5 / 30) * 30,
        Scores("q", "k", 0.5, softcap=30.0),
    ),
    "bias, then a number": (
        lambda q, k, b, h, s: (b + q @ k) * 0.5,
        Scores("q", "k", 0.5, terms=(Term("b", 0.5),)),
    ),
    "less a bias": (
        lambda q, k, b, h, s: q @ k - b,
        Scores("q", "k", terms=(Term("b", -1.0),)),
    ),
    "filled": (
        lambda q, k, b, h, s: (q @ k).masked_fill(h, LOW),
        Scores("q", "k", terms=(Term("h", fill=LOW),)),
    ),
    "chosen": (
        lambda q, k, b, h, s: torch.where(h, q @ k, LOW) + b,
        Scores("q", "k", terms=(Term("h", fill=LOW, where=False), Term("b"))),
    ),
    "batch and heads in one": (
        lambda q, k, b, h, s: torch.baddbmm(
            b.repeat(2, 1, 1), q.flatten(0, 1), k.flatten(0, 1), beta=2.0, alpha=0.5
        ).view(2, 3, 5, 5),
        Scores("view", "view_1", 0.5, terms=(Term("repeat", 2.0),)),
    ),
    "sinks": (
        lambda q, k, b, h, s: with_column(q @ k * 0.5, s),
        Scores("q", "k", 0.5, sinks="s"),
    ),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_what_scores_are_made_of(how: str) -> None:
    write, want = WRITTEN[how]
    found, (q, k, b, h, s) = scores_of(write)
    assert found is not None
    name = {q: "q", k: "k", b: "b", h: "h", s: "s"}

    def short(x: object) -> str:
        return name.get(str(x), str(x))

    assert (found.scale, found.softcap) == pytest.approx((want.scale, want.softcap))
    assert [(short(t.node), t.factor, t.fill, t.where) for t in found.terms] == [
        (t.node, t.factor, t.fill, t.where) for t in want.terms
    ]
    assert found.sinks is None if want.sinks is None else short(found.sinks) == want.sinks
    if how != "batch and heads in one":
        assert (short(found.q), short(found.keys)) == (want.q, want.keys)


@pytest.mark.parametrize(
    "write",
    [
        lambda q, k, b, h, s: (q @ k).exp(),
        lambda q, k, b, h, s: torch.tanh(q @ k / 30) * 20,
        lambda q, k, b, h, s: torch.tanh(q @ k / 30) * 30 * 2,
        lambda q, k, b, h, s: (q @ k).masked_fill(h, LOW) * -1,
        lambda q, k, b, h, s: (q @ k) * b,
        lambda q, k, b, h, s: torch.cat([q @ k, q @ k], -1),
    ],
)
def test_what_is_something_else(write: Callable[..., Tensor]) -> None:
    assert scores_of(write)[0] is None
