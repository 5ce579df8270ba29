"""Cost models from profiles: what they predict, where it comes from, and which are refused."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_planner import MACHINE, SHORT, explained, model, planner

from paradyse.config import parse_options
from paradyse.planning.costs import NOTHING, BlockCost
from paradyse.planning.curves import Curve, fit_polynomial
from paradyse.planning.measured import CostModel, head_structure, load_cost_model
from paradyse.planning.planner import Planner
from paradyse.planning.prior import gradient_sum_s, head_cost, prior_cost
from paradyse.planning.profile_file import OVER_LIMIT, Header, Measurement, Profile, append
from paradyse.planning.units import dtype_name
from paradyse.strategies import canonical_strategy
from paradyse.types import ATTENTION_STRATEGIES, HEAD, BlockSpec, HeadSpec, Plan, Workload

RATES = replace(MACHINE, links={}, capacity_bytes=2**36)
HEADER = Header(
    versions={"paradyse": "0.1.0", "torch": "2.13.0", "triton": "none"},
    device="a device",
    num_ranks=4,
    dtype="bfloat16",
    sharded=False,
    inner="inductor",
    machine=asdict(RATES),
    memory_limit=2**34,
)
LENGTHS = (128, 512, 2048, 8192)
ATTENTION, MLP = model(1)


def measure(
    block: BlockSpec,
    strategy: str,
    seq_len: int,
    factor: float = 1.0,
    training: bool = True,
    batch: int = 1,
) -> Measurement:
    """As the prior says, times ``factor``; 40 % of a step with gradients is its forward.

    Bringing gradients together is not in it, as it is not in what is measured of a block.
    """
    w = replace(SHORT, seq_len=seq_len, batch=batch, training=training)
    c = prior_cost(block, strategy, w, RATES)
    c = replace(c, time_s=c.time_s - gradient_sum_s(block, strategy, w, RATES))
    return Measurement(
        structure=block.structure,
        kind=block.kind,
        strategy=canonical_strategy(block.kind, strategy),
        batch=batch,
        seq_len=seq_len,
        training=training,
        forward_s=factor * c.time_s * (0.4 if training else 1),
        backward_s=factor * c.time_s * 0.6 if training else 0.0,
        saved_bytes=c.saved_bytes,
        workspace_bytes=c.workspace_bytes,
    )


def profile_of(
    factors: dict[str, float],
    lengths: Iterable[int] = LENGTHS,
    blocks: Iterable[BlockSpec] = (ATTENTION, MLP),
    more: Iterable[Measurement] = (),
    **changes: Any,
) -> Profile:
    rows = {
        (b.structure, canonical_strategy(b.kind, s), n): measure(b, s, n, f, **changes)
        for b in blocks
        for s, f in factors.items()
        for n in lengths
    }
    return Profile(HEADER, (*rows.values(), *more), "p.jsonl", 1)


def work(seq_len: int, **changes: Any) -> Workload:
    return replace(SHORT, seq_len=seq_len, **changes)


def planner_on(profile: Profile, layers: int = 2, **options: Any) -> Planner:
    parsed = parse_options(options)
    return Planner(parsed, model(layers), 4, lambda d: RATES, cost_model=CostModel(profile))


def test_predictions_follow_the_measurements_and_name_their_source() -> None:
    m = CostModel(profile_of({"metp": 0.1, "ulysses_z": 3.0}))
    for strategy, factor in (("metp", 0.1), ("ulysses_z", 3.0)):
        for s, source in ((700, "forest"), (5000, "forest"), (32_768, "polynomial")):
            truth = prior_cost(ATTENTION, strategy, work(s), RATES)
            cost = m.cost(ATTENTION, strategy, work(s))
            assert cost.source == source
            sums_s = gradient_sum_s(ATTENTION, strategy, work(s), RATES)
            assert cost.time_s - sums_s == pytest.approx(factor * (truth.time_s - sums_s), rel=0.1)
            assert cost.saved_bytes == pytest.approx(truth.saved_bytes, rel=0.02)
            assert cost.workspace_bytes == pytest.approx(truth.workspace_bytes, rel=0.02)
            assert cost.comm_bytes == truth.comm_bytes
    other = replace(ATTENTION, structure="x")  # of which nothing was measured
    assert m.cost(other, "metp", work(700)) == prior_cost(other, "metp", work(700), RATES)


def test_the_z_names_of_an_mlp_share_one_curve() -> None:
    m = CostModel(profile_of({"megatron_cz": 0.5}))
    costs = {m.cost(MLP, s, work(700)) for s in ("megatron_cz", "ulysses_z", "colossal_z")}
    assert {c.source for c in costs} == {"forest"}
    assert len(costs) == 1


def test_a_forward_alone_is_taken_from_training_where_only_that_was_measured() -> None:
    trained = profile_of({"metp": 1.0})
    step, forward = (
        CostModel(trained).cost(ATTENTION, "metp", work(2048, training=t)) for t in (True, False)
    )
    sums_s = gradient_sum_s(ATTENTION, "metp", work(2048), RATES)
    assert forward.time_s == pytest.approx(0.4 * (step.time_s - sums_s), rel=0.05)
    assert forward.saved_bytes == 0
    both = step.saved_bytes + step.workspace_bytes
    assert forward.workspace_bytes == pytest.approx(both, rel=0.01)
    extra = [measure(ATTENTION, "metp", s, 7.0, training=False) for s in LENGTHS]
    measured = CostModel(profile_of({"metp": 1.0}, more=extra))
    own = measured.cost(ATTENTION, "metp", work(2048, training=False))
    prior = prior_cost(ATTENTION, "metp", work(2048, training=False), RATES)
    assert own.time_s == pytest.approx(7 * prior.time_s, rel=0.05)
    assert own.workspace_bytes == pytest.approx(prior.workspace_bytes, rel=0.01)
    only_forward = CostModel(profile_of({"metp": 9.0}, training=False))
    assert only_forward.cost(ATTENTION, "metp", work(2048)).source == "prior"


def over(seq_len: int, batch: int = 1, training: bool = True) -> Measurement:
    row = measure(ATTENTION, "metp", seq_len, batch=batch, training=training)
    return replace(row, outcome=OVER_LIMIT, forward_s=0.0, backward_s=0.0)


def test_what_did_not_fit_when_measured_needs_more_than_that_limit() -> None:
    m = CostModel(profile_of({"metp": 0.1}, more=[over(16_384)]))
    limit = HEADER.memory_limit
    assert limit is not None
    for w in (work(16_384), work(20_000), work(16_384, batch=2)):
        assert m.cost(ATTENTION, "metp", w).workspace_bytes > limit
    for w in (work(16_383), work(16_384, training=False)):
        assert m.cost(ATTENTION, "metp", w).workspace_bytes < limit
    assert m.cost(ATTENTION, "megatron_ts", work(16_384)).workspace_bytes < limit
    again = CostModel(
        profile_of({"metp": 0.1}, more=[over(8192), measure(ATTENTION, "metp", 8192)])
    )
    assert again.cost(ATTENTION, "metp", work(8192)).workspace_bytes < limit  # the later line holds
    forward = CostModel(profile_of({"metp": 0.1}, more=[over(16_384, training=False)]))
    assert forward.cost(ATTENTION, "metp", work(16_384)).workspace_bytes > limit
    unnamed = replace(m.profile, header=replace(HEADER, memory_limit=None))
    need = CostModel(unnamed).cost(ATTENTION, "metp", work(16_384)).workspace_bytes
    assert need == RATES.capacity_bytes + 1  # measured up to what the device had


def test_the_order_of_the_lines_does_not_matter() -> None:
    profile = profile_of({"metp": 0.1, "ulysses_z": 3.0})
    rows = [
        replace(r, forward_s=r.forward_s * (1 + i % 3 / 10))
        for i, r in enumerate(profile.measurements)
    ]
    shuffled = random.Random(0).sample(rows, len(rows))
    a, b = (CostModel(replace(profile, measurements=tuple(r))) for r in (rows, shuffled))
    for s in (100, 700, 30_000):
        for name in ("metp", "ulysses_z"):
            assert a.cost(ATTENTION, name, work(s)) == b.cost(ATTENTION, name, work(s))


def test_a_machine_that_is_none_is_refused() -> None:
    profile = replace(
        profile_of({"metp": 1.0}), header=replace(HEADER, machine={"links": {"x": 3}})
    )
    with pytest.raises(ValueError, match="p.jsonl:1: the fields of the machine .* measure again"):
        CostModel(profile)


def test_the_plan_follows_the_profile_and_not_the_prior() -> None:
    w = work(8192)
    by_prior = planner().plan(w).strategies[0]
    fastest = "metp"
    assert by_prior != fastest
    factors = dict.fromkeys(ATTENTION_STRATEGIES, 1.0) | {fastest: 1e-3}
    p = planner_on(profile_of(factors))
    assert p.plan(w) == Plan((fastest,) * 4)
    report = explained(p, w)
    assert {r.source for b in report.blocks for r in b.rows} == {"forest"}
    assert report.notes == ("costs from the profile p.jsonl",)
    text = str(report)
    assert "sent      source  why" in text
    assert "costs from the profile p.jsonl" in text
    assert (report.time_s, report.peak_bytes) == p.predict(report.plan, w)


def test_explain_tells_what_was_not_measured() -> None:
    profile = profile_of({"metp": 1.0, "megatron_ts": 1.0}, blocks=[ATTENTION])
    report = explained(planner_on(profile), SHORT)
    sources = {r.strategy: r.source for r in report.blocks[0].rows}
    assert sources["metp"] == sources["megatron_ts"] == "forest"
    assert sources["ulysses_z"] == "prior"
    assert {r.source for r in report.blocks[1].rows} == {"prior"}
    static = {r.strategy: r.source for r in report.static_plans}
    assert (static["metp"], static["ulysses_z"]) == ("forest, prior", "prior")
    note = "not in the profile, so predicted by the analytic prior: layers.0.mlp and 1 like it"
    assert note in report.notes
    assert note in str(report)


def test_explain_names_what_a_strategy_needs_that_does_not_fit() -> None:
    factors = dict.fromkeys(ATTENTION_STRATEGIES, 1.0) | {"metp": 1e-3}
    profile = profile_of(factors, more=[over(128)])
    p = planner_on(profile, memory_limit="8GiB")
    plan = p.plan(SHORT)
    assert "metp" not in plan.strategies[::2]
    why = {r.strategy: r.why for r in explained(p, SHORT).blocks[0].rows}
    assert re.fullmatch(
        r"0\.\d\dx the time, but does not fit: needs 16\.\d GiB of 8\.0 GiB", why["metp"]
    )


def rest(s: int) -> Measurement:
    return Measurement("", "rest", "", 1, s, True, "measured", 1.0, 1.0, 10**6 * s, 10**5 * s)


def test_what_is_not_in_a_block_counts_for_memory_and_time() -> None:
    factors = dict.fromkeys(ATTENTION_STRATEGIES, 1.0)
    without = planner_on(profile_of(factors))
    p = planner_on(profile_of(factors, more=[rest(s) for s in LENGTHS]))
    plan = without.plan(work(8192))
    (time_s, peak), (blocks_s, blocks_peak) = (x.predict(plan, work(8192)) for x in (p, without))
    assert time_s == pytest.approx(blocks_s + 2.0, rel=1e-3)
    saved = sum(c[s].saved_bytes for c, s in zip(p.costs(work(8192)), plan.strategies))
    blocks_held, held = blocks_peak / (1 + CostModel.margin), peak / (1 + CostModel.margin)
    more = 10**6 * 8192 + max(0, saved + 10**5 * 8192 - blocks_held)  # at the loss
    assert held == pytest.approx(blocks_held + more, rel=1e-3)
    tight = planner_on(
        profile_of(factors, more=[rest(s) for s in LENGTHS]), memory_limit=blocks_peak, smoothing=0
    )
    with pytest.raises(ValueError, match="no plan fits"):
        tight.plan(work(8192))
    assert without.beside(SHORT).rest == NOTHING


def test_a_step_needs_its_floor_whatever_the_plan() -> None:
    """The sums of gradients at the end of backward, when little is saved any more."""
    factors, floor = dict.fromkeys(ATTENTION_STRATEGIES, 1.0), 10**12
    row = replace(rest(512), saved_bytes=0, workspace_bytes=0, floor_bytes=floor)
    p = planner_on(profile_of(factors, more=[row]))
    plan = p.plan(work(512))
    assert p.predict(plan, work(512))[1] == p.least_bytes(work(512)) >= floor
    assert p.least_bytes(replace(work(512), training=False)) < floor
    tight = planner_on(profile_of(factors, more=[row]), memory_limit=floor - 1)
    with pytest.raises(ValueError, match="the longest sequences that would fit have 0 tokens"):
        tight.plan(work(512))


def test_a_floor_of_the_rest_follows_the_tokens() -> None:
    """Of a model whose head was not found, logits are among it."""
    rows = [replace(rest(s), floor_bytes=1000 + 100 * s) for s in LENGTHS]
    m = CostModel(profile_of({}, more=rows))
    found = [m.floor(work(s)) for s in (64, 128, 300, 8192, 10_000)]
    assert found == [1000 + 100 * s for s in (128, 128, 300, 8192, 10_000)]


def test_whole_logits_are_no_floor_of_plans_without_them() -> None:
    """The caller has them to the end; a step by tiles needs no more than it held itself."""

    def floor(levers: str, seq_len: int, held: int) -> Measurement:
        return Measurement("head", HEAD, levers, 1, seq_len, True, "measured", floor_bytes=held)

    whole = [floor("", s, 1000 + 100 * s) for s in (64, 512)]
    m = CostModel(profile_of({}, more=whole))
    assert m.floor(work(32)) == m.floor(work(4096)) == 1000 + 100 * 64
    tiled = [floor("tiled", s, 1000 + s) for s in (64, 512)]
    m = CostModel(profile_of({}, more=[*whole, *tiled]))
    assert [m.floor(work(s)) for s in (32, 64, 256, 4096)] == [1064, 1064, 1256, 5096]
    assert m.floor(replace(work(256), batch=2)) == 1512


def test_a_head_by_tiles_is_predicted_from_the_head_as_measured() -> None:
    """In a profile without levers, logits twice as large as the prior counts are so in tiles."""
    head = HeadSpec(1024, 32_768)

    def prior(levers: str, seq_len: int) -> BlockCost:
        return head_cost(head, levers, work(seq_len), RATES, sharded=False)

    def as_measured(seq_len: int) -> Measurement:
        c = prior("", seq_len)
        row = Measurement(head_structure(head), HEAD, "", 1, seq_len, True, "measured")
        held = 2 * (c.saved_bytes + c.workspace_bytes)
        return replace(row, forward_s=c.time_s, workspace_bytes=held)

    m = CostModel(profile_of({}, more=[as_measured(s) for s in LENGTHS]))
    for s in (700, 5000):
        found, said = m.head(head, "tiled", work(s)), prior("tiled", s)
        assert found.saved_bytes == said.saved_bytes
        held = 2 * (said.saved_bytes + said.workspace_bytes)
        assert found.saved_bytes + found.workspace_bytes == pytest.approx(held, rel=0.05)


def test_gradients_of_whole_weights_are_counted_with_the_strategy_that_sums_them() -> None:
    """They come at the end of the model's backward: measured with the rest, caused by a block."""
    profile = profile_of({"megatron_ts": 1.0, "megatron_cz": 1.0})
    sharded = replace(profile, header=replace(HEADER, sharded=True))
    for strategy in ("megatron_ts", "megatron_cz"):
        whole, split = (
            CostModel(x).cost(MLP, strategy, work(2048)).time_s for x in (profile, sharded)
        )
        sent = 2 * MLP.num_weight_elements * 2 * 3 / 4
        link_s = sent / RATES.bandwidth_bytes + RATES.latency_s
        copies_s = 4 * MLP.num_weight_elements * 2 / RATES.memory_bandwidth
        assert whole - split == pytest.approx(link_s + copies_s, rel=0.2)
    row = Measurement("", "rest", "", 1, 0, True, "measured", 1.0, 1.0)
    m = CostModel(profile_of({}, more=[replace(row, seq_len=s) for s in LENGTHS]))
    alone, beside = m.rest(work(512)), m.rest(work(512), [MLP, MLP])
    sums_s = gradient_sum_s(MLP, "megatron_cz", work(512), RATES)
    assert alone.time_s - beside.time_s == pytest.approx(2 * sums_s)


