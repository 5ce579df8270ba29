"""What each node of a mask computation holds at an index: ATen to formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.rules import argument
from paradyse.passes.mask_domain import (
    ONE,
    ZERO,
    Bool,
    Expr,
    Lin,
    Load,
    Var,
    Where,
    absolute,
    add,
    as_bool,
    as_number,
    atom,
    choose,
    conj,
    disj,
    eq0,
    floor_div,
    le0,
    negate,
    scale,
    sub,
    substitute,
    truth,
    var,
    where,
)
from paradyse.torch_private import OpOverload, schema_of

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)
_COPIES = ("alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy")
_CASTS = ("to", "_to_copy", "type_as")
_FILLS = ("zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones")
_VALUE_FILLS = {"scalar_tensor": "s"} | dict.fromkeys(
    ("full", "full_like", "new_full"), "fill_value"
)
_COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")
_LOGIC = {
    "and": conj,
    "or": disj,
    "xor": lambda a, b: choose(a, negate(b), b),
}
"""By names without ``bitwise_``, ``logical_`` and underscores."""


@dataclass(frozen=True)
class Band:
    """A square mask of zeros and ones: which it is at (i, j) depends on j - i."""

    left: int | None
    """Inside is j >= i - left; None for no bound."""
    right: int | None
    """Inside is j <= i + right; None for no bound."""
    inside: bool
    """Whether there are ones inside."""

    def __str__(self) -> str:
        """In words, for people."""
        ones, zeros = ("ones", "zeros")[:: 1 if self.inside else -1]
        left = "no bound" if self.left is None else f"{self.left} keys"
        right = "no bound" if self.right is None else f"{self.right}"
        return f"a mask of {ones} to {left} behind and {right} ahead of the diagonal, else {zeros}"

    def at(self, row: Lin, key: Lin) -> Bool:
        """Whether there is a one in ``row`` at ``key``."""
        bounds = [le0(add(sub(row, key), Lin(-self.left)))] if self.left is not None else []
        if self.right is not None:
            bounds.append(le0(add(sub(key, row), Lin(-self.right))))
        return conj(*bounds) if self.inside else negate(conj(*bounds))


class NotUnderstood(Exception):
    """This node has no formula of its own; its elements stay unknown."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Sizes of the node's value; a tensor of another kind raises ``NotUnderstood``."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotUnderstood
    return tuple(int(s) for s in value.shape)


