"""Pure bfloat16 and autocast with sharded weights: no further from float64 than one process is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, norm_of, relative, whole
from torch import Tensor

from paradyse.runtime.frame import Frame
from paradyse.types import ATTENTION_STRATEGIES, BATCH
from paradyse.weights.sharded_tensor import rows_here
from paradyse.weights.unshard import Gathered

WHOLE, EACH = 1.5, 2.0
"""Largest ratio of errors, ours to one process's: of all parameters together, and of any one.

Spreading the work adds a rounding to what is summed over ranks: the rank's part is rounded, then
the sum. Twice as many independent roundings are sqrt(2) times the error in norm (measured: 1.2);
in a single small parameter, such as a bias, they need not be independent (measured: 1.7).
"""
LOSS = 2**-8
"""A rounding to the 8 bits of bfloat16."""


@dataclass(frozen=True)
class Training:
    """A few steps of AdamW."""

    losses: list[float]
    grads: Mapping[str, Tensor]
    """Of the first step."""
    weights: Mapping[str, Tensor]
    dtypes: Mapping[str, Any]
    """Per parameter the dtype of its gradient, and of everything that AdamW keeps for it."""


def train(model: Any, call: Any, autocast: bool) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for i in range(2):
        optimizer.zero_grad()
        how = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with how:
            loss = call(**make_batch("plain", 2, 29 + 4 * i)).loss
        loss.backward()
        losses.append(loss.item())
        grads = grads or {n: whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    dtypes = {
        n: (p.grad.dtype, {k: x.dtype for k, x in optimizer.state[p].items()})
        for n, p in model.named_parameters()
    }
    return Training(losses, grads, {n: whole(p) for n, p in model.named_parameters()}, dtypes)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return norm_of([a[n].double() - x for n, x in b.items()])


def compare(
    family: str, kind: str, inner: str, plans: tuple[Any, ...]
) -> list[tuple[Any, dict[str, float]]]:
    """(plan, what -> its error over one process's error)."""
    import paradyse

    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    autocast = kind == "autocast"
    exact = train(model := make_model(family, dtype).double(), model, False)
    alone = train(model := make_model(family, dtype), model, autocast)
    assert distance(alone.grads, exact.grads) > 1e-3 * norm_of(list(exact.grads.values()))
    found = []
    for plan in plans:
        torch._dynamo.reset()
        model = paradyse.shard(make_model(family, dtype))
        options = {"plan": plan, "inner": inner}
        got = train(model, torch.compile(model, backend="paradyse", options=options), autocast)
        assert got.dtypes == alone.dtypes
        ratios = {
            "gradients": distance(got.grads, exact.grads) / distance(alone.grads, exact.grads),
            "weights": distance(got.weights, exact.weights)
            / distance(alone.weights, exact.weights),
        }
        for name, grad in exact.grads.items():
            ratios[name] = relative(got.grads[name], grad) / relative(alone.grads[name], grad)
        for i, (a, b) in enumerate(zip(got.losses, exact.losses, strict=True)):
            ratios[f"loss {i}"] = abs(a / b - 1) / LOSS
        found.append((plan, ratios))
    return found


def bound(what: str) -> float:
    return 1.0 if what.startswith("loss") else WHOLE if what in ("gradients", "weights") else EACH


BY_SEQUENCES = (
    {"attention": "megatron_cz", "mlp": "megatron_cz", "split": BATCH},
    {"attention": "megatron_ts", "mlp": "metp", "split": BATCH},
)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "family", "kind", "inner", "plans"),
    [
        pytest.param(
            *(2, "llama", "bfloat16", "eager", ("ulysses_z", "metp")), marks=pytest.mark.slow
        ),
        (2, "llama_odd", "autocast", "eager", ("megatron_cz",)),
        pytest.param(
            *(2, "llama_odd", "autocast", "eager", BY_SEQUENCES[:1]), marks=pytest.mark.slow
        ),
        pytest.param(
            *(2, "llama_odd", "autocast", "aot_eager", BY_SEQUENCES), marks=pytest.mark.slow
        ),
        pytest.param(*(2, "llama_odd", "bfloat16", "eager", BY_SEQUENCES), marks=pytest.mark.slow),
        pytest.param(
            *(2, "llama", "bfloat16", "eager", ATTENTION_STRATEGIES), marks=pytest.mark.slow
        ),
        pytest.param(
            *(2, "llama_odd", "autocast", "eager", ATTENTION_STRATEGIES), marks=pytest.mark.slow
        ),
        pytest.param(*(3, "llama_odd", "bfloat16", "aot_eager", ("metp",)), marks=pytest.mark.slow),
    ],
)
def test_precision(
    nproc: int,
    family: str,
    kind: str,
    inner: str,
    plans: tuple[Any, ...],
    ranks: Callable[[int], RankPool],
) -> None:
    for found in ranks(nproc).run(compare, family, kind, inner, plans, timeout_s=300):
        wrong = [(p, w, r) for p, ratios in found for w, r in ratios.items() if not r <= bound(w)]
        assert len(found) == len(plans) and not wrong


