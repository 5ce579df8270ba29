"""From the formula of a mask to its meaning, or the reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paradyse.passes.mask_domain import (
    FALSE,
    ONE,
    TRUE,
    And,
    Atom,
    Bool,
    Eq0,
    Expr,
    FloorDiv,
    Le0,
    Lin,
    Load,
    Var,
    Where,
    add,
    as_bool,
    as_number,
    atom,
    atoms_of,
    choose,
    conj,
    dims_of,
    eq0,
    negate,
    rewrite,
    scale,
    sub,
    substitute,
    var,
)
from paradyse.passes.mask_values import MaskValues

HEAD, QUERY, KEY = 1, 2, 3
HIDDEN = -1e4
"""Added to a score this leaves nothing of its probability: those of a row are never so far
apart."""
_OFFSET = Var(-1)
"""How far positions are ahead of indices: unknown, but one number for a whole document."""


@dataclass(frozen=True)
class Recovered:
    """A mask as conditions on query i and key j of sequence b, all of which must hold.

    Formulas are over (Var(0), Var(1)) = (b, index along the sequence).
    """

    left: int = -1
    """j >= i - left; -1 is no bound."""
    right: int = -1
    """j <= i + right; -1 is no bound."""
    chunk: int = -1
    """i // chunk == j // chunk; -1 is no chunks."""
    padding: Bool = TRUE
    """Holds at (b, j)."""
    documents: tuple[Lin, ...] = ()
    """Each is equal at (b, i) and (b, j)."""

    @property
    def sees_itself(self) -> bool:
        """Every query surely sees one key, its own."""
        return self.padding == TRUE


class Unrecoverable(Exception):
    """The mask says something that ``Recovered`` cannot; the message says what."""


def visible(value: Expr, dtype: torch.dtype) -> tuple[Bool, bool] | None:
    """Where a mask lets a key be seen, and whether the hidden ones get less than minus infinity.

    A bool mask is itself. A float mask must be 0 or hidden: minus infinity, or (flag True) a number
    of at most ``HIDDEN``, which acts alike in every row that sees at least one key.

    Args:
        value: of the mask at (batch, head, query, key).
        dtype: of the mask.
    Returns:
        None where neither is known of some number.
    """
    if not isinstance(value, Lin):
        return value, False
    if value.is_const:
        if value.const == 0:
            return TRUE, False
        if value.const == float("-inf"):
            return FALSE, False
        return (FALSE, True) if dtype.is_floating_point and value.const <= HIDDEN else None
    w = value.single()
    if not isinstance(w, Where):
        return None
    then, other = visible(w.then, dtype), visible(w.other, dtype)
    if then is None or other is None:
        return None
    return choose(w.condition, then[0], other[0]), then[1] or other[1]


def classify(mask: Bool, values: MaskValues) -> Recovered:
    """The meaning of ``mask``, a formula over (batch, head, query, key) that ``values`` found.

    Raises:
        Unrecoverable: some condition has no field. Nothing is ever dropped: all or none is
        recovered.
    """
    parts = list(mask.parts) if isinstance(mask, And) else [mask]
    spec, left_over = Recovered(), []
    query_only: list[Bool] = []
    for part in parts:
        dims = dims_of(part)
        if HEAD in dims:
            raise Unrecoverable("differs between heads")
        if QUERY not in dims:
            local = as_bool(substitute(part, {KEY: var(1)}))
            spec = replace(spec, padding=conj(spec.padding, local))
        elif KEY not in dims:
            query_only.append(as_bool(substitute(part, {QUERY: var(1)})))
        elif (found := _relation(part, spec)) is not None:
            spec = found
        else:
            left_over.append(part)
    for part in left_over:
        found = _relation(_by_index(part, spec, values), spec)
        if found is None:
            raise Unrecoverable(f"compares query and key through {_names(part)}")
        spec = found
    known = spec.padding.parts if isinstance(spec.padding, And) else (spec.padding,)
    for part in query_only:
        # A query outside sees nothing: its document is then one whose keys are all padding.
        if part not in known:
            raise Unrecoverable(f"hides whole queries by {_names(part)}")
        spec = replace(spec, documents=(*spec.documents, as_number(part)))
    return spec


