"""Where the weights of a block lie at rest: rows of whole heads (or columns) on each rank.

Head-parallel strategies then use a rank's shard as it lies; the others gather all of them and do
not mind the order.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from paradyse.strategies.base import Scope
from paradyse.strategies.groups.analyse import analyse
from paradyse.strategies.groups.model import Unsplittable
from paradyse.weights.layout import ShardLayout


def rest_layouts(scope: Scope, block: Any) -> dict[fx.Node, ShardLayout]:
    """Parameter of ``block`` -> layout by groups over the axis of ``scope``, for those whose rows
    each belong to exactly one group.

    Others (of a block that mixes heads, of KV heads that several groups need, norms) keep even
    rows.
    """
    try:
        groups = analyse(scope, block)
    except Unsplittable:
        return {}
    out: dict[fx.Node, ShardLayout] = {}
    for weight in groups.weights:
        if (form := weight.form) is None:
            continue
        rows = sorted(r for group in form.groups for r in group if r >= 0)
        if rows == list(range(weight.node.meta["val"].shape[form.dim])):
            out.setdefault(weight.node, ShardLayout(scope.axis, form.dim, form.present))
    return out
