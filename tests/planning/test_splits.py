"""Which dim tokens lie split along: workloads as other planners have them, and what is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import networkx as nx
import pytest
import torch
from test_measured import LENGTHS, planner_on, profile_of, rest
from test_planner import LONG, MACHINE, SHORT, model, planner

from paradyse.planning.alone import Alone
from paradyse.planning.corrections import Corrections, scale_of
from paradyse.planning.explain import explain_plan
from paradyse.planning.planner import Planner
from paradyse.planning.prior import prior_cost
from paradyse.planning.profile_file import Measurement
from paradyse.planning.splits import Splits, lies_along, off_by
from paradyse.planning.time_ratios import OF_PROFILE, TimeRatios
from paradyse.planning.units import format_seconds
from paradyse.types import (
    ATTENTION_STRATEGIES,
    BATCH,
    BlockSpec,
    HeadSpec,
    Plan,
    Workload,
    other_dim,
)

MANY = replace(LONG, seq_len=2048, batch=8)
HEAD = HeadSpec(1024, 32_000)


def along(blocks: list[BlockSpec]) -> list[BlockSpec]:
    """Blocks of one sequence as a program has them that splits another dim of their tokens."""
    return [replace(b, over=1) if b.kind == "attention" else b for b in blocks]


def splits(refused: str = "", **options: Any) -> Splits:
    blocks = options.setdefault("blocks", model())
    made = Splits(planner(head=HEAD, **options), refused)
    made.describe = lambda split: (along(blocks), HEAD)
    return made


def profiled(factor: float, at: Workload, more: Sequence[Measurement] = (), **how: Any) -> Splits:
    """By a profile that has times the prior's times ``factor``, at lengths from that of ``at``."""
    factors, lengths = (
        dict.fromkeys(ATTENTION_STRATEGIES, factor),
        [at.seq_len << i for i in range(4)],
    )
    profile = profile_of(factors, lengths, batch=at.batch, more=more)
    made = Splits(planner_on(profile, **{"levers": [], **how}))
    made.describe = lambda split: (along(model()), None)
    return made


def test_workloads_as_planners_of_other_dims_have_them() -> None:
    w = Workload(3, 100, torch.float32, True, 4)
    assert lies_along(w, BATCH) == replace(w, batch=100, seq_len=3, others=((3, 100),))
    # time 16 is split, space 9 beside it, two videos
    video = replace(w, batch=18, seq_len=16, others=((32, 9),))
    batch = replace(w, batch=144, seq_len=2, others=((18, 16), (32, 9)))
    assert lies_along(video, BATCH) == batch
    space = replace(w, batch=32, seq_len=9, others=((18, 16), (144, 2)))
    assert lies_along(video, other_dim(1)) == space


