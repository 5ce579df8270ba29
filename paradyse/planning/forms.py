"""The ``plan`` option for the blocks that a model has: a name for each, whatever form it is given
in.

Throughout, ``blocks`` are those of a program in the order of computation, and ``where`` says what
gave the plan, for messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradyse.config import AUTO, BLOCK_KINDS, PlanByKind, PlanOption, parse_plan
from paradyse.types import EXPERTS, REPLICATED, BlockSpec, HeadSpec, Plan, Point

SHARES = "blocks of one plan are computed either all whole on every rank or none"


def asked_plan(form: PlanOption, blocks: Sequence[BlockSpec], where: str) -> Plan:
    """What ``form`` asks for each block and for the head: a point, or "auto".

    A form that names points for blocks alone means the head with whole logits; one that leaves a
    block open leaves the head open.

    Raises:
        ValueError: ``form`` cannot be read, does not fit the number of blocks, or has every rank
            compute the whole head and a part of the blocks.
    """
    form = parse_plan(form, where)
    if callable(form):
        raise ValueError(f"{where}: returned a function; return a Plan or names")
    if isinstance(form, Plan):
        if blocks and len(form.strategies) != len(blocks):
            raise ValueError(
                f"{where}: {len(form.strategies)} strategies given, but the model has "
                f"{len(blocks)} blocks ({_counts(blocks)})"
            )
        if form.alone and any(Point.parse(s).strategy != REPLICATED for s in form.strategies):
            raise ValueError(
                f"{where}: the head is {REPLICATED!r} and some block is not: {SHARES}; give "
                f"{REPLICATED!r} for all blocks, or '' for the head"
            )
        return form if blocks else Plan(())
    if not blocks:
        return Plan(())
    if isinstance(form, PlanByKind):
        return Plan(_by_kind(form, blocks, where), form.head)
    names = (form,) * len(blocks) if isinstance(form, str) else _by_layer(form, blocks, where)
    return Plan(names, AUTO if AUTO in names else "")


def check_feasible(
    block: BlockSpec, name: str, free: Sequence[str], splitting: Sequence[str], where: str
) -> None:
    """
    Args:
        name: what a plan has for ``block``: a point, or "auto".
        free: the points that "auto" may choose for it.
        splitting: the strategies of the option.
    Raises:
        ValueError: ``name`` cannot compute ``block``, or is to choose of nothing.
    """
    feasible = ", ".join(block.feasible()) or "none"
    reason = "" if name == AUTO else block.why_not(name)
    if reason:
        raise ValueError(
            f"{where}: {name!r} cannot compute block '{block.name}': {reason}; "
            f"feasible there: {feasible}"
        )
    if name == AUTO and not free:
        reasons = "; ".join(f"{s}: {block.infeasible[s]}" for s in splitting)
        raise ValueError(
            f"no strategy in option 'strategies' can compute block '{block.name}' "
            f"({reasons}); feasible there: {feasible}"
        )


def check_head(levers: str, head: HeadSpec | None, where: str) -> None:
    """
    Args:
        levers: what a plan has for the ``head`` of a model; None: it has none.
    Raises:
        ValueError: it cannot have them.
    """
    if levers in ("", AUTO) or levers in (head.points() if head else ()):
        return
    found = head.infeasible if head else {}
    reasons = [found[v] for v in levers.split("+") if v in found]
    why = "; ".join(reasons) or "no last linear with a loss was found in its graph"
    raise ValueError(
        f"{where}: the head of this model cannot have the levers {levers!r}: {why}; "
        "give '' or 'auto'"
    )


def leaves_open(form: PlanOption) -> bool:
    """Whether ``form`` leaves the point of any block, the levers of the head or the split to be
    chosen. What a function would return is not asked."""
    parts: tuple[object, ...]
    if isinstance(form, Plan):
        parts = form.strategies, form.head, form.split
    elif isinstance(form, PlanByKind):
        parts = *form.of_blocks, form.head, form.split
    else:
        parts = (form,)
    return any(p == AUTO or isinstance(p, tuple) and AUTO in p for p in parts)


def _kinds(blocks: Sequence[BlockSpec]) -> list[str]:
    """Of the blocks that there are, and those that every model may be expected to have."""
    return [kind for kind in BLOCK_KINDS if kind != EXPERTS or _num_blocks(blocks, kind)]


def _num_blocks(blocks: Sequence[BlockSpec], kind: str) -> int:
    return sum(b.kind == kind for b in blocks)


def _counts(blocks: Sequence[BlockSpec]) -> str:
    return ", ".join(f"{_num_blocks(blocks, kind)} {kind}" for kind in _kinds(blocks))


def _by_layer(names: tuple[str, ...], blocks: Sequence[BlockSpec], where: str) -> tuple[str, ...]:
    counts = {n for kind in BLOCK_KINDS if (n := _num_blocks(blocks, kind))}
    if len(counts) > 1:
        raise ValueError(
            f"{where}: a list with one name per layer is ambiguous for a model whose blocks do "
            f"not pair up ({_counts(blocks)}); give "
            f"{{{', '.join(f'{kind!r}: [...]' for kind in _kinds(blocks))}}}"
        )
    if len(names) not in counts:
        raise ValueError(
            f"{where}: {len(names)} names given, but the model has {max(counts)} layers "
            f"({_counts(blocks)} blocks); give one name per layer"
        )
    return tuple(names[b.layer] for b in blocks)


def _by_kind(form: PlanByKind, blocks: Sequence[BlockSpec], where: str) -> tuple[str, ...]:
    of = dict(zip(BLOCK_KINDS, form.of_blocks, strict=True))
    for kind, given in of.items():
        if not isinstance(given, str) and len(given) != _num_blocks(blocks, kind):
            raise ValueError(
                f"{where}[{kind!r}]: {len(given)} names given, but the model has "
                f"{_num_blocks(blocks, kind)} {kind} blocks"
            )
    per_block = [(of[b.kind], b.layer) for b in blocks]
    return tuple(g if isinstance(g, str) else g[i] for g, i in per_block)
