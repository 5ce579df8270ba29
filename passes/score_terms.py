"""Scores as models write them out: the product of queries and keys, and what is done to it.

Between the product and the softmax stand, in any order: factors, softcap, masks and biases that
are added, places that are filled with a number, casts, reshapes that join batch and heads. A
column of sinks may be put beside the scores, and a row's maximum taken off.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.rules import argument
from paradyse.graph.subgraph import is_weight
from paradyse.passes.mask_values import NotUnderstood, shape_of

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_FACTORS = {aten.mul.Tensor: 1, aten.mul.Scalar: 1, aten.div.Tensor: -1, aten.div.Scalar: -1}
_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CHOICES = (
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
)
_MAXIMA = (aten.maximum.default, aten.max.other)
_NEGLIGIBLE = -1e30
"""What is below counts as the lowest number: scores are above it."""


@dataclass(frozen=True)
class Term:
    """What is added to scores [B, H, S, S], or with a ``fill`` the number that stands in place of
    some of them.
    """

    node: fx.Node
    """A mask or a bias; with a ``fill``, the condition, bool."""
    factor: float = 1.0
    """What is added is this times ``node``."""
    fill: float | None = None
    where: bool = True
    """The value of the condition at filled places."""


@dataclass(frozen=True)
class Scores:
    """Scores of ``q`` [B, H, S, D], or [B H, S, D], and ``keys``, the same transposed."""

    q: fx.Node
    keys: fx.Node
    scale: float = 1.0
    softcap: float = 0.0
    terms: tuple[Term, ...] = ()
    """The first one comes first."""
    sinks: fx.Node | None = None
    """[H], a parameter."""
    factors: tuple[tuple[Any, fx.Node], ...] = ()
    """Operators, and what each multiplies or divides the queries by: one number for a row of
    scores at most, as a learned temperature of a head has."""


def number_of(x: Any) -> float | None:
    """The number that ``x`` is, or that all elements of it are; None where it is none."""
    if isinstance(x, bool):
        return None
    if isinstance(x, int | float):
        return float(x)
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
        return None
    if x.target in (*CASTS, aten.detach.default, aten.clone.default, aten.scalar_tensor.default):
        found = number_of(x.args[0])
    else:
        found = number_of(x.args[1]) if x.target is aten.full.default else None
    if found is None or x.meta["val"].is_floating_point():
        return found
    return None if x.meta["val"].dtype is torch.bool else float(int(found))  # as a cast does


def below_casts(x: Any) -> Any:
    """``x`` without casts between floating-point types, and copies, that nothing else reads."""
    while isinstance(x, fx.Node) and alone(x):
        if x.target in CASTS and not x.args[0].meta["val"].dtype.is_floating_point:
            break
        if x.target not in (*CASTS, aten.contiguous.default, aten.clone.default):
            break
        x = x.args[0]
    return x


def below_moves(x: Any) -> Any:
    """``below_casts`` of ``x``, and without what joins batch and heads or takes them apart."""
    while True:
        x = below_casts(x)
        if not isinstance(x, fx.Node) or x.target not in _RESHAPES or not alone(x):
            return x
        if shape_of(x)[-2:] != shape_of(x.args[0])[-2:]:
            return x
        x = x.args[0]


def alone(x: fx.Node) -> bool:
    """Whether one node reads ``x``."""
    return len(x.users) == 1


def match_scores(node: Any) -> Scores | None:
    """What ``node``, which a softmax reads, is made of; None where it is something else."""
    node = below_casts(node)
    column = None
    if isinstance(node, fx.Node) and (shifted := _without_maximum(node)) is not None:
        node = shifted
    if isinstance(node, fx.Node) and node.target is aten.cat.default and _alone_but_maximum(node):
        parts, dim = node.args[0], argument(node, "dim")
        if len(parts) != 2 or dim not in (-1, len(shape_of(node)) - 1):
            return None
        column = _sinks(parts[1], len(shape_of(node)))
        if column is None:
            return None
        node = parts[0]
    found = _chain(node)
    return found if found is None or column is None else replace(found, sinks=column)


def _maximum_of(node: Any) -> fx.Node | None:
    """x where ``node`` is the maximum of each row of x."""
    if isinstance(node, fx.Node) and node.target is aten.detach.default:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    reduced = node.args[0] if node.target is operator.getitem and not node.args[1] else node
    if reduced.target not in (aten.max.dim, aten.amax.default):
        return None
    dim = argument(reduced, "dim")
    last = len(shape_of(reduced.args[0])) - 1
    whole = dim in (-1, last, [-1], [last]) and argument(reduced, "keepdim")
    return reduced.args[0] if whole else None


def _without_maximum(node: fx.Node) -> fx.Node | None:
    """x where ``node`` is x less the maximum of each row, which no softmax sees."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x = node.args[0]
    return x if isinstance(x, fx.Node) and _maximum_of(node.args[1]) is x else None


def _alone_but_maximum(node: fx.Node) -> bool:
    """Whether one node reads ``node``, but for a row's maximum."""
    others = [u for u in node.users if u.target not in (aten.max.dim, aten.amax.default)]
    return len(others) == 1


