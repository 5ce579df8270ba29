"""Rules of the operators that deal tokens to experts (``paradyse.kernels.expert_rows``).

Factor maps are as in ``rules``. Each of them mixes rows, as it depends on the experts of all of
them. Together they need not: rows keep the name of their dim while they are in the order of
experts, and each rank may sort its own alone as long as nothing sees that order
(``passes.expert_regions``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import paradyse.kernels.expert_rows  # noqa: F401  registers the operators
from paradyse.graph.factors import Names, rule
from paradyse.graph.rules import factor_map

ROUTE_ROWS = torch.ops.paradyse.route_rows.default
TAKE_ROWS = torch.ops.paradyse.take_rows.default
GROUPED_MM = torch.ops.paradyse.grouped_mm.default

ROWS = {ROUTE_ROWS, TAKE_ROWS, GROUPED_MM}
"""All of them."""

IN_ORDER, ORDER, INVERSE, ENDS = range(4)
"""What ``ROUTE_ROWS`` gives."""

rule(GROUPED_MM)(factor_map("x[n, i], w[e, i, o], ends[e] -> [n, o]; mixes n, e, i"))


@rule(ROUTE_ROWS)
def route_rows(names: Names, node: fx.Node) -> Any:
    """``ids[n] -> [n], [n], [n], [new]; mixes n``"""
    (rows,) = names.of(node.args[0])
    names.mix(node, rows)
    return [[rows], [rows], [rows], names.fresh([node.args[1]])]


@rule(TAKE_ROWS)
def take_rows(names: Names, node: fx.Node) -> Any:
    """``x[t, ...], order[t k], inverse[t k] -> [t k, ...]; mixes t, k``, where each row is taken k
    times."""
    x, order, inverse, repeats = node.args
    dims, (rows,) = names.of(x), names.of(order)
    names.unify_at(node, rows, names.of(inverse)[0])
    names.unify_at(node, (*dims[0], *names.fresh([repeats])[0]), rows)
    names.mix(node, rows)
    return [names.of(order)[0], *dims[1:]]
