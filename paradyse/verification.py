"""``paradyse.verify``: every strategy against one device, on the user's own model and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradyse.config import AUTO, parse_options
from paradyse.distributed.axis import resolve_axis
from paradyse.passes.pipeline import OPTIONAL
from paradyse.planning.alone import OTHER_BLOCKS
from paradyse.planning.tables import Rows, Shown, rich_table, text_table
from paradyse.runtime.registry import captures_of
from paradyse.torch_private import compiled_call_of, original_module
from paradyse.types import ATTENTION_STRATEGIES, BATCH, REPLICATED, Plan, Point, Workload
from paradyse.weights.shard import check_module, is_sharded

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative norm of a difference: strategies add up the same terms in another order. Half
precisions get 5e-2."""


ALONG_BATCH = f"split along {BATCH}"
"""Name of the plan under which each rank computes its own sequences."""


@dataclass(frozen=True)
class VerifyRow:
    """One plan against one-device eager."""

    plan: str
    """A strategy's name, ``mixed``, or ``split along batch``."""
    loss_error: float | None = None
    """|loss - reference| / |reference|; None where the plan cannot run."""
    worst_gradient: str = ""
    """The parameter whose gradient is furthest off."""
    gradient_error: float | None = None
    """Its distance from the reference, in relative norm."""
    infeasible: str = ""
    """Why the plan cannot run on this model."""
    tolerance: float = 1e-4
    """What both errors may be at most."""

    @property
    def ok(self) -> bool:
        """Within the tolerance. A plan that cannot run is not wrong."""
        errors = (self.loss_error, self.gradient_error)
        return bool(self.infeasible) or all(e is not None and e <= self.tolerance for e in errors)


@dataclass(frozen=True)
class VerifyReport(Shown):
    """Every feasible strategy and a mixed plan against one-device eager, as ``paradyse.verify``
    gives it.

    Errors are relative, so without a unit. ``str()`` is a table; reading it never raises.

    Example:

        report = paradyse.verify(model, batch)
        for row in report.rows:
            print(row.plan, row.loss_error, row.gradient_error, row.infeasible)
        assert report.ok, str(report)
    """

    rows: tuple[VerifyRow, ...]
    description: str = ""
    """Of model, batch, dtype and ranks."""

    @property
    def ok(self) -> bool:
        """At least one plan ran, and all that ran agree with the reference."""
        return any(not r.infeasible for r in self.rows) and all(r.ok for r in self.rows)

    def _table(self) -> tuple[str, tuple[str, ...], Rows]:
        rows: Rows = []
        for r in self.rows:
            if r.infeasible:
                rows.append((r.plan, "-", "-", "", f"infeasible: {r.infeasible}"))
                continue
            loss, grad = (
                "-" if e is None else f"{e:.1e}" for e in (r.loss_error, r.gradient_error)
            )
            verdict = "ok" if r.ok else f"WRONG: over {r.tolerance:.0e}"
            rows.append((r.plan, loss, grad, r.worst_gradient, verdict))
        title = f"against one-device eager: {self.description}".removesuffix(": ")
        return title, ("plan", "loss error", "gradient error", "worst gradient", "result"), rows

    def __str__(self) -> str:
        title, header, rows = self._table()
        return f"{title}\n{text_table(header, rows)}\n{'ok' if self.ok else 'FAILED'}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        style = "green" if self.ok else "bold red"
        return Group(rich_table(*self._table()), Text("ok" if self.ok else "FAILED", style))


def verify(
    model: torch.nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Compare loss and every gradient of every feasible strategy, and of mixtures, with eager.

    Runs ``model`` eagerly, whole, on every rank, then under the backend with each plan; dropout is
    off. Gradients and the mode of each module are restored. Call it on every rank with the same
    batch.

    Args:
        model: a module whose output has ``.loss``, with whole weights: before ``paradyse.shard``,
            or a copy of it from then; of what ``torch.compile`` returned, its own.
        batch: keyword arguments of one call, labels included; [B, S] tensors.
        options: options of the backend other than ``plan``.
    Returns:
        For each plan the relative error of the loss and of the worst gradient, or why no block can
        run under the strategy.
    Raises:
        ValueError: an argument is wrong, the model is sharded, or the output has no loss.

    Example:

        ids = torch.randint(64, (2, 32))  # [B, S]
        report = paradyse.verify(model, {"input_ids": ids, "labels": ids})
        assert report.ok, str(report)
    """
    model = original_module(model)
    _check(model, batch, options)
    axis = resolve_axis((options or {}).get("mesh"))
    kept = {n: p.grad for n, p in model.named_parameters()}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        loss, grads = _step(model, model, batch)
        current: list[Any] = [AUTO]

        def plan(workload: Workload) -> Any:
            return current[0]

        given = {**(options or {}), "plan": plan}
        compiled = torch.compile(model, backend="paradyse", options=given)
        _step(compiled, model, batch)
        graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
        blocks = graphs[-1].blocks if graphs else ()
        rows = []
        plans: dict[str, Any] = {AUTO: AUTO}
        if axis.size > 1 and blocks:
            plans = _plans(blocks) | {ALONG_BATCH: _along_batch(graphs[-1])}
            plans[REPLICATED] = _alone(graphs[-1])
        tolerance = TOLERANCES.get(next(model.parameters()).dtype, 5e-2)
        for name, planned in plans.items():
            if isinstance(planned, str) and planned != AUTO:
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
        for module, training in modes.items():
            module.training = training
        for n, p in model.named_parameters():
            p.grad = kept[n]


def _check(model: Any, batch: Any, options: Mapping[str, Any] | None) -> None:
    check_module(model)
    if compiled_call_of(model) is not None:
        raise ValueError("model.compile() was called: verify the model before, or a copy of it")
    if is_sharded(model):
        raise ValueError(
            "the model is sharded, and one device computes with whole weights: verify the plain "
            "model, before paradyse.shard, or a copy of it"
        )
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


def _along_batch(graph: Any) -> Plan | str:
    """A plan under which each rank computes its own sequences, or why there is none."""
    described = graph.describe(BATCH)
    if isinstance(described, str):
        return described
    each = [b.feasible()[:2] for b in described[0]]
    return Plan(tuple(of[i % len(of)] for i, of in enumerate(each)), split=BATCH)


def _alone(graph: Any) -> Plan | str:
    """The plan under which every rank computes the whole ``graph``, or why it cannot."""
    if refused := graph.choice.alone.refused:
        return str(refused)
    return OTHER_BLOCKS if graph.alone is None else Plan((REPLICATED,) * len(graph.blocks))


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
