"""Rules of norms, statistics and products of vectors, which losses and layers of people's own have.

Factor maps are as in ``rules``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import Dim, Names, rule
from paradyse.graph.rules import (
    along_dim,
    argument,
    elementwise,
    factor_map,
    mix_along,
    ordering,
    overloads,
    reduction,
    shape_of,
)

aten = torch.ops.aten

rule(*overloads("lgamma digamma erfinv i0 angle real imag"))(elementwise)
rule(*overloads("linalg_vector_norm norm.ScalarOpt_dim nanmean nansum"))(reduction)
rule(*overloads("cumprod logcumsumexp argsort.default argsort.stable"))(along_dim)
rule(*overloads("cummax cummin"))(ordering)

for pattern, target in {
    "x[i], y[j] -> [i, j]": aten.outer.default,
    "x[i, j], y[j] -> [i]; mixes j": aten.mv.default,
    "x[i], y[i] -> []; mixes i": aten.dot.default,
}.items():
    rule(target)(factor_map(pattern))


@rule(*overloads("var_mean.dim var_mean.correction std_mean.dim std_mean.correction median.dim"))
@rule(*overloads("nanmedian.dim mode kthvalue aminmax"))
def reductions(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., ...], [..., ...]; mixes n``, or with keepdim 1 in its place."""
    dims = reduction(names, node)
    return [dims, list(dims)]


@rule(aten.glu.default)
def gated(names: Names, node: fx.Node) -> Any:
    """``x[..., 2 n, ...] -> [..., new, ...]; mixes 2 n``"""
    dims, (d,) = mix_along(names, node)
    dims[d] = names.fresh([shape_of(node)[d]])[0]
    return dims


@rule(aten.prelu.default)
def by_channel(names: Names, node: fx.Node) -> Any:
    """``x[b, c, ...], w[c] -> [b, c, ...]``, or with one weight for all."""
    dims, weight = names.of(node.args[0]), names.of(node.args[1])
    if len(dims) > 1 and weight and weight[0]:
        names.unify_at(node, dims[1], weight[0])
    return dims


@rule(aten.bucketize.Tensor)
def buckets(names: Names, node: fx.Node) -> Any:
    """``x[...], bounds[n] -> [...]; mixes n``"""
    names.mix(node, *names.of(node.args[1]))
    return names.of(node.args[0])


@rule(aten.cosine_similarity.default, aten.linalg_cross.default)
def along_one_of_both(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], y[..., n, ...] -> [..., ...]; mixes n``; of a cross product with n."""
    pair = node.args[:2]
    shape = torch.broadcast_shapes(*map(shape_of, pair))
    dims: list[Dim] = names.broadcast(node, pair, shape)
    along = argument(node, "dim") % len(dims)
    names.mix(node, dims[along])
    return dims if len(dims) == len(shape_of(node)) else [*dims[:along], *dims[along + 1 :]]


@rule(aten.pairwise_distance.default)
def distances(names: Names, node: fx.Node) -> Any:
    """``x[..., n], y[..., n] -> [...]; mixes n``, or with keepdim 1 in its place."""
    pair = node.args[:2]
    *dims, last = names.broadcast(node, pair, torch.broadcast_shapes(*map(shape_of, pair)))
    names.mix(node, last)
    return [*dims, ()] if argument(node, "keepdim") else dims


@rule(aten.one_hot.default)
def one_hot(names: Names, node: fx.Node) -> Any:
    """``x[...] -> [..., new]``"""
    return [*names.of(node.args[0]), *names.fresh(shape_of(node)[-1:])]


@rule(*overloads("meshgrid"))
def grids(names: Names, node: fx.Node) -> Any:
    """``x[i], y[j], .. -> [i, j, ..], [i, j, ..], ..``, the first two the other way round where
    images count so."""
    found = [names.of(x) for x in node.args[0]]
    dims: list[Dim] = [of[0] if of else () for of in found]
    if argument(node, "indexing") == "xy":
        dims[:2] = dims[1::-1]
    return [list(dims) for _ in found]
