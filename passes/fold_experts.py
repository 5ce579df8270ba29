"""Fold experts: what sorts tokens by expert and puts them back becomes operators that say so."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from paradyse.graph.expert_rules import GROUPED_MM, ROUTE_ROWS, TAKE_ROWS
from paradyse.graph.rules import argument
from paradyse.torch_private import FakeTensorMode

aten = torch.ops.aten

_MATMULS = {
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
}
"""Operators that multiply rows in the order of experts, by name, and what they call the rows, the
weights and the ends of the experts' rows."""

_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}
_SORTS = {aten.sort.default, aten.sort.stable}
_FLOORS = {aten.floor_divide.default, aten.floor_divide.Scalar}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_SAME_VALUES = {aten.reshape.default, aten.unsqueeze.default, aten.expand.default, *_CASTS}


def fold_experts(gm: fx.GraphModule, ctx: Any) -> int:
    """Write rows that are sorted by expert, multiplied and put back by operators of ours.

    before: i, p = sort(ids); n = cumsum(histc(i, E, 0, E - 1)); q = index_put(_, [p], arange)
            r = x[p // k]; y = grouped_mm(r, w, n); z = (y * v[p])[q]
    after:  i, p, q, n = route_rows(ids, E)
            r = take_rows(x, p, q, k); y = grouped_mm(r, w, n)
            z = take_rows(y * take_rows(v, p, q, 1), q, p, 1)
    What these give is equal to what was there. Where ids are places of a top-k of at most E
    numbers, none is E or more, and what is done to rows of such ids, which transformers 5.17 has
    for experts that another rank holds, is not done. Whether rows may be split over ranks between
    the sort and the way back is for ``place_tokens`` to see. Refuses, with a note, a matmul whose
    ends are not the counts of sorted ids.
    """
    found: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if str(node.target) in _MATMULS:
            sort = _sort_of(node)
            if sort is None:
                where = node.meta.get("module") or node.name
                ctx.note(f"{where}: rows of experts stay as they are, nothing says how they lie")
            else:
                num_experts = _operands(node)[1].meta["val"].shape[0]
                found.setdefault((sort, num_experts), []).append(node)
    for (sort, num_experts), matmuls in found.items():
        _write_route(gm.graph, sort, num_experts, matmuls)
    gm.graph.eliminate_dead_code()
    return sum(map(len, found.values()))


def _operands(matmul: fx.Node) -> list[fx.Node]:
    """Rows, weights and ends."""
    return [argument(matmul, name) for name in _MATMULS[str(matmul.target)]]


def _sort_of(matmul: fx.Node) -> fx.Node | None:
    """The sort of the ids whose counts say where the experts' rows end; None where there is none,
    or the matmul does more than multiply."""
    rows, weights, ends = _operands(matmul)
    shape, out = weights.meta["val"].shape, matmul.meta["val"]
    plain = argument(matmul, "bias") is None and out.dtype == rows.meta["val"].dtype
    if not plain or len(shape) != 3 or rows.meta["val"].ndim != 2 or not isinstance(ends, fx.Node):
        return None
    if ends.target is not aten.cumsum.default:
        return None
    counts = ends.args[0]
    while counts.target in _CASTS:
        counts = counts.args[0]
    if counts.target is not aten.histc.default:
        return None
    bins, least, most = (argument(counts, name) for name in ("bins", "min", "max"))
    if (bins, least, most) != (shape[0], 0, shape[0] - 1):
        return None
    ids = counts.args[0]
    while ids.target in _CASTS:
        ids = ids.args[0]
    if ids.target is operator.getitem and ids.args[0].target in _SORTS and ids.args[1] == 0:
        return ids.args[0] if _is_plain(ids.args[0]) else None
    return next((u for u in ids.users if u.target in _SORTS and _is_plain(u)), None)


def _is_plain(sort: fx.Node) -> bool:
    """Whether ``sort`` sorts numbers in one dim, the least first."""
    val = sort.args[0].meta["val"]
    return val.ndim == 1 and not val.is_floating_point() and not argument(sort, "descending")