def test_the_rest_of_a_step_is_linear_in_the_tokens() -> None:
    """Little of it shows among the overhead, and a cubic through noise would be far off beyond."""
    times = dict(zip((128, 256, 512, 1024, 2048), (9.02, 9.53, 9.88, 11.97, 15.8)))  # measured, ms
    row = Measurement("", "rest", "", 1, 0, True)
    rows = [replace(row, seq_len=s, forward_s=t / 1e3) for s, t in times.items()]
    cost = CostModel(profile_of({}, more=rows)).rest(work(8192))
    assert 32e-3 < cost.time_s < 40e-3


def test_the_prior_steadies_memory_and_time_beyond_the_range() -> None:
    """Against the polynomial alone."""
    far = work(16_384)
    truth = prior_cost(ATTENTION, "ulysses_z", far, RATES)
    sums_s = gradient_sum_s(ATTENTION, "ulysses_z", far, RATES)
    steadied, alone = [], []

    def off(*predicted: float) -> list[float]:
        wanted = truth.time_s, truth.saved_bytes, truth.workspace_bytes
        return [abs(x / y - 1) for x, y in zip(predicted, wanted, strict=True)]

    for seed in range(10):
        rng = random.Random(seed)
        exact = [measure(ATTENTION, "ulysses_z", s) for s in (256, 512, 1024, 2048, 4096)]
        rows = [
            replace(
                m,
                forward_s=m.forward_s * rng.uniform(0.9, 1.1),
                saved_bytes=int(m.saved_bytes * rng.uniform(0.9, 1.1)),
                workspace_bytes=int(m.workspace_bytes * rng.uniform(0.9, 1.1)),
            )
            for m in exact
        ]
        cost = CostModel(profile_of({}, more=rows)).cost(ATTENTION, "ulysses_z", far)
        steadied.append(off(cost.time_s, cost.saved_bytes, cost.workspace_bytes))
        points = [(m.batch, m.seq_len) for m in rows]
        time_s, saved, workspace = (
            fit_polynomial(points, values)(1, far.seq_len)
            for values in (
                [m.forward_s + m.backward_s for m in rows],
                [m.saved_bytes for m in rows],
                [m.workspace_bytes for m in rows],
            )
        )
        alone.append(off(time_s + sums_s, saved, workspace))
    for held, free in zip(zip(*steadied), zip(*alone)):
        assert sum(held) < 0.5 * sum(free)


