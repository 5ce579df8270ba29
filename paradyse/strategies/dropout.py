"""Dropout by place: an element's mask depends on where the element lies in the whole tensor, so it
is the same on one rank and on many, under every strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.dropouts import DROPOUT, dropout_places
from paradyse.graph.factors import Dim, Factor, size_of
from paradyse.graph.subgraph import Override
from paradyse.kernels.dropout import hashed_dropout
from paradyse.strategies.base import SPLIT, Scope, bind_factors
from paradyse.strategies.groups.model import Groups


def dropout_overrides(
    scope: Scope,
    nodes: Sequence[fx.Node],
    layout: str,
    sizes: Mapping[str, Any],
    common: Sequence[Tensor],
    groups: Groups | None = None,
    heads: Tensor | None = None,
    own: Mapping[Factor, tuple[Tensor, Any]] | None = None,
) -> dict[fx.Node, Override]:
    """What runs in place of the dropouts among ``nodes``.

    Args:
        scope: what all variants of the capture share.
        nodes: of the whole piece or block: a dropout's place among them is a part of its seed.
        layout: of the tokens where it runs, ``SPLIT`` or ``WHOLE``.
        sizes: of the letters, at hand.
        common: ``StepContext.common``.
        groups: where it runs on a group's part: then those of the groups' core alone.
        heads: int64 [h], query heads (or columns) of the group.
        own: other dims of which the rank has some rows: which, int64 [n], and how many there are.
    """
    seed, at = common[-1], own or {}
    out: dict[fx.Node, Override] = {}
    core = set(groups.core.nodes) if groups is not None else nodes
    for node, i in dropout_places(nodes).items():
        if node.target != DROPOUT:
            continue

        def drop(x: Tensor, p: float, train: bool, node: fx.Node = node, i: int = i) -> Tensor:
            dims = scope.names.of(node)
            index = _element_index(scope, dims, layout, sizes, common, at, groups, heads, x.shape)
            return hashed_dropout(x, p, seed + (i + 1), index.expand(x.shape))

        if node in core:
            out[node] = drop
    return out


def sequence_ids(
    scope: Scope,
    attention: fx.Node,
    layout: str,
    sizes: Mapping[str, Any],
    common: Sequence[Tensor],
    own: Mapping[Factor, tuple[Tensor, Any]] | None = None,
) -> Tensor | None:
    """The global indices of the sequences of ``attention``, int64 [B]; None without dropout.

    Args:
        scope, layout, sizes, common, own: as of ``dropout_overrides``.
    """
    call = AttentionCall.of(attention)
    if call.dropout_p == 0:
        return None
    batch = scope.names.of(call.q)[:1]
    return _element_index(scope, batch, layout, sizes, common, own or {})


def _element_index(
    scope: Scope,
    dims: Sequence[Dim],
    layout: str,
    sizes: Mapping[str, Any],
    common: Sequence[Tensor],
    own: Mapping[Factor, tuple[Tensor, Any]],
    groups: Groups | None = None,
    heads: Tensor | None = None,
    shape: Sequence[Any] = (),
) -> Tensor:
    """Where each element of a value of ``dims``, or of a group's part of it, lies in the whole
    tensor: int64, of the value's shape. The rank's tokens may be any of the sequence's. ``shape``,
    if given, tells of dims that no letter stands for, such as what a convolution makes.
    """
    whole, local, _, info, _ = common
    positions = local if layout == SPLIT else whole
    known = bind_factors(scope, layout, sizes)
    factors = [f for d in dims for f in d]
    outer, inner, ratio, table = None, None, 1, torch.empty(0)
    if groups is not None and heads is not None:
        outer, inner, ratio = groups.outer, groups.inner, groups.slots.group
        table = heads.view(-1, groups.slots.heads_per_slot)
    alone = {dim[0]: n for dim, n in zip(dims, shape) if len(dim) == 1}
    index: Tensor = torch.zeros((), dtype=torch.int64, device=positions.device)
    for at, f in enumerate(factors):
        num: Any = size_of((f,), known)
        if f is scope.seq:
            digit, num = positions, info[0]
        elif f in own:
            digit, num = own[f]
        elif f is outer:
            digit = table[:, 0] // ratio
        elif f is inner and outer in factors:  # a digit for each slot
            between = at - factors.index(outer) - 1
            digit = (table % ratio).view(-1, *[1] * between, table.shape[1])
        elif f is inner:
            digit = table.flatten() % ratio
        else:
            num = alone.get(f, num)
            digit = torch.arange(num, device=positions.device)
        index = index[..., None] * num + digit
    here = dict(zip(factors, index.shape, strict=True))
    return index.reshape([size_of(d, here) for d in dims])
