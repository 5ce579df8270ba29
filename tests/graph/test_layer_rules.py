"""Rules of whole layers: what they mix. That they are right is tested with all rules' samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rules import infer, ints, t
from torch import fx

from paradyse.graph.factors import Names

aten = torch.ops.aten


def mixed(target: Any, *args: Any) -> set[int]:
    """Sizes of the factors that are mixed; all in the samples differ."""
    _, outputs, names = infer(target, args, {})
    node: fx.Node = outputs[0]
    assert isinstance(names, Names)
    return {factor.size for factor in names.mixed(node)}


Q, K, V = t(2, 4, 5, 3), t(2, 4, 7, 3), t(2, 4, 7, 6)


@pytest.mark.parametrize(
    ("rest", "sizes"),
    [
        ((), {7, 3}),
        ((None, 0.0, True), {7, 3, 5}),
        ((None, 0.1), {2, 4, 5, 6, 7, 3}),
    ],
    ids=["each query by itself", "causal counts queries", "dropout draws for the whole"],
)
def test_attention_that_is_left_to_pytorch(rest: tuple[Any, ...], sizes: set[int]) -> None:
    assert mixed(aten.scaled_dot_product_attention.default, Q, K, V, *rest) == sizes


def test_a_convolution_keeps_the_batch_and_what_it_gives() -> None:
    x, w, b = t(2, 4, 9), t(5, 4, 3), t(5)
    assert mixed(aten.conv1d.default, x, w, b) == {4, 9, 3}
    grouped = (t(2, 4, 9), t(8, 1, 3), None, [1], [0], [1], 4)
    assert mixed(aten.conv1d.default, *grouped) >= {4, 9, 3, 8}


def test_an_index_of_fewer_rows_is_of_the_first_ones() -> None:
    x, one, half = t(6, 5, 7), ints(6, 1, 4), ints(3, 5, 4)
    assert mixed(aten.gather.default, x, -1, one) == {5, 7}
    assert mixed(aten.gather.default, x, -1, half) == {6, 3, 7}
    assert mixed(aten.scatter.value, x, -1, one, 2.0) == {5, 7, 4}
    assert mixed(aten.scatter.value, x, -1, half, 2.0) == {6, 3, 7, 4}


def test_a_write_of_a_part_mixes_the_dim_that_it_is_along() -> None:
    x = t(6, 5, 7)
    assert mixed(aten.slice_scatter.default, x, t(6, 4, 7), 1, 1) == {5, 4}
    assert mixed(aten.select_scatter.default, x, t(6, 7), 1, 2) == {5}
    assert mixed(aten.group_norm.default, t(2, 6, 5), 3, t(6), t(6)) == {6, 5}