def test_blocks_of_equal_shape_but_another_structure_are_costed_apart() -> None:
    other = replace(ATTENTION, structure="other", name="layers.1.attention", layer=1)
    factors = dict.fromkeys(ATTENTION_STRATEGIES, 1.0) | {"metp": 1e-3}
    more = [
        measure(other, s, n, 1e-3 if s == "colossal_z" else 1.0) for s in factors for n in LENGTHS
    ]
    m = CostModel(profile_of(factors, more=more))
    p = Planner(parse_options({}), [ATTENTION, other], 4, lambda d: RATES, cost_model=m)
    assert p.plan(SHORT).strategies == ("metp", "colossal_z")


def test_curves_are_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {s: 1 + i / 10 for i, s in enumerate(ATTENTION_STRATEGIES)}
    profile = profile_of(factors)
    rows = tuple(
        replace(
            m,
            forward_s=m.forward_s * (1 + i * 7 % 5 / 50),
            saved_bytes=m.saved_bytes + i % 7 * 10**5,
        )
        for i, m in enumerate(profile.measurements)
    )
    fitted = []

    def fit(*args: Any) -> Curve:
        fitted.append(args)
        return Curve(*args)

    monkeypatch.setattr("paradyse.planning.measured.Curve", fit)
    p = planner_on(replace(profile, measurements=rows), layers=24)
    p.plan(work(100))
    first = len(fitted)
    assert first
    for seq_len in (300, 700, 1100, 3000, 20_000):
        p.plan(work(seq_len))
    assert len(fitted) == first