def _relation(part: Bool, spec: Recovered) -> Recovered | None:
    """``spec`` with one more condition on query and key, or None without a field for it."""
    if Var(-1) in atoms_of(part):
        return None
    match part:
        case Le0(Lin(const, terms)) if isinstance(const, int):
            coefficients = dict(terms)
            if coefficients == {Var(QUERY): 1, Var(KEY): -1} and const <= 0:
                left = -const if spec.left < 0 else min(spec.left, -const)
                return replace(spec, left=left)
            if coefficients == {Var(QUERY): -1, Var(KEY): 1} and const <= 0:
                right = -const if spec.right < 0 else min(spec.right, -const)
                return replace(spec, right=right)
            return None
        case Eq0(lin):
            return _equality(lin, spec)
        case _:
            return None


def _equality(lin: Lin, spec: Recovered) -> Recovered | None:
    """f(b, i) == f(b, j): a chunk when f is index // size, the diagonal when f is the index,
    otherwise documents."""
    ours, theirs = Lin(lin.const), Lin(0)
    for t, c in lin.terms:
        dims = dims_of(atom(t))
        if dims >= {QUERY, KEY}:
            return None
        if QUERY in dims:
            ours = Lin(ours.const, (*ours.terms, (t, c)))
        elif KEY in dims:
            theirs = Lin(theirs.const, (*theirs.terms, (t, -c)))
        else:
            return None  # a number of the sequence alone sets the two apart
    f = as_number(substitute(ours, {QUERY: var(1)}))
    if f != substitute(theirs, {KEY: var(1)}):
        return None
    if all(c < 0 for _, c in f.terms):
        f = scale(f, -1)
    if f.const == 0 and len(f.terms) == 1:
        t, _ = f.terms[0]
        if t == Var(1):
            return replace(spec, left=0, right=0)
        if isinstance(t, FloorDiv) and t.value == var(1):
            if spec.chunk in (-1, t.divisor):
                return replace(spec, chunk=t.divisor)
    return spec if f in spec.documents else replace(spec, documents=(*spec.documents, f))


def _by_index(part: Bool, spec: Recovered, values: MaskValues) -> Bool:
    """``part`` with positions replaced by indices, where the documents make that exact.

    Packed sequences compare positions P[b, j] <= P[b, i], not indices. Let the documents be D =
    cumsum(P[b, t] != P[b, t-1] + 1). D never falls, so D[b, i] == D[b, j] for j < i says that no t
    in j+1..i starts a document, hence P rises by exactly 1 at each of them: P[b, i] - P[b, j] == i
    - j. So within a document P[b, t] is t plus a number of that document, and ``part``, which only
    matters where the documents agree, may be read with that.
    """
    exchange: dict[Atom, Lin] = {}
    for load in atoms_of(part):
        if not isinstance(load, Load) or (side := dims_of(atom(load)) & {QUERY, KEY}) not in (
            {QUERY},
            {KEY},
        ):
            continue
        (index,) = side
        positions = substitute(atom(load), {index: var(1)})
        if isinstance(positions, Lin) and any(
            _restarts(d, positions, values) for d in spec.documents
        ):
            exchange[load] = add(var(index), atom(_OFFSET))
    return as_bool(rewrite(part, exchange)) if exchange else part


def _restarts(document: Lin, positions: Lin, values: MaskValues) -> bool:
    """Whether ``document`` counts the places t >= 1 with positions[t] != positions[t-1] + 1."""
    counted = document.single()
    if not isinstance(counted, Load) or counted.index[-1:] != (var(1),):
        return False
    if any(1 in dims_of(i) for i in counted.index[:-1]):
        return False
    summed = values.cumulative(counted.node)
    if summed is None:
        return False
    # The first place does not matter: look at the one after t, where no first place is left.
    later = add(var(1), ONE)
    step = sub(as_number(substitute(positions, {1: later})), positions)
    at = {**dict(enumerate(counted.index)), len(counted.index) - 1: later}
    return as_bool(substitute(summed, at)) == negate(eq0(sub(step, ONE)))


def _names(part: Bool) -> str:
    loads = dict.fromkeys(a.node.name for a in atoms_of(part) if isinstance(a, Load))
    return " and ".join(f"`{n}`" for n in loads) or "their indices"