@dataclass(frozen=True)
class Moved:
    """What one training step sent, and the most that was left of whole weights and of their whole
    gradients when a block was done, in forward and in backward."""

    gathered: int
    scattered: int
    forward: int
    backward: int


def shaped_as_weights(model: torch.nn.Module) -> dict[int, int]:
    """Address and bytes of all plain tensors in this process that have the shape of a weight of
    ``model``, and not of the rows of any."""
    gc.collect()
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    shapes -= {tuple(rows_here(p).shape) for p in model.parameters()}
    shaped = (x for x in gc.get_objects() if type(x) is Tensor and tuple(x.shape) in shapes)
    storages = (x.untyped_storage() for x in shaped)
    return {s.data_ptr(): s.nbytes() for s in storages}


def move(autocast: bool, inner: str) -> tuple[Moved, int]:
    """On one rank; and bytes that it holds of the weights of linears."""
    import paradyse

    model = paradyse.shard(make_model("llama", num_hidden_layers=2))
    options = {"plan": "megatron_cz", "inner": inner}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 16)
    before = shaped_as_weights(model)
    left: dict[str, list[int]] = {"forward": [], "backward": []}
    run_step, fill = Frame.run_step, Gathered.fill

    def note(when: str) -> None:
        left[when].append(sum(n for at, n in shaped_as_weights(model).items() if at not in before))

    def run(frame: Frame, *args: Any) -> None:
        run_step(frame, *args)
        note("forward")

    def begin_backward(gathered: Gathered) -> None:
        note("backward")
        fill(gathered)

    with patch.object(Frame, "run_step", run), patch.object(Gathered, "fill", begin_backward):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compiled(**batch).loss
        loss.backward()
    assert all(len(seen) >= 5 for seen in left.values())
    sent = paradyse.stats(compiled).bytes_per_collective
    linears = (m.weight for m in model.modules() if isinstance(m, torch.nn.Linear))
    most = {when: max(seen) for when, seen in left.items()}
    moved = Moved(sent["all_gather"], sent["reduce_scatter"], **most)
    return moved, sum(rows_here(w).nbytes for w in linears)


def move_both(inner: str) -> list[tuple[Moved, int]]:
    found = []
    for autocast in (False, True):
        torch._dynamo.reset()
        found.append(move(autocast, inner))
    return found


@pytest.mark.broad
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_casts_are_made_before_weights_are_gathered(inner: str, pool2: RankPool) -> None:
    """Whole weights travel, and lie, in the dtype that the step computes in."""
    for (full, linears), (half, _) in pool2.run(move_both, inner, timeout_s=200):
        assert full.gathered - half.gathered == linears  # a half, in forward and in backward
        assert full.scattered - half.scattered == linears // 2
        for moved in (full, half):
            assert moved.forward == moved.backward == 0