PRESENT = replace(HEADER, machine={})


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "profile.jsonl"
    append(path, HEADER, profile_of({"metp": 1.0}).measurements)
    return str(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_ranks": 8},
            "measured with 4 ranks, this runs with 8 ranks; measure on 8 ranks: paradyse profile "
            "--ranks 8, or leave option 'cost_model' out",
        ),
        ({"dtype": "float32"}, "measured with bfloat16, this runs with float32; measure in this"),
        (
            {"sharded": True},
            "measured with whole weights on every rank, this runs with sharded weights; measure",
        ),
    ],
)
def test_a_profile_of_another_run_is_refused(file: str, changes: Any, text: str) -> None:
    load_cost_model(file, model(), PRESENT)
    with pytest.raises(ValueError, match=re.escape(text)):
        load_cost_model(file, model(), replace(PRESENT, **changes))


def test_a_profile_of_another_model_is_refused(file: str) -> None:
    others = [replace(b, structure="zz") for b in model()]
    text = (
        "a profile of another model: its blocks have the structures a, m, this model's zz; measure"
    )
    with pytest.raises(ValueError, match=text):
        load_cost_model(file, others, PRESENT)
    some = load_cost_model(file, [*others, ATTENTION], PRESENT)
    assert "not in the profile" in some.notes_on([*others, ATTENTION])[1]


