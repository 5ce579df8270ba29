"""Plans: every form of the option, the exact choice, smoothing, memory, every error's text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paradyse.config import AUTO, parse_options
from paradyse.planning.alone import Alone
from paradyse.planning.costs import BlockCost, Machine, longest_length
from paradyse.planning.explain import PlanReport, explain_plan
from paradyse.planning.planner import Planner
from paradyse.planning.prior import prior_cost
from paradyse.planning.splits import Splits
from paradyse.planning.units import format_bytes
from paradyse.types import ATTENTION_STRATEGIES, BlockSpec, HeadSpec, MaskSpec, Plan, Workload

MACHINE = Machine(3e14, 2e12, 1e-5, 2e11, op_overhead_s=0.0, capacity_bytes=2**36)
SHORT = Workload(1, 128, torch.bfloat16, True, 4)
LONG = replace(SHORT, seq_len=65_536)
NORM = "a norm mixes the heads"


def model(layers: int = 2, h: int = 1024, **attention: Any) -> list[BlockSpec]:
    blocks = []
    for i in range(layers):
        a = BlockSpec(
            f"layers.{i}.attention",
            "attention",
            i,
            "a",
            hidden=h,
            num_heads=16,
            num_kv_heads=16,
            head_dim=h // 16,
            num_weight_elements=4 * h * h,
            num_split_weight_elements=4 * h * h,
            mask=MaskSpec(right=0),
        )
        m = BlockSpec(
            f"layers.{i}.mlp",
            "mlp",
            i,
            "m",
            hidden=h,
            intermediate=4 * h,
            num_weight_elements=8 * h * h,
            num_split_weight_elements=8 * h * h,
        )
        blocks += [replace(a, **attention), m]
    return blocks


def planner(
    plan: Any = "auto",
    blocks: list[BlockSpec] | None = None,
    num_ranks: int = 4,
    machine: Callable[[torch.dtype], Machine] = lambda dtype: MACHINE,
    static_bytes: int = 0,
    levers: Any = (),
    head: HeadSpec | None = None,
    sharded: bool = False,
    **options: Any,
) -> Planner:
    """Without levers unless they are given: what strategies do by themselves."""
    parsed = parse_options({"plan": plan, "levers": levers, **options})
    blocks = model() if blocks is None else blocks
    return Planner(parsed, blocks, num_ranks, machine, static_bytes, sharded, head=head)


def explained(p: Planner, workload: Workload, **of_graph: Any) -> PlanReport:
    """The report on the plan of ``p``, where the whole cannot be computed on every rank."""
    return explain_plan(Alone(Splits(p), "a reason"), workload, **of_graph)


def no_machine(dtype: torch.dtype) -> Machine:
    raise AssertionError("a plan given by name needs no machine")


NAMED = Plan(("metp", "ulysses_z", "megatron_ts", "megatron_cz"))


@pytest.mark.parametrize(
    ("form", "strategies"),
    [
        ("colossal_z", ("colossal_z",) * 4),
        (["metp", "ulysses_z"], ("metp", "metp", "ulysses_z", "ulysses_z")),
        (
            {"attention": ["metp", "megatron_ts"], "mlp": ["ulysses_z", "megatron_cz"]},
            NAMED.strategies,
        ),
        ({"attention": "metp", "mlp": "megatron_ts"}, ("metp", "megatron_ts") * 2),
        (NAMED, NAMED.strategies),
        (lambda w: "metp", ("metp",) * 4),
        (lambda w: ["metp", "ulysses_z"], ("metp", "metp", "ulysses_z", "ulysses_z")),
        (lambda w: {"attention": "metp", "mlp": "megatron_ts"}, ("metp", "megatron_ts") * 2),
        (lambda w: NAMED, NAMED.strategies),
    ],
)
def test_every_form_of_plan_by_name(form: Any, strategies: tuple[str, ...]) -> None:
    p = planner(form, machine=no_machine)
    assert p.plan(SHORT) == p.plan(SHORT) == Plan(strategies)


def test_a_function_sees_the_workload_and_may_leave_the_choice_open() -> None:
    p = planner(lambda w: "metp" if w.seq_len > 1000 else "auto")
    assert p.plan(LONG) == Plan(("metp",) * 4)
    auto = planner().plan(SHORT)
    assert "metp" not in auto.strategies
    assert p.plan(SHORT) == auto


@pytest.mark.parametrize(
    ("form", "is_open"),
    [
        (Plan(("auto", "metp") * 2), True),
        (Plan(("metp",) * 4, head="auto"), True),
        (Plan(("metp",) * 4), False),
        (["metp", "auto"], True),
        (["metp", "metp"], False),
        ({"attention": "metp", "mlp": "metp", "experts": "metp"}, True),  # the head
        ({"attention": "metp", "mlp": "metp", "experts": "metp", "head": ""}, False),
        ("auto", True),
        ("metp", False),
        (lambda workload: "auto", False),
    ],
)
def test_a_plan_that_leaves_a_point_or_the_head_open_is_chosen(form: Any, is_open: bool) -> None:
    p = planner(form, head=HeadSpec(1024, 32_000))
    assert p.chooses == is_open
    assert AUTO not in p.points(p.plan(SHORT))


def test_a_function_is_asked_every_time() -> None:
    answers = iter(["metp", "ulysses_z", "metp"])
    p = planner(lambda w: next(answers))
    assert [p.plan(SHORT).strategies[0] for _ in range(3)] == ["metp", "ulysses_z", "metp"]


def test_auto_may_stand_for_single_blocks() -> None:
    auto = planner().plan(SHORT).strategies
    mixed = planner({"attention": ["metp", "auto"]}).plan(SHORT).strategies
    assert mixed == ("metp", auto[1], auto[2], auto[3])


def test_one_rank_replicates_whatever_the_plan_says() -> None:
    w = replace(SHORT, num_ranks=1)
    for form in ("auto", "metp", ["metp", "metp"], lambda w: NAMED):
        p = planner(form, num_ranks=1, machine=no_machine)
        assert p.plan(w) == Plan(("replicated",) * 4)
    refused = model(infeasible={"megatron_ts": NORM})
    assert planner("megatron_ts", refused, 1).plan(w).strategies[0] == "replicated"


def test_a_graph_without_blocks_has_an_empty_plan() -> None:
    for form in ("auto", "metp", ["metp", "metp"]):
        assert planner(form, []).plan(SHORT) == Plan(())


def test_auto_is_the_best_of_all_static_plans_and_changes_with_length() -> None:
    p = planner(smoothing=0)
    chosen = {}
    for w in (SHORT, LONG):
        chosen[w] = p.plan(w)
        times = {s: p.predict(Plan((s,) * 4), w)[0] for s in ATTENTION_STRATEGIES}
        assert p.predict(chosen[w], w)[0] <= min(times.values())
    assert chosen[SHORT] != chosen[LONG]


def test_auto_names_the_shared_variant_of_an_mlp_by_one_name() -> None:
    assert planner().plan(LONG).strategies[1] == "megatron_cz"
    assert planner(strategies=["ulysses_z"]).plan(LONG).strategies == ("ulysses_z",) * 4
    p = planner("ulysses_z")
    assert p.variants(p.plan(SHORT)) == ("ulysses_z", "megatron_cz") * 2


def test_auto_chooses_only_what_is_allowed_and_feasible() -> None:
    first = planner().plan(LONG).strategies[0]
    refused = model(infeasible={first: NORM})
    assert first not in planner(blocks=refused).plan(LONG).strategies[::2]
    for s in ATTENTION_STRATEGIES:
        assert set(planner(strategies=[s]).plan(LONG).strategies) == {s}


def test_a_limit_holds_where_there_is_one_way_alone() -> None:
    """One rank without levers computes a length in one way, or not at all."""
    alone = replace(SHORT, num_ranks=1)
    need = planner(num_ranks=1).least_bytes(alone)
    assert set(planner(num_ranks=1, memory_limit=need).plan(alone).strategies) == {"replicated"}
    with pytest.raises(ValueError, match=r"the longest sequences that would fit .*'memory_limit'"):
        planner(num_ranks=1, memory_limit=need - 1).plan(alone)


def test_memory_limit_turns_blocks_one_by_one_to_smaller_strategies() -> None:
    blocks = model(layers=6)
    p = planner(blocks=blocks, smoothing=0)
    free = p.plan(LONG)
    least = planner("metp", blocks)
    high, low = p.predict(free, LONG)[1], least.predict(least.plan(LONG), LONG)[1]
    assert low < high
    last = p.predict(free, LONG)[0]
    mixed = 0
    for share in (0.9, 0.7, 0.5, 0.3, 0.1):
        limit = int(low + share * (high - low))
        bounded = planner(blocks=blocks, memory_limit=limit, smoothing=0)
        plan = bounded.plan(LONG)
        time_s, peak = bounded.predict(plan, LONG)
        assert peak <= limit
        assert time_s >= last
        last = time_s
        mixed += len(set(plan.strategies[::2])) > 1 or len(set(plan.strategies[1::2])) > 1
    assert mixed


def test_the_device_is_the_limit_by_default_but_never_refuses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = replace(MACHINE, capacity_bytes=10**6)
    with caplog.at_level(logging.WARNING):
        plan = planner(machine=lambda dtype: tiny).plan(LONG)
    assert plan == Plan(("metp",) * 4)
    assert "no plan fits" in caplog.text
    assert "the device has 976.6 KiB" in caplog.text


def test_static_bytes_count_against_the_limit() -> None:
    limit = 2**34
    assert planner(memory_limit=limit).plan(LONG)
    with pytest.raises(ValueError, match=r"the smallest needs 1[67]\.\d GiB a rank, 16\.0 GiB of"):
        planner(memory_limit=limit, static_bytes=limit).plan(LONG)


def test_the_previous_plan_stays_while_nearly_as_fast() -> None:
    restless, calm = planner(smoothing=0), planner(smoothing=1e9)
    lengths = [128, 1024, 8192, 65_536]
    works = [replace(SHORT, seq_len=s) for s in lengths]
    assert len({restless.plan(w) for w in works}) > 1
    assert len({calm.plan(w) for w in works}) == 1
    a, b = planner(smoothing=1e9), planner(smoothing=1e9)
    assert [a.plan(w) for w in works] == [b.plan(w) for w in works]  # ranks agree


def test_smoothing_never_keeps_a_plan_over_the_limit() -> None:
    p = planner(smoothing=1e9)
    p.plan(SHORT)
    need = planner("metp").predict(Plan(("metp",) * 4), LONG)[1]
    tight = planner(smoothing=1e9, memory_limit=need)
    assert tight.plan(SHORT) == p.plan(SHORT)
    assert tight.plan(LONG) == Plan(("metp",) * 4)


def count_costs(p: Planner, patch: pytest.MonkeyPatch) -> list[str]:
    """Names of the blocks whose cost ``p`` asks for from now on."""
    asked: list[str] = []

    def cost(block: BlockSpec, *args: Any) -> BlockCost:
        asked.append(block.name)
        return prior_cost(block, *args)

    patch.setattr("paradyse.planning.planner.prior_cost", cost)
    return asked


@pytest.mark.parametrize("form", ["auto", "metp"])
def test_a_workload_seen_before_is_looked_up(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = planner(form, model(layers=80))
    first = p.plan(SHORT)
    asked = count_costs(p, monkeypatch)
    monkeypatch.setattr(p, "_decide", None)
    assert p.plan(replace(SHORT)) is first  # equal, not the same object
    assert not asked


def test_the_cost_of_equal_blocks_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p = planner(blocks=model(layers=80))
    asked = count_costs(p, monkeypatch)
    p.plan(LONG)
    assert asked == ["layers.0.attention"] * 6 + ["layers.0.mlp"] * 3  # variants


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            ["metp"] * 3,
            "option 'plan': 3 names given, but the model has 2 layers (2 attention, 2 mlp blocks)",
        ),
        ({"mlp": ["metp"]}, "option 'plan'['mlp']: 1 names given, but the model has 2 mlp blocks"),
        (
            Plan(("metp",)),
            "option 'plan': 1 strategies given, but the model has 4 blocks (2 attention, 2 mlp)",
        ),
        (
            lambda w: ["metp"],
            "the function given as option 'plan': 1 names given, but the model has 2 layers",
        ),
        (
            lambda w: "ulyses_z",
            "the function given as option 'plan': unknown strategy 'ulyses_z' (did you mean",
        ),
        (lambda w: None, "the function given as option 'plan': cannot read None; give 'auto',"),
        (lambda w: len, "the function given as option 'plan': returned a function"),
    ],
)
def test_error_texts_of_plans_that_do_not_fit(form: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        planner(form).plan(SHORT)


def test_an_infeasible_strategy_is_refused_by_name_with_the_reason() -> None:
    blocks = model(infeasible={"megatron_ts": NORM, "metp": NORM})
    text = (
        "option 'plan': 'megatron_ts' cannot compute block 'layers.0.attention': a norm mixes the "
        "heads; feasible there: megatron_cz, ulysses_z, colossal_z"
    )
    for form in ("megatron_ts", ["megatron_ts", "metp"], {"attention": "megatron_ts"}):
        with pytest.raises(ValueError, match=re.escape(text)):
            planner(form, blocks).plan(SHORT)
    assert planner({"mlp": "megatron_ts"}, blocks).plan(SHORT).strategies[1] == "megatron_ts"
    text = (
        "no strategy in option 'strategies' can compute block 'layers.0.attention' (megatron_ts: "
        "a norm mixes the heads; metp: a norm mixes the heads); feasible there: megatron_cz,"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        planner("auto", blocks, strategies=["megatron_ts", "metp"]).plan(SHORT)


def test_a_list_is_ambiguous_where_blocks_do_not_pair_up() -> None:
    blocks = model()[:3]
    text = (
        "ambiguous for a model whose blocks do not pair up (2 attention, 1 mlp); give {'attention'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        planner(["metp", "metp"], blocks).plan(SHORT)
    only_attention = [b for b in model() if b.kind == "attention"]
    assert planner(["metp", "ulysses_z"], only_attention).plan(SHORT).key == "metp,ulysses_z"


def test_nothing_fits_names_the_need_the_limit_and_the_way_out() -> None:
    pattern = (
        r"no plan fits for batch 1 x 65536 tokens, bfloat16, training, 4 ranks: the smallest needs "
        r"\d+\.\d MiB a rank, 0 B of them weights, gradients and optimizer state; the longest "
        r"sequences that would fit have \d+ tokens, but option "
        r"'memory_limit' is 1\.0 MiB; raise it, use more ranks or shorter or fewer sequences, or "
        r"allow more strategies or levers \(now: megatron_ts, .*dsp\)"
    )
    with pytest.raises(ValueError, match=pattern):
        planner(memory_limit="1MiB").plan(LONG)


def test_the_longest_length_named_fits_and_little_more_does_not() -> None:
    limited = planner(memory_limit="200MiB")
    with pytest.raises(ValueError, match="longest sequences that would fit") as error:
        limited.plan(replace(LONG, seq_len=10**7))
    found = re.search(r"have (\d+) tokens", str(error.value))
    assert found is not None
    longest = int(found[1])
    assert longest > 100
    limited.plan(replace(LONG, seq_len=longest))
    with pytest.raises(ValueError, match="no plan fits"):
        limited.plan(replace(LONG, seq_len=longest + longest // 100))


@pytest.mark.parametrize("most", [1, 2, 100, 65_536, 100_000])
def test_the_longest_length_is_no_longer_than_what_is_asked_for(most: int) -> None:
    assert longest_length(lambda n: 0, 1, most) == most
    found = longest_length(lambda n: n, 77, most)
    assert found == min(77, most)


def test_a_mixture_trains_at_least_as_long_as_any_strategy() -> None:
    limit = 200 * 2**20

    def longest(strategies: list[str]) -> int:
        chooses = planner(strategies=strategies, memory_limit=limit)
        return longest_length(lambda n: chooses.least_bytes(replace(LONG, seq_len=n)), limit, 10**7)

    alone = {s: longest([s]) for s in ATTENTION_STRATEGIES}
    assert longest(list(ATTENTION_STRATEGIES)) >= max(alone.values()) > min(alone.values())


@pytest.mark.parametrize(("batch", "seq_len"), [(0, 5), (5, 0)])
def test_empty_input_is_refused(batch: int, seq_len: int) -> None:
    w = replace(SHORT, batch=batch, seq_len=seq_len)
    with pytest.raises(ValueError, match=f"empty input: batch {batch}, sequence length {seq_len};"):
        planner().plan(w)


def test_bytes_for_people() -> None:
    sizes = [0, 1023, 1024, 1.5 * 2**30, 2**50]
    assert [format_bytes(n) for n in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "1024.0 TiB"]
