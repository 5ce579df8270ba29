"""Why a plan has this point for a block, or for the head, and not another.

Throughout, ``plan`` is the planner's for ``workload``, ``i`` the index of a block, or for the head
the number of blocks, and ``point`` one that can compute it.
"""

from __future__ import annotations

from paradyse.planning.planner import Planner
from paradyse.planning.units import format_bytes
from paradyse.strategies import variant_of
from paradyse.types import DSP, REPLICATED, BlockSpec, Plan, Point, Workload


def slower(time_s: float, best_s: float) -> str:
    """In words, ``time_s`` against ``best_s``."""
    return f"{time_s / best_s:.2f}x the time" if best_s > 0 else "no faster"


def over(peak: int, limit: float) -> str:
    """In words, that ``peak`` bytes are more than ``limit``."""
    return f"does not fit: needs {format_bytes(peak)} of {format_bytes(limit)}"


def what_is_seen(block: BlockSpec, workload: Workload) -> str:
    """The mask of ``block`` in words, and where its tokens have several dims that attention is over
    in turn, which of them plays what part."""
    if block.kind != "attention":
        return ""
    text = "dense, not recovered" if block.mask is None else str(block.mask)
    at = workload.of(block)
    if at.over_len is not None:
        return f"{text}; over {at.over_len} of a dim that is not split"
    if at.switch_len is not None:
        return f"{text}; {DSP} splits a dim of {at.switch_len} meanwhile"
    return text


def why_chosen(planner: Planner, workload: Workload, plan: Plan, i: int, point: str) -> str:
    """Why it has ``point``, of ``planner``'s choice; of one with levers, why not without."""
    of_head = i == len(planner.blocks)
    plain = "" if of_head else Point.parse(point).strategy
    if point == plain or planner.asked_by_name(workload, i):
        return "chosen"
    if not of_head and planner.blocks[i].recompute:
        return "chosen; the model asks for gradient checkpointing"
    peak, limit, *_ = _held_with(planner, workload, plan, i, plain)
    return f"chosen; without levers: {over(peak, limit)}" if peak > limit else "chosen"


def why_not(planner: Planner, workload: Workload, plan: Plan, i: int, point: str) -> str:
    """Why it does not have ``point``, of ``planner``'s choice."""
    of_head, chosen = i == len(planner.blocks), planner.points(plan)[i]
    costs = planner.costs(workload, planner.mixes(plan))[i]
    variants = {p if of_head else variant_of(planner.blocks[i], p) for p in (point, chosen)}
    if len(variants) == 1:
        return f"the same variant as {chosen}"
    strategies = (REPLICATED, *planner.options.strategies)
    if not of_head and Point.parse(point).strategy not in strategies:
        return "not in option 'strategies'"
    if REPLICATED in (point, chosen) and point != chosen and planner.num_ranks > 1:
        return "blocks are whole on every rank all together or not at all: see below"
    text = slower(costs[point].time_s, costs[chosen].time_s)
    if costs[point].time_s >= costs[chosen].time_s:
        return text
    return f"{text}, but {_why_not_faster(planner, workload, plan, i, point)}"


def _why_not_faster(planner: Planner, workload: Workload, plan: Plan, i: int, point: str) -> str:
    """Why a point that is predicted to be faster was not taken."""
    peak, limit, on_host, host_limit = _held_with(planner, workload, plan, i, point)
    if peak > limit:
        return over(peak, limit)
    if on_host > host_limit:
        return f"{over(on_host, host_limit)} on the host"
    if planner.asked_by_name(workload, i):
        return f"the plan option asks for {planner.points(plan)[i] or 'whole logits'}"
    (with_s, _), (time_s, _) = (
        planner.predict(p, workload) for p in (_swapped(planner, plan, i, point), plan)
    )
    if with_s > time_s:
        return "not beside other strategies, by what such plans took"
    return (
        f"within {planner.options.smoothing:.0%} the previous plan is kept, or one strategy for all"
        "; or whole steps were slower, where they were tried"
    )


def _held_with(
    planner: Planner, workload: Workload, plan: Plan, i: int, point: str
) -> tuple[int, float, int, float]:
    """Peak bytes of ``plan`` with ``point`` instead, and what it may need; the same on the host."""
    swapped = _swapped(planner, plan, i, point)
    peak, limit = planner.predict(swapped, workload)[1], planner.memory_limit(workload.dtype)
    return peak, limit, *held_on_host(planner, workload, swapped)


def _swapped(planner: Planner, plan: Plan, i: int, point: str) -> Plan:
    """``plan`` with ``point`` instead."""
    points = planner.points(plan)
    return planner.plan_of((*points[:i], point, *points[i + 1 :]))


def held_on_host(planner: Planner, workload: Workload, plan: Plan) -> tuple[int, float]:
    """Bytes that blocks keep on the host under ``plan`` of ``planner``, and what they may keep."""
    pairs = zip(planner.costs(workload), planner.points(plan))
    return sum(c[s].host_bytes for c, s in pairs), planner.host_limit(workload.dtype)