def test_another_device_or_version_is_noted_and_logged_once(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = replace(
        PRESENT, device="another", inner="eager", versions={**HEADER.versions, "torch": "2.14.0"}
    )
    with caplog.at_level(logging.WARNING):
        first = load_cost_model(file, model(), here)
        assert load_cost_model(file, model(), here) is first
    notes = (
        "measured on device a device, running on another",
        "measured on inner inductor, running on eager",
        "measured on torch 2.13.0, running on 2.14.0",
    )
    assert first.notes == notes
    assert [r.getMessage() for r in caplog.records] == [f"profile {file}: {n}" for n in notes]
    assert notes[0] in first.notes_on(model())
    assert load_cost_model(file, model(), PRESENT).notes == ()


def test_a_profile_that_grew_is_read_anew(file: str) -> None:
    before = load_cost_model(file, model(), PRESENT).cost(ATTENTION, "ulysses_z", work(700))
    more = profile_of({"ulysses_z": 5.0}).measurements
    append(file, HEADER, more)
    after = load_cost_model(file, model(), PRESENT).cost(ATTENTION, "ulysses_z", work(700))
    assert (before.source, after.source) == ("prior", "forest")


def test_costs_of_the_prior_say_so() -> None:
    assert BlockCost(1.0, 1, 1, 1).source == "prior"
    assert {planner().costs(SHORT)[0][s].source for s in ATTENTION_STRATEGIES} == {"prior"}
    assert dtype_name(torch.bfloat16) == HEADER.dtype


def test_blocks_of_two_models_that_have_one_name() -> None:
    slow = replace(MLP, structure="slow")
    known = [measure(b, "megatron_ts", n, f) for b, f in ((MLP, 1), (slow, 50)) for n in LENGTHS]
    point, both = "megatron_ts+recompute", CostModel(Profile(HEADER, tuple(known), "", 0))
    alone = CostModel(both.profile).cost(slow, point, SHORT)
    assert both.cost(MLP, point, SHORT).time_s < alone.time_s / 10
    assert both.cost(slow, point, SHORT) == alone
