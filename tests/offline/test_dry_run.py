"""Dry runs: memory seen without devices is memory seen with them; the outlook made from it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import FAMILIES, make_batch, make_model
from torch import Tensor

from paradyse.cli.commands.plan import levers_chart, page_of, tables_of_the_longest
from paradyse.offline import dry_run as dry
from paradyse.offline import ops
from paradyse.offline.capture import capture_program, fake_world
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import (
    DryRun,
    Sizes,
    dry_run,
    measure_step,
)
from paradyse.offline.outlook import MIXTURE, NO_LEVERS, Outlook, PaperCosts, look_ahead
from paradyse.offline.timeline import Growth, Sample, Timeline, fit_growth
from paradyse.planning.costs import Machine
from paradyse.planning.units import format_bytes
from paradyse.runtime.describe import describe_blocks
from paradyse.runtime.saved_memory import Saved
from paradyse.types import ATTENTION_STRATEGIES, DSP, BlockSpec, Workload

FEASIBLE = tuple(s for s in ATTENTION_STRATEGIES if s != DSP)
"""Of one sequence alone, whose tokens have no dim to switch to."""

SEQ_LEN = 92
"""Two ranks hold 46 tokens each, without padding."""


def meta_model(family: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A model of the tests' families, float32, without memory, and a batch for it."""
    import transformers

    torch._dynamo.reset()
    of = FAMILIES[family]
    with torch.device("meta"):
        config = getattr(transformers, of.cls).config_class(**of.config, use_cache=False)
        model = getattr(transformers, of.cls)._from_config(config)
        ids = torch.zeros(1, 64, dtype=torch.int64)
    return model.train(), {"input_ids": ids, "labels": ids}


def on_paper(family: str, num_ranks: int, autocast: torch.dtype | None = None) -> DryRun:
    """A model of the tests' families on ranks that are not there."""
    model, batch = meta_model(family)
    return dry_run(model, batch, num_ranks, autocast=autocast)


def attention_on_paper(
    num_ranks: int, strategies: Sequence[str], changes: Mapping[Any, Mapping[str, int]]
) -> list[list[tuple[int, int]]]:
    """Memory of Llama's attention by each strategy, as it is and with module constants changed."""
    model, batch = meta_model("llama")
    found = []
    with fake_world(num_ranks) as axis, pytest.MonkeyPatch.context() as patch:
        program = capture_program(model, batch, axis)
        for changed in ({}, changes):
            for module, values in changed.items():
                for name, value in values.items():
                    patch.setattr(module, name, value)
            sizes = [measure_step(program, program.block_steps[0], s) for s in strategies]
            found.append([s.at(4096) for s in sizes])
    return found


@pytest.fixture(scope="module")
def llama8() -> DryRun:
    return on_paper("llama", 8)


def saved_by_blocks(family: str, autocast: torch.dtype | None) -> dict[tuple[str, str], int]:
    """(Kind of block, strategy) -> bytes that the block saves on this rank, in a real run."""
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        return _saved_by_blocks(family)


def _saved_by_blocks(family: str) -> dict[tuple[str, str], int]:
    import paradyse
    from paradyse.runtime.frame import Frame

    kept: dict[tuple[str, str], int] = {}
    run_step, weights = Frame.run_step, Frame.weights
    handed: list[Tensor] = []

    def watched_weights(self: Frame, *args: Any, **kwargs: Any) -> Any:
        out = weights(self, *args, **kwargs)
        handed.extend(out)
        return out

    def watched(self: Frame, step: Any, strategy: str) -> None:
        saved = Saved()
        with saved.watch():
            run_step(self, step, strategy)
        if not strategy:  # a piece between blocks
            return
        forms = [x for found in self.forms.values() for x in found.values()]
        common = self.constants.common(step, self.seed(step))
        tables = [*common, *self.env.values(), *forms]
        shards = [x.local for x in self.env.values() if hasattr(x, "local")]
        fixed = [x for x in tables if isinstance(x, Tensor) and not x.requires_grad]
        found = []
        for _ in range(5):  # gloo's thread drops a message's tensors a moment after it has come
            found.append(saved.num_bytes([*handed, *shards, *fixed]))
            time.sleep(0.02)
        kept[step.block.kind, strategy] = min(found)

    model = paradyse.shard(make_model(family)).train()
    current = [""]
    options = {"plan": lambda workload: current[0], "inner": "aot_eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 1, SEQ_LEN)
    try:
        for strategy in FEASIBLE:
            current[0] = strategy
            compiled(**batch).loss.backward()  # compiles
            Frame.run_step, Frame.weights = watched, watched_weights  # type: ignore[method-assign,assignment]
            compiled(**batch).loss.backward()
            Frame.run_step, Frame.weights = run_step, weights  # type: ignore[method-assign]
            handed.clear()
    finally:
        Frame.run_step, Frame.weights = run_step, weights  # type: ignore[method-assign]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_save_as_much_in_a_dry_run_as_on_two_ranks(
    family: str, autocast: torch.dtype | None, pool2: RankPool
) -> None:
    real = pool2.run(saved_by_blocks, family, autocast, timeout_s=200)[0]
    run = on_paper(family, 2, autocast)
    found = {}
    for block in run.blocks:
        for s in {*block.feasible()} & {*FEASIBLE}:
            found[block.kind, s] = run.block(block, s).at(run.tokens(SEQ_LEN, 1))[0]
    assert found == real


