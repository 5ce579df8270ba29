"""Plans tried beside the chosen one: when, for how long, and what is made of their times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step

from paradyse.config import parse_options
from paradyse.planning.alone import Alone
from paradyse.planning.costs import Machine
from paradyse.planning.planner import Planner
from paradyse.planning.splits import Splits
from paradyse.profiling.step_reports import StepReport
from paradyse.profiling.trials import (
    LONGER,
    MOST,
    NEAR,
    ROUNDS,
    TRY_AFTER,
    TRY_AGAIN,
    WARM_UP,
    Trials,
    may_be_fastest,
)
from paradyse.types import REPLICATED, BlockSpec, Plan, Workload

T, Z, U = "megatron_ts", "megatron_cz", "ulysses_z"
OF_T, OF_Z = Plan((T,) * 4), Plan((Z,) * 4)
MIXED = Plan((T, Z) * 2)
SHORT = Workload(1, 128, torch.float32, True, 2)
MACHINE = Machine(1e12, 1e12, 1e-5, 1e10)
BLOCKS = [
    BlockSpec(
        "attention", "attention", 0, "a", hidden=64, num_heads=4, num_kv_heads=4, head_dim=16
    ),
    BlockSpec("mlp", "mlp", 0, "m", hidden=64, intermediate=256),
] * 2


def planner(**options: Any) -> Planner:
    """Of two layers on two ranks."""
    return Planner(parse_options(options), BLOCKS, 2, lambda dtype: MACHINE, 0)


class Run:
    """A run of a program on ranks, of which this one is the first.

    Args:
        seconds: of a step under each plan; of others one.
        spread: standard deviation of their logarithms.
        predicted: the same as predicted.
        options: of the planner.
    """

    def __init__(
        self,
        seconds: Mapping[Plan, float],
        predicted: Mapping[Plan, float] | None = None,
        spread: float = 0.0,
        **options: Any,
    ) -> None:
        self.noise = partial(random.Random(3).lognormvariate, 0.0, spread)
        self.alone, times = Alone(Splits(planner(**options))), predicted or {}
        self.alone.splits.predict = (  # type: ignore[method-assign]
            lambda plan, workload: (times.get(plan, 1.0) * workload.seq_len, workload.seq_len)
        )
        self.seconds, self.said, self.forgotten = seconds, list[Sequence[int]](), 0
        self.often = set[Plan]()
        self.trials = Trials(self.alone, self.say, self.forget, self.often.__contains__)
        self.number, self.follows = 0, True

    def say(self, numbers: Sequence[int]) -> list[int]:
        self.said.append(numbers)
        return list(numbers)

    def forget(self) -> None:
        self.forgotten += 1

    def call(self, chosen: Plan, workload: Workload = SHORT, trained: bool = True) -> Plan:
        """What a call runs by for which ``chosen`` is the planner's."""
        best = self.alone.tried.best(chosen, workload)
        plan = self.trials.turn(best, workload)
        self.number += 1
        time_s = self.seconds.get(plan, 1.0) * self.noise()
        assert self.trials.under_way or plan == best
        call: Any = SimpleNamespace(report=None, follows=self.follows)
        self.trials.began(call)
        call.report = StepReport(
            number=self.number,
            workload=workload,
            plan=plan,
            num_switches=0,
            switched=False,
            trained=trained,
            held_bytes=None,
            _seconds=lambda: [0.0, time_s],
            _predict=lambda: None,
        )
        return plan


def rivals_of(run: Run, chosen: Plan, **call: bool) -> list[Plan]:
    """What runs beside ``chosen`` in its first trial."""
    plans = [run.call(chosen, **call) for _ in range(TRY_AFTER + (MOST + 1) * ROUNDS)]
    return [p for p in dict.fromkeys(plans) if p != chosen]


