"""Names for dimensions: every dim of every value is a list of factors, found by unification.

In the manner of Shardy's factors. A rule (``rules``) says how one operator treats the
factors of its inputs; views split and merge factors, contractions and elementwise operators unify
them. What an operator mixes (reduces over, slices, normalizes over) cannot be split there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, fx


class Factor:
    """A dimension, or a part of one: unknown until unified with others or split by a view."""

    __slots__ = ("size", "base", "given", "whole", "_same_as", "_parts", "_shifts", "_entire")

    def __init__(self, size: int, base: tuple[Factor, int] | None = None):
        self.size = size
        self.base = base
        """(f, k) for a dim of k more elements than f has: what padding and shifting make."""
        self.given = False
        """Whether it is a dim of what each call is given: no weight's, and of no table."""
        self.whole = False
        """Whether it stays one factor: a view that splits it mixes it."""
        self._shifts: dict[int, Factor] = {}
        self._entire: Factor | None = None
        self._same_as: Factor | None = None
        self._parts: tuple[Factor, ...] | None = None

    def resolve(self) -> tuple[Factor, ...]:
        """The factors this one stands for, outermost first."""
        if self._same_as is not None:
            return self._same_as.resolve()
        if self._parts is not None:
            return tuple(f for part in self._parts for f in part.resolve())
        return (self,)

    def shifted(self, k: int) -> Factor:
        """The factor of ``k`` more elements; shifting back gives this one again."""
        base, offset = self.base or (self, 0)
        if offset + k == 0:
            return base
        if offset + k not in base._shifts:
            base._shifts[offset + k] = Factor(base.size + offset + k, (base, offset + k))
        return base._shifts[offset + k]

    def origin(self) -> tuple[Factor, int]:
        """(f, k): this factor has k more elements than f, as unified by now."""
        if self.base is None:
            return self, 0
        found = self.base[0].resolve()
        return (found[0], self.base[1]) if len(found) == 1 else (self, 0)

    @property
    def entire(self) -> Factor:
        """What stands for the size of all of it where this one is bound to a rank's part; of no
        dim, and of size -1 where nothing binds it."""
        if self._entire is None:
            self._entire = Factor(-1)
        return self._entire

    def says(self) -> int:
        """How much it says of its size: of two that are the same, the one that says more stays. A
        dim of the call's own may be cut from a table here, and from no other length in the next."""
        if self.base is None:
            return 2 if self.given else 0
        return 3 if self.origin()[0].given else 1

    def __repr__(self) -> str:
        return f"{self.size}@{id(self) % 9973}"


Dim = tuple[Factor, ...]
"""Factors of one dim, outermost first; () for size 1."""


def resolve(dim: Iterable[Factor]) -> Dim:
    """``dim`` by the factors that its own stand for."""
    return tuple(f for factor in dim for f in factor.resolve())


def size_of(dim: Iterable[Factor], sizes: Mapping[Factor, Any]) -> Any:
    """Product of the sizes of ``dim``'s factors, with ``sizes`` in place of those it names."""
    return math.prod((_size(f, sizes) for f in resolve(dim)), start=1)


def _size(factor: Factor, sizes: Mapping[Factor, Any]) -> Any:
    if factor in sizes:  # a slice may be a dim in its own right: the query heads of a fused QKV
        return sizes[factor]
    f, k = factor.origin()
    return sizes[f] + k if f in sizes else factor.size


def times(dims: Iterable[Dim], factor: Factor) -> int:
    """How often ``dims`` have ``factor``."""
    return sum(f is factor for d in dims for f in d)


@dataclass(frozen=True)
class Length:
    """A number that is ``start + sign * n``, with n the size of the dim ``dim`` of the input
    ``of``."""

    of: fx.Node
    dim: int
    start: int
    sign: int


@dataclass(frozen=True)
class Product:
    """A number that is ``times`` the product of ``lengths``: elements of a tensor, tokens of a
    batch."""

    times: int
    lengths: tuple[Length, ...]


