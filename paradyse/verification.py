"""``paradyse.verify``: every strategy against one device, on the user's own model and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paradyse.config import parse_options
from paradyse.distributed.axis import resolve_axis
from paradyse.passes.pipeline import OPTIONAL
from paradyse.planning.explain import VerifyReport, VerifyRow
from paradyse.runtime.registry import captures_of
from paradyse.types import ATTENTION_STRATEGIES, REPLICATED, Plan, Point, Workload
from paradyse.weights.shard import check_module

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative norm of a difference: strategies add up the same terms in another order. Half
precisions get 5e-2."""


def verify(
    model: torch.nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Compare loss and every gradient of every feasible strategy, and of mixtures, with eager.

    Runs ``model`` eagerly, whole, on every rank, then under the backend with each plan; dropout is
    off. Gradients and the training flag are restored. Call it on every rank with the same batch.

    Args:
        model: an uncompiled module whose output has ``.loss``.
        batch: keyword arguments of one call, labels included; [B, S] tensors.
        options: options of the backend other than ``plan``.
    Returns:
        For each plan the relative error of the loss and of the worst gradient, or why no block can
        run under the strategy.
    Raises:
        ValueError: an argument is wrong, or the output has no loss.
    """
    _check(model, batch, options)
    axis = resolve_axis((options or {}).get("mesh"))
    kept = {n: p.grad for n, p in model.named_parameters()}
    training = model.training
    model.eval()
    try:
        loss, grads = _step(model, model, batch)
        current: list[Any] = ["auto"]

        def plan(workload: Workload) -> Any:
            return current[0]

        given = {**(options or {}), "plan": plan}
        compiled = torch.compile(model, backend="paradyse", options=given)
        _step(compiled, model, batch)
        graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
        blocks = graphs[-1].blocks if graphs else ()
        rows = []
        plans = _plans(blocks) if axis.size > 1 and blocks else {"auto": "auto"}
        tolerance = TOLERANCES.get(next(model.parameters()).dtype, 5e-2)
        for name, planned in plans.items():
            if isinstance(planned, str) and planned != "auto":
                rows.append(VerifyRow(name, infeasible=planned, tolerance=tolerance))
                continue
            current[0] = planned
            got, got_grads = _step(compiled, model, batch)
            worst, error = worst_gradient(grads, got_grads)
            loss_error = abs(got - loss) / max(abs(loss), 1e-30)
            name = name if axis.size > 1 else REPLICATED
            rows.append(VerifyRow(name, loss_error, worst, error, "", tolerance))
        first = next(v for v in batch.values() if isinstance(v, Tensor))
        ranks = f"{axis.size} rank{'s' * (axis.size > 1)}"
        text = f"{type(model).__name__}, batch {list(first.shape)}, {ranks}"
        return VerifyReport(tuple(rows), text)
    finally:
        model.train(training)
        for n, p in model.named_parameters():
            p.grad = kept[n]


def _check(model: Any, batch: Any, options: Mapping[str, Any] | None) -> None:
    check_module(model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to verify")
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise ValueError(f"give the keyword arguments of one call as a dict, not {kind}")
    if not any(isinstance(x, Tensor) for x in batch.values()):
        raise ValueError("the batch has no tensor; give the keyword arguments of one call")
    parse_options(options, OPTIONAL)
    if "plan" in (options or {}):
        raise ValueError("options ['plan']: every strategy is verified as the plan; leave it out")


def _plans(blocks: Any) -> dict[str, Any]:
    """Plan name -> plan, or a text that says why it is infeasible."""
    plans: dict[str, Any] = {}
    for s in ATTENTION_STRATEGIES:
        reasons = [f"{b.name}: {b.infeasible[s]}" for b in blocks if s in b.infeasible]
        if len(reasons) == len(blocks):
            plans[s] = reasons[0]
        else:
            names = tuple(b.feasible()[0] if s in b.infeasible else s for b in blocks)
            plans[f"{s} where feasible" if reasons else s] = Plan(names)
    plans["mixed"] = Plan(tuple(b.feasible()[i % len(b.feasible())] for i, b in enumerate(blocks)))
    levered = [[p for p in b.points() if Point.parse(p).levers] for b in blocks]
    if all(levered):
        points = tuple(of[i % len(of)] for i, of in enumerate(levered))
        plans["mixed, with levers"] = Plan(points)
    return plans


def _step(
    call: Any, model: torch.nn.Module, batch: Mapping[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    out = call(**batch)
    loss = getattr(out, "loss", None)
    if loss is None:
        raise ValueError("the model returned no loss; put labels into the batch")
    loss.backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def worst_gradient(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient in ``got`` is furthest from that in ``want``, and by how much,
    in relative norm; not a number is further than any.

    A gradient that is mathematically zero (a key bias) is compared with the norm of the whole
    gradient.
    """
    if want.keys() != got.keys():
        missing = sorted(want.keys() ^ got.keys())
        return f"{missing[0]} (in one only)", float("inf")
    whole = torch.stack([g.double().norm() for g in want.values()]).norm().item()
    errors = {}
    for name, g in want.items():
        norm = g.double().norm().item()
        scale = whole if norm < 1e-6 * whole else norm
        errors[name] = (got[name].double() - g.double()).norm().item() / max(scale, 1e-30)
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return worst, errors[worst]
