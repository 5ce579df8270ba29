"""Formulas say what they are made of: every constructor against its meaning, at every index."""

from __future__ import annotations

import itertools
import random

import pytest
from mask_graphs import evaluate

from paradyse.passes import mask_domain as d

INDICES = [dict(enumerate(at)) for at in itertools.product(range(4), repeat=2)]


def number(rng: random.Random, depth: int) -> d.Lin:
    kind = rng.randrange(7) if depth else rng.randrange(2)
    if kind == 0:
        return d.Lin(rng.randint(-3, 3))
    if kind == 1:
        return d.var(rng.randrange(2))
    a, b = number(rng, depth - 1), number(rng, depth - 1)
    if kind == 2:
        return d.add(a, b, rng.choice((-2, -1, 1)))
    if kind == 3:
        return d.scale(a, rng.randint(-2, 2))
    if kind == 4:
        return d.floor_div(a, rng.randint(1, 3))
    if kind == 5:
        return d.absolute(a)
    return d.where(truth(rng, depth - 1), a, b)


def truth(rng: random.Random, depth: int) -> d.Bool:
    kind = rng.randrange(6) if depth else 0
    if kind < 2:
        return (d.le0, d.eq0)[kind](number(rng, depth))
    a, b = truth(rng, depth - 1), truth(rng, depth - 1)
    if kind == 2:
        return d.negate(a)
    return {3: d.conj, 4: d.disj}.get(kind, lambda x, y: d.choose(x, y, d.negate(y)))(a, b)


@pytest.mark.parametrize("seed", range(60))
def test_constructors_mean_what_they_say(seed: int) -> None:
    rng = random.Random(seed)
    a, b, p, q = number(rng, 3), number(rng, 2), truth(rng, 3), truth(rng, 2)
    for at in INDICES:
        x, y, v, w = (evaluate(f, at) for f in (a, b, p, q))
        meant = {
            d.add(a, b, -2): x - 2 * y,
            d.floor_div(a, 3): x // 3,
            d.absolute(a): abs(x),
            d.where(p, a, b): x if v else y,
            d.le0(a): x <= 0,
            d.eq0(d.sub(a, b)): x == y,
            d.negate(p): not v,
            d.conj(p, q): v and w,
            d.disj(p, q): v or w,
            d.choose(p, q, d.negate(p)): w if v else True,
            d.as_number(p): int(v),
            d.as_bool(a): x != 0,
        }
        for formula, value in meant.items():
            assert evaluate(formula, at) == value, formula
        moved = d.substitute(p, {0: d.var(1), 1: d.add(d.var(0), d.ONE)})
        if at[0] < 3:
            assert evaluate(moved, at) == evaluate(p, {0: at[1], 1: at[0] + 1})


def test_formulas_are_equal_whatever_the_order() -> None:
    i, j = d.var(0), d.var(1)
    assert d.add(i, j) == d.add(j, i) and hash(d.add(i, j)) == hash(d.add(j, i))
    assert d.eq0(d.sub(i, j)) == d.eq0(d.sub(j, i))
    p, q = d.le0(i), d.le0(d.sub(i, j))
    assert d.conj(p, q) == d.conj(q, p) and d.disj(p, q) == d.disj(q, p) != d.conj(p, q)
    assert len({d.conj(p, q), d.conj(q, p), d.disj(p, q)}) == 2


def test_what_holds_at_every_index_is_a_constant() -> None:
    i, j = d.var(0), d.var(1)
    assert d.le0(d.scale(i, -1)) == d.TRUE and d.eq0(d.add(i, d.ONE)) == d.FALSE
    near = d.eq0(d.sub(i, j))
    assert d.disj(near, d.negate(near)) == d.TRUE and d.conj(near, d.negate(near)) == d.FALSE
    assert d.conj() == d.TRUE and d.disj() == d.FALSE
    assert d.where(near, i, i) == i and d.choose(near, near, near) == near


def test_what_a_formula_is_made_of() -> None:
    formula = d.conj(d.le0(d.absolute(d.sub(d.var(2), d.var(0)))), d.le0(d.sub(d.var(0), d.ONE)))
    assert d.dims_of(formula) == {0, 2}
    assert [a.dim for a in d.atoms_of(formula) if isinstance(a, d.Var)] == [2, 0]
    assert d.dims_of(d.TRUE) == d.dims_of(d.ONE) == frozenset()