@dataclass
class Names:
    """Names of all dims of a graph's values, and what each operator mixes."""

    dims: dict[fx.Node, Any] = field(default_factory=dict)
    """Node -> list of Dim, or list of such lists where the node has several results."""
    _mixed: dict[fx.Node, list[Factor]] = field(default_factory=dict)
    unnamed: dict[fx.Node, str] = field(default_factory=dict)
    """Operators without a rule, and why."""
    lengths: Mapping[fx.Node, Mapping[int, Length | Product]] = field(default_factory=dict)
    """Operator -> position of an argument that is a number made of sizes."""

    def of(self, node: fx.Node) -> list[Dim]:
        """Factors of each dim of ``node``, resolved."""
        return [resolve(d) for d in self.dims[node]]

    def of_each(self, node: fx.Node) -> list[list[Dim]]:
        """Factors of each dim of each result of ``node`` that is a tensor."""
        dims, val = self.dims.get(node, []), node.meta.get("val")
        results = dims if isinstance(val, tuple | list) else [dims] * isinstance(val, Tensor)
        return [[resolve(d) for d in of] for of in results]

    def factors(self, node: fx.Node) -> set[Factor]:
        """All factors in the dims of ``node``, or of its several results."""
        return {f for dims in self.of_each(node) for d in dims for f in d}

    def mixed(self, node: fx.Node) -> set[Factor]:
        """Factors along which ``node`` cannot be split."""
        return set(resolve(self._mixed.get(node, ())))

    def mix(self, node: fx.Node, *dims: Iterable[Factor]) -> None:
        """Note that ``node`` mixes the factors of ``dims``."""
        for dim in dims:
            self._mixed.setdefault(node, []).extend(dim)

    def fresh(self, shape: Sequence[int]) -> list[Dim]:
        """Dims of ``shape`` that nothing else has yet."""
        return [() if n == 1 else (Factor(int(n)),) for n in shape]

    def unify(self, a: Iterable[Factor], b: Iterable[Factor]) -> bool:
        """Make ``a`` and ``b``, dims of equal size, the same, splitting factors as needed.

        Returns False, and unifies nothing more, where they are split in ways that do not nest.
        """
        left, right = list(resolve(a))[::-1], list(resolve(b))[::-1]
        while left and right:
            x, y = left.pop(), right.pop()
            if x is y:
                continue
            if x.size == y.size:
                if y.says() > x.says():
                    x, y = y, x
                if x.base and y.base and x.base[1] == y.base[1]:
                    self.unify([x.base[0]], [y.base[0]])
                y._same_as = x
                x.whole, x.given = x.whole or y.whole, x.given or y.given
            elif x.size > y.size and x.size % y.size == 0 and not x.whole:
                rest = Factor(x.size // y.size)
                x._parts = (y, rest)
                left.append(rest)
            elif y.size > x.size and y.size % x.size == 0 and not y.whole:
                rest = Factor(y.size // x.size)
                y._parts = (x, rest)
                right.append(rest)
            else:
                return False
            left = [f for g in left[::-1] for f in g.resolve()][::-1]
            right = [f for g in right[::-1] for f in g.resolve()][::-1]
        return True

    def unify_at(self, node: fx.Node, a: Iterable[Factor], b: Iterable[Factor]) -> None:
        """Make ``a`` and ``b`` the same dim; where they cannot be, ``node`` mixes both."""
        if not self.unify(a, b):
            self.mix(node, a, b)

    def broadcast(
        self, node: fx.Node, inputs: Iterable[fx.Node], shape: Sequence[int]
    ) -> list[Dim]:
        """Dims of an elementwise result of ``shape``; ``inputs`` are unified from the right."""
        out: list[Dim] = [()] * len(shape)
        for arg in inputs:
            dims = self.of(arg)
            for i, dim in enumerate(dims):
                at = len(shape) - len(dims) + i
                if not dim:
                    continue
                self.unify_at(node, out[at], dim)
                out[at] = dim
        return [d if d or n == 1 else self.fresh([n])[0] for d, n in zip(out, shape, strict=True)]

    def reshape(self, node: fx.Node, dims: list[Dim], shape: Sequence[int]) -> list[Dim]:
        """``dims`` after a view to ``shape``: factors are split and merged where sizes allow."""
        out = self.fresh(shape)
        if 0 in shape:
            self.mix(node, *dims)
        elif not self.unify(chain(*dims), chain(*out)):
            out = self._between_equal_ends(node, dims, shape)
        return [resolve(d) for d in out]

    def _between_equal_ends(
        self, node: fx.Node, dims: list[Dim], shape: Sequence[int]
    ) -> list[Dim]:
        """``dims`` after a view to ``shape`` that mixes some: [2, 6, 4] seen as [2, 4, 6], of which
        neither nests in the other. Outer and inner dims of equal sizes are the same."""
        sizes = [size_of(d, {}) for d in dims]
        most = min(len(sizes), len(shape))
        first = next((i for i in range(most) if sizes[i] != shape[i]), most)
        most -= first
        last = next((i for i in range(most) if sizes[-1 - i] != shape[-1 - i]), most)
        self.mix(node, *dims[first : len(dims) - last])
        middle = self.fresh(shape[first : len(shape) - last])
        return [*dims[:first], *middle, *dims[len(dims) - last :]]


Rule = Callable[[Names, fx.Node], Any]
"""Gives the dims of a node from the dims of its inputs, unifying and marking what is mixed."""

RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators; a second rule for an operator raises."""

    def register(fn: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"operator {target} has a rule already")
            RULES[target] = fn
        return fn

    return register
