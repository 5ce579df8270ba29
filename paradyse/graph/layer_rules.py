"""Rules of whole layers that PyTorch has as one operator, and of writes into a part of a value.

Factor maps are as in ``rules``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import Names, rule
from paradyse.graph.rules import (
    argument,
    cuts_ends,
    factor_map,
    mix_along,
    overloads,
    same_or_shorter,
    shape_of,
    shifted,
)

aten = torch.ops.aten

_SOLVED = factor_map("a[..., i, j], b[..., i, k] -> [..., i, k]; mixes i, j")

_SDPA = factor_map(
    "q[..., s, d], k[..., t, d], v[..., t, e], mask[..., s, t] -> [..., s, e]; mixes t, d"
)


@rule(aten.scaled_dot_product_attention.default)
def left_attention(names: Names, node: fx.Node) -> Any:
    """``q[..., s, d], k[..., t, d], v[..., t, e], mask[..., s, t] -> [..., s, e]; mixes t, d``: of
    attention that is left to PyTorch, such as that to another sequence, each query is by itself.

    Mixes s too under a causal mask, which counts queries, and all under dropout, whose random
    numbers are for the whole.
    """
    dims = _SDPA(names, node)
    if dims is not None and argument(node, "dropout_p"):
        names.mix(node, *dims)
    elif dims is not None and argument(node, "is_causal"):
        names.mix(node, dims[-2])
    return dims


@rule(*overloads("conv1d conv2d conv3d"))
def convolution(names: Names, node: fx.Node) -> Any:
    """``x[b, c, n, ..], w[o, i, k, ..], b[o] -> [b, o, new, ..]; mixes c, n, i, k``, and o where it
    is in groups. Of channels by themselves ``x[b, c, n, ..], w[c, 1, k, ..], b[c] -> [b, c, new,
    ..]; mixes n, k``."""
    x, w = names.of(node.args[0]), names.of(node.args[1])
    shape = shape_of(node)
    if len(x) != len(shape) or len(x) != len(w):
        return None
    channels = shape_of(node.args[0])[1]
    if 1 < argument(node, "groups") == channels == shape[1]:
        names.unify_at(node, x[1], w[0])
        names.mix(node, *x[2:], *w[2:])
    else:
        names.mix(node, *x[1:], *w[1:])
        if argument(node, "groups") != 1:
            names.mix(node, w[0])
    if len(node.args) > 2 and node.args[2] is not None:
        names.unify_at(node, w[0], names.of(node.args[2])[0])
    return [x[0], w[0], *names.fresh(shape[2:])]


@rule(aten.group_norm.default)
def group_norm(names: Names, node: fx.Node) -> Any:
    """``x[b, c, ..], w[c], b[c] -> [b, c, ..]; mixes c, ..``"""
    dims = names.of(node.args[0])
    names.mix(node, *dims[1:])
    for weight in node.args[2:4]:
        if weight is not None:
            names.unify_at(node, dims[1], names.of(weight)[0])
    return dims


@rule(aten.slice_scatter.default)
def slice_scatter(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], y[..., n - k, ...] -> [..., n, ...]; mixes n, n - k`` where both are not of
    one size.
    """
    dims, (d,) = mix_along(names, node)
    part = names.of(node.args[1])
    for i, (mine, theirs) in enumerate(zip(dims, part, strict=True)):
        if i != d:
            names.unify_at(node, mine, theirs)
            dims[i] = dims[i] or theirs
    names.mix(node, part[d])
    size = shape_of(node.args[1])[d]
    if dims[d] and cuts_ends(node):
        same = size == shape_of(node)[d]
        names.unify(dims[d] if same else shifted(names, dims[d], size), part[d])
    return dims


@rule(aten.select_scatter.default)
def select_scatter(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], y[..., ...] -> [..., n, ...]; mixes n``"""
    dims, (d,) = mix_along(names, node)
    for mine, theirs in zip(dims[:d] + dims[d + 1 :], names.of(node.args[1]), strict=True):
        names.unify_at(node, mine, theirs)
    return dims


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., n k, ...]``, where each element is there k times."""
    dims, repeats = names.of(node.args[0]), argument(node, "repeats")
    if argument(node, "dim") is None and len(dims) > 1:
        return None
    d = argument(node, "dim") or 0
    dims[d] = (*dims[d], *names.fresh([repeats])[0])
    return dims


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def scatter(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], i[..., k, ...], y[..., k, ...] -> [..., n, ...]; mixes n, k``, and where
    ``i`` is shorter."""
    dims, (d,) = mix_along(names, node)
    for other in (a for a in node.args[2:] if isinstance(a, fx.Node)):
        for i, (mine, theirs) in enumerate(zip(dims, names.of(other), strict=True)):
            if i == d:
                names.mix(node, theirs)
            else:
                same_or_shorter(names, node, mine, theirs)
    return dims


@rule(aten.masked_scatter.default)
def masked_scatter(names: Names, node: fx.Node) -> Any:
    """``x[...], mask[...], y[..] -> [...]; mixes all``: what is taken of y depends on all of the
    mask."""
    dims = names.broadcast(node, node.args[:2], shape_of(node))
    names.mix(node, *dims, *names.of(node.args[2]))
    return dims


@rule(aten.repeat.default, aten.tile.default)
def repeat(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [new, ..., n, ...]``, with a new dim in place of n, which it mixes, where
    n is repeated."""
    dims, times, shape = names.of(node.args[0]), node.args[1], shape_of(node)
    out = names.fresh(shape)
    ahead, more = len(shape) - len(dims), len(shape) - len(times)
    for d, dim in enumerate(dims, ahead):
        if d < more or times[d - more] == 1:
            out[d] = dim
        else:
            names.mix(node, dim)
    return out


@rule(aten.einsum.default)
def einsum(names: Names, node: fx.Node) -> Any:
    """``x[a, i], y[b, i] -> [a, b]; mixes i``, as the equation says. Nothing is known of diagonals,
    nor of dims without a letter."""
    left, arrow, right = node.args[0].replace(" ", "").partition("->")
    terms, found = left.split(","), dict[str, Any]()
    if not arrow or "." in node.args[0] or any(len(set(x)) < len(x) for x in (*terms, right)):
        return None
    for letters, arg in zip(terms, node.args[1], strict=True):
        for letter, dim in zip(letters, names.of(arg), strict=True):
            names.unify_at(node, found.setdefault(letter, dim), dim)
            found[letter] = found[letter] or dim
    names.mix(node, *[dim for letter, dim in found.items() if letter not in right])
    return [found[letter] for letter in right]


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(names: Names, node: fx.Node) -> Any:
    """``a[..., i, j], b[..., i, k] -> [..., i, k]; mixes i, j``. Nothing is known of the
    other order."""
    if argument(node, "left") is False:
        return None
    return _SOLVED(names, node)


@rule(aten.tril.default, aten.triu.default)
def triangle(names: Names, node: fx.Node) -> Any:
    """``x[..., i, j] -> [..., i, j]; mixes i, j``"""
    dims = names.of(node.args[0])
    names.mix(node, *dims[-2:])
    return dims