@pytest.mark.broad
@pytest.mark.slow
def test_nothing_of_a_dry_run_stays(llama8: DryRun) -> None:
    from paradyse.kernels.attention_mask import position_intervals

    assert not dist.is_initialized()
    assert not position_intervals.cache_info().currsize


@pytest.mark.broad
def test_memory_grows_with_the_length_and_only_scores_grow_faster(llama8: DryRun) -> None:
    for block in llama8.blocks:
        for s in block.feasible():
            sums = [sum(llama8.block(block, s).at(n)) for n in (1 << 8, 1 << 12, 1 << 16)]
            assert sums == sorted(set(sums))
            quadratic = s == "colossal_z" and block.kind == "attention"
            assert (sums[2] / sums[1] > 100) == quadratic


@pytest.mark.slow
def test_groups_that_are_not_run_repeat_the_last() -> None:
    few, every = attention_on_paper(4, ["metp"], {dry: {"FEW_GROUPS": 100}})
    assert few[0] == pytest.approx(every[0], rel=1e-3)


@pytest.mark.slow
def test_short_rings_and_whole_copies_need_as_much() -> None:
    changes = {ops: {"RING": 8, "MANY_RANKS": 2}}
    short, full = attention_on_paper(8, ["megatron_ts", "megatron_cz"], changes)
    assert short == [pytest.approx(x, rel=1e-3) for x in full]


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    model, batch = meta_model("llama")
    strategies = ("megatron_ts", "megatron_cz", "ulysses_z")
    with fake_world(1024) as axis:
        program = capture_program(model, batch, axis)
        ts, cz, ulysses = (
            sum(measure_step(program, program.block_steps[0], s).at(1024)) for s in strategies
        )
    assert cz < ulysses < ts  # rows of one head or of all, of the whole sequence


def outlook_of(run: DryRun, memory: float = 2**31, **changes: Any) -> Outlook:
    machine = machine_of(read_cluster("a100-80gb"), run.num_ranks, torch.float32)
    lengths = [2**k for k in range(8, 22, 2)]
    return look_ahead(
        run, replace(machine, **changes), lengths, torch.float32, memory_limit=int(memory)
    )


@pytest.mark.broad
def test_the_mixture_is_the_fastest_and_the_longest(llama8: DryRun) -> None:
    outlook = outlook_of(llama8)
    static = [s for s in outlook.forecasts if s != MIXTURE]
    assert set(static) == set(FEASIBLE)
    for f in outlook.forecasts[MIXTURE]:
        assert f.fits and f.peak_bytes <= outlook.limit_bytes
        for s in static:
            (other,) = [o for o in outlook.forecasts[s] if o.seq_len == f.seq_len]
            assert not other.fits or f.time_s <= other.time_s * (1 + 1e-9)
    assert outlook.longest[MIXTURE] >= max(outlook.longest[s] for s in static) * 0.999