def _write_route(
    graph: fx.Graph, sort: fx.Node, num_experts: int, matmuls: Sequence[fx.Node]
) -> None:
    kept = {k: v for k, v in sort.meta.items() if k not in ("val", "tensor_meta")}
    ids = sort.args[0]
    mode = getattr(ids.meta["val"], "fake_mode", None)
    assert isinstance(mode, FakeTensorMode), "experts are folded in a graph of fake values"
    with graph.inserting_before(sort):
        route = graph.call_function(ROUTE_ROWS, (ids, num_experts))
        parts = [graph.call_function(operator.getitem, (route, i)) for i in range(4)]
    with torch.no_grad(), mode:
        route.meta = {**kept, "val": ROUTE_ROWS(ids.meta["val"], num_experts)}
    for part, val in zip(parts, route.meta["val"], strict=True):
        part.meta = {**kept, "val": val}
    in_order, order, inverse, ends = parts
    for result in list(sort.users):
        result.replace_all_uses_with((in_order, order)[result.args[1]])
    if _are_below(ids, num_experts):
        _drop_ids_beyond(in_order, num_experts)
    for user in list(order.users):
        if _is_inverse(user, order):
            user.replace_all_uses_with(inverse)
    for user in list(order.users):
        if user.target in _FLOORS and isinstance(user.args[1], int):
            _write_takes(user, order, inverse, user.args[1])
    _write_takes(order, order, inverse, 1)
    _write_takes(inverse, inverse, order, 1)
    for matmul in matmuls:
        rows, weights, _ = _operands(matmul)
        matmul.target, matmul.args, matmul.kwargs = GROUPED_MM, (rows, weights, ends), {}


def _are_below(ids: fx.Node, num_experts: int) -> bool:
    """Whether ``ids`` are places in a dim of at most ``num_experts``."""
    while ids.target in _SAME_VALUES:
        ids = ids.args[0]
    if ids.target is not operator.getitem or ids.args[1] != 1:
        return False
    top = ids.args[0]
    if top.target is not aten.topk.default:
        return False
    dim = argument(top, "dim")
    return bool(top.args[0].meta["val"].shape[-1 if dim is None else dim] <= num_experts)


def _drop_ids_beyond(ids: fx.Node, num_experts: int) -> None:
    """Leave out what is done where ``ids``, all below ``num_experts``, are not."""
    for user in list(ids.users):
        if user.target is aten.clamp.default:
            least, most = argument(user, "min"), argument(user, "max")
            if (least is None or least <= 0) and (most is None or most >= num_experts - 1):
                user.replace_all_uses_with(ids)
        elif user.target is aten.ge.Scalar and user.args[1] >= num_experts:
            _drop_fills(user)


def _drop_fills(mask: fx.Node) -> None:
    """Leave out what fills where ``mask``, which is False everywhere, is True."""
    for user in list(mask.users):
        if user.target in _FILLS and user.args[1] is mask:
            filled = user.args[0]
            if filled.meta["val"].shape == user.meta["val"].shape:
                user.replace_all_uses_with(filled)
        elif user.target in _SAME_VALUES:
            _drop_fills(user)


def _is_inverse(node: fx.Node, order: fx.Node) -> bool:
    """Whether ``node`` is 0, 1, .. written to the places that ``order`` says."""
    if node.target is not aten.index_put.default or argument(node, "accumulate"):
        return False
    places, numbers = node.args[1:3]
    (length,) = order.meta["val"].shape
    counts = numbers.target is aten.arange.default and numbers.args[0] == length
    counts |= numbers.target is aten.arange.start and tuple(numbers.args[:2]) == (0, length)
    return bool(counts) and list(places) == [order] and node.meta["val"].shape == (length,)


def _write_takes(index: fx.Node, order: fx.Node, inverse: fx.Node, repeats: int) -> None:
    """Have what ``index``, ``order`` over ``repeats``, takes rows of taken by an operator that
    knows of ``inverse``."""
    (length,) = order.meta["val"].shape
    for user in list(index.users):
        if user.target is not aten.index.Tensor or list(user.args[1]) != [index]:
            continue
        if user.args[0].meta["val"].shape[0] * repeats == length:
            user.target, user.args = TAKE_ROWS, (user.args[0], order, inverse, repeats)
