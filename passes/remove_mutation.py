"""Remove mutation: what a graph writes in place becomes new values."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from paradyse.graph.rules import argument
from paradyse.graph.subgraph import has_gradient
from paradyse.passes.retrace import Untraceable
from paradyse.torch_private import OpOverload, schema_of

aten = torch.ops.aten

_MAY_COPY = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
}
"""Operators whose result shares memory with what they read where that is possible."""


def remove_mutation(gm: fx.GraphModule, ctx: Any) -> int:
    """Replace in-place operators by their functional forms, and read what they wrote.

    before: y = new_zeros(a, [4]); s = slice(y, 0, 1); w = copy_(s, b); z = mul(y, c)
    after:  y = new_zeros(a, [4]); t = slice_scatter(y, b, 0, 1);       z = mul(t, c)
    Refuses (Untraceable) a write into the memory of a graph input, into a value whose gradient is
            to come through what it was before, through a view that nothing scatters into, and an
            operator that has no functional form.
    """
    nodes = list(gm.graph.nodes)
    if not any(map(_writes, nodes)):
        return 0
    memory = _Memory(gm.graph)
    for node in nodes:
        memory.visit(node)
    written = [n for n in nodes if _writes(n)]
    for node in reversed(written):  # what read them reads their values by now
        gm.graph.erase_node(node)
    return len(written)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _shares(node: fx.Node) -> bool:
    """Whether the value of ``node`` shows the memory of its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return _shares(node.args[0])
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    returns = schema_of(node.target).returns
    viewed = bool(returns) and returns[0].alias_info is not None
    return viewed and not (node.target in _MAY_COPY and _copies(node))


