"""Models whose tokens have several dims, with attention over one of them in turn: exact under every
strategy, and what switches of the split send."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import space_time
import torch
from harness import RankPool
from plans import blocks_of, choose

from paradyse.planning.costs import Machine
from paradyse.planning.prior import prior_cost
from paradyse.types import DSP, BlockSpec, MaskSpec, Workload

TOLERANCE = 1e-9
"""Relative, in float64; as DESIGN's first invariant."""

SIZES = [(2, 5, 7), (3, 9, 4), (2, 3, 2), (2, 13, 6)]
"""Batch, time and space: odd ones, and fewer than there are ranks."""


def train(
    plans: tuple[str, ...], sizes: list[Any], how: str, sharded: bool, inner: str
) -> tuple[dict[str, str], Any]:
    """What is further off than the tolerance; programs, blocks and notes."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"causal": how == "causal", "places": 7 if how == "places" else 0}
    reference = space_time.SpaceTime(**options).double()
    model = copy.deepcopy(reference)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    given = {"plan": lambda workload: current[0], "inner": inner}
    compiled = torch.compile(model, backend="paradyse", options=given)
    off: dict[str, str] = {}
    for size in sizes:
        batch = space_time.cells(*size)
        reference.zero_grad()
        want = reference(*batch)
        want.backward()
        for name in plans:
            model.zero_grad()
            got = compiled(*batch)
            got.backward()
            worst = max(space_time.errors(model, got, reference, want))
            if not worst[0] <= TOLERANCE:
                off[f"{size} {current[0]}"] = str(worst)
            current[0] = choose(name, blocks_of(compiled))
    captures = list(captures_of(compiled))
    num = len(list(captures_of(compiled, whole=True))) + sum(len(c.graphs) for c in captures)
    blocks = [(b.kind, b.over, b.switch, sorted(b.infeasible)) for b in blocks_of(compiled)]
    return off, (num, blocks, [n for c in captures for n in c.notes])


@pytest.mark.broad
@pytest.mark.parametrize(
    ("how", "sharded", "nproc", "inner"),
    [
        ("plain", False, 2, "eager"),
        ("causal", True, 2, "eager"),
        pytest.param("plain", True, 3, "eager", marks=pytest.mark.slow),
        pytest.param("causal", False, 3, "eager", marks=pytest.mark.slow),
        pytest.param("plain", False, 4, "eager", marks=pytest.mark.slow),
        pytest.param("causal", True, 4, "eager", marks=pytest.mark.slow),
        pytest.param("plain", False, 2, "inductor", marks=pytest.mark.slow),
    ],
)
def test_exact_at_odd_lengths_of_both_dims(
    how: str, sharded: bool, nproc: int, inner: str, ranks: Any
) -> None:
    plans = ("ulysses_z", "megatron_ts", DSP, "mixed 0") if inner == "eager" else (DSP, "mixed 0")
    sizes = SIZES if inner == "eager" else SIZES[:2]
    case = (plans, sizes, how, sharded, inner)
    for off, (num, blocks, notes) in ranks(nproc).run(train, *case, timeout_s=400):
        assert not off and not notes
        assert num == 2  # two captures serve all sizes of both dims
        kinds = [kind for kind, *_ in blocks]
        assert kinds == ["attention", "attention", "mlp"] * 2
        assert blocks[0][1:] == (None, 1, [])  # over time, which is split
        assert blocks[1][1:] == (1, None, ["metp"])  # over space, with time in the batch


def one_sequence(time: int, space: int) -> tuple[dict[str, str], list[Any], str]:
    """What is further off than the tolerance in a batch of one, and the blocks; the error where
    nothing but the split dim has more than one element."""
    off, (_, blocks, _) = train((DSP, "ulysses_z"), [(1, time, space)], "plain", False, "eager")
    with pytest.raises(ValueError) as refusal:
        steps(DSP, (1, time, 1))
    return off, blocks, str(refusal.value)


@pytest.mark.broad
def test_a_batch_of_one(pool3: RankPool) -> None:
    """It switches to another dim where there is one; else the error says what to do."""
    for off, blocks, error in pool3.run(one_sequence, 7, 5, timeout_s=200):
        assert not off
        assert blocks[0] == ("attention", None, 1, [])  # to space, which is no batch
        assert "option 'plan': 'dsp' cannot compute block 'layers.0.attention'" in error
        assert "give a batch of more than one; feasible there: megatron_ts" in error


def steps(plan: Any, size: tuple[int, int, int], **options: Any) -> tuple[Any, Any, Any]:
    """Of one step of one layer under ``plan``: what was sent, per collective and per block, and the
    report of the plan."""
    import paradyse

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = space_time.SpaceTime(layers=1).double()
    given = {"plan": plan, "inner": "eager", **options}
    compiled = torch.compile(model, backend="paradyse", options=given)
    found = []
    for _ in range(2):
        compiled(*space_time.cells(*size)).backward()
        stats = paradyse.stats(compiled)
        found.append((Counter(stats.bytes_per_collective), Counter(stats.calls_per_collective)))
    batch, time, space = size
    report = paradyse.explain(compiled, batch * space, time, (space,))
    # of the second step: some of what is counted is of all models that ran on these ranks
    return *(dict(after - before) for before, after in zip(*found, strict=True)), report


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_switch_there_and_back_sends_half_of_what_ulysses_does(nproc: int, ranks: Any) -> None:
    batch, time, space = 2, 8, 12  # time is split; both divide
    values = batch * time * space * space_time.WIDTH * 8  # M, in bytes
    each = (nproc - 1) / nproc * values / nproc  # of one all-to-all of M, per rank
    padded = max(1, nproc // space_time.HEADS)  # ulysses has a head for each rank
    for strategy, moved in ((DSP, 2), ("ulysses_z", 4 * padded)):
        case = (strategy, (batch, time, space))
        for sent, calls, _ in ranks(nproc).run(steps, *case, timeout_s=200):
            # forward and backward; of the pair, attention over space sends nothing
            assert sent["all_to_all"] == 2 * moved * each
            assert calls["all_to_all"] == 4  # in and out, forward and backward
            assert "ring_exchange" not in sent and "all_gather" not in sent


def test_explain_shows_what_is_switched_and_what_needs_no_switch(pool2: RankPool) -> None:
    for _, _, report in pool2.run(steps, DSP, (2, 8, 12), timeout_s=200):
        over_time, over_space, _ = report.blocks[:3]
        sent = {r.strategy: r.comm_bytes for r in over_time.rows}
        weights = {r.strategy: r.comm_bytes for r in over_space.rows}[DSP]
        assert over_time.chosen == over_space.chosen == DSP
        assert sent[DSP] - weights == (sent["ulysses_z"] - weights) / 2 > 0
        text = str(report)
        assert "dsp splits a dim of 12 meanwhile" in text
        assert "over 12 of a dim that is not split" in text


def dropping(where: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A model that drops out values of "blocks" or of "attention", or TimeSformer; and a batch."""
    torch.manual_seed(0)
    if where == "timesformer":
        return space_time.make_timesformer(5, dropout=0.3), space_time.videos(3, 5)
    given = {"dropout": 0.5} if where == "blocks" else {"attention_dropout": 0.5}
    return space_time.SpaceTime(layers=1, **given).double(), space_time.cells(3, 5, 7)


