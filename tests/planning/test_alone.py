"""Whether every rank computes the whole: weighed against the planner's plan, in time and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_measured import planner_on, profile_of
from test_planner import LONG, MACHINE, SHORT, model, planner

from paradyse.planning.alone import WHY_REPLICAS, Alone
from paradyse.planning.prior import head_cost, prior_cost
from paradyse.planning.splits import Splits
from paradyse.types import ATTENTION_STRATEGIES, REPLICATED, HeadSpec, Plan, Workload

HEAD = HeadSpec(1024, 32_000)


def settled(workload: Workload, refused: str = "", **options: Any) -> Plan:
    alone = Alone(Splits(planner(head=HEAD, **options)), refused)
    return alone.settle(alone.planner.plan(workload), workload)


def test_dear_messages_make_short_sequences_whole_and_cheap_ones_do_not() -> None:
    tiny, dear = replace(SHORT, seq_len=16), replace(MACHINE, latency_s=1e-3)
    assert settled(tiny, machine=lambda dtype: dear).alone
    free = replace(MACHINE, latency_s=0.0, bandwidth_bytes=1e15)
    assert not settled(tiny, machine=lambda dtype: free).alone
    assert not settled(LONG, machine=lambda dtype: dear).alone
    plan = settled(tiny, machine=lambda dtype: dear)
    assert set(plan.strategies) == {REPLICATED} and Plan.of_key(plan.key) == plan


@pytest.mark.parametrize(
    "given",
    [
        {"refused": WHY_REPLICAS},
        {"strategies": ["megatron_cz", "metp"]},
        {"plan": "megatron_cz"},
        {"plan": {"attention": "auto", "mlp": "metp"}},
    ],
)
def test_it_is_left_alone_where_another_plan_is_asked_for(given: dict[str, Any]) -> None:
    tiny, dear = replace(SHORT, seq_len=16), replace(MACHINE, latency_s=1e-3)
    assert not settled(tiny, machine=lambda dtype: dear, **given).alone


def test_it_has_to_fit_and_is_left_when_it_did_not() -> None:
    w, dear = replace(SHORT, seq_len=8192), replace(MACHINE, latency_s=1.0)
    p = planner(machine=lambda dtype: dear, head=HEAD)
    alone = Alone(Splits(p))
    plan = p.plan(w)
    need, split = p.predict(alone.plan(w), w)[1], p.predict(plan, w)[1]
    assert split < need
    for limit, fits in ((need, True), (need - 1, False)):
        assert settled(w, machine=lambda dtype: dear, memory_limit=limit).alone == fits
    assert alone.settle(plan, w).alone
    alone.ran_out(w)
    assert alone.settle(plan, w) == plan


def test_its_cost_is_that_of_one_rank_and_the_sum_of_gradients() -> None:
    block = model()[0]
    one = replace(SHORT, num_ranks=1)
    for w in (SHORT, replace(SHORT, training=False)):
        cost = prior_cost(block, REPLICATED, w, MACHINE)
        by_itself = prior_cost(block, REPLICATED, replace(one, training=w.training), MACHINE)
        sent = 2 * block.num_weight_elements * 2 * 3 // 4 if w.training else 0
        assert cost.comm_bytes == sent
        assert cost.saved_bytes == by_itself.saved_bytes
        assert cost.time_s >= by_itself.time_s
        assert (cost.time_s == by_itself.time_s) == (not w.training)
    repeating = replace(MACHINE, repeatable=True)
    compared = prior_cost(block, REPLICATED, SHORT, repeating)
    assert compared.comm_bytes == 0 < prior_cost(block, "metp", SHORT, repeating).comm_bytes
    assert compared.time_s < prior_cost(block, REPLICATED, SHORT, MACHINE).time_s
    assert head_cost(HEAD, REPLICATED, SHORT, repeating).comm_bytes == 0
    assert head_cost(HEAD, "", SHORT, repeating).comm_bytes > 0
    head, one_head = (head_cost(HEAD, at, w, MACHINE) for at, w in ((REPLICATED, SHORT), ("", one)))
    assert head.comm_bytes > 0 == one_head.comm_bytes
    assert head.saved_bytes == one_head.saved_bytes
    assert head_cost(HEAD, "", SHORT, MACHINE).saved_bytes == pytest.approx(head.saved_bytes / 4)


def test_blocks_that_are_checkpointed_stay_so() -> None:
    blocks = [replace(b, recompute=True) for b in model()]
    alone = Alone(Splits(planner(blocks=blocks)))
    assert set(alone.plan(SHORT).strategies) == {f"{REPLICATED}+recompute"}
    assert set(alone.plan(replace(SHORT, training=False)).strategies) == {REPLICATED}


def test_what_was_chosen_may_be_asked_for() -> None:
    """As plans are kept: with the head, on as many ranks or on one."""
    tiny, dear = replace(SHORT, seq_len=16), replace(MACHINE, latency_s=1e-3)
    chosen = settled(tiny, machine=lambda dtype: dear)
    assert chosen.alone
    for kept in (chosen, Plan.of_key(chosen.key)):
        assert settled(LONG, plan=kept) == chosen
        on_one = settled(replace(LONG, num_ranks=1), plan=kept, num_ranks=1)
        assert on_one.strategies == chosen.strategies and not on_one.alone
    with pytest.raises(ValueError, match="the head is 'replicated' and some block is not: .* give"):
        settled(LONG, plan=Plan((REPLICATED, "metp") * 2, REPLICATED))


def test_a_machine_that_is_slower_throughout_changes_no_choice() -> None:
    """What a profile says of the strategies that it has counts for this one too, and once."""

    def chosen(factor: float, seq_len: int) -> bool:
        factors = dict.fromkeys(ATTENTION_STRATEGIES, factor)
        p = planner_on(profile_of(factors, (16, 64, 256, 1024), training=False), levers=[])
        alone, w = Alone(Splits(p)), replace(SHORT, seq_len=seq_len, training=False)
        return alone.settle(p.plan(w), w).alone

    for seq_len in (16, 64, 1024):
        assert chosen(1.0, seq_len) == chosen(2.0, seq_len) == (seq_len < 1024)


def test_one_rank_has_no_such_choice() -> None:
    w = replace(SHORT, num_ranks=1)
    assert not settled(w, num_ranks=1).alone