def test_a_batch_of_many_sequences_needs_no_messages_between_blocks() -> None:
    s = splits()
    plan = s.plan(MANY)
    assert plan.split == BATCH and Plan.of_key(plan.key) == plan
    own_planner, own = s.of(plan, MANY)
    assert own_planner is s.planners[BATCH] and own.seq_len == 8
    costs = own_planner.costs(own)
    gradients = [2 * b.num_weight_elements * 2 * 3 // 4 for b in s.planner.blocks]
    assert [c[p].comm_bytes for c, p in zip(costs, plan.strategies)] == gradients
    assert s.predict(plan, MANY)[0] < s.planner.predict(s.planner.plan(MANY), MANY)[0]


@pytest.mark.parametrize(
    "case",
    [
        {"workload": replace(LONG, batch=1)},
        {"workload": replace(LONG, batch=5)},  # ranks would compute eight sequences, not five
        {"workload": MANY, "refused": "a reason"},
        {"workload": MANY, "splits": []},
        {"workload": MANY, "plan": "megatron_cz"},
        {"workload": MANY, "plan": {"attention": "ulysses_z"}},
        {"workload": replace(MANY, num_ranks=1), "num_ranks": 1},
    ],
)
def test_the_sequence_stays_split_where_that_is_best_or_asked_for(case: dict[str, Any]) -> None:
    workload = case.pop("workload")
    s = splits(**case)
    assert s.plan(workload).split == "" and not s.planners


def test_a_program_that_there_is_not_is_asked_for_once() -> None:
    s, asked = splits(), []

    def describe(split: str) -> str:
        asked.append(split)
        return "a reason"

    s.describe = describe
    for workload in (MANY, replace(MANY, batch=16)):
        assert s.plan(workload).split == ""
    assert asked == [BATCH] and s.refused == {BATCH: "a reason"}
    named = splits("a reason", plan={"split": BATCH})
    with pytest.raises(ValueError, match="option 'plan': tokens cannot lie split along 'batch' .*"):
        named.plan(MANY)


@pytest.mark.parametrize(("time", "asked"), [(8, [BATCH]), (5, [BATCH, "dim1"])])
def test_another_dim_is_looked_at_where_fewer_of_its_rows_are_padding(
    time: int, asked: list[str]
) -> None:
    """Of five rows on four ranks three are padding, of eight and of 64 none."""
    s, found = splits(blocks=[replace(b, switch=1) for b in model()]), []
    s.describe = lambda split: found.append(split) or "a reason"
    s.plan(replace(MANY, batch=8 * 64, seq_len=time, others=((8 * time, 64),)))
    assert found == asked


def test_a_graph_without_blocks_has_nothing_to_split_otherwise() -> None:
    """As that of a loss, behind a break in a model's graph."""
    s = splits("a reason", blocks=[], plan={"split": BATCH})
    assert s.plan(MANY) == Plan(()) and not s.planners


def test_it_may_be_asked_for_by_name() -> None:
    plan = splits(plan={"attention": "megatron_ts", "split": BATCH}).plan(SHORT_MANY)
    assert plan.split == BATCH and plan.strategies[::2] == ("megatron_ts",) * 2
    kept = splits(plan=plan).plan(SHORT_MANY)
    assert kept == plan
    either = splits(plan={"mlp": "megatron_cz", "split": "auto"}).plan(MANY)
    assert either.split == BATCH and either.strategies[1::2] == ("megatron_cz",) * 2


@pytest.mark.parametrize(
    "plan", [{"split": "dim2"}, lambda workload: Plan(("metp",) * 4, split="typo")]
)
def test_a_dim_that_tokens_lack_is_refused_in_words(plan: Any) -> None:
    text = r"along '(dim2|typo)' for .*: beside their sequence they have the dims 'batch'; leave"
    with pytest.raises(ValueError, match=text):
        splits(plan=plan).plan(MANY)


def test_sequences_of_their_own_do_not_make_a_batch_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What an encoder reads is no dim of the tokens that its decoder reads."""
    for batch in (1, 8):
        s = splits(plan={"split": BATCH})
        s.describe = lambda split: "tokens of several sequences are not split along 'batch'"
        with pytest.raises(ValueError, match="tokens of several sequences"):
            s.plan(replace(MANY, batch=batch, seq_len=128, others=((batch, 512),)))
    assert not caplog.records


def test_videos_of_a_batch_of_one_are_split_along_their_sequence() -> None:
    one = replace(MANY, batch=64, seq_len=5, others=((5, 64),))
    assert splits(plan={"split": BATCH}).plan(one).split == ""


SHORT_MANY = replace(SHORT, batch=4)


def test_of_a_batch_of_one_the_sequence_is_split(caplog: pytest.LogCaptureFixture) -> None:
    """The last batch of an epoch must not end it."""
    for form in (Plan(("megatron_cz",) * 4, split=BATCH), {"attention": "metp", "split": BATCH}):
        s = splits(plan=form)
        for _ in range(2):
            plan = s.plan(replace(LONG, batch=1))
            assert plan.split == "" and plan.strategies[0] in ("megatron_cz", "metp")
        assert sum("of a batch of one" in r.message for r in caplog.records) == 1
        caplog.clear()
        alone = splits(plan=form, num_ranks=1)  # where nothing is split
        on_one = alone.plan(replace(LONG, batch=1, num_ranks=1))
        assert set(on_one.strategies) == {"replicated"}
        assert not caplog.records


def test_what_planners_learn_all_of_them_learn() -> None:
    s = splits()
    plan = s.plan(MANY)
    s.hold(2**30, 0)
    assert s.planner.static_bytes == s.planners[BATCH].static_bytes == 2**30
    s.ran_out(MANY)
    own_planner, own = s.of(plan, MANY)
    smallest = own_planner.plan_of(own_planner._choices(own_planner._all_auto(), own).smallest()[1])
    assert own_planner.plan(own) == smallest


def test_memory_may_forbid_it() -> None:
    free = splits()
    plan = free.plan(MANY)
    need = free.predict(plan, MANY)[1]
    least = free.planner.least_bytes(MANY)
    assert splits(memory_limit=max(need, least)).plan(MANY).split == BATCH


def test_messages_that_cost_nothing_leave_the_sequence_split() -> None:
    fast = replace(MACHINE, latency_s=0.0, bandwidth_bytes=1e18)
    s = splits(machine=lambda dtype: fast)
    assert s.plan(MANY).split == "" and not s.planners


VIDEO = replace(MANY, batch=8 * 64, seq_len=5, others=((8 * 5, 64),))
"""Rows of time are padding on four ranks, those of space and of the batch are not."""


@pytest.mark.parametrize("at", [MANY, VIDEO], ids=["sequences", "videos"])
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_a_machine_that_is_slower_throughout_changes_no_split(factor: float, at: Workload) -> None:
    """What no profile has measured is as far off as what it has: also one split against another."""
    s = profiled(factor, at)
    by_prior = splits().plan(at)
    assert s.plan(at).split == by_prior.split == BATCH
    assert len(s.planners) == 1 + len(at.others)


def test_the_rest_of_a_step_is_there_whatever_is_split() -> None:
    def predicted(more: Sequence[Measurement]) -> list[float]:
        s = profiled(1.0, MANY, more)
        plans = s.planner.plan(MANY), s.best_along(BATCH, MANY)
        return [s.predict(plan, MANY)[0] for plan in plans if isinstance(plan, Plan)]

    without, with_rest = predicted(()), predicted([rest(n) for n in LENGTHS])
    assert [b - a for a, b in zip(without, with_rest, strict=True)] == pytest.approx(
        [2.0, 2.0], 1e-3
    )


def test_a_split_that_fits_is_taken_where_that_of_the_sequence_does_not() -> None:
    """Nine tokens on eight ranks are sixteen with padding."""
    workload = Workload(4096, 9, torch.bfloat16, True, 8)
    free = splits(num_ranks=8)
    need = free.planner.least_bytes(workload)
    along_batch = free.planner_along(BATCH)
    assert isinstance(along_batch, Planner)
    less = along_batch.least_bytes(lies_along(workload, BATCH))
    assert less < need
    limited = splits(num_ranks=8, memory_limit=(need + less) // 2)
    assert limited.plan(workload).split == BATCH
    with pytest.raises(ValueError, match="no plan fits for batch 4096 x 9"):
        splits(num_ranks=8, memory_limit=less // 2).plan(workload)


def test_what_does_not_fit_is_told_of_as_it_was_given() -> None:
    """Not as the planner of the batch has it, to which sequences are tokens."""
    tight = splits(memory_limit=1000, plan={"split": BATCH})
    with pytest.raises(ValueError, match="no plan fits for batch 8 x 2048 tokens") as error:
        tight.plan(MANY)
    assert "longest" not in str(error.value) and "weights, gradients" in str(error.value)


def test_the_memory_of_the_rest_is_there_whatever_is_split() -> None:
    """Also the floor and the margin of the profile."""
    big = [replace(rest(n), saved_bytes=n << 20, workspace_bytes=n << 19) for n in LENGTHS]
    s, without = profiled(1.0, MANY, big), profiled(1.0, MANY)
    for plan in (s.planner.plan(MANY), s.best_along(BATCH, MANY)):
        assert isinstance(plan, Plan) and isinstance(without.best_along(BATCH, MANY), Plan)
        more = s.predict(plan, MANY)[1] - without.predict(plan, MANY)[1]
        kept = s.planner.beside(MANY).rest.saved_bytes
        assert kept == pytest.approx(8 * 2048 << 20)
        assert kept < more < 2 * kept
    of, own = s.of(plan, MANY)
    assert of.beside(own) == s.planner.beside(MANY)
    floor = [replace(rest(n), saved_bytes=0, workspace_bytes=0, floor_bytes=2**40) for n in LENGTHS]
    s = profiled(1.0, MANY, floor)
    plan = s.best_along(BATCH, MANY)
    assert isinstance(plan, Plan) and s.predict(plan, MANY)[1] >= 2**40
    tight = profiled(1.0, MANY, big, memory_limit=s.planner.beside(MANY).rest.saved_bytes + 2**30)
    with pytest.raises(ValueError, match="no plan fits"):
        tight.plan(MANY)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_profile_says_of_blocks_is_held_against_their_own_work(sharded: bool) -> None:
    """A profile that says what the prior does is off by nothing: of an encoder's blocks, which have
    sequences of their own, and of sharded weights, which are gathered."""
    decoder, encoder = model(1), [replace(b, sequence=1) for b in model(1)]
    across = replace(decoder[0], name="layers.0.cross_attention", keys=1, layer=1)
    p = planner(blocks=[*encoder, *decoder, across])
    p.sharded = sharded
    profile = SimpleNamespace(cost=lambda b, point, w: prior_cost(b, point, w, MACHINE, sharded))
    p.cost_model = cast(Any, profile)
    for others in ((), ((1, 16),), ((4, 8192),)):
        assert off_by(p, replace(SHORT, others=others)) == pytest.approx(1)


def test_what_a_run_has_shown_is_not_scaled_again() -> None:
    s = profiled(2.0, MANY)
    plan = s.plan(MANY)
    own_planner, own = s.of(plan, MANY)
    before, times = s.predict(plan, MANY)[0], TimeRatios(OF_PROFILE)
    costs = (c[point] for c, point in zip(own_planner.costs(own), plan.strategies))
    for key, cost in zip(own_planner.time_keys(plan), costs):
        for _ in range(8):
            times.add(key, scale_of(own), 2.0, cost.parts)
    s.correct(Corrections(times=times.estimate()))
    assert s.predict(plan, MANY)[0] == pytest.approx(before, 0.1)


def test_explain_has_times_of_other_splits_as_they_are_compared() -> None:
    s = profiled(0.25, MANY)
    report = explain_plan(Alone(s), MANY)
    assert report.plan.split == BATCH and report.time_s == s.predict(report.plan, MANY)[0]
    rows = {r.strategy: r for r in report.static_plans}
    assert rows["split along batch"].time_s == report.time_s
    assert all(r.time_s is None or r.time_s >= report.time_s for r in rows.values())
    again = Plan(("megatron_cz+recompute", "megatron_cz") * 2, split=BATCH)
    s = profiled(0.25, MANY, plan=again, levers=["recompute"])
    report = explain_plan(Alone(s), MANY)
    assert report.plan == again
    plain = Plan(("megatron_cz",) * 4, split=BATCH)
    without, with_it = (format_seconds(s.predict(plan, MANY)[0]) for plan in (plain, again))
    assert f"without it {without} instead of {with_it} a step" in str(report)


def fewest_switches(stages: Sequence[str], dims: Sequence[str]) -> int:
    """Of any path through ``stages``, each of which mixes one of ``dims`` and may be computed split
    along the others: arXiv 2403.10266, as a shortest path."""
    paths = nx.DiGraph()
    for i, mixed in enumerate(stages):
        for at in dims:
            if at == mixed:
                continue
            if i == 0:
                paths.add_edge("begin", (0, at), weight=0)
            for before in dims:
                if i and before != stages[i - 1]:
                    paths.add_edge((i - 1, before), (i, at), weight=int(at != before))
            if i == len(stages) - 1:
                paths.add_edge((i, at), "end", weight=0)
    return int(nx.shortest_path_length(paths, "begin", "end", "weight"))


@pytest.mark.parametrize("num_layers", [1, 2, 6])
@pytest.mark.parametrize("layer", ["TS", "ST", "STM", "THW", "HTW", "TTS", "TSS", "B"])
def test_one_dim_at_rest_is_the_best_path_of_splits(layer: str, num_layers: int) -> None:
    """Stages that mix the dim at rest switch to another and back, the others stay: as few messages
    as on the best path through all stages, but for the one at the end of a model."""
    stages, dims = layer * num_layers, sorted({*layer, "S", "T"} - {"M"})
    at_rest = min(2 * stages.count(dim) for dim in dims)
    assert 0 <= at_rest - fewest_switches(stages, dims) <= 1
