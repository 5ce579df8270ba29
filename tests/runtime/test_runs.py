"""Runs: blocks in a row as one compiled piece, when their plan is used often, and exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step
from written_out import BY_HAND, HUGGING_FACE, make

from paradyse.passes.split_steps import BlockStep
from paradyse.runtime import runs
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.registry import captures_of
from paradyse.runtime.runs import Run
from paradyse.types import Plan
from paradyse.weights import gradients

LAYERS = 3
"""Blocks of one whole run and of a shorter one."""

SMALL: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "head_dim": 8,
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs are of two layers, and compiled at the second call of a plan."""
    monkeypatch.setattr(runs, "FUSE_AFTER", 1)
    monkeypatch.setattr(runs, "RUN_BLOCKS", 4)
    yield
    torch._dynamo.reset()


def compiled_of(model: Any, inner: str = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"inner": inner, **options}
    return torch.compile(model, backend="paradyse", dynamic=True, options=options)


def programs_of(compiled: Any) -> list[Any]:
    return [g.program for c in captures_of(compiled) for g in c.graphs.values()]


def units_of(
    compiled: Any, plan: str | Plan = "replicated", sums: Iterable[int] = ()
) -> list[list[str]]:
    """Labels of the blocks of each unit that has blocks, as a call of 13 tokens would run them,
    which sends gradients after the backward of the blocks ``sums``."""
    (program,) = programs_of(compiled)
    num_blocks = len(program.block_steps)
    strategies = plan.strategies if isinstance(plan, Plan) else (plan,) * num_blocks
    sizes = {"B": 2, "S": 13, "s": 7}
    at = frozenset(program.block_steps[i].position for i in sums)
    units = program.runs.units(strategies, sizes, at)
    steps = [u.steps if isinstance(u, Run) else [u] for u in units]
    assert [s for unit in steps for s in unit] == list(program.steps)
    return [[s.block.label for s in unit] for unit in steps if isinstance(unit[0], BlockStep)]


def compiled_nodes(loss: torch.Tensor) -> int:
    """Compiled regions that backward from ``loss`` runs."""
    found, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [n for n, _ in node.next_functions]
    return sum("CompiledFunction" in n.name() for n in found)


def test_plans_are_counted_each_by_itself() -> None:
    uses = runs.Uses()
    plans = [Plan((name,) * 2) for name in ("metp", "ulysses_z", "metp", "metp", "ulysses_z")]
    assert [uses.add(plan) for plan in plans] == [False, False, True, True, True]


@pytest.mark.slow
def test_a_region_for_eight_blocks_after_some_calls_and_none_for_long_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama", **SMALL)
    reference, compiled = copy.deepcopy(model), compiled_of(model)
    monkeypatch.setattr(runs, "FUSED_TOKENS", 60)
    counts = []
    for seq_len in (13, 17, 31):  # of two sequences: 31 are too long
        batch = make_batch("plain", 2, seq_len)
        counts.append(compiled_nodes(compiled(**batch).loss))
        check(run_step(compiled, model, batch), run_step(reference, reference, batch))
    alone = counts[0]
    assert alone > 2 * LAYERS
    assert counts == [alone, alone - 2 * LAYERS + 2, alone]


@pytest.mark.broad
def test_new_lengths_compile_nothing_and_layers_share_a_run() -> None:
    from paradyse.strategies.base import VariantCache

    model = make_model("llama", **SMALL | {"num_hidden_layers": 4, "hidden_size": 48})
    compiled = compiled_of(model)
    compiled(**make_batch("plain", 2, 13)).loss.backward()
    (program,) = programs_of(compiled)
    cache = program.axis.session.of(VariantCache)
    before = cache.num_compiled
    compiled(**make_batch("plain", 2, 13)).loss.backward()
    assert cache.num_compiled == before + 1  # two runs of two layers are one function
    for seq_len in (5, 64):
        compiled(**make_batch("plain", 2, seq_len)).loss.backward()
    assert cache.num_compiled == before + 1
    assert [len(u) for u in units_of(compiled)] == [4, 4]


@pytest.mark.broad
def test_no_gradients_are_sent_inside_a_run() -> None:
    compiled = compiled_of(make_model("llama", **SMALL))
    compiled(**make_batch("plain", 2, 13))
    assert [len(u) for u in units_of(compiled)] == [4, 2]
    assert [len(u) for u in units_of(compiled, sums=[0, 4])] == [4, 2]
    assert [len(u) for u in units_of(compiled, sums=[0, 1, 3])] == [1, 2, 3]


def summed_in_parts() -> tuple[list[int], list[list[int]]]:
    """Of calls that send gradients in parts: the positions of the steps after whose backward they
    do, and of the steps of each run."""
    runs.FUSE_AFTER, after = 0, runs.FUSE_AFTER
    try:
        model = make_model("llama", **SMALL)
        reference, compiled = copy.deepcopy(model), compiled_of(model, plan="ulysses_z")
        batch = make_batch("plain", 2, 13)
        want = run_step(reference, reference, batch)
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        with patch.object(gradients, "TOGETHER_BYTES", layer):
            check(run_step(compiled, model, batch), want)
        (program,) = programs_of(compiled)
        ((_, sums, _), units) = next(iter(program.runs._units.items()))
        of_runs = [[s.position for s in u.steps] for u in units if isinstance(u, Run)]
        return sorted(sums), of_runs
    finally:
        runs.FUSE_AFTER = after
        torch._dynamo.reset()


@pytest.mark.broad
def test_runs_of_a_call_end_where_its_gradients_are_sent(pool2: RankPool) -> None:
    for sums, of_runs in pool2.run(summed_in_parts, timeout_s=120):
        assert len(sums) >= LAYERS and len(of_runs) >= LAYERS - 1
        assert not {*sums} & {position for run in of_runs for position in run[1:]}


