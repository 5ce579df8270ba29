"""Biases that depend on how far a key is from its query: one number for each head and distance.

A table that is looked up by a bucket of the distance (T5, arXiv 1910.10683), or slopes times
distances (ALiBi, arXiv 2108.12409), are written out for every pair. Their operators work on each
pair alone, so that the same operators on [2, S] pairs give all that there is: of each distance a
key behind its query, and one ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.rules import argument
from paradyse.graph.subgraph import is_weight
from paradyse.passes.mask_domain import (
    ONE,
    ZERO,
    Lin,
    Load,
    add,
    as_number,
    atoms_of,
    dims_of,
    eq0,
    substitute,
    var,
    where,
)
from paradyse.passes.mask_emit import Emitter
from paradyse.passes.mask_values import MaskValues, shape_of

aten = torch.ops.aten

_ELEMENTWISE = {
    getattr(aten, name).default
    for name in ("neg", "abs", "log", "exp", "sqrt", "minimum", "maximum", "clamp", "sign")
} | {
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor,
    aten.div.Tensor_mode, aten.floor_divide.default, aten.pow.Tensor_Scalar, aten.to.dtype,
    aten._to_copy.default, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.lt.Tensor,
    aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Scalar, aten.min.other,
    aten.max.other, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.contiguous.default, aten.clone.default, aten.logical_and.default,
    aten.logical_or.default, aten.logical_not.default, aten.masked_fill.Scalar,
}  # fmt: skip

_REPEATS = (aten.expand.default, aten.contiguous.default, aten.clone.default)

_LARGE = 1e4
"""A number as large as this may stand for minus infinity."""


class _NotByDistance(Exception):
    """Some element depends on more than the distance of its pair."""


def is_ordinary(node: fx.Node) -> bool:
    """Whether ``node`` surely hides no pair: no large number goes into it, nor floating-point data,
    nor a table of as many rows and columns as there are tokens, unless it is looked up.
    """
    seen, stack = set[fx.Node](), [node]
    length = max(shape_of(node)[-2:], default=1)
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        val = at.meta.get("val")
        real = isinstance(val, torch.Tensor) and val.is_floating_point()
        if real and at.op in ("placeholder", "get_attr"):
            pairs = val.ndim > 1 and min(val.shape[-2:]) >= length > 1
            if not is_weight(at) or pairs:
                return False
        numbers = [] if at.target is aten.slice.Tensor else [*at.args, *at.kwargs.values()]
        if real and any(isinstance(x, int | float) and abs(x) >= _LARGE for x in numbers):
            return False
        looks_up = at.target in (aten.embedding.default, aten.index.Tensor)
        stack += [x for x in at.all_input_nodes if not (looks_up and is_weight(x))]
    return True


def by_distance(parts: Sequence[fx.Node], emit: Emitter, values: MaskValues) -> fx.Node | None:
    """[H|1, 2, S], the sum of ``parts`` for keys behind and ahead at each distance; None where they
    depend on anything else, or on queries or keys alone.

    Args:
        parts: each broadcasts to [B, H, S, S].
        emit: writes it, for sequences of S tokens.
        values: formulas of nodes.
    """
    if not all(x.meta["val"].is_floating_point() for x in parts):
        return None
    if all(1 in (1, *shape_of(x))[-2:] for x in parts):
        return None  # a number for each key takes less
    try:
        found = [_Distances(emit, values).heads_of(x) for x in parts]
    except _NotByDistance:
        return None
    return reduce(lambda a, b: emit.call(aten.add.Tensor, (a, b)), found)


class _Distances:
    """Writes values for [2, S] pairs in place of [S, S]: query i with key 0, query 0 with key i.

    A value has its queries along the dim ``q`` and its keys along ``k``, counted from the last dim
    (-1); None where it has none.
    """

    def __init__(self, emit: Emitter, values: MaskValues) -> None:
        self.values, self.length = values, emit.sizes[1]
        self.emit = Emitter(emit.graph, emit.place, (2, self.length))
        self.known: dict[tuple[fx.Node, int | None, int | None], fx.Node] = {}

    def heads_of(self, x: fx.Node) -> fx.Node:
        """[H|1, 2, S] of ``x``, which broadcasts to [B, H, S, S]."""
        while x.target in _REPEATS:
            x = x.args[0]
        while len(shape_of(x)) < 4:
            x = self.emit.call(aten.unsqueeze.default, (x, 0))
        batch, heads, *_ = shape_of(x)
        if batch != 1:
            raise _NotByDistance
        return self.emit.call(aten.reshape.default, (self.of(x, -2, -1), [heads, 2, self.length]))

    def of(self, node: fx.Node, q: int | None, k: int | None) -> fx.Node:
        """``node`` at all distances."""
        shape = shape_of(node)
        q, k = (d if d is not None and self._along(shape, d) else None for d in (q, k))
        key = node, q, k
        if key not in self.known:
            if q is None and k is None:
                self.known[key] = node
            elif (found := self._by_formula(node, q, k)) is not None:
                self.known[key] = found
            else:
                self.known[key] = self._by_operator(node, q, k)
        return self.known[key]

    def _along(self, shape: Sequence[int], d: int) -> bool:
        if -d > len(shape) or shape[d] == 1:
            return False
        if shape[d] != self.length:
            raise _NotByDistance
        return True

    def _by_formula(self, node: fx.Node, q: int | None, k: int | None) -> fx.Node | None:
        """Where the element is a formula of the distance alone."""
        value, n = self.values.value(node), len(shape_of(node))
        known = isinstance(value, Lin) and not node.meta["val"].is_floating_point()
        if not known or any(isinstance(a, Load) for a in atoms_of(value)):
            return None
        dims = dims_of(value)
        if q is None or k is None or not dims <= {n + q, n + k}:
            raise _NotByDistance
        rows, keys = n + q, n + k
        if value != substitute(value, {d: add(var(d), ONE) for d in (rows, keys)}):
            raise _NotByDistance
        behind = substitute(value, {rows: var(1), keys: ZERO})
        ahead = substitute(value, {rows: ZERO, keys: var(1)})
        far = where(eq0(var(0)), as_number(behind), as_number(ahead))
        table = self.emit.cast(self.emit.table(far), node.meta["val"].dtype)
        if rows > keys:
            table = self.emit.call(aten.transpose.int, (table, 0, 1))
        shape = [1] * n
        shape[rows], shape[keys] = 2, self.length
        return self.emit.call(aten.reshape.default, (table, shape))

    def _by_operator(self, node: fx.Node, q: int | None, k: int | None) -> fx.Node:
        """By the operator that gives ``node``, on what it reads at all distances."""
        target, emit = node.target, self.emit
        if target in _ELEMENTWISE:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self.of(a, q, k))
            return emit.call(target, args, **kwargs)
        n = len(shape_of(node))
        if target is aten.embedding.default:
            table, ids = node.args[:2]
            if -1 in (q, k):
                raise _NotByDistance
            inner = [d if d is None else d + 1 for d in (q, k)]
            # by an index: what embeds is taken for tokens, of which ranks have a part
            return emit.call(aten.index.Tensor, (table, [self.of(ids, *inner)]))
        if target is aten.index.Tensor and len(node.args[1]) == 1:
            table, (ids,) = node.args
            behind = len(shape_of(table)) - 1
            inner = [d if d is None else d + behind for d in (q, k)]
            if any(d is not None and d > -1 for d in inner):
                raise _NotByDistance
            return emit.call(target, (table, [self.of(ids, *inner)]))
        if target is aten.unsqueeze.default:
            at = node.args[1] % n
            return emit.call(target, (self._moved(node, q, k, lambda d: d - (d > at)), at))
        if target is aten.permute.default:
            order = [d % n for d in node.args[1]]
            return emit.call(target, (self._moved(node, q, k, lambda d: order[d]), order))
        if target is aten.transpose.int:
            a, b = (d % n for d in node.args[1:])
            swap = {a: b, b: a}
            return emit.call(target, (self._moved(node, q, k, lambda d: swap.get(d, d)), a, b))
        if target is aten.slice.Tensor:
            dim = argument(node, "dim") % n - n
            if shape_of(node) == shape_of(node.args[0]):
                return self.of(node.args[0], q, k)
            if dim in (q, k):
                raise _NotByDistance
            return emit.call(target, (self.of(node.args[0], q, k), *node.args[1:]))
        raise _NotByDistance

    def _moved(self, node: fx.Node, q: int | None, k: int | None, source: Any) -> fx.Node:
        """What ``node`` reads; ``source`` gives the dim there of each of its dims."""
        x, n = node.args[0], len(shape_of(node))
        m = len(shape_of(x))
        inner = [None if d is None else source(n + d) - m for d in (q, k)]
        return self.of(x, *inner)