def _sinks(x: fx.Node, rank: int) -> fx.Node | None:
    """The parameter [H] that ``x`` [B, H, S, 1] has for every row of a head."""
    shape = shape_of(x)
    if rank != 4 or shape[-1] != 1:
        return None
    moves = (*_RESHAPES, *CASTS, aten.expand.default, aten.unsqueeze.default)
    while x.target in moves:
        source = x.args[0]
        here, there = shape_of(x), shape_of(source)
        real = [n for n in there if n != 1]
        if real not in ([], [shape[1]]):
            return None
        if len(here) == 4 and here[1] != shape[1]:
            return None
        x = source
    return x if is_weight(x) and shape_of(x) == (shape[1],) else None


def _chain(node: Any) -> Scores | None:
    node = below_moves(node)
    if not isinstance(node, fx.Node) or not _alone_but_maximum(node):
        return None
    try:
        return _product(node) if node.target in _PRODUCTS else _step(node)
    except NotUnderstood:
        return None


def _product(node: fx.Node) -> Scores | None:
    if node.target is not aten.baddbmm.default:
        return Scores(*node.args)
    added, q, keys = node.args
    alpha, beta = (number_of(argument(node, name)) for name in ("alpha", "beta"))
    if alpha is None or beta is None:
        return None
    return Scores(q, keys, scale=alpha, terms=(Term(added, beta),) if beta else ())


def _step(node: fx.Node) -> Scores | None:
    """One operator between the product and the softmax."""
    target, args = node.target, node.args
    if target in _FACTORS:
        return _multiplied(node)
    if target in _SUMS:
        sign = _SUMS[target] * node.kwargs.get("alpha", 1)
        ways: Sequence[tuple[Any, Any]] = [(args[0], args[1])]
        if target is aten.add.Tensor and not node.kwargs:
            ways = [*ways, (args[1], args[0])]
        for scores, term in ways:
            found = _chain(scores) if isinstance(term, fx.Node) else None
            if found is not None:
                return _with(found, Term(term, float(sign)))
        return None
    if target in _FILLS:
        return _filled(args[0], args[1], args[2], True)
    if target in _CHOICES:
        found = _filled(args[2], args[0], args[1], True)
        return found if found is not None else _filled(args[1], args[0], args[2], False)
    if target in _MAXIMA:
        for x, bound in (args, args[::-1]):
            low = number_of(bound)
            if low is not None and low <= _NEGLIGIBLE:
                return _chain(x)
        return None
    return None


def _with(found: Scores, term: Term) -> Scores:
    return replace(found, terms=(*found.terms, term))


def _filled(scores: Any, condition: fx.Node, number: Any, where: bool) -> Scores | None:
    fill = number_of(number)
    if fill is None or not isinstance(scores, fx.Node):
        return None
    found = _chain(scores)
    return None if found is None else _with(found, Term(condition, fill=fill, where=where))


def _multiplied(node: fx.Node) -> Scores | None:
    x, factor = times_number(node)
    inside = below_moves(x)
    if not isinstance(inside, fx.Node):
        return _times_rows(node)
    if inside.target is aten.tanh.default and alone(inside):
        x, inverse = times_number(inside.args[0])
        found = _chain(x) if x is not None else None
        if found is None or found.softcap or found.terms:
            return None
        if not factor > 0 or abs(factor * inverse - 1) > 1e-6:
            return None
        return replace(found, softcap=factor)
    found = _chain(inside)
    if found is None or found.softcap:  # times a number after the cap: no operator of ours
        return None
    if any(t.fill is not None for t in found.terms) and not factor > 0:
        return None
    terms = tuple(
        replace(t, factor=t.factor * factor) if t.fill is None else replace(t, fill=t.fill * factor)
        for t in found.terms
    )
    return replace(found, scale=found.scale * factor, terms=terms)


def _times_rows(node: fx.Node) -> Scores | None:
    """Scores times what is one number for each row, which their queries may be times as well."""
    ways = [node.args, node.args[::-1]] if node.target is aten.mul.Tensor else [node.args]
    for scores, factor in ways:
        if not isinstance(factor, fx.Node) or shape_of(factor)[-1:] not in ((), (1,)):
            continue
        if shape_of(factor) and len(shape_of(node)) != 4 or shape_of(scores) != shape_of(node):
            continue  # [B H, 1, 1] is no factor of queries [B, H, S, D]
        found = _chain(scores)
        if found is not None and not found.terms and not found.softcap:
            return replace(found, factors=(*found.factors, (node.target, factor)))
    return None


def times_number(node: Any) -> tuple[fx.Node | None, float]:
    """x and c where ``node`` is c x, of which nothing else reads; None where it is not."""
    if not isinstance(node, fx.Node) or node.target not in _FACTORS or node.kwargs:
        return None, 1.0
    if not alone(node):
        return None, 1.0
    x, c = node.args[0], number_of(node.args[1])
    if c is None and node.target is aten.mul.Tensor:
        x, c = node.args[1], number_of(node.args[0])
    if c is None or c == 0 or not isinstance(x, fx.Node):
        return None, 1.0
    return x, c ** _FACTORS[node.target]
