"""From formulas back to nodes: the [B, S] tensors that travel with a recovered mask."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.passes.mask_domain import (
    Abs,
    And,
    Atom,
    Bool,
    Eq0,
    Expr,
    FloorDiv,
    Le0,
    Lin,
    Load,
    Not,
    Or,
    Var,
    Where,
    scale,
)
from paradyse.torch_private import FakeTensorMode

aten = torch.ops.aten


class Emitter:
    """Writes nodes before ``place``, each with its fake value.

    Formulas are over (b, index along the sequence); nodes have shape [B | 1, S | 1] until they are
    returned.

    Args:
        sizes: (B, S), for tables.
    """

    def __init__(self, graph: fx.Graph, place: fx.Node, sizes: tuple[int, int] = (1, 1)) -> None:
        self.graph, self.place, self.sizes = graph, place, sizes

    def call(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """A new node that calls ``target`` with ``args`` and ``kwargs``."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        mode = getattr(self.place.meta["val"], "fake_mode", None)
        assert isinstance(mode, FakeTensorMode), "masks are recovered on a graph of fake values"
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), mode:
            node.meta["val"] = target(*args, **kwargs)
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``x`` in ``dtype``."""
        return x if x.meta["val"].dtype == dtype else self.call(aten.to.dtype, (x, dtype))

    def four_dims(self, mask: fx.Node) -> fx.Node:
        """``mask``, which broadcasts to [B, H, S, S], with all four dims."""
        while mask.meta["val"].dim() < 4:
            mask = self.call(aten.unsqueeze.default, (mask, 0))
        return mask

    def number(self, value: float, dtype: torch.dtype) -> fx.Node:
        """``value`` as a tensor [] of ``dtype``, at most as far from 0 as that reaches."""
        if value != float("-inf"):
            value = max(value, torch.finfo(dtype).min)
        return self._make(aten.full.default, ([], value), dtype)

    def replace_by(self, call: AttentionCall) -> fx.Node:
        """Put the output of ``call`` where ``place`` is, which goes."""
        attention = self.call(ATTENTION, call.args)
        result = self.call(operator.getitem, (attention, 0))
        kept = {k: v for k, v in self.place.meta.items() if k not in ("val", "tensor_meta")}
        for node in (attention, result):
            node.meta.update(kept)
        self.place.replace_all_uses_with(result)
        self.graph.erase_node(self.place)
        return result

    def table(self, value: Expr) -> fx.Node:
        """``value`` as a tensor [B, S], bool or int64."""
        if isinstance(value, Lin):
            node = self.cast(self._number(value), torch.int64)
        else:
            node = self._boolean(value)
        same = tuple(node.meta["val"].shape) == self.sizes
        return node if same else self.call(aten.expand.default, (node, list(self.sizes)))

    def documents(self, values: tuple[Lin, ...]) -> fx.Node:
        """Int64 [B, S], equal at two places of a sequence where all ``values`` are."""
        tables = [self.table(v) for v in values]
        if len(tables) == 1:
            return tables[0]

        def rank(x: fx.Node) -> fx.Node:
            # The place among the sorted values: the same for equal ones, below S, so pairs fit an
            # int64.
            ordered = self.call(aten.sort.default, (x,))
            ordered = self.call(operator.getitem, (ordered, 0))
            return self.call(aten.searchsorted.Tensor, (ordered, x))

        def pair(a: fx.Node, b: fx.Node) -> fx.Node:
            b = rank(b)
            span = self.call(aten.add.Tensor, (self.call(aten.amax.default, (b, [-1], True)), 1))
            return self.call(aten.add.Tensor, (self.call(aten.mul.Tensor, (rank(a), span)), b))

        return reduce(pair, tables)

    def _number(self, value: Lin) -> Any:
        total: Any = None
        for t, c in value.terms:
            term = self._atom(t)
            if len(value.terms) > 1 or c != 1 or value.const:
                term = self.cast(term, torch.int64)
            if c not in (1, -1):
                term = self.call(aten.mul.Tensor, (term, c))
            if total is None:
                total = self.call(aten.neg.default, (term,)) if c == -1 else term
            else:
                total = self.call(aten.sub.Tensor if c == -1 else aten.add.Tensor, (total, term))
        if total is None:
            return self._constant(value.const, torch.int64)
        return self.call(aten.add.Tensor, (total, value.const)) if value.const else total

    def _constant(self, value: Any, dtype: torch.dtype) -> fx.Node:
        return self._make(aten.full.default, ([1, 1], value), dtype)

    def _make(self, target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        device = self.place.meta["val"].device
        return self.call(target, args, dtype=dtype, device=device)

    def _atom(self, value: Atom) -> fx.Node:
        match value:
            case Var(dim):
                indices = self._make(aten.arange.default, (self.sizes[dim],), torch.int64)
                return self.call(aten.unsqueeze.default, (indices, 1 - dim))
            case Load(node, index):
                return self._load(node, index)
            case FloorDiv(x, divisor):
                return self.call(aten.floor_divide.default, (self._number(x), divisor))
            case Abs(x):
                return self.call(aten.abs.default, (self._number(x),))
            case Where(condition, then, other):
                chosen = self._boolean(condition)
                if (then, other) == (Lin(1), Lin(0)):
                    return self.cast(chosen, torch.int64)
                a, b = self._number(then), self._number(other)
                return self.call(aten.where.self, (chosen, a, b))

    def _load(self, node: fx.Node, index: tuple[Lin, ...]) -> fx.Node:
        """A whole [.., B, .., S, ..] tensor is reshaped; anything else is looked up."""
        dims: list[int | None] = []
        for i, size in zip(index, node.meta["val"].shape, strict=True):
            if i == Lin(0) and size == 1:
                dims.append(None)
            elif isinstance(v := i.single(), Var) and self.sizes[v.dim] == size:
                dims.append(v.dim)
            else:
                break
        else:
            kept = [d for d in dims if d is not None]
            if kept == sorted(set(kept)):
                shape = [self.sizes[d] if d in kept else 1 for d in (0, 1)]
                same = list(node.meta["val"].shape) == shape
                return node if same else self.call(aten.reshape.default, (node, shape))
        places = [self._number(i) for i in index]
        return self.call(aten.index.Tensor, (node, places))

    def _boolean(self, value: Bool) -> fx.Node:
        match value:
            case Load(node, index):
                return self._load(node, index)
            case Le0(x):
                return self._against(aten.le.Scalar, aten.ge.Scalar, x)
            case Eq0(x):
                return self._against(aten.eq.Scalar, aten.eq.Scalar, x)
            case Not(Eq0(x)):
                return self._against(aten.ne.Scalar, aten.ne.Scalar, x)
            case Not(x):
                return self.call(aten.logical_not.default, (self._boolean(x),))
            case And(parts) | Or(parts):
                if not parts:
                    return self._constant(isinstance(value, And), torch.bool)
                op = aten.logical_and.default if isinstance(value, And) else aten.logical_or.default
                nodes = [self._boolean(p) for p in parts]
                return reduce(lambda a, b: self.call(op, (a, b)), nodes)
        raise AssertionError(value)

    def _against(self, op: Any, mirrored: Any, x: Lin) -> fx.Node:
        """Compare the terms with the constant: no arithmetic on a tensor of another type."""
        sign = -1 if all(c < 0 for _, c in x.terms) else 1
        terms = self._number(scale(Lin(0, x.terms), sign))
        return self.call(op if sign > 0 else mirrored, (terms, -sign * x.const))
