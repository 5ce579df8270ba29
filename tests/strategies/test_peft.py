"""Low-rank adapters of peft on a frozen base, with replicated and with sharded weights."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import TOLERANCE, check, make_batch, make_model, norm_of, relative, run_step, worst
from plans import PLANS, Blocks, blocks_of, choose
from torch import Tensor

from paradyse.types import ATTENTION_STRATEGIES

SOME = ["v_proj", "o_proj", "down_proj"]
GROUPED = ("megatron_ts", "metp")
"""Strategies that take a fused projection apart, after its adapter is added."""


def with_adapters(model: Any, **config: Any) -> Any:
    """``model`` with adapters of rank 4 that all matter: peft draws B as zeros."""
    import peft

    config = {"target_modules": "all-linear", **config}
    with warnings.catch_warnings():
        # peft asks transformers by an old name, and warns of Conv1D where it needs no argument
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **config))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) * 0.12)
    return adapted


def compare_plans(
    family: str, config: dict[str, Any], sharded: bool, inner: str, plans: tuple[str, ...]
) -> tuple[list[tuple[str, float, str]], Blocks]:
    """Errors of every plan against one process; the blocks with what they refuse."""
    import paradyse

    reference = model = with_adapters(make_model(family), **config)
    if sharded:
        model = paradyse.shard(with_adapters(make_model(family), **config))
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": inner}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("left", 2, 13)
    want = run_step(reference, reference, batch)
    assert want.grads.keys() == {n for n, _ in model.named_parameters() if "lora_" in n}
    torch._dynamo.utils.counters.clear()
    run_step(compiled, model, batch)
    assert not torch._dynamo.utils.counters["graph_break"]
    blocks = blocks_of(compiled)
    rows = []
    for name in plans:
        current[0] = choose(name, blocks)
        rows.append((name, *worst(run_step(compiled, model, batch), want)))
    assert paradyse.stats(compiled).captures == 1
    return rows, [(b.kind, dict(b.infeasible)) for b in blocks]


@pytest.mark.broad(but="1-llama-config0-False-eager-plans0")
@pytest.mark.parametrize(
    ("nproc", "family", "config", "sharded", "inner", "plans"),
    [
        (1, "llama", {}, False, "eager", ("mixed 0",)),
        pytest.param(
            *(2, "llama", {}, True, "aot_eager", ("megatron_ts", "metp")), marks=pytest.mark.slow
        ),
        (2, "llama_odd", {"lora_bias": True, "use_rslora": True}, True, "eager", PLANS),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (3, "llama", {"target_modules": SOME}, True, "eager", (*GROUPED, "mixed 1")),
                (2, "gpt2", {}, False, "eager", GROUPED),
                (2, "phi3", {}, True, "eager", GROUPED),
            )
        ),
    ],
)
def test_exact(
    nproc: int,
    family: str,
    config: dict[str, Any],
    sharded: bool,
    inner: str,
    plans: tuple[str, ...],
    ranks: Callable[[int], RankPool],
) -> None:
    """Loss and gradients equal one process's under every strategy, in one graph, none refused."""
    args = (family, config, sharded, inner, plans)
    for rows, blocks in ranks(nproc).run(compare_plans, *args, timeout_s=300):
        wrong = [row for row in rows if not row[1] <= TOLERANCE[torch.float32]]
        assert len(rows) == len(plans) and not wrong
        assert blocks == [("attention", {}), ("mlp", {})] * 2


def _adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def _train(model: Any, call: Any, optimizer: Any) -> None:
    for i in range(4):
        optimizer.zero_grad()
        call(**make_batch("plain", 2, 9 + 4 * i)).loss.backward()
        optimizer.step()