@pytest.mark.broad
@pytest.mark.slow
def test_the_longest_length_fits_and_a_longer_one_does_not(llama8: DryRun) -> None:
    outlook = outlook_of(llama8)
    for s in FEASIBLE:
        n = outlook.longest[s]
        at = look_ahead(
            llama8, outlook.machine, [n, n + n // 200], torch.float32, memory_limit=2**31
        ).forecasts[s]
        assert at[0].fits and not at[1].fits


@pytest.mark.broad
def test_more_memory_trains_longer_and_none_trains_nothing(llama8: DryRun) -> None:
    little, much = outlook_of(llama8, 2**30), outlook_of(llama8, 2**32)
    assert all(little.longest[s] < much.longest[s] for s in little.longest)
    nothing = outlook_of(llama8, 2**10)
    assert set(nothing.longest.values()) == {0} and not nothing.forecasts[MIXTURE]


@pytest.mark.broad
def test_the_host_takes_what_blocks_keep(llama8: DryRun) -> None:
    machine = machine_of(read_cluster("a100-80gb"), 8, torch.float32)

    def longest(levers: Sequence[str], **changes: Any) -> int:
        here, fixed = replace(machine, **changes), 2 * machine.communicator_bytes
        memory = 2**29 + fixed + llama8.static_bytes
        found = look_ahead(llama8, here, [], torch.float32, memory_limit=memory, levers=levers)
        return found.longest[MIXTURE]

    none, alone = longest(()), longest(["offload"])
    assert none <= longest(["offload"], host_capacity_bytes=2**20) < alone
    costs, (block, *_) = PaperCosts(llama8, machine), llama8.blocks
    w = Workload(1, alone, torch.float32, True, 8)
    here, there = (costs.cost(block, f"megatron_cz{v}", w) for v in ("", "+offload"))
    assert (there.saved_bytes, there.host_bytes) == (0, here.saved_bytes)
    assert there.workspace_bytes == here.workspace_bytes + 2 * here.saved_bytes


@pytest.mark.slow
def test_chunks_are_predicted_by_two_of_them() -> None:
    """What a step in six chunks holds at another length, from steps in two of a few tokens."""
    model, batch = meta_model("llama")
    point, local, num_chunks = "ulysses_z+chunked", 240, 6
    with fake_world(2) as axis, pytest.MonkeyPatch.context() as patch:
        program = capture_program(model, batch, axis)
        step = program.block_steps[0]
        saved, workspace = measure_step(program, step, point).at(local, local // num_chunks)
        patch.setattr(dry, "TILES", num_chunks)
        real = dry._run_alone(program, step, point, 2 * local)
    held = max(a + b for a, b in zip(real.timeline, real.in_tile, strict=True))
    assert saved == real.saved_bytes == 4 * local * 64  # the block's input
    assert held - saved == pytest.approx(workspace, rel=0.06)


@pytest.mark.broad
@pytest.mark.slow
def test_chunks_train_longer_than_what_runs_again(llama8: DryRun) -> None:
    machine = machine_of(read_cluster("a100-80gb"), 8, torch.float32)

    def outlook(*levers: str) -> Outlook:
        limit = 2**30 + 2 * machine.communicator_bytes
        levers = (*levers, "tiled", "vocabulary", "offload")
        return look_ahead(llama8, machine, [], torch.float32, memory_limit=limit, levers=levers)

    with_chunks, without = outlook("recompute", "chunked"), outlook("recompute")
    assert with_chunks.longest[MIXTURE] > 1.1 * without.longest[MIXTURE]
    reach = with_chunks.reaches[MIXTURE].longest
    assert reach is not None and any("chunked" in point for point in reach.plan.strategies)


@pytest.mark.broad
@pytest.mark.slow
def test_the_page_has_a_line_for_each_strategy(llama8: DryRun) -> None:
    page = page_of("", outlook_of(llama8))
    times, peaks, levers = page.charts
    strategies = {*FEASIBLE, MIXTURE}
    named = (times, strategies), (peaks, strategies), (levers, {"no levers", "all levers"})
    for chart, lines in named:
        assert lines <= {line.name for line in chart.lines if line.points}
        assert all(math.isfinite(v) for line in chart.lines for _, v, _ in line.points)
    assert times.fits_to == outlook_of(llama8).longest[MIXTURE]
    whole, of_levers = ([b for b in page.bands if b.of_one_whole is one] for one in (True, False))
    assert all(sum(shares.values()) == pytest.approx(1) for b in whole for shares in b.shares)
    assert whole and all(b.title.startswith("Levers") for b in of_levers)


def test_growth_finds_another_moment_of_the_peak() -> None:
    def sample(n: int) -> Sample:
        return Sample(3 * n, (1000, 2 * n, n * n), 0, n)

    growth = fit_growth([2, 4, 8, 16], [sample(n) for n in (2, 4, 8, 16)])
    assert growth.at(10) == (30, 1000) and growth.at(1000) == (3000, 10**6)
    with pytest.raises(ValueError, match="no polynomial"):
        fit_growth([2, 4, 8], [sample(n) for n in (2, 4, 8)])
    with pytest.raises(ValueError, match="not the same operators"):
        fit_growth([2, 4], [sample(2), Sample(1, (1,), 0, 0)])


def test_a_timeline_counts_each_memory_once_while_it_is_alive() -> None:
    with Timeline({}) as timeline:
        x = torch.zeros(8)
        y = x.view(2, 4) + 1
        del x
        timeline.mark()
        y.mul_(2)
    assert timeline.alive_bytes[0] == 32 and max(timeline.alive_bytes) == 64
    assert timeline.alive_bytes[-1] == 32


def test_what_is_made_in_tiles_grows_with_the_tile() -> None:
    def sample(n: int) -> Sample:  # two tiles of n / 2 tokens, weights of 100 bytes
        return Sample(3 * n, (2 * n, 5 * n), 0, n, (100 + n // 2, 0))

    growth = fit_growth([2, 4, 8], [sample(n) for n in (2, 4, 8)])
    assert growth.at(1000, 2 * 10) == (3000, 5000)
    assert growth.at(1000, 2 * 4000) == (3000, 2000 + 100 + 4000)
    assert Sizes(growth).at(1000, 10) == (3000, 2000)
    assert Sizes(growth).at(1000) == (3000, 2000)


@pytest.mark.broad
def test_the_head_is_measured_under_its_levers(llama8: DryRun) -> None:
    head, n = llama8.head, 1 << 20
    assert head is not None and llama8.heads.keys() == set(head.points())
    whole, tiled = (sum(llama8.heads[v][0].at(n, 64)) for v in ("", "tiled"))
    logits = 4 * n * head.vocabulary
    assert whole - tiled > 2 * logits  # and their gradient


@pytest.mark.broad
@pytest.mark.slow
def test_the_mixture_is_told_by_lever_and_its_peak_by_parts(llama8: DryRun) -> None:
    outlook = outlook_of(llama8)
    reach = outlook.reaches[MIXTURE].longest
    assert reach is not None
    assert sum(part for _, part in reach.held) == reach.peak_bytes <= outlook.limit_bytes
    alone = [name for name in outlook.reaches if name.endswith(" alone")]
    assert len(alone) >= 3 and f"{MIXTURE}, all but tiled" in outlook.reaches
    longest = outlook.longest
    assert all(longest[NO_LEVERS] <= longest[name] <= longest[MIXTURE] * 1.001 for name in alone)
    drawn = {line.name for line in levers_chart(outlook).lines}
    assert {"no levers", "all levers", "tiled", "recompute"} <= drawn


def test_weights_on_the_host_leave_less_of_it_to_blocks() -> None:
    """And where it cannot take them nothing is trained, whatever the device has."""
    growth = Growth(np.array([0, 1e6]), np.array([[0, 3e6]]), np.array([0, 1e6]), 0)
    sizes: Any = defaultdict(lambda: Sizes(growth))
    run = DryRun((BlockSpec("b", "mlp", 8, "s"),) * 8, sizes, (), 2, 0, 0, ())
    machine = replace(machine_of(read_cluster("a100-80gb"), 2), capacity_bytes=2**36)
    host = machine.host_capacity_bytes or 0

    def outlook(at_rest: int, host_bytes: int = host) -> Outlook:
        resting = replace(run, on_host_bytes=at_rest)
        here = replace(machine, host_capacity_bytes=host_bytes)
        return look_ahead(resting, here, [64], torch.bfloat16, levers=["offload"], sharded=False)

    plenty, little = outlook(0), outlook(host - 2**35)
    assert little.longest == outlook(0, 2**35).longest
    assert 0 < little.longest[NO_LEVERS] < little.longest[MIXTURE] < plenty.longest[MIXTURE]
    none = outlook(host + 1)
    assert set(none.longest.values()) == {0} and none.limit_bytes == plenty.limit_bytes
    assert not none.forecasts[MIXTURE] and none.reaches[MIXTURE].longest is None
    assert not any(f.fits for of in none.forecasts.values() for f in of)
    static, _, *on_host = tables_of_the_longest(none)[0][2]
    assert static[1] == "0 B" and on_host == [
        ("weights, gradients, optimizer on the host", format_bytes(host + 1)),
        ("may be used there", format_bytes(host)),
    ]


@pytest.mark.broad
def test_scores_grow_with_each_sequence_and_not_with_all() -> None:
    """Eight short sequences, seen as such, on one of two ranks."""
    model, batch = meta_model("llama")
    with fake_world(2) as axis:
        program = capture_program(model, {k: x.expand(2, -1) for k, x in batch.items()}, axis)
        step, point = program.block_steps[0], "colossal_z"
        sizes, block = measure_step(program, step, point), describe_blocks(program)[0]
        dry._run_alone(program, step, point, 128, batch=8)  # it compiles
        real = dry._run_alone(program, step, point, 128, batch=8)
    run = DryRun((block,), {(block.structure, point): sizes}, (), 2, 0, 0, ())
    machine = machine_of(read_cluster("a100-80gb"), 2, torch.float32)
    costs = PaperCosts(run, machine, sharded=False)
    cost = costs.cost(block, point, Workload(8, 128, torch.float32, True, 2))
    assert cost.saved_bytes == real.saved_bytes
    need = max(real.timeline)  # all sequences share a mask, which is counted for each
    assert need <= cost.saved_bytes + cost.workspace_bytes <= 1.1 * need


def test_machines_without_a_limit() -> None:
    machine = Machine(1e12, 1e11, 1e-5, 1e9)
    run = DryRun((BlockSpec("b", "mlp", 0, "s"),), {}, (), 2, 0, 0, ())
    assert math.isinf(look_ahead(replace(run, blocks=()), machine, [], torch.float32).limit_bytes)