def dropped(plans: tuple[str, ...], where: str, inner: str) -> tuple[list[Any], list[str]]:
    """Loss and gradients of a step with dropout under each plan, from the same random state."""
    torch._dynamo.reset()
    model, batch = dropping(where)
    current: list[Any] = [plans[0]]
    options = {"plan": lambda workload: current[0], "inner": inner}
    compiled = torch.compile(model, backend="paradyse", options=options)
    found = []
    for current[0] in plans:
        model.zero_grad()
        torch.manual_seed(5)
        out = compiled(*batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append([loss.detach(), *grads])
    return found, [b.infeasible.get(DSP, "") for b in blocks_of(compiled)]


@pytest.mark.broad(but="3-attention-eager")
@pytest.mark.parametrize(
    ("nproc", "where", "inner"),
    [
        (3, "blocks", "eager"),
        (2, "attention", "eager"),
        (3, "attention", "eager"),
        pytest.param(2, "attention", "aot_eager", marks=pytest.mark.slow),
        pytest.param(2, "timesformer", "eager", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_the_same_whatever_is_split(
    nproc: int, where: str, inner: str, ranks: Any
) -> None:
    plans = "megatron_cz", DSP, "ulysses_z", "megatron_ts"
    ((whole,), _), *_ = ranks(1).run(dropped, (DSP,), where, "eager", timeout_s=200)
    for found, refused in ranks(nproc).run(dropped, plans, where, inner, timeout_s=200):
        assert not any(refused)
        for other in found:
            for x, y in zip(whole, other, strict=True):
                assert (x - y).norm() <= TOLERANCE * (x.norm() + 1e-3)


def prior_times(batch: int, time: int, space: int, num_ranks: int) -> dict[str, float]:
    """Seconds by the prior, of attention over time, which is split."""
    block = BlockSpec(
        "layers.0.attention",
        "attention",
        0,
        "",
        hidden=1152,
        num_heads=16,
        num_kv_heads=16,
        head_dim=72,
        num_weight_elements=4 * 1152**2,
        num_split_weight_elements=4 * 1152**2,
        mask=MaskSpec(),
        switch=1,
    )
    machine = Machine(2e14, 1.5e12, 1e-5, 5e10, op_overhead_s=1e-6)
    workload = Workload(batch * space, time, torch.bfloat16, True, num_ranks)
    workload = replace(workload, others=((batch * time, space),)).of(block)
    return {s: prior_cost(block, s, workload, machine).time_s for s in block.feasible()}


def test_the_prior_prefers_switches_where_there_is_a_row_for_each_rank() -> None:
    many, few = prior_times(1, 16, 1024, 8), prior_times(1, 16, 2, 8)
    assert min(many, key=many.__getitem__) == DSP
    assert min(few, key=few.__getitem__) != DSP


def automatic() -> tuple[Any, Any, Any]:
    """``steps`` under "auto"; these two cost the same but for what they move."""
    return steps("auto", (2, 16, 24), strategies=["ulysses_z", DSP], splits=[])


def test_auto_takes_it_where_the_prior_says_so(pool2: RankPool) -> None:
    for _, calls, report in pool2.run(automatic, timeout_s=200):
        over_time = report.blocks[0]
        times = {r.strategy: r.time_s for r in over_time.rows}
        assert times[DSP] < times["ulysses_z"] and over_time.chosen == DSP
        assert calls["all_to_all"] == 4


def timesformer(
    plans: tuple[str, ...], sharded: bool, frames: int, batches: tuple[int, ...]
) -> tuple[Any, ...]:
    """What is further off than the tolerance; blocks, how many differ, and notes."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = space_time.make_timesformer(frames)
    model = copy.deepcopy(reference)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = [plans[0]]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off: dict[str, str] = {}
    for batch in batches:
        given = space_time.videos(batch, frames)
        reference.zero_grad()
        want = reference(*given).loss
        want.backward()
        for name in (*plans[1:], plans[0]):
            model.zero_grad()
            got = compiled(*given).loss
            got.backward()
            worst = max(space_time.errors(model, got, reference, want))
            if not worst[0] <= TOLERANCE:
                off[f"{batch} {current[0]}"] = str(worst)
            current[0] = choose(name, blocks_of(compiled))
    found = list(captures_of(compiled))
    blocks = [(b.kind, b.over, b.switch) for b in blocks_of(compiled)]
    structures = len({b.structure for b in blocks_of(compiled)})
    return off, blocks, structures, [n for c in found for n in c.notes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "nproc", "frames", "batches"),
    [
        (False, 2, 5, (2, 3)),
        pytest.param(True, 2, 4, (1, 2), marks=pytest.mark.slow),
        pytest.param(True, 3, 7, (2, 3), marks=pytest.mark.slow),
        pytest.param(False, 4, 3, (2, 3), marks=pytest.mark.slow),
    ],
)
def test_timesformer(
    sharded: bool, nproc: int, frames: int, batches: tuple[int, ...], ranks: Any
) -> None:
    plans = ("megatron_cz", DSP, "megatron_ts", "mixed 0")
    case = (plans, sharded, frames, batches)
    for off, blocks, structures, notes in ranks(nproc).run(timesformer, *case, timeout_s=400):
        assert not off
        time, space = ("attention", None, 2), ("attention", 1, None)
        # of the last layer nothing but the class token is read, which is no frame's
        assert blocks == [time, space, ("mlp", None, None), time, space]
        assert structures <= 4  # the last attention over space is cut short
        means = "aten.mean.dim runs on gathered tensors in "
        assert notes and all(n.startswith(means) for n in notes), (
            notes
        )  # of the class token over frames
