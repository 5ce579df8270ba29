"""The heuristic choice as it was published, to hold the exact one against (arXiv 2511.13198).

Strategies that another beats in both time and memory are dropped. The fastest that fits runs all
layers; else, of every pair, the first layers take one and the rest the other, at the split that is
fastest among those that fit; else the smallest strategy runs all layers.
"""

from __future__ import annotations

from paradyse.planning.solver import Choices, Strategies


def published(choices: Choices, limit: float, layers: int) -> tuple[Strategies, bool]:
    """A plan, and whether it needs at most ``limit`` bytes.

    Args:
        choices: every block offers the same strategies: a strategy runs whole layers.
        layers: of as many blocks each.
    """
    (offered,) = set(choices.names)
    blocks = len(choices.names)

    def split(a: str, b: str, first: int) -> Strategies:
        at = first * blocks // layers
        return (a,) * at + (b,) * (blocks - at)

    kept: list[str] = []
    peaks: dict[str, int] = {}
    for _, s in sorted((choices.time_s((s,) * blocks), s) for s in offered):
        peaks[s] = choices.peak((s,) * blocks)
        if not kept or peaks[s] < peaks[kept[-1]]:
            kept.append(s)
    if peaks[kept[0]] <= limit:
        return (kept[0],) * blocks, True
    mixed = (split(a, b, k) for a in kept for b in kept for k in range(1, layers + 1))
    fitting = [p for p in mixed if choices.peak(p) <= limit]
    if fitting:
        return min(fitting, key=choices.time_s), True
    return (kept[-1],) * blocks, False