@pytest.mark.broad
def test_who_watches_blocks_sees_each_of_them() -> None:
    seen: list[int] = []

    class Watched(Frame):
        fuses = False

        def run_step(self, step: Any, strategy: str) -> None:
            super().run_step(step, strategy)
            seen.append(step.position)

    compiled, batch = compiled_of(make_model("llama", **SMALL)), make_batch("plain", 2, 13)
    for _ in range(3):
        compiled(**batch)
    with frames_by(Watched):
        compiled(**batch)
    (program,) = programs_of(compiled)
    assert seen == [s.position for s in program.steps]


@pytest.mark.broad
def test_dropout_and_values_of_the_inside_are_those_of_single_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drops = {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2}
    model = make_model("gpt2", torch.float64, use_cache=True, **drops).train()
    compiled, ids = compiled_of(model), make_batch("plain", 2, 13)["input_ids"]
    found = []
    for calls in (10**9, 0):
        monkeypatch.setattr(runs, "FUSE_AFTER", calls)
        torch.manual_seed(3)
        out = compiled(input_ids=ids)
        keys = [layer.keys for layer in out.past_key_values.layers]
        model.zero_grad()
        loss = out.logits.square().mean() + sum(k.square().mean() for k in keys)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append([loss.detach(), *(k.detach() for k in keys), *grads])
    assert len(units_of(compiled)) == 1
    for single, together in zip(*found, strict=True):
        torch.testing.assert_close(together, single, rtol=1e-9, atol=1e-12)


def train_on_ranks() -> tuple[list[list[str]], ...]:
    """Blocks of each unit under each plan, where steps were compared with one process."""
    plan = Plan(("megatron_ts", "megatron_cz", "ulysses_z", "megatron_ts"))
    compiled, (used,) = trained([plan], sharded=False)
    assert any(len(unit) > 1 for unit in used)
    plans = "megatron_cz", "megatron_ts", "metp", "megatron_cz+recompute"
    return *(units_of(compiled, name) for name in plans), units_of(compiled, plan)


def trained(plans: Iterable[Plan], sharded: bool) -> tuple[Any, list[list[list[int]]]]:
    """A compiled model of two layers, whose steps were compared with those of one process, and
    under each of ``plans`` the blocks of each unit that was run."""
    import paradyse

    config = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 4, "use_cache": True}
    runs.FUSE_AFTER, after = 0, runs.FUSE_AFTER
    try:
        model = make_model("llama", torch.float64, **config)
        reference = copy.deepcopy(model)
        if sharded:
            paradyse.shard(model)
        current: list[Plan] = []
        compiled = compiled_of(model, plan=lambda workload: current[-1])
        found = []
        for plan in plans:
            current.append(plan)
            for seq_len in (9, 14):
                batch = make_batch("plain", 2, seq_len)
                want = run_step(reference, reference, batch)
                check(run_step(compiled, model, batch), want, torch.float64, f"{plan} {seq_len}")
            (program,) = programs_of(compiled)
            units = list(program.runs._units.values())[-1]
            ran = [u for u in units if isinstance(u, Run)]
            assert all(run._fused is not None for run in ran)
            of_unit = [u.steps if isinstance(u, Run) else [u] for u in units]
            blocks = [[s.index for s in unit if isinstance(s, BlockStep)] for unit in of_unit]
            found.append([index for index in blocks if index])
        return compiled, found
    finally:
        runs.FUSE_AFTER = after
        torch._dynamo.reset()


def test_ranks_agree_with_one_process(pool2: RankPool) -> None:
    for found in pool2.run(train_on_ranks, timeout_s=300):
        assert [[len(u) for u in units] for units in found] == [
            [4],
            [4],
            [1, 1, 1, 1],  # one group of heads after the other
            [1, 1, 1, 1],  # levers
            [2, 2],  # where the strategy of a kind changes
        ]


SHARDED = {
    Plan(("megatron_ts",) * 4): [[0, 1, 2, 3]],
    Plan(("megatron_cz", "megatron_ts", "megatron_ts", "ulysses_z")): [[0], [1, 2], [3]],
    Plan(("megatron_ts", "megatron_ts", "metp", "metp")): [[0, 1], [2], [3]],
    Plan(("megatron_cz",) * 4): [[0], [1], [2], [3]],
}
"""Blocks of each unit of sharded weights: what gathers none runs together."""


def train_sharded() -> list[list[list[int]]]:
    return trained(SHARDED, sharded=True)[1]


@pytest.mark.broad
@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_of_sharded_weights_run_together_where_they_gather_none(
    nproc: int, ranks: Callable[[int], RankPool]
) -> None:
    for found in ranks(nproc).run(train_sharded, timeout_s=300):
        assert found == list(SHARDED.values())


QUICK = ("sunk", "alibi")


@pytest.mark.broad(but="sunk")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*BY_HAND, *HUGGING_FACE)
    ],
)
def test_attention_of_any_kind_is_that_of_single_blocks(name: str) -> None:
    """On one rank, where a run takes PyTorch's own kernel for what is plain, and nothing else."""
    # HuggingFace's compute scores, biases or experts in float32 whatever the weights have.
    dtype = torch.float64 if name in BY_HAND else torch.float32
    model, batch = make(name).to(dtype), make_batch("plain", 2, 13)

    def loss_of(out: Any) -> Any:
        return out if isinstance(out, torch.Tensor) else out.loss

    want = run_step(model, model, batch, loss_of)
    compiled = compiled_of(model)
    for _ in range(3):
        check(run_step(compiled, model, batch, loss_of), want, dtype, name)
    # Experts that look at how many tokens they have make a model several graphs.
    assert any(program.runs._units for program in programs_of(compiled))