def _copies(node: fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.dtype != after.dtype or before.device != after.device or argument(node, "copy"):
        return True
    if node.target is aten.contiguous.default:
        return not before.is_contiguous()
    try:
        before.view(after.shape)
    except (RuntimeError, ValueError):
        return True
    return False


class _Memory:
    """Which value each alias of a memory shows, while the graph is read from start to end."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.source: dict[fx.Node, fx.Node] = {}
        """Alias -> what it is a view of."""
        self.writes: dict[fx.Node, int] = defaultdict(int)
        """Root of aliases -> writes to its memory so far."""
        self.values: dict[fx.Node, tuple[int, fx.Node]] = {}
        """Alias or root -> the value that it showed after so many writes."""

    def visit(self, node: fx.Node) -> None:
        """Have ``node`` read what its inputs show now, and note what it writes."""
        if _writes(node):
            self._write(node)
            return
        if _shares(node):
            self.source[node] = node.args[0]
        for a in node.all_input_nodes:
            value = self._value(a, node)
            if value is not a:
                node.replace_input_with(a, value)
        self.values[node] = self.writes[self._root(node)], node

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.source:
            node = self.source[node]
        return node

    def _value(self, alias: fx.Node, at: fx.Node) -> fx.Node:
        """What ``alias`` shows now; a view of what was written since is taken again before
        ``at``."""
        now = self.writes[self._root(alias)]
        made, value = self.values[alias]
        if made < now:
            value = self._value(self.source[alias], at)
            if not _writes(alias):
                value = self._emit(at, alias.target, value, *alias.args[1:], **alias.kwargs)
            self.values[alias] = now, value
        return value

    def _emit(self, at: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operator before ``at``."""
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args, kwargs)
        vals = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _fake_mode(args):
            node.meta = {**at.meta, "val": target(*vals[0], **vals[1])}
        return node

    def _write(self, node: fx.Node) -> None:
        chain = [node.args[0]]
        if not isinstance(chain[0], fx.Node):
            raise Untraceable(f"operator {node.target} writes to several tensors")
        while chain[-1] in self.source:
            chain.append(self.source[chain[-1]])
        if chain[-1].op == "placeholder":
            raise Untraceable(f"{node.target} writes into {chain[0]}, which shows an input")
        for view, whole in zip(chain, chain[1:]):
            if view.target is aten.detach.default and has_gradient(whole):
                raise Untraceable(
                    f"{node.target} writes into {chain[0]}, which shows a value with a gradient"
                )
        before = [self._value(alias, node) for alias in chain]
        value = self._written(node, before[0])
        now = self.writes[chain[-1]] + 1
        self.writes[chain[-1]] = now
        self.source[node] = chain[0]
        self.values[node] = self.values[chain[0]] = now, value
        for view, whole, old in zip(chain, chain[1:], before[1:]):
            value = value if _writes(view) else self._scatter(node, view, old, value)
            self.values[whole] = now, value

    def _written(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """What the write ``node`` leaves in the place of ``old``."""
        name, like = schema_of(node.target).name.removeprefix("aten::"), old.meta["val"]
        args, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda n: self._value(n, node))
        if name == "zero_":
            return self._emit(node, aten.zeros_like.default, old)
        if name == "fill_" and not isinstance(args[0], fx.Node):
            return self._emit(node, aten.full_like.default, old, args[0])
        if name in ("copy_", "fill_"):
            value, number = args[0], _number(args[0])
            if isinstance(number, int) or (number is not None and like.is_floating_point()):
                # it lies on the host, wherever ``old`` does
                return self._emit(node, aten.full_like.default, old, number)
        elif name == "normal_" and argument(node, "generator") is None:
            value = self._emit(node, aten.randn_like.default, old)
            value = self._emit(node, aten.mul.Scalar, value, argument(node, "std"))
            value = self._emit(node, aten.add.Scalar, value, argument(node, "mean"))
        else:
            functional = _functional(node.target)
            if functional is None or _changes_shape(node.target):
                raise Untraceable(
                    f"operator {node.target} writes to its input and has no functional form here"
                )
            value = self._emit(node, functional, old, *args, **kwargs)
        if value.meta["val"].device != like.device:
            value = self._emit(node, aten.to.device, value, like.device, like.dtype)
        if value.meta["val"].dtype != like.dtype:
            value = self._emit(node, aten.to.dtype, value, like.dtype)
        if value.meta["val"].shape != like.shape:
            value = self._emit(node, aten.expand.default, value, list(like.shape))
        return value

    def _scatter(self, at: fx.Node, view: fx.Node, old: fx.Node, value: fx.Node) -> fx.Node:
        """``old`` with ``value`` in the place that ``view`` shows of it."""
        target, args = view.target, view.args[1:]
        if target is operator.getitem:  # of the parts of a split
            raise Untraceable(f"{at.target} writes into {view}, a view by {old.target}")
        shape = list(old.meta["val"].shape)
        if target is aten.slice.Tensor:
            return self._emit(at, aten.slice_scatter.default, old, value, *args)
        if target is aten.select.int:
            return self._emit(at, aten.select_scatter.default, old, value, *args)
        if target in (aten.transpose.int, aten.t.default, aten.numpy_T.default, aten.mT.default):
            return self._emit(at, target, value, *args)
        if target is aten.permute.default:
            back = sorted(range(len(shape)), key=lambda d: args[0][d] % len(shape))
            return self._emit(at, target, value, back)
        if target in _SAME_ELEMENTS:
            same = list(value.meta["val"].shape) == shape
            return value if same else self._emit(at, aten.reshape.default, value, shape)
        raise Untraceable(f"{at.target} writes into {view}, a view by {target}")


def _changes_shape(target: Any) -> bool:
    """Whether ``target`` writes no elements: what it is given is another view of them after it."""
    return torch.Tag.inplace_view in target.tags and target is not aten.detach_.default


def _functional(target: Any) -> Any:
    """The operator that gives what ``target`` writes; None where there is none of its name."""
    schema = schema_of(target)
    name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
    if target is aten.bernoulli_.float:
        return aten.bernoulli.p
    return getattr(getattr(aten, name[:-1], None), overload, None) if name[-1] == "_" else None


_SAME_ELEMENTS = {
    *_MAY_COPY,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unflatten.int,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
}
"""Views that show every element, in the same order."""


def _number(node: fx.Node) -> Any:
    """The number that ``node``, a tensor without dims, was written as, in its dtype; None where it
    was written otherwise."""
    while node.target is aten.detach.default:
        node = node.args[0]
    if node.target is not aten.full.default or node.args[0]:
        return None
    number = node.args[1]
    known = isinstance(number, int | float)
    return torch.tensor(number, dtype=node.meta["val"].dtype).item() if known else None


def _fake_mode(args: tuple[Any, ...]) -> Any:
    val = next(a.meta["val"] for a in args if isinstance(a, fx.Node))
    return (val[0] if isinstance(val, tuple | list) else val).fake_mode