def test_a_mix_takes_turns_with_what_it_is_made_of_and_the_fastest_stays() -> None:
    run = Run({MIXED: 1.2, OF_T: 1.5, OF_Z: 1.0})
    before = [run.call(MIXED) for _ in range(TRY_AFTER - 1)]
    assert set(before) == {MIXED}
    tried = [run.call(MIXED) for _ in range(3 * ROUNDS)]
    assert tried == tried[:3] * ROUNDS and {*tried[:3]} == {MIXED, OF_T, OF_Z}
    assert tried[2] == MIXED and not run.forgotten
    assert run.call(MIXED) == MIXED and run.forgotten == 1  # judged
    assert {run.call(MIXED) for _ in range(TRY_AGAIN // 2)} == {OF_Z}
    assert len(run.said) == 3


def test_where_nothing_is_clear_what_may_be_the_fastest_takes_further_turns() -> None:
    run = Run({MIXED: 1.05, OF_T: 1.6, OF_Z: 1.0}, spread=0.15)
    for _ in range(TRY_AFTER - 1):
        run.call(MIXED)
    turns = Counter[Plan]()
    while not run.forgotten:
        plan = run.call(MIXED)
        turns[plan] += run.trials.under_way
    most = ROUNDS + LONGER * (ROUNDS - WARM_UP)
    assert turns[OF_T] < turns[MIXED] <= turns[OF_Z] <= most  # it is surely slower, sooner
    assert sum(turns.values()) == len(run.said[-1])
    assert {run.call(MIXED) for _ in range(TRY_AGAIN // 4)} == {OF_Z}


def test_what_may_be_the_fastest() -> None:
    wide, narrow = ((1.0, 1.1, 0.9), (1.0, 1.01, 0.99))
    assert may_be_fastest({"a": wide, "b": [x + 0.05 for x in wide]}) == ["a", "b"]
    assert may_be_fastest({"a": wide, "b": [x + 0.5 for x in wide]}) == ["a"]
    assert may_be_fastest({"a": [x + 0.05 for x in narrow], "b": narrow}) == ["b"]
    assert may_be_fastest({"a": narrow, "b": narrow}) == ["a"]  # it does not matter which
    assert may_be_fastest({"a": wide, "b": wide * 30, "c": [9.0]}) == ["a", "b"]
    assert may_be_fastest({"a": [1.0], "b": [2.0]}) == ["a"]


def test_a_mix_that_is_faster_stays() -> None:
    run = Run({MIXED: 1.0, OF_T: 1.04, OF_Z: 1.04})
    assert rivals_of(run, MIXED)
    assert {run.call(MIXED) for _ in range(TRY_AGAIN // 2)} == {MIXED}


def test_a_plan_of_one_strategy_is_tried_beside_those_that_run_at_other_lengths() -> None:
    run, long = Run({OF_Z: 0.8}), replace(SHORT, seq_len=8 * SHORT.seq_len)
    assert [run.call(OF_T) for _ in range(TRY_AFTER)] == [OF_T] * TRY_AFTER
    run.call(OF_Z, long)
    plans = [run.call(OF_T) for _ in range(TRY_AFTER + 2 * ROUNDS)]
    assert plans.index(OF_Z) == TRY_AFTER - 1 and plans.count(OF_Z) >= ROUNDS
    assert len(run.said) == 3
    assert {run.call(OF_T) for _ in range(TRY_AGAIN // 2)} == {OF_Z}


def test_what_was_tried_is_tried_again_much_later() -> None:
    run = Run({MIXED: 1.2, OF_Z: 1.0, OF_T: 1.5})
    rivals_of(run, MIXED)
    run.seconds = {MIXED: 0.8, OF_Z: 1.0, OF_T: 1.2}
    before = [run.call(MIXED) for _ in range(TRY_AGAIN - TRY_AFTER)]
    assert set(before) == {OF_Z}
    after = [run.call(MIXED) for _ in range(TRY_AFTER + 3 * ROUNDS)]
    assert MIXED in after and after[-1] == MIXED


def test_what_is_predicted_to_be_far_slower_or_to_need_too_much_is_not_tried() -> None:
    for share, tried in ((NEAR - 0.01, [OF_T, OF_Z]), (NEAR + 0.01, [OF_T])):
        assert rivals_of(Run({}, {OF_T: 0.9, OF_Z: share}), MIXED) == tried
    most = 2 * SHORT.seq_len  # others of the scale have up to twice as many tokens
    assert rivals_of(Run({}, memory_limit=most), MIXED)
    assert not rivals_of(Run({}, memory_limit=most - 1), MIXED)


def test_calls_without_a_backward_say_nothing() -> None:
    run = Run({MIXED: 1.2, OF_Z: 1.0})
    assert rivals_of(run, MIXED, trained=False)
    assert not any([*run.said[1], *run.said[2]]) and not run.forgotten
    assert run.alone.tried.best(MIXED, SHORT) == MIXED
    assert {run.call(MIXED) for _ in range(4 * TRY_AFTER)} == {MIXED}  # nothing is tried any more


def test_calls_that_are_parts_of_a_step_say_nothing() -> None:
    """Such as those of a model that is two graphs."""
    run = Run({MIXED: 1.2, OF_Z: 1.0})
    run.follows = False
    assert rivals_of(run, MIXED)
    assert not any([*run.said[1], *run.said[2]]) and not run.forgotten


def test_calls_without_gradients_between_steps_change_nothing() -> None:
    run, plans = Run({MIXED: 1.2, OF_T: 1.5, OF_Z: 1.0}), list[Plan]()
    for _ in range(TRY_AFTER + 3 * ROUNDS):
        plans.append(run.call(MIXED))
        run.call(MIXED, replace(SHORT, training=False), trained=False)
        assert not run.trials.under_way
    assert {*plans} == {MIXED, OF_T, OF_Z} and plans[-1] == MIXED  # judged
    assert run.forgotten == 1 and run.call(MIXED) == OF_Z


def test_blocks_run_together_under_all_plans_of_a_trial_or_under_none() -> None:
    for often, together in (({MIXED, OF_T}, False), ({MIXED, OF_T, OF_Z}, True)):
        run, seen = Run({}), list[bool]()
        run.often |= often
        for _ in range(TRY_AFTER + 3 * ROUNDS):
            run.call(MIXED)
            if run.trials.under_way:
                seen.append(run.trials.together)
                run.often.add(OF_Z)  # it was used often meanwhile
        assert seen == [together] * (3 * ROUNDS)


def test_the_first_rounds_are_not_counted() -> None:
    """They compile."""
    run = Run({MIXED: 1.2, OF_T: 1.5, OF_Z: 1.0})
    rivals_of(run, MIXED)
    seen = run.said[-1]
    assert len(seen) == 3 * ROUNDS
    assert not any(seen[: 3 * WARM_UP]) and all(seen[3 * WARM_UP :])


def test_other_calls_are_left_alone() -> None:
    run = Run({})
    without, more = replace(SHORT, training=False), replace(SHORT, keeps_gradients=True)
    levers, split = Plan((f"{T}+recompute", Z) * 2), replace(MIXED, split="batch")
    for plan, workload in ((MIXED, without), (MIXED, more), (levers, SHORT), (split, SHORT)):
        assert {run.call(plan, workload) for _ in range(3 * TRY_AFTER)} == {plan}
    assert not run.said


def test_the_whole_on_every_rank_is_tried_where_it_runs_elsewhere_and_the_other_way_round() -> None:
    long = replace(SHORT, seq_len=8 * SHORT.seq_len)
    alone = Plan((REPLICATED,) * 4, REPLICATED)

    for chosen, other in ((alone, OF_T), (OF_T, alone)):
        run = Run({})
        run.call(other, long)
        assert rivals_of(run, chosen) == [other]
    run = Run({})
    run.call(alone, long)
    run.alone.refused = "it turned out to have other blocks"
    assert rivals_of(run, OF_T) == []


def trained() -> tuple[set[str], list[bool], list[tuple[bool, bool]], dict[str, float]]:
    """Plans of attention that steps of one length ran by on this rank, each of them exact; of those
    that were watched, whether they were turns; of turns, whether blocks ran together, and were to;
    and what is made of it."""
    from paradyse.planned_program import PlannedProgram
    from paradyse.profiling import online, trials
    from paradyse.runtime.registry import captures_of

    model, reference = make_model("llama"), make_model("llama")
    options = {"strategies": [Z, U], "levers": [], "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch, taken, watched = make_batch("plain", 1, 16), set[str](), list[bool]()
    want, watched_frame = run_step(reference, reference, batch), online.WatchedFrame
    compute, together = PlannedProgram._compute, list[tuple[bool, bool]]()

    def graph() -> Any:
        found, *_ = [g for c in captures_of(compiled) for g in c.graphs.values()]
        return found  # the other one takes no gradients

    def watch(*of: Any) -> Any:
        watched.append(graph().choice.trials.under_way)
        return watched_frame(*of)

    def compute_turn(self: Any, *of: Any) -> Any:
        if torch.is_grad_enabled() and self.choice.trials.under_way:
            together.append((of[-1], self.choice.trials.together))
        return compute(self, *of)

    near, frames = patch.object(trials, "NEAR", 1e9), patch.object(online, "WatchedFrame", watch)
    expected: dict[Plan, float] = {}
    with near, frames, patch.object(PlannedProgram, "_compute", compute_turn):
        for n in range(8 * TRY_AFTER):  # plans may be chosen anew in the middle of a trial
            check(run_step(compiled, model, batch), want, what=f"step {n}")
            choice = graph().choice
            if n == 0:  # as if the other strategy had run at another length
                half = len(choice.planner.blocks) // 2
                choice.trials._ran |= dict.fromkeys(Plan((s, Z) * half) for s in (Z, U))
            taken.add(choice.guard._last.strategies[0])
            expected = choice.alone.tried.expected_s(choice.workload(1, 16, training=True))
            if expected:
                break
            with torch.no_grad():  # as samples are scored before they are learned from
                compiled(**batch)
    return taken, watched, together, {plan.key: s for plan, s in expected.items()}


def test_ranks_try_the_same_and_go_on_by_the_same(pool2: RankPool) -> None:
    (first, watched, together, seconds), other = pool2.run(trained, timeout_s=100)
    second, _, _, same = other
    assert first == second == {Z, U}
    assert watched and not any(watched)
    assert (False, False) in together  # a rival had not run before
    assert len(together) >= 2 * ROUNDS and all(ran == wanted for ran, wanted in together)
    assert seconds == same and len(seconds) >= 2, seconds  # more where a mix was chosen


def test_a_trial_ends_where_memory_ran_out() -> None:
    run = Run({MIXED: 1.2, OF_Z: 1.0})
    for _ in range(TRY_AFTER + 2):
        run.call(MIXED)
    run.trials.ran_out()
    assert {run.call(MIXED) for _ in range(50)} == {MIXED}
    assert len(run.said) == 1
