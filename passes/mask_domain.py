"""What an attention mask holds at (batch, head, query, key), as a formula.

The value of a tensor at an index is a formula over the index itself. Numbers are sums of atoms
(``Lin``), truth values are and/or/not over comparisons with zero. Constructors simplify as they
build, with facts that hold for every size (an index is >= 0), never with the size of the trace at
hand: a formula found at one length stands for all. Order is kept from the program, so that every
rank writes the same graph.

``a``, ``b`` and ``value`` are formulas; ``factor`` is any integer, a ``divisor`` a positive one. A
choice takes ``then`` where ``condition`` holds, else ``other``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Var:
    """The index along one dim of the tensor; >= 0. Negative numbers name unknown constants."""

    dim: int


@dataclass(frozen=True)
class Load:
    """``node[index]``: the element of a tensor whose content is not known."""

    node: fx.Node
    index: tuple[Lin, ...]


@dataclass(frozen=True)
class FloorDiv:
    """``value // divisor``, rounded down; divisor > 0."""

    value: Lin
    divisor: int


@dataclass(frozen=True)
class Abs:
    """``|value|``."""

    value: Lin


@dataclass(frozen=True)
class Where:
    """A choice of numbers."""

    condition: Bool
    then: Lin
    other: Lin


Atom = Var | Load | FloorDiv | Abs | Where


@dataclass(frozen=True, eq=False)
class Lin:
    """``const + sum(coefficient * atom)``. Equality ignores the order of the terms."""

    const: int | float
    terms: tuple[tuple[Atom, int], ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lin):
            return NotImplemented
        return self.const == other.const and frozenset(self.terms) == frozenset(other.terms)

    def __hash__(self) -> int:
        return hash((self.const, frozenset(self.terms)))

    @property
    def is_const(self) -> bool:
        return not self.terms

    def single(self) -> Atom | None:
        """The atom, when the value is exactly one atom."""
        if self.const == 0 and len(self.terms) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0]
        return None


@dataclass(frozen=True)
class Le0:
    """``value <= 0``, over integers."""

    value: Lin


@dataclass(frozen=True, eq=False)
class Eq0:
    """``value == 0``. Equality ignores the sign of the value."""

    value: Lin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Eq0):
            return NotImplemented
        return self.value == other.value or self.value == scale(other.value, -1)

    def __hash__(self) -> int:
        return hash(("eq0", frozenset((self.value, scale(self.value, -1)))))


@dataclass(frozen=True)
class Not:
    """True where ``value`` is not."""

    value: Bool


@dataclass(frozen=True, eq=False)
class _Parts:
    """Equality ignores the order of the parts."""

    parts: tuple[Bool, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Parts) or type(self) is not type(other):
            return False
        return frozenset(self.parts) == frozenset(other.parts)

    def __hash__(self) -> int:
        return hash((type(self).__name__, frozenset(self.parts)))


class And(_Parts):
    """All of the parts; of none, true."""


class Or(_Parts):
    """Any of the parts; of none, false."""


Bool = Le0 | Eq0 | Not | And | Or | Load
Expr = Lin | Bool
TRUE = And(())
FALSE = Or(())
ZERO = Lin(0)
ONE = Lin(1)


def atom(a: Atom) -> Lin:
    return Lin(0, ((a, 1),))


def var(dim: int) -> Lin:
    """The index along ``dim``."""
    return atom(Var(dim))


def truth(value: bool) -> Bool:
    return TRUE if value else FALSE


def add(a: Lin, b: Lin, factor: int = 1) -> Lin:
    """a + factor * b."""
    terms: dict[Atom, int] = dict(a.terms)
    for t, c in b.terms:
        terms[t] = terms.get(t, 0) + factor * c
    return Lin(a.const + factor * b.const, tuple((t, c) for t, c in terms.items() if c))


def sub(a: Lin, b: Lin) -> Lin:
    return add(a, b, -1)


def scale(a: Lin, factor: int) -> Lin:
    return add(ZERO, a, factor)


