"""Explain numbers: those among operators' arguments that are a length, or made of one.

A bound of ``clamp``, a class to ignore, where a table is cut: in a graph of plain integers they
look like constants. Two traces at different sizes tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import Length, Product
from paradyse.graph.subgraph import is_tensor, is_weight


def made_by_cases(gm: fx.GraphModule, traces: Sequence[Mapping[Any, int]]) -> bool:
    """Whether tensors of Dynamo's graph ``gm`` are computed with a number that is made of sizes by
    cases, such as ``max(S, 64)`` or ``S // 64``: two traces need not tell it from a constant. Where
    it is but a size of what is computed, as in a reshape, dims tell, unless it is a constant or one
    of the sizes in both traces.

    Args:
        traces: symbol -> its size in the first trace, and in the second.
    """
    known = set(traces[0])
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _gives_number(node):
                continue
            shown = _is_of_sizes(node)
            for number in (a.meta.get("example_value") for a in node.all_input_nodes):
                if isinstance(number, torch.SymInt | torch.SymFloat):
                    made = number.node.expr
                    by_cases = made.free_symbols & known and not _is_polynomial(made)
                    if by_cases and not (shown and _is_told(made, traces)):
                        return True
    return False


def _is_told(made: Any, traces: Sequence[Mapping[Any, int]]) -> bool:
    """Whether the SymPy expression ``made`` looks like no constant in ``traces``, and like none of
    the sizes."""
    one, other = (made.xreplace(at) for at in traces)
    alike = any((traces[0][s], traces[1][s]) == (one, other) for s in traces[0])
    return bool(one.is_Integer and other.is_Integer and one != other) and not alike


_OF_SIZES = {torch.zeros, torch.ones, torch.empty, torch.reshape, torch.broadcast_to}
_OF_SIZES |= {torch.unflatten, torch.nn.functional.pad, torch.split, "split"}
_OF_SIZES |= {"view", "reshape", "expand", "unflatten", "repeat", "new_zeros", "new_ones"}
_OF_SIZES |= {"new_empty", "broadcast_to"}
"""Functions and methods of Dynamo's graphs whose numbers show in the shape of what they give."""


def _gives_number(node: fx.Node) -> bool:
    """Whether ``node`` is no more than a number itself, or what ends a graph."""
    made = node.meta.get("example_value")
    return node.op in ("placeholder", "output") or isinstance(
        made, int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _is_of_sizes(node: fx.Node) -> bool:
    from_zero = node.target is torch.arange and len(node.args) == 1
    return node.target in _OF_SIZES or from_zero


def _is_polynomial(made: Any) -> bool:
    """Whether the SymPy expression ``made`` is one of its symbols: two traces, at primes, tell what
    it is."""
    if made.is_Symbol or made.is_Integer:
        return True
    if made.is_Pow:
        base, exponent = made.args
        return bool(exponent.is_Integer and exponent > 0) and _is_polynomial(base)
    return bool(made.is_Add or made.is_Mul) and all(map(_is_polynomial, made.args))


def explain_numbers(
    traced: fx.GraphModule, other: fx.GraphModule
) -> dict[fx.Node, dict[int, Length | Product]]:
    """The arguments of ``traced`` that differ from those of ``other``, the same graph at other
    sizes, as one size of an input does, or as what a fixed number leaves of it; or as a multiple of
    one or two sizes, or of these less 1, does, such as the tokens of a batch.

    Refuses what two sizes explain that are not equal, and graphs that differ in their operators.
    """
    nodes, others = list(traced.graph.nodes), list(other.graph.nodes)
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        return {}
    sizes: _Sizes = {}
    for node, twin in zip(nodes, others, strict=True):
        if node.op == "placeholder" and is_tensor(node) and not is_weight(node):
            pairs = zip(node.meta["val"].shape, twin.meta["val"].shape, strict=True)
            for d, pair in enumerate(pairs):
                if pair[0] != pair[1]:
                    sizes.setdefault(pair, (node, d))
    found: dict[fx.Node, dict[int, Length | Product]] = {}
    for node, twin in zip(nodes, others, strict=True):
        for i, (x, y) in enumerate(zip(node.args, twin.args, strict=False)):
            if type(x) is int and type(y) is int and x != y:
                number = _length(x, y, sizes) or _multiple(x, y, sizes)
                if number is not None:
                    found.setdefault(node, {})[i] = number
    return found


_Sizes = dict[tuple[int, int], tuple[fx.Node, int]]
"""A size in the first trace and in the second -> an input and its dim."""


def _length(x: int, y: int, sizes: _Sizes) -> Length | None:
    """What is ``x`` at the first of ``sizes`` and ``y`` at the second."""
    found = [
        Length(*at, x - sign * a, sign)
        for (a, b), at in sizes.items()
        for sign in (1, -1)
        if x - sign * a == y - sign * b
    ]
    exact = [e for e in found if e.start == 0]
    return exact[0] if exact else found[0] if len(found) == 1 else None


def _multiple(x: int, y: int, sizes: _Sizes) -> Product | None:
    """What is ``x`` at the first of ``sizes`` and ``y`` at the second, as one product does and no
    other of as many sizes."""
    for number in (1, 2):
        found = []
        for chosen in combinations(sizes.items(), number):
            for less in product((0, 1), repeat=number):
                a, b = (prod(s[i] - n for (s, _), n in zip(chosen, less)) for i in (0, 1))
                if a and b and x % a == 0 and x // a == y / b:
                    lengths = (Length(*at, -n, 1) for (_, at), n in zip(chosen, less))
                    found.append(Product(x // a, tuple(lengths)))
        if found:
            return found[0] if len(found) == 1 else None
    return None
