"""The guard: plans are asked for once for each workload, or at every call where they may change."""

from __future__ import annotations

from typing import Any

import torch
from models import make_batch, make_model

import paradyse
from paradyse.runtime.guard import Guard
from paradyse.types import Plan, Workload


def work(batch: int, seq_len: int, training: bool = True, **rest: Any) -> Workload:
    return Workload(batch, seq_len, torch.float32, training, 2, "causal", **rest)


class Plans:
    """Long sequences get another plan; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[Workload] = []

    def __call__(self, workload: Workload) -> Plan:
        self.asked.append(workload)
        return Plan(("metp" if workload.seq_len > 100 else "megatron_cz",))


def test_a_workload_seen_before_costs_a_look_up() -> None:
    plans = Plans()
    guard = Guard(plans, True)
    made = guard(work(2, 7))
    assert guard(work(2, 7)) is made
    guard(work(2, 7, False))
    assert plans.asked == [work(2, 7), work(2, 7, False)]


def test_the_lengths_of_other_sequences_count() -> None:
    plans = Plans()
    guard = Guard(plans, True)
    for others in (((2, 5),), ((2, 6),), ((2, 5),)):
        guard(work(2, 7, others=others))
    assert [w.others for w in plans.asked] == [((2, 5),), ((2, 6),)]
    assert plans.asked[0].lengths == "7 and 5"


def test_a_function_is_asked_at_every_call_and_forgotten_plans_anew() -> None:
    plans = Plans()
    guard = Guard(plans, False)
    for _ in range(3):
        guard(work(2, 7))
    assert len(plans.asked) == 3
    fixed = Guard(plans, True)
    fixed(work(2, 7))
    fixed.forget()
    fixed(work(2, 7))
    assert len(plans.asked) == 5


def test_switches_are_counted_and_lengths_remembered() -> None:
    guard = Guard(Plans(), True)
    for length in (7, 9, 200, 300, 7):
        guard(work(1, length))
    assert guard.num_switches == 2
    assert guard.plan_of == {7: "megatron_cz", 9: "megatron_cz", 200: "metp", 300: "metp"}


def test_the_plan_of_a_length_is_that_of_its_latest_call() -> None:
    guard = Guard(lambda w: Plan(("metp" if w.training else "dsp",) * w.batch), True)
    for batch, training, plan in (
        (1, True, "metp"),
        (1, False, "dsp"),
        (1, True, "metp"),
        (2, True, "metp,metp"),
        (1, True, "metp"),
    ):
        guard(work(batch, 7, training))
        assert guard.plan_of == {7: plan}


def test_of_one_length_in_several_graphs_the_latest_call_counts() -> None:
    plans = {"causal": "replicated", "causal, key padding": "replicated+recompute"}
    options = {"inner": "eager", "plan": lambda workload: plans[workload.mask]}
    compiled = torch.compile(make_model("llama_odd"), backend="paradyse", options=options)
    for how, mask in zip(("plain", "right", "plain"), (*plans, "causal")):
        compiled(**make_batch(how, 2, 9)).loss.backward()
        (key,) = paradyse.stats(compiled).plan_per_length.values()
        assert set(key.split(",")) == {plans[mask]}


def test_lengths_without_end_take_bounded_memory() -> None:
    guard = Guard(Plans(), True)
    for length in range(2000):
        guard(work(1, length))
    assert len(guard._known) <= 512 and len(guard.used) <= 512


def test_another_plan_may_run_instead() -> None:
    plans, asked = Plans(), list[tuple[Plan, Workload]]()
    guard = Guard(plans, True)
    other = Plan(("ulysses_z",))

    def instead(plan: Plan, workload: Workload) -> Plan:
        asked.append((plan, workload))
        return plan if len(asked) % 2 else other

    guard.instead = instead
    chosen = Plan(("megatron_cz",))
    for plan in (chosen, other, chosen):
        assert guard(work(1, 7)) == plan
        assert guard.plan_of[7] == plan.key
    assert asked == [(chosen, work(1, 7))] * 3
    assert len(plans.asked) == 1 and guard.num_switches == 2
