"""From formulas to fields, or the reason why not."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from paradyse.passes import mask_domain as d
from paradyse.passes.mask_spec import KEY, QUERY, Recovered, Unrecoverable, classify, visible
from paradyse.passes.mask_values import MaskValues

GRAPH = fx.Graph()
IDS, PADDING = GRAPH.placeholder("ids"), GRAPH.placeholder("padding")
B, Q, K = d.var(0), d.var(QUERY), d.var(KEY)


def at(index: d.Lin) -> d.Lin:
    return d.atom(d.Load(IDS, (B, index)))


CAUSAL = d.le0(d.sub(K, Q))
SEEN = d.Load(PADDING, (B, K))
SAME, BACK = d.eq0(d.sub(at(Q), at(K))), d.eq0(d.sub(at(K), d.add(at(Q), d.ZERO)))


def near(left: int) -> d.Bool:
    return d.le0(d.sub(Q, d.add(K, d.Lin(left))))


SPECS: dict[str, tuple[d.Bool, Recovered]] = {
    "everything": (d.TRUE, Recovered()),
    "causal": (CAUSAL, Recovered(right=0)),
    "the tighter of two": (d.conj(near(3), near(2)), Recovered(left=2)),
    "window": (d.conj(CAUSAL, near(3)), Recovered(left=3, right=0)),
    "both sides": (d.le0(d.sub(d.absolute(d.sub(Q, K)), d.Lin(2))), Recovered(left=2, right=2)),
    "chunks": (
        d.eq0(d.sub(d.floor_div(Q, 4), d.floor_div(K, 4))),
        Recovered(chunk=4),
    ),
    "the diagonal": (d.eq0(d.sub(Q, K)), Recovered(left=0, right=0)),
    "padding": (SEEN, Recovered(padding=d.Load(PADDING, (B, d.var(1))))),
    "documents": (d.conj(CAUSAL, SAME), Recovered(right=0, documents=(at(d.var(1)),))),
    "documents twice": (d.conj(SAME, BACK), Recovered(documents=(at(d.var(1)),))),
}


@pytest.mark.parametrize("name", SPECS)
def test_fields(name: str) -> None:
    mask, want = SPECS[name]
    assert classify(mask, MaskValues()) == want


def test_queries_that_are_padding_too_are_a_document_of_their_own() -> None:
    both = d.conj(SEEN, d.Load(PADDING, (B, Q)))
    found = classify(both, MaskValues())
    assert found.documents == (d.as_number(d.Load(PADDING, (B, d.var(1)))),)
    assert not found.sees_itself and classify(CAUSAL, MaskValues()).sees_itself


REASONS: dict[str, tuple[d.Bool, str]] = {
    "heads": (d.le0(d.sub(d.var(1), K)), "differs between heads"),
    "either": (d.disj(CAUSAL, SAME), "compares query and key through `ids`"),
    "the future": (d.le0(d.sub(d.add(Q, d.ONE), K)), "their indices"),
    "whole queries": (d.Load(PADDING, (B, Q)), "hides whole queries by `padding`"),
    "positions alone": (d.le0(d.sub(at(K), at(Q))), "through `ids`"),
}


@pytest.mark.parametrize("name", REASONS)
def test_nothing_is_dropped(name: str) -> None:
    mask, reason = REASONS[name]
    with pytest.raises(Unrecoverable, match=reason):
        classify(d.conj(CAUSAL, mask) if name != "either" else mask, MaskValues())


def test_numbers_that_hide() -> None:
    lowest = torch.finfo(torch.float32).min
    hidden = d.where(CAUSAL, d.ZERO, d.Lin(-torch.inf))
    assert visible(hidden, torch.float32) == (CAUSAL, False)
    assert visible(d.where(CAUSAL, d.ZERO, d.Lin(lowest)), torch.float32) == (CAUSAL, True)
    assert visible(CAUSAL, torch.bool) == (CAUSAL, False)
    for bias in (d.where(CAUSAL, d.ZERO, d.Lin(-2.5)), d.where(CAUSAL, d.ONE, d.ZERO), Q):
        assert visible(bias, torch.float32) is None
