"""The heuristic choice as it was published, to hold the exact one against (arXiv 2511.13198).

Strategies that another beats in both time and memory are dropped. The fastest that fits runs all
layers; else, of every pair, the first layers take one and the rest the other, at the split that is
fastest among those that fit; else the smallest strategy runs all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradyse.planning.solver import Counts, Group


def published(groups: Sequence[Group], budget_bytes: float) -> tuple[Counts, bool]:
    """Counts, and whether they fit ``budget_bytes``: sum saved + largest workspace.

    Args:
        groups: each offers the same strategies in the same order: a strategy runs whole layers.
    Raises:
        ValueError: the groups offer different numbers of choices.
    """
    widths = {len(g.choices) for g in groups}
    if len(widths) != 1:
        raise ValueError(
            f"groups offer {sorted(widths)} strategies; the published heuristic needs the same "
            "ones for every block: leave out those that some block cannot take"
        )
    kept: list[int] = []
    whole = {i: _measure(groups, _split(groups, i, i, 1.0)) for i in range(widths.pop())}
    for i in sorted(whole, key=lambda i: whole[i]):
        if not kept or whole[i][1] < whole[kept[-1]][1]:
            kept.append(i)
    if whole[kept[0]][1] <= budget_bytes:
        return _split(groups, kept[0], kept[0], 1.0), True
    layers = max(g.count for g in groups)
    best: tuple[float, Counts] | None = None
    for a in kept:
        for b in kept:
            for k in range(1, layers + 1):
                counts = _split(groups, a, b, k / layers)
                time_s, peak = _measure(groups, counts)
                if peak <= budget_bytes and (best is None or time_s < best[0]):
                    best = (time_s, counts)
    if best is not None:
        return best[1], True
    return _split(groups, kept[-1], kept[-1], 1.0), False


def _split(groups: Sequence[Group], a: int, b: int, share: float) -> Counts:
    """The first ``share`` of the layers with strategy ``a``, the rest with ``b``."""
    out = []
    for g in groups:
        first = round(g.count * share)
        row = [0] * len(g.choices)
        row[a] += first
        row[b] += g.count - first
        out.append(tuple(row))
    return tuple(out)


def _measure(groups: Sequence[Group], counts: Counts) -> tuple[float, int]:
    """Seconds, and bytes saved and of the largest workspace."""
    used = [(n, c) for g, row in zip(groups, counts) for n, c in zip(row, g.choices) if n]
    workspace = max((c.workspace_bytes for _, c in used), default=0)
    return sum(n * c.time_s for n, c in used), workspace + sum(n * c.saved_bytes for n, c in used)