def train(order: str) -> None:
    import peft
    from safetensors.torch import load_file

    import paradyse

    reference = with_adapters(make_model("llama"))
    _train(reference, reference, _adamw(reference))
    if order == "adapters first":
        model = paradyse.shard(with_adapters(make_model("llama")))
    else:
        model = with_adapters(paradyse.shard(make_model("llama")))
    before = {n: x.clone() for n, x in paradyse.full_state_dict(model).items()}
    optimizer, plans = _adamw(model), iter(ATTENTION_STRATEGIES * 2)
    options = {"plan": lambda workload: next(plans), "inner": "eager"}
    _train(model, torch.compile(model, backend="paradyse", options=options), optimizer)

    held = [x for s in optimizer.state.values() for x in s.values() if x.ndim]
    adapters = [p for p in reference.parameters() if p.requires_grad]
    assert len(held) == 2 * len(adapters)
    share = sum(getattr(x, "local", x).numel() for x in held) / sum(p.numel() for p in adapters)
    assert share == (2.0 if order == "base first" else pytest.approx(1.0, rel=0.1))  # two moments
    after = paradyse.full_state_dict(model)
    for name, weight in reference.state_dict().items():
        assert torch.equal(before[name], after[name]) == ("lora_" not in name), name
        assert relative(after[name], weight) <= TOLERANCE[torch.float32]
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)

    want = peft.get_peft_model_state_dict(reference)
    mine = peft.get_peft_model_state_dict(model, state_dict=after)
    assert mine.keys() == want.keys()
    state, is_main = paradyse.full_state_dict(model, cpu=True, rank0_only=True), not dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state, is_main_process=is_main)
        if is_main:
            saved = load_file(Path(folder) / "adapter_model.safetensors")
            assert all(torch.equal(saved[n], mine[n]) for n in want)
        else:
            assert not list(Path(folder).iterdir())
    redraw = {n: torch.full_like(w, 0.5) for n, w in mine.items()}
    peft.set_peft_model_state_dict(model, redraw)
    found = peft.get_peft_model_state_dict(model, state_dict=paradyse.full_state_dict(model))
    assert all(torch.equal(found[n], redraw[n]) for n in redraw)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["adapters first", "base first"])
def test_training(order: str, pool2: RankPool) -> None:
    """Adapters equal one process's; the base stays as it was, and only adapters have state."""
    pool2.run(train, order, timeout_s=200)


def steps_with_dropout(plans: tuple[str, ...], sharded: bool) -> list[Any]:
    import paradyse

    model = with_adapters(make_model("llama"), lora_dropout=0.25)
    if sharded:
        model = paradyse.shard(model)
    current = list(plans[:1])
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch, steps = make_batch("left", 3, 13), []
    for current[0] in plans:
        torch.manual_seed(5)
        steps.append(run_step(compiled, model, batch))
    torch.manual_seed(6)
    assert abs(run_step(compiled, model, batch).loss / steps[-1].loss - 1) > 1e-4
    return steps


@pytest.mark.slow
def test_dropout_of_adapters(pool1: RankPool, pool2: RankPool) -> None:
    """The same elements are dropped on one rank and on two, whatever the strategy."""
    ((want,),) = pool1.run(steps_with_dropout, ("megatron_cz",), False, timeout_s=100)
    for steps in pool2.run(steps_with_dropout, ATTENTION_STRATEGIES, True, timeout_s=200):
        for plan, got in zip(ATTENTION_STRATEGIES, steps, strict=True):
            check(got, want, what=plan)


def half_precision_base() -> list[tuple[str, float, float]]:
    """(plan, its error, one process's error) of the gradients, against float64."""
    import paradyse

    def gradients(call: Any, model: Any) -> dict[str, Tensor]:
        return dict(run_step(call, model, make_batch("plain", 2, 29)).grads)

    def error(got: dict[str, Tensor]) -> float:
        off = [got[n].double() - g for n, g in exact.items()]
        return norm_of(off) / norm_of(list(exact.values()))

    reference = with_adapters(make_model("llama", torch.bfloat16))
    one = gradients(reference, reference)
    assert {g.dtype for g in one.values()} == {torch.float32}
    exact = gradients(reference.double(), reference)
    model = paradyse.shard(with_adapters(make_model("llama", torch.bfloat16)))
    current, found = [""], []
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for current[0] in ATTENTION_STRATEGIES:
        got = gradients(compiled, model)
        assert {g.dtype for g in got.values()} == {torch.float32}
        found.append((current[0], error(got), error(one)))
    return found


@pytest.mark.slow
def test_float32_adapters_of_a_bfloat16_base(pool2: RankPool) -> None:
    """As ``test_shard_precision`` has it; casts stand between the projections and adapters."""
    for found in pool2.run(half_precision_base, timeout_s=200):
        for plan, error, alone in found:
            assert 1e-3 < error <= 1.5 * alone, plan