def floor_div(a: Lin, divisor: int) -> Lin:
    """a // divisor, rounded down."""
    if divisor == 1:
        return a
    if a.is_const:
        return Lin(math.floor(a.const // divisor))
    if all(x % divisor == 0 for x in (a.const, *(c for _, c in a.terms))):
        return Lin(a.const // divisor, tuple((t, c // divisor) for t, c in a.terms))
    return atom(FloorDiv(a, divisor))


def absolute(a: Lin) -> Lin:
    return Lin(abs(a.const)) if a.is_const else atom(Abs(a))


def where(condition: Bool, then: Lin, other: Lin) -> Lin:
    then, other = _given(condition, then), _given(negate(condition), other)
    if condition == TRUE or then == other:
        return then
    return other if condition == FALSE else atom(Where(condition, then, other))


def _given(condition: Bool, value: Lin) -> Lin:
    """``value`` where ``condition`` holds: a choice by the same condition is made."""
    w = value.single()
    if isinstance(w, Where):
        if w.condition == condition:
            return w.then
        if w.condition == negate(condition):
            return w.other
    return value


def _sign(value: Lin) -> int | None:
    """For every index: 1 when value > 0, -1 when < 0, 0 when <= 0, None when not known."""
    if any(not isinstance(t, Var) or t.dim < 0 for t, _ in value.terms):
        return None
    coefficients = [c for _, c in value.terms]
    if value.const > 0 and all(c >= 0 for c in coefficients):
        return 1
    if value.const <= 0 and all(c <= 0 for c in coefficients):
        return -1 if value.const < 0 else 0
    return None


def _only_where(value: Lin) -> tuple[Bool, Lin, Lin] | None:
    """Condition and both outcomes, when ``value`` has one term and that is a choice."""
    if len(value.terms) != 1 or not isinstance(w := value.terms[0][0], Where):
        return None
    rest, factor = Lin(value.const), value.terms[0][1]
    return w.condition, add(rest, w.then, factor), add(rest, w.other, factor)


def le0(value: Lin) -> Bool:
    """value <= 0 over integers."""
    if value.is_const:
        return truth(value.const <= 0)
    sign = _sign(value)
    if sign is not None:
        return truth(sign <= 0)
    if choice := _only_where(value):
        condition, then, other = choice
        return choose(condition, le0(then), le0(other))
    bounds = [(t, c) for t, c in value.terms if isinstance(t, Abs)]
    if len(bounds) == 1:
        a, c = bounds[0]
        rest = add(value, atom(a), -c)
        both = le0(add(rest, a.value, c)), le0(add(rest, a.value, -c))
        return conj(*both) if c > 0 else disj(*both)
    return Le0(value)


def eq0(value: Lin) -> Bool:
    """value == 0."""
    if value.is_const:
        return truth(value.const == 0)
    if _sign(value) in (1, -1):
        return FALSE
    if choice := _only_where(value):
        condition, then, other = choice
        return choose(condition, eq0(then), eq0(other))
    return Eq0(value)


def negate(value: Bool) -> Bool:
    match value:
        case Not(inner):
            return inner
        case And(parts):
            return disj(*(negate(p) for p in parts))
        case Or(parts):
            return conj(*(negate(p) for p in parts))
        case Le0(lin):
            return le0(sub(ONE, lin))
        case _:
            return Not(value)


def _flat(kind: type[And] | type[Or], values: Iterable[Bool]) -> dict[Bool, None]:
    """The parts of ``values``, where one is of ``kind`` its own; in order, each once."""
    return dict.fromkeys(p for v in values for p in (v.parts if isinstance(v, kind) else (v,)))


def _contradict(parts: Collection[Bool]) -> bool:
    return any(isinstance(p, Not) and p.value in parts for p in parts)


def conj(*values: Bool) -> Bool:
    parts = _flat(And, values)
    if FALSE in parts or _contradict(parts):
        return FALSE
    return next(iter(parts)) if len(parts) == 1 else And(tuple(parts))


def disj(*values: Bool) -> Bool:
    parts = _flat(Or, values)
    # x or (not x and y) is x or y; x or (x and y) is x.
    reduced: dict[Bool, None] = {}
    for p in parts:
        if isinstance(p, And) and p != TRUE:
            if any(q in parts for q in p.parts):
                continue
            reduced[conj(*(q for q in p.parts if negate(q) not in parts))] = None
        else:
            reduced[p] = None
    if TRUE in reduced or _contradict(reduced):
        return TRUE
    return next(iter(reduced)) if len(reduced) == 1 else Or(tuple(reduced))


def choose(condition: Bool, then: Bool, other: Bool) -> Bool:
    if then == other:
        return then
    return disj(conj(condition, then), conj(negate(condition), other))


def as_bool(value: Expr) -> Bool:
    return negate(eq0(value)) if isinstance(value, Lin) else value


def as_number(value: Expr) -> Lin:
    return value if isinstance(value, Lin) else where(value, ONE, ZERO)


def rewrite(value: Expr, atoms: Mapping[Atom, Lin]) -> Expr:
    """``value`` with the atoms that ``atoms`` has replaced, simplified again."""

    def number(x: Lin) -> Lin:
        out = Lin(x.const)
        for t, c in x.terms:
            out = add(out, one(t), c)
        return out

    def one(t: Atom) -> Lin:
        if t in atoms:
            return atoms[t]
        match t:
            case Load(node, index):
                return atom(Load(node, tuple(number(i) for i in index)))
            case FloorDiv(v, d):
                return floor_div(number(v), d)
            case Abs(v):
                return absolute(number(v))
            case Where(c, a, b):
                return where(boolean(c), number(a), number(b))
            case _:
                return atom(t)

    def boolean(x: Bool) -> Bool:
        match x:
            case Le0(v):
                return le0(number(v))
            case Eq0(v):
                return eq0(number(v))
            case Not(v):
                return negate(boolean(v))
            case And(parts):
                return conj(*map(boolean, parts))
            case Or(parts):
                return disj(*map(boolean, parts))
            case Load(node, index):
                return Load(node, tuple(number(i) for i in index))

    return number(value) if isinstance(value, Lin) else boolean(value)


def substitute(value: Expr, indices: Mapping[int, Lin]) -> Expr:
    """``value`` with the index of each dim that ``indices`` has replaced."""
    return rewrite(value, {Var(d): e for d, e in indices.items()})


def atoms_of(value: Expr) -> list[Atom]:
    """Every atom, those inside others included, in the order of the formula, without repeats."""
    found: dict[Atom, None] = {}

    def visit(x: Expr | Atom) -> None:
        match x:
            case Lin():
                for t, _ in x.terms:
                    found[t] = None
                    visit(t)
            case Load():
                found[x] = None
                for i in x.index:
                    visit(i)
            case FloorDiv() | Abs() | Le0() | Eq0() | Not():
                visit(x.value)
            case Where():
                visit(x.condition)
                visit(x.then)
                visit(x.other)
            case And() | Or():
                for p in x.parts:
                    visit(p)

    visit(value)
    return list(found)


def dims_of(value: Expr) -> frozenset[int]:
    """The dims whose index the value depends on."""
    return frozenset(a.dim for a in atoms_of(value) if isinstance(a, Var))
