"""Names of dims: unification, splitting, merging, shifting."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from paradyse.graph.factors import Factor, Names, resolve, rule, size_of
from paradyse.graph.infer import infer_names

aten = torch.ops.aten


def trace(fn, *args):
    gm = make_fx(fn, pre_dispatch=True)(*args)
    return gm, infer_names(gm.graph)


def node(gm, target):
    return next(n for n in gm.graph.nodes if n.target == target)


def test_a_view_splits_a_factor_for_everything_unified_with_it():
    def fn(x, w):
        return torch.nn.functional.linear(x, w).reshape(2, 5, 4, 6)

    gm, names = trace(fn, torch.randn(2, 5, 8), torch.randn(24, 8))
    out = names.of(node(gm, aten.reshape.default))
    weight = names.of([n for n in gm.graph.nodes if n.op == "placeholder"][1])
    assert weight[0] == (*out[2], *out[3])


def test_flattened_tokens_keep_both_factors():
    gm, names = trace(lambda x: x.reshape(-1, 8).relu().reshape(3, 7, 8), torch.randn(3, 7, 8))
    x, *_, out = [n for n in gm.graph.nodes if n.op != "output"]
    assert names.of(out) == names.of(x)
    assert names.of(node(gm, aten.relu.default))[0] == (*names.of(x)[0], *names.of(x)[1])


def test_unify_splits_the_coarser_side():
    names, a, b, whole = Names(), Factor(2), Factor(6), Factor(12)
    assert names.unify([a, b], [whole])
    assert whole.resolve() == (a, b)


def test_factors_that_do_not_nest_are_not_unified():
    names = Names()
    assert not names.unify([Factor(6), Factor(4)], [Factor(4), Factor(6)])


def test_a_reshape_that_does_not_nest_is_marked_as_mixing():
    gm, names = trace(lambda x: x.reshape(4, 6), torch.randn(6, 4))
    n = node(gm, aten.reshape.default)
    assert names.mixed(n) == {f for d in names.of(n.args[0]) for f in d}


def test_labels_padded_and_shifted_are_as_long_as_before():
    def shift(labels):
        return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]

    gm, names = trace(shift, torch.zeros(2, 9, dtype=torch.int64))
    labels, pad, *_, out = [n for n in gm.graph.nodes if n.op != "output"]
    (length,) = names.of(labels)[1]
    assert names.of(out)[1] == (length,)
    assert size_of(names.of(pad)[1], {length: 100}) == 101


@pytest.mark.parametrize("table_first", [False, True])
def test_tokens_keep_their_dim_where_a_table_is_cut_to_their_length(table_first):
    """As a bias by distance is: another length is cut elsewhere. What is cut of tokens is theirs,
    before and after."""

    def add(x, table):
        ahead, cut = x[:, 1:], table[7:]
        both = cut + x if table_first else x + cut
        return ahead, both[:, 2:]

    gm = make_fx(add, pre_dispatch=True)(torch.randn(2, 9), torch.randn(16))
    x, table = (n for n in gm.graph.nodes if n.op == "placeholder")
    table.meta["weight"] = True
    names = infer_names(gm.graph)
    (tokens,) = names.of(x)[1]
    (out,) = gm.graph.find_nodes(op="output")
    ahead, cut = out.args[0]
    assert tokens.origin() == (tokens, 0)
    assert names.of(ahead)[1][0].origin() == (tokens, -1)
    assert names.of(cut)[1][0].origin() == (tokens, -2)


def test_what_a_mean_reduces_is_mixed_and_nothing_else():
    gm, names = trace(lambda x: x.mean(-1, keepdim=True) * x, torch.randn(2, 5, 8))
    mean = node(gm, aten.mean.dim)
    b, s, h = names.of(mean.args[0])
    assert names.mixed(mean) == set(h)
    assert names.of(mean) == [b, s, ()]


def test_an_operator_without_a_rule_mixes_everything_and_says_so():
    gm, names = trace(lambda x: torch.fft.fft(x).abs(), torch.randn(3, 5))
    unknown = next(n for n in gm.graph.nodes if "fft" in str(n.target))
    assert "no rule" in names.unnamed[unknown]
    assert names.mixed(unknown) == set(resolve(f for d in names.of(unknown.args[0]) for f in d))


def test_two_rules_for_one_operator_are_an_error():
    with pytest.raises(ValueError, match="has a rule already"):
        rule(aten.linear.default)(lambda names, n: None)
