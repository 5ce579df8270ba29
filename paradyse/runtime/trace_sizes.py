"""Sizes to trace a graph with: those that no weight has, and others to compare the trace with.

What a graph does with a size shows where two traces at different ones differ. Dynamo's guards say
which sizes its graph is right for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import gcd
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from paradyse.torch_private import symbol_values

_PRIMES = (37, 41, 53, 67, 97, 131, 193, 257, 389, 521, 1031, 2053)
_EVEN = (46, 58, 62, 74, 82, 86, 94, 106, 118)
"""Twice a prime each: from an odd size the distance to a prime is even, as multiples of 2 are."""


def choose_sizes(
    sizes: Sequence[torch.SymInt], metas: Sequence[Any]
) -> tuple[dict[Any, int], dict[Any, int], bool]:
    """Symbol -> the value to trace with; other values to compare with, of those symbols that may
    have any; and whether sizes got one value that may differ in another call.

    Symbols that Dynamo holds apart get values apart, also where they are equal in this call, unless
    its guards want them equal.

    Args:
        sizes: symbolic ones of a graph of Dynamo's.
        metas: what its placeholders stand for; no size is that of a dim of theirs that is fixed.
    """
    taken = {n for m in metas if isinstance(m, Tensor) for n in m.shape if isinstance(n, int)}
    hints: dict[Any, int] = {}
    env: Any = None
    for size in sizes:
        env = size.node.shape_env
        known = symbol_values(env)
        hints.update({symbol: int(known[symbol]) for symbol in size.node.expr.free_symbols})
    if not hints:
        return {}, {}, False
    groups = _equal_by_guards(env, hints)
    primes = (v for v in _PRIMES if v not in taken)
    values: dict[Any, int] = {}
    for group in groups:
        hint = hints[group[0]]
        value = hint if hint not in taken else next(primes, hint)
        taken.add(value)
        values.update(dict.fromkeys(group, value))
    merged = False
    if not allowed(env, values):
        values, merged = hints, len({hints[g[0]] for g in groups}) < len(groups)
    return values, _other_values(env, groups, values, taken), merged


def _other_values(
    env: Any, groups: Sequence[Sequence[Any]], values: Mapping[Any, int], taken: set[int]
) -> dict[Any, int]:
    """Symbol -> another size than in ``values``, none of ``taken``; without those of which the
    guards of ``env`` allow none."""
    taken = {*taken, *values.values()}
    others: dict[Any, int] = {}
    for group in groups:
        used = {*taken, *others.values()}
        left = (v for v in _candidates(values[group[0]]) if v not in used)
        others.update(dict.fromkeys(group, next(left)))
    if allowed(env, others):
        return others
    others = {}
    for group in groups:  # such as of a loss over the last tokens, of which there are enough
        used = {*taken, *others.values()}
        for value in _candidates(values[group[0]]):
            one = dict.fromkeys(group, value)
            if value not in used and allowed(env, {**values, **others, **one}):
                others |= one
                break
    return others


def _candidates(traced: int) -> list[int]:
    """Sizes other than ``traced``, those before others of which no remainder is that of ``traced``
    when both are divided by up to 10: what is padded to a multiple then does not look like a
    constant."""
    near = [n for step in range(1, 65) for n in (traced + step, traced - step) if n > 1]
    multiples = [traced * factor for factor in (2, 3, 5, 9, 17)]
    found = [v for v in (*_PRIMES, *_EVEN) if v != traced]
    return [
        *sorted(found, key=lambda v: (gcd(v - traced, 210) > 1, v % 2 == 0)),
        *sorted(near, key=lambda v: gcd(v - traced, 210) > 1),
        *multiples,
    ]


def _equal_by_guards(env: Any, hints: Mapping[Any, int]) -> list[list[Any]]:
    """The symbols of ``hints``, those together that guards of ``env`` want equal."""
    equal = nx.Graph()
    equal.add_nodes_from(hints)
    while True:
        groups = [sorted(g, key=str) for g in nx.connected_components(equal)]
        apart = {s: v for g, v in zip(groups, _PRIMES, strict=False) for s in g}
        more = [pair for g in _guards(env, apart) for pair in _wanted_equal(g, apart, hints)]
        if not more:
            return groups
        equal.add_edges_from(more)


def _wanted_equal(
    guard: Any, values: Mapping[Any, int], hints: Mapping[Any, int]
) -> tuple[tuple[Any, Any], ...]:
    """The fewest pairs of symbols, equal in the call, that must be equal for an equation to
    hold."""
    if getattr(guard, "rel_op", "") != "==" or guard.xreplace(values):
        return ()
    symbols = sorted(guard.free_symbols, key=str)
    pairs = [(a, b) for a, b in combinations(symbols, 2) if hints[a] == hints[b]]
    for number in (1, 2, 3):  # [B, S] flattened against another [B, S]: two; [B, T, S]: three
        for chosen in combinations(pairs, number):
            if guard.xreplace({**values, **{a: values[b] for a, b in chosen}}):
                return chosen
    return ()


def _guards(env: Any, values: Mapping[Any, int]) -> list[Any]:
    """Dynamo's guards that speak of symbols of ``values`` alone, or of others that it found to be
    these."""
    found = [env.replace(g.expr) for g in env.guards]
    return [e for e in found if e.free_symbols <= set(values)]


def allowed(env: Any, values: Mapping[Any, int]) -> bool:
    """Whether Dynamo's guards, those of ``env``, hold for ``values``, as far as they speak of these
    alone."""
    for symbol, value in values.items():
        bounds = env.var_to_range.get(symbol)
        if bounds is not None and not (bounds.lower <= value and bool(value <= bounds.upper)):
            return False
    return all(bool(e.xreplace(values)) for e in _guards(env, values))