class MaskValues:
    """Formulas of the nodes of one graph, each computed once.

    ``value(node)`` is the node's element at index (Var(0), Var(1), ...). Bool tensors have a
    ``Bool``, others a ``Lin``. Where a node is not understood its elements are ``Load``s of itself,
    so a small tensor of unknown content is still usable and only what it feeds decides. The graph
    writes nothing in place and computes nothing twice (``remove_mutation``, ``merge_equals``).
    """

    def __init__(self) -> None:
        self._known: dict[fx.Node, Expr] = {}

    def value(self, node: fx.Node) -> Expr:
        if node not in self._known:
            shape = shape_of(node)
            try:
                found = self._interpret(node)
            except NotUnderstood:
                load = Load(node, tuple(map(var, range(len(shape)))))
                found = load if _is_bool(node) else atom(load)
            found = substitute(found, {d: ZERO for d, s in enumerate(shape) if s == 1})
            self._known[node] = as_bool(found) if _is_bool(node) else as_number(found)
        return self._known[node]

    def cumulative(self, node: fx.Node) -> Bool | None:
        """The formula of x when ``node`` is ``cumsum(x, last dim)`` of truth values."""
        if node.target is not aten.cumsum.default or node.meta["val"].dtype not in _INTEGERS:
            return None
        if argument(node, "dim") not in (-1, len(shape_of(node)) - 1):
            return None
        counted = self.value(node.args[0])
        return counted if not isinstance(counted, Lin) else None

    def _interpret(self, node: fx.Node) -> Expr:
        band = node.meta.get("band")
        if isinstance(band, Band):
            node.meta["band_uses"].add(node.name)
            n = len(shape_of(node))
            return band.at(var(n - 2), var(n - 1))
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NotUnderstood
        namespace, name = schema_of(node.target).name.split("::")
        if namespace != "aten":
            raise NotUnderstood
        if name in _COPIES:
            return self.value(node.args[0])
        if name in _CASTS:
            return self._cast(node)
        logic = name.strip("_").removeprefix("bitwise_").removeprefix("logical_")
        if logic in _LOGIC and _is_bool(node):
            return _LOGIC[logic](*(as_bool(self._operand(a, node)) for a in node.args[:2]))
        if name in _COMPARISONS:
            return self._compare(name, node)
        if name in _FILLS:
            return Lin(1 if "ones" in name else 0)
        if name in _VALUE_FILLS:
            return self._scalar(argument(node, _VALUE_FILLS[name]))
        method: Callable[[fx.Node], Expr] | None = getattr(self, "_op_" + name.strip("_"), None)
        if method is None:
            raise NotUnderstood
        return method(node)

    # Operands.

    def _scalar(self, x: Any) -> Expr:
        if isinstance(x, fx.Node) and not shape_of(x):
            return self.value(x)
        if isinstance(x, bool):
            return truth(x)
        if isinstance(x, int | float):
            return Lin(x)
        raise NotUnderstood

    def _operand(self, x: Any, out: fx.Node) -> Expr:
        """The element of operand ``x`` that broadcasts to the index of ``out``."""
        if not isinstance(x, fx.Node):
            return self._scalar(x)
        shift = len(shape_of(out)) - len(shape_of(x))
        return self._moved(x, {d: var(d + shift) for d in range(len(shape_of(x)))})

    def _moved(self, x: fx.Node, indices: dict[int, Lin]) -> Expr:
        return substitute(self.value(x), indices)

    def _numbers(self, node: fx.Node, *operands: Any) -> list[Lin]:
        return [as_number(self._operand(a, node)) for a in operands]

    # Arithmetic. Exact on integers; on floats only between constants, through choices.

    def _arithmetic(self, node: fx.Node, op: Callable[[Lin, Lin], Lin], a: Lin, b: Lin) -> Lin:
        dtype = node.meta["val"].dtype
        if dtype in _INTEGERS:
            return op(a, b)
        if not dtype.is_floating_point:
            raise NotUnderstood
        if a.is_const and b.is_const:
            return op(a, b)
        ways: list[tuple[Lin, Callable[[Lin], Lin]]] = [
            (a, lambda x: self._arithmetic(node, op, x, b)),
            (b, lambda x: self._arithmetic(node, op, a, x)),
        ]
        for operand, result in ways:
            if isinstance(w := operand.single(), Where):
                return where(w.condition, result(w.then), result(w.other))
        raise NotUnderstood

    def _op_add(self, node: fx.Node, sign: int = 1) -> Expr:
        factor = sign * node.kwargs.get("alpha", 1)
        a, b = self._numbers(node, *node.args[:2])
        return self._arithmetic(node, lambda x, y: add(x, y, factor), a, b)

    def _op_sub(self, node: fx.Node) -> Expr:
        return self._op_add(node, -1)

    def _op_rsub(self, node: fx.Node) -> Expr:
        if argument(node, "alpha") != 1:
            raise NotUnderstood
        a, b = self._numbers(node, *node.args[:2])
        return self._arithmetic(node, sub, b, a)

    def _op_neg(self, node: fx.Node) -> Expr:
        (a,) = self._numbers(node, node.args[0])
        return self._arithmetic(node, sub, ZERO, a)

    def _op_mul(self, node: fx.Node) -> Expr:
        if _is_bool(node):
            return conj(*(as_bool(self._operand(a, node)) for a in node.args[:2]))

        def product(x: Lin, y: Lin) -> Lin:
            if x.is_const and y.is_const:
                return Lin(x.const * y.const)
            if x.is_const and isinstance(x.const, int):
                return scale(y, x.const)
            if y.is_const and isinstance(y.const, int):
                return scale(x, y.const)
            raise NotUnderstood

        a, b = self._numbers(node, *node.args[:2])
        return self._arithmetic(node, product, a, b)

    def _op_floor_divide(self, node: fx.Node) -> Expr:
        a, b = self._numbers(node, *node.args[:2])
        whole = node.meta["val"].dtype in _INTEGERS and isinstance(b.const, int)
        if not whole or not b.is_const or b.const <= 0:
            raise NotUnderstood
        return floor_div(a, int(b.const))

    def _op_div(self, node: fx.Node) -> Expr:
        if argument(node, "rounding_mode") != "floor":
            raise NotUnderstood
        return self._op_floor_divide(node)

    def _op_abs(self, node: fx.Node) -> Expr:
        (a,) = self._numbers(node, node.args[0])
        if node.meta["val"].dtype not in _INTEGERS:
            raise NotUnderstood
        return absolute(a)

    def _compare(self, name: str, node: fx.Node) -> Bool:
        a, b = self._numbers(node, *node.args[:2])
        dtypes = [x.meta["val"].dtype for x in node.args[:2] if isinstance(x, fx.Node)]
        whole = all(not t.is_floating_point and not t.is_complex for t in dtypes)
        whole = whole and all(isinstance(x.const, int) for x in (a, b))
        if name in ("eq", "ne"):
            # Floats: only "equal to a constant".
            if not whole and not (
                b.is_const and (a.is_const or isinstance(a.single(), Load | Where))
            ):
                raise NotUnderstood
            same = eq0(sub(a, b)) if whole else _equals(a, b)
            return same if name == "eq" else negate(same)
        if whole:
            low, high = (a, b) if name in ("le", "lt") else (b, a)
            return le0(add(sub(low, high), Lin(int(name in ("lt", "gt")))))

        def ordered(x: Lin, y: Lin) -> Bool:
            """Floats: only between what reduces to constants."""
            if x.is_const and y.is_const:
                return truth(x.const <= y.const if name in ("le", "gt") else x.const < y.const)
            if isinstance(w := x.single(), Where):
                return choose(w.condition, ordered(w.then, y), ordered(w.other, y))
            raise NotUnderstood

        return negate(ordered(a, b)) if name in ("ge", "gt") else ordered(a, b)

    # Logic and choice.

    def _not(self, node: fx.Node) -> Expr:
        if not _is_bool(node):
            raise NotUnderstood
        return negate(as_bool(self.value(node.args[0])))

    _op_bitwise_not = _op_logical_not = _not

    def _op_where(self, node: fx.Node) -> Expr:
        if len(node.args) != 3:
            raise NotUnderstood
        condition = as_bool(self._operand(node.args[0], node))
        a, b = (self._operand(x, node) for x in node.args[1:3])
        return _select(condition, a, b, node)

    def _op_masked_fill(self, node: fx.Node) -> Expr:
        x, mask, fill = node.args
        return _select(
            as_bool(self._operand(mask, node)), self._scalar(fill), self._operand(x, node), node
        )

    def _triangle(self, node: fx.Node, keep: Callable[[Lin], Bool]) -> Expr:
        n = len(shape_of(node))
        inside = keep(add(sub(var(n - 1), var(n - 2)), Lin(-argument(node, "diagonal"))))
        return _select(inside, self.value(node.args[0]), ZERO, node)

    def _op_tril(self, node: fx.Node) -> Expr:
        return self._triangle(node, le0)

    def _op_triu(self, node: fx.Node) -> Expr:
        return self._triangle(node, lambda x: le0(scale(x, -1)))

    def _cast(self, node: fx.Node) -> Expr:
        """Exact conversions only: to and from bool, to int64, constants to floats."""
        value = self.value(node.args[0])
        source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        if source == target or torch.bool in (source, target):
            return value
        if target == torch.int64 and not source.is_floating_point and not source.is_complex:
            return value
        if target.is_floating_point and isinstance(value, Lin) and _choices_of_constants(value):
            return value
        raise NotUnderstood

    # Making indices.

    def _op_arange(self, node: fx.Node) -> Expr:
        start, step = argument(node, "start") or 0, argument(node, "step") or 1
        whole = type(start) is int and type(step) is int
        if node.meta["val"].dtype not in _INTEGERS or not whole:
            raise NotUnderstood
        return add(Lin(start), var(0), step)

    def _op_diff(self, node: fx.Node) -> Expr:
        """Steps along a dim: a constant for positions that count up by one."""
        x, prepend = node.args[0], argument(node, "prepend")
        dim = argument(node, "dim") % len(shape_of(x))
        if argument(node, "n") != 1 or argument(node, "append") is not None:
            raise NotUnderstood
        if _is_bool(x) or node.meta["val"].dtype not in _INTEGERS:
            raise NotUnderstood
        value = as_number(self.value(x))
        if prepend is None:
            return sub(as_number(substitute(value, {dim: add(var(dim), ONE)})), value)
        if shape_of(prepend)[dim] != 1:
            raise NotUnderstood
        before = substitute(value, {dim: add(var(dim), Lin(-1))})
        first = sub(as_number(substitute(value, {dim: ZERO})), as_number(self.value(prepend)))
        return where(eq0(var(dim)), first, sub(value, as_number(before)))

    def _op_cumsum(self, node: fx.Node) -> Expr:
        value = as_number(self.value(node.args[0]))
        dim = argument(node, "dim") % max(1, len(shape_of(node)))
        if node.meta["val"].dtype not in _INTEGERS or not value.is_const:
            raise NotUnderstood
        return add(Lin(value.const), var(dim), int(value.const))

    # Moving elements.

    def _op_unsqueeze(self, node: fx.Node) -> Expr:
        n = len(shape_of(node.args[0]))
        dim = node.args[1] % (n + 1)
        return self._moved(node.args[0], {d: var(d + (d >= dim)) for d in range(n)})

    def _squeezed(self, node: fx.Node) -> Expr:
        """Also view and reshape, where they only add or remove dims of size 1."""
        if node.args[1:] and isinstance(node.args[1], torch.dtype):
            raise NotUnderstood
        source, target = shape_of(node.args[0]), shape_of(node)
        kept = [d for d, s in enumerate(source) if s != 1]
        places = [d for d, s in enumerate(target) if s != 1]
        if [source[d] for d in kept] != [target[d] for d in places]:
            raise NotUnderstood
        return self._moved(node.args[0], {d: var(t) for d, t in zip(kept, places, strict=True)})

    _op_squeeze = _op_view = _op_reshape = _op_unsafe_view = _squeezed

    def _op_expand(self, node: fx.Node) -> Expr:
        return self._operand(node.args[0], node)

    _op_expand_as = _op_broadcast_to = _op_expand

    def _op_repeat(self, node: fx.Node) -> Expr:
        source, target = shape_of(node.args[0]), shape_of(node)
        shift = len(target) - len(source)
        if any(s not in (1, target[d + shift]) for d, s in enumerate(source)):
            raise NotUnderstood
        return self._operand(node.args[0], node)

    def _op_permute(self, node: fx.Node) -> Expr:
        n = len(shape_of(node))
        return self._moved(node.args[0], {d % n: var(t) for t, d in enumerate(node.args[1])})

    def _op_transpose(self, node: fx.Node) -> Expr:
        n = max(1, len(shape_of(node)))
        a, b = (d % n for d in node.args[1:3] or (0, 1))
        return self._moved(node.args[0], {a: var(b), b: var(a)})

    _op_t = _op_transpose

    def _op_slice(self, node: fx.Node) -> Expr:
        x = node.args[0]
        dim = argument(node, "dim") % len(shape_of(x))
        start, step = argument(node, "start") or 0, argument(node, "step")
        if type(start) is not int or type(step) is not int:
            raise NotUnderstood
        if start < 0 < start + shape_of(x)[dim]:  # from the end: good for this length alone
            raise NotUnderstood
        return self._moved(x, {dim: add(Lin(max(start, 0)), var(dim), step)})

    def _op_select(self, node: fx.Node) -> Expr:
        x, dim, index = node.args
        n = len(shape_of(x))
        dim %= n
        if type(index) is not int or index < 0:
            raise NotUnderstood
        chosen = {dim: Lin(index)}
        return self._moved(x, chosen | {d: var(d - (d > dim)) for d in range(n) if d != dim})

    def _op_pad(self, node: fx.Node) -> Expr:
        if any(p != 0 for p in node.args[1]):
            raise NotUnderstood
        return self.value(node.args[0])

    _op_constant_pad_nd = _op_pad

    def _op_index(self, node: fx.Node) -> Expr:
        """``x[i, j]`` with whole-tensor indices: the lookup at the query or at the key index."""
        x, indices = node.args[0], list(node.args[1])
        n = len(shape_of(x))
        indices += [None] * (n - len(indices))
        given = [d for d, i in enumerate(indices) if i is not None]
        if given != list(range(given[0], given[-1] + 1)):
            raise NotUnderstood
        if any(indices[d].meta["val"].dtype not in _INTEGERS for d in given):
            raise NotUnderstood
        rank = max(len(shape_of(indices[d])) for d in given)
        moved: dict[int, Lin] = {}
        for d in range(n):
            if d < given[0]:
                moved[d] = var(d)
            elif d > given[-1]:
                moved[d] = var(d - len(given) + rank)
            else:
                i = indices[d]
                shift = given[0] + rank - len(shape_of(i))
                at = as_number(self._moved(i, {k: var(k + shift) for k in range(len(shape_of(i)))}))
                if at.const < 0 or any(not isinstance(t, Var) or c < 0 for t, c in at.terms):
                    raise NotUnderstood  # a negative index counts from the end
                moved[d] = at
        return self._moved(x, moved)


def _equals(x: Lin, y: Lin) -> Bool:
    """Whether ``x``, floats, is the constant ``y``: their difference says nothing of infinities."""
    if x.is_const:
        return truth(x.const == y.const)
    if isinstance(w := x.single(), Where):
        return choose(w.condition, _equals(w.then, y), _equals(w.other, y))
    if not math.isfinite(y.const):
        raise NotUnderstood
    return eq0(sub(x, y))


def _select(condition: Bool, then: Expr, other: Expr, node: fx.Node) -> Expr:
    if _is_bool(node):
        return choose(condition, as_bool(then), as_bool(other))
    return where(condition, as_number(then), as_number(other))


def _choices_of_constants(value: Lin) -> bool:
    if value.is_const:
        return True
    w = value.single()
    return isinstance(w, Where) and _choices_of_constants(w.then) and _choices_of_constants(w.other)


def _is_bool(node: fx.Node) -> bool:
    return node.meta["val"].dtype == torch.bool
