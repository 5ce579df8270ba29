"""What blocks take while a model trains is fed back: slow collectives, memory underrated."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step

import paradyse
from paradyse.planning.corrections import FLOOR, REST_WORKSPACE, STATIC
from paradyse.profiling import marks as m
from paradyse.profiling.online import Feedback, StepWatch, _Record
from paradyse.runtime.saved_memory import Saved, storages
from paradyse.torch_private import saved_tensors_hooks_are_free
from paradyse.types import Plan, Workload

MESSAGE_S = {"all_to_all": 1e-4, "ring_exchange": 2e-4}
"""What messages take by the machine's rates; others take nothing."""
OFF = 3
"""And in truth so many times as long, unless a test changes it; on the second rank twice that."""


def rates(axis: Any, dtype: torch.dtype) -> Any:
    from paradyse.planning.costs import Link, Machine

    links = {name: Link(s, 1e12) for name, s in MESSAGE_S.items()}
    return Machine(1e13, 1e13, 0.0, 1e13, op_overhead_s=0.0, links=links)


class VirtualTime:
    """Seconds that only messages take, so that no other load of the machine counts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slow: str | None = None
        """The collective that takes ten times as long."""
        self.off = OFF

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def send(self, what: str, axis: Any) -> None:
        tenfold = 10 if what == self.slow else 1
        self.now_s += MESSAGE_S.get(what, 0.0) * self.off * (1 + axis.rank) * tenfold


class Run:
    """A model that trains on a machine where a collective can be slowed (``time.slow``).

    Args:
        options: of the backend.
    """

    def __init__(self, family: str, patch: pytest.MonkeyPatch, **options: Any):
        from paradyse import choice
        from paradyse.distributed import collectives
        from paradyse.profiling import marks
        from paradyse.runtime.registry import captures_of

        self.time = VirtualTime()
        start = collectives._start

        def send(what: str, x: torch.Tensor, axis: Any, *args: Any, **kwargs: Any) -> Any:
            self.time.send(what, axis)
            return start(what, x, axis, *args, **kwargs)

        patch.setattr(collectives, "_start", send)
        patch.setattr(marks, "time", self.time)
        patch.setattr(choice, "measure_machine", rates)
        self.model, self.reference = make_model(family), make_model(family)
        given = {"strategies": ["ulysses_z", "megatron_cz"], "inner": "eager", **options}
        self.compiled: Any = torch.compile(
            self.model, backend="paradyse", options=given, dynamic=True
        )
        self.captures = lambda: captures_of(self.compiled)
        self.taken: list[str] = []
        """The first attention's strategy at each step."""
        self.planned: list[int] = []
        """Steps at which plans were chosen anew."""

    @property
    def graph(self) -> Any:
        (graph,) = [g for c in self.captures() for g in c.graphs.values()]
        return graph

    def step(self, seq_len: int, checked: bool = False) -> None:
        batch = make_batch("plain", 1, seq_len)
        got = run_step(self.compiled, self.model, batch)
        if checked:
            want = run_step(self.reference, self.reference, batch)
            check(got, want, what=f"step {len(self.taken)}")
        graph = self.graph
        if not self.taken and graph.choice.feedback is not None:
            forget = graph.choice.feedback.forget

            def note() -> None:
                self.planned.append(len(self.taken))
                forget()

            graph.choice.feedback.forget = note
        self.taken.append(graph.choice.guard._last.strategies[0])

    def rows(self, seq_len: int) -> dict[str, Any]:
        """Strategy -> what ``explain`` tells of it for the first attention."""
        report = paradyse.explain(self.compiled, 1, seq_len)
        return {row.strategy: row for row in report.blocks[0].rows}

    def times(self, strategy: str) -> dict[int, float]:
        """Scale -> measured over predicted, of the first attention."""
        kind = self.graph.choice.feedback.times.estimate().of_kind[
            self.graph.choice.planner.kinds[0]
        ]
        scales = [int(s) for v, s in zip(kind.variants, kind.scales) if v == strategy]
        return {scale: kind.ratio(strategy, scale) for scale in scales}


def slowing(steps: int, slow_from: int) -> tuple[list[str], list[int], dict[int, float], str]:
    with pytest.MonkeyPatch.context() as patch:
        run = Run("llama", patch)
        for now in range(steps):
            run.time.slow = "all_to_all" if now >= slow_from else None
            run.step(24, checked=now in (0, steps - 1))
        return run.taken, run.planned, run.times("ulysses_z"), run.rows(24)["megatron_cz"].source


@pytest.mark.broad
def test_a_slow_collective_is_planned_around(pool2: RankPool) -> None:
    """Within 50 steps of the collective's slowing, on both ranks at the same step."""
    first, second = pool2.run(slowing, 72, 20, timeout_s=200)
    assert first == second
    strategies, _, times, source = first
    assert set(strategies[:20]) == {"ulysses_z"}
    assert set(strategies[70:]) == {"megatron_cz"}
    assert times[5] > 2 * OFF  # more than the slower rank took before
    assert source == "online"


def watching(sharded: bool) -> list[tuple[int, int]]:
    """Blocks whose times were told apart, and by how many predictions, of each watched step."""
    from paradyse.profiling import online

    told: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:

        def note(spans_s: list[float], costs: list[Any]) -> list[float]:
            told.append((len(spans_s), len(costs)))
            assert all(s > 0 for s in spans_s)
            return [2 * s for s in spans_s]

        patch.setattr(online, "caused_s", note)
        run = Run("llama", patch, strategies=["ulysses_z"])
        if sharded:
            paradyse.shard(run.model)
        for _ in range(40):
            run.step(24)
        return told


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [False, True])
def test_what_blocks_wait_for_each_other_s_weights_is_told_apart(
    sharded: bool, pool2: RankPool
) -> None:
    for told in pool2.run(watching, sharded, timeout_s=200):
        assert set(told) == ({(4, 4)} if sharded else set())


def watched_calls(path: str) -> list[int]:
    """Calls of which times were watched, of as many as two of them may be apart; the profile is of
    a model that is compiled without ``dynamic=True``."""
    from paradyse.profiling import online

    with pytest.MonkeyPatch.context() as patch:
        paradyse.profile(make_model("llama"), path, [24], repeats=1, options={"inner": "eager"})
        run = Run("llama", patch, cost_model=path)
        watched: list[int] = []

        class Noted(online.Clock):
            def __init__(self, *args: Any) -> None:
                watched.append(len(run.taken) + 1)
                super().__init__(*args)

        patch.setattr(online, "Clock", Noted)
        for _ in range(2 * online.SAMPLE_PROFILED):
            run.step(24)
        return watched


def test_with_a_profile_few_steps_are_watched(pool2: RankPool, tmp_path: Path) -> None:
    for watched in pool2.run(watched_calls, str(tmp_path / "profile.jsonl"), timeout_s=100):
        assert watched == [4, 8, 12, 16, 32]  # what the first ones took is known at the 20th


STEADY = 240
"""Steps in which nothing changes."""


def slowing_late() -> tuple[list[int], list[str]]:
    """Steps that were watched, and strategies, where the collective slows after ``STEADY``."""
    from paradyse.profiling import online

    watched: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        run = Run("llama", patch)

        class Noted(online.StepWatch):
            def __init__(self, *args: Any) -> None:
                watched.append(len(run.taken))
                super().__init__(*args)

        run.time.off = 1
        patch.setattr(online, "StepWatch", Noted)
        for now in range(STEADY + 3 * online.SAMPLE_AT_LEAST):
            run.time.slow = "all_to_all" if now >= STEADY else None
            run.step(24)
        return watched, run.taken


@pytest.mark.slow
def test_what_does_not_change_is_watched_seldom(pool2: RankPool) -> None:
    """And a change is still seen, from when on more is watched again."""
    first, second = pool2.run(slowing_late, timeout_s=200)
    assert first == second
    watched, strategies = first
    early, late, after = (
        sum(a <= step < a + 50 for step in watched) for a in (0, STEADY - 50, STEADY)
    )
    assert late <= 3 < 9 <= early and late < after, watched
    assert set(strategies[100:STEADY]) == {"ulysses_z"}
    assert set(strategies[-20:]) == {"megatron_cz"}


def slowing_when_long() -> tuple[list[str], list[int], list[int]]:
    """Strategies of the last short and long step; short steps watched in 20 of them before the
    strategy of the long ones slows, and in 40 of them, after."""
    from paradyse.profiling import online

    watched: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        run = Run("llama", patch)

        class Noted(online.StepWatch):
            def __init__(self, *args: Any) -> None:
                watched.append(len(run.taken))
                super().__init__(*args)

        patch.setattr(online, "StepWatch", Noted)
        for now in range(2 * (STEADY + 40)):
            is_long = now % 2 == 1
            run.time.slow = "all_to_all" if is_long else None
            run.time.off = 2 * OFF if is_long and now > 2 * STEADY else OFF
            run.step(65 if is_long else 9)
        short = [step for step in watched if step % 2 == 0]
        before = [step for step in short if 2 * STEADY - 40 <= step < 2 * STEADY]
        return run.taken[2 * STEADY - 2 : 2 * STEADY], before, [s for s in short if s > 2 * STEADY]


@pytest.mark.slow
def test_what_slows_is_watched_anew_and_nothing_else(pool2: RankPool) -> None:
    for strategies, before, after in pool2.run(slowing_when_long, timeout_s=300):
        assert strategies == ["ulysses_z", "megatron_cz"]
        # what is predicted of the short ones moves with it, once
        assert len(before) <= 2 and len(after) <= 6, (before, after)


LENGTHS = (9, 65, 13, 101)
"""Odd, and of two scales."""


def slow_when_long(rounds: int) -> tuple[list[int], dict[int, str], dict[int, float]]:
    """Later only long sequences meet a slow all-to-all. Plans by length at the end."""
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        run = Run("gpt2", patch)
        for i in range(rounds):
            for seq_len in LENGTHS:
                run.time.slow = "all_to_all" if i >= 4 and seq_len > 32 else None
                run.step(seq_len, checked=i == rounds - 1)
        attention = {n: run.graph.choice.guard.plan_of[n].split(",")[0] for n in LENGTHS}
        return run.planned, attention, run.times("ulysses_z")


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Twice the samples and agreements."""
    from paradyse.profiling import online

    for name, value in (("REFRESH_EVERY", 8), ("SETTLE", 2), ("SAMPLE_EVERY", 2)):
        patch.setattr(online, name, value)


@pytest.mark.slow
def test_an_error_at_one_length_does_not_spoil_others(pool3: RankPool) -> None:
    """Three ranks, another family; lengths that come in turn are all watched."""
    first, *others = pool3.run(slow_when_long, 15, timeout_s=200)
    assert all(other == first for other in others)
    _, plans, times = first
    assert plans == {9: "ulysses_z", 13: "ulysses_z", 65: "megatron_cz", 101: "megatron_cz"}
    assert times.keys() == {4, 7} and times[7] > 2 * times[4]


def train_given() -> tuple[list[str], list[int], bool]:
    with pytest.MonkeyPatch.context() as patch:
        run = Run("llama", patch, plan="ulysses_z")
        for _ in range(3):
            run.step(24)
        return run.taken, run.planned, run.graph.choice.feedback is not None


def test_a_plan_that_is_given_is_not_watched(pool2: RankPool) -> None:
    for strategies, planned, watched in pool2.run(train_given, timeout_s=100):
        assert set(strategies) == {"ulysses_z"} and not planned and not watched


UNDERRATED = 61
"""Tokens. On two ranks of Qwen3, ``ulysses_z`` for all blocks saves 343 kB and is said to need 150;
``metp`` saves half as much."""
ROOM = 310_000
"""Bytes beyond static."""


def underrate(patch: pytest.MonkeyPatch) -> None:
    """Has the cost model predict half of all bytes."""
    from paradyse.planning import planner
    from paradyse.planning.prior import prior_cost

    def half(*args: Any) -> Any:
        cost = prior_cost(*args)
        saved, workspace = cost.saved_bytes // 2, cost.workspace_bytes // 2
        return replace(cost, saved_bytes=saved, workspace_bytes=workspace)

    patch.setattr(planner, "prior_cost", half)


def held(run: Run, seq_len: int) -> Any:
    """Bytes of one step by the allocator's own account."""
    from paradyse.profiling.marks import (
        END,
        START,
        HostAllocations,
        Watch,
        WatchedFrame,
        memory_of,
    )
    from paradyse.runtime.frame_maker import frames_by

    kept = run.graph.choice.feedback
    run.graph.choice.feedback = None
    with HostAllocations() as probe:
        watch = Watch(probe)
        watch.mark(START)
        with frames_by(partial(WatchedFrame, watch)):
            run_step(run.compiled, run.model, make_batch("plain", 1, seq_len))
        watch.mark(END)
    run.graph.choice.feedback = kept
    return memory_of(watch, probe.read(), {})


def train_underrated(steps: int) -> dict[str, Any]:
    """Plans, what they really save, and what is told of the first one afterwards."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        underrate(patch)
        hasten(patch)
        weights = sum(p.nbytes for p in make_model("qwen3").parameters())
        limit = 4 * weights + ROOM
        given = {"strategies": ["ulysses_z", "metp"], "memory_limit": limit}
        run = Run("qwen3", patch, **given)
        run.time.slow = "ring_exchange"  # metp is not taken for its speed
        saved = {}
        for i in range(steps):
            run.step(UNDERRATED, checked=i == steps - 1)
            key = run.graph.choice.guard.plan_of[UNDERRATED]
            if key not in saved:
                memory = held(run, UNDERRATED)
                saved[key] = sum(memory.saved_bytes.values())
                mlp = run.graph.program.block_steps[1].block_id
                seen.setdefault("mlp", memory.saved_bytes[mlp])
        planner = run.graph.choice.planner
        workload = run.graph.choice.workload(1, UNDERRATED, True)
        report = paradyse.explain(run.compiled, 1, UNDERRATED)
        seen["mlp as corrected"] = planner.costs(workload)[1]["ulysses_z"].saved_bytes
        seen["static"] = {row.strategy: row for row in report.static_plans}["ulysses_z"]
        seen["told"] = str(report)
        return seen | {"saved": saved, "peak": report.peak_bytes, "limit": limit}


@pytest.mark.broad
def test_a_plan_that_needs_more_than_predicted_is_left(pool2: RankPool) -> None:
    first, second = pool2.run(train_underrated, 40, timeout_s=200)
    assert first["saved"].keys() == second["saved"].keys()
    everywhere = ",".join(["ulysses_z"] * 4)
    before, *_, after = first["saved"]
    assert before == everywhere != after
    assert first["saved"][before] > ROOM > first["saved"][after]
    assert first["mlp as corrected"] == pytest.approx(max(first["mlp"], second["mlp"]), rel=0.02)
    assert first["peak"] <= first["limit"] < first["static"].peak_bytes
    assert first["static"].why.startswith("does not fit: needs")
    assert first["static"].memory_source == "online" and " online " in first["told"]


def test_memory_is_not_watched_where_hooks_take_what_is_saved() -> None:
    hooks = torch.autograd.graph
    assert saved_tensors_hooks_are_free()
    with hooks.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not saved_tensors_hooks_are_free()
    with hooks.disable_saved_tensors_hooks("no"):
        assert not saved_tensors_hooks_are_free()


@pytest.mark.parametrize("missing", [16, 0])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("logits", [0, 30])
def test_gradients_that_a_call_makes_are_static_alone(
    missing: int, keeps: bool, logits: int
) -> None:
    """Two blocks that save one byte each and have gradients of eight, made in backward where they
    are missing, and kept back where ``keeps``; before it there are logits at most."""
    marks = [(m.START, -1), *((what, i) for i in (0, 1) for what in (m.ENTER, m.EXIT, m.FREED))]
    marks += [*((what, i) for i in (1, 0) for what in (m.GRAD, m.DONE)), (m.END, -1)]
    grown = 8 if missing or keeps else 0
    held = [0, 0, 1, 1, 1, 2, 2, 2, 1 + grown, 1 + grown, 2 * grown, 2 * grown]
    highest = [*accumulate([*held[:7], max(2, logits), *held[8:]], max)]
    probe = m.DeviceMemory(torch.device("cuda"), reset=False)
    probe._points = [(100 + h, 100 + p) for h, p in zip(held, highest, strict=True)]
    workload = Workload(1, 8, torch.float32, True, 2, keeps_gradients=keeps)
    planner: Any = SimpleNamespace(
        kept_bytes=16, predicted_costs=lambda workload: [], points=lambda plan: []
    )
    feedback: Any = SimpleNamespace(
        _keys=lambda plan: {}, splits=SimpleNamespace(of=lambda *given: (planner, workload))
    )
    program: Any = SimpleNamespace(steps=[], block_steps=[])
    record = _Record(program, 1, workload, Plan(()), True, StepWatch(probe, marks), missing)
    found = {quantity: v for (quantity, *_), v in Feedback._memory(feedback, record).items()}
    assert found[REST_WORKSPACE] == max(0, logits - 2)
    assert found[FLOOR] == 0 and found[STATIC] == (0 if keeps else 100 + missing)


def test_emptied_memory_does_not_count() -> None:
    """As of gathered weights, which are given back after forward."""
    weight = torch.ones(3, 3, requires_grad=True)
    given = torch.ones(2, 3, requires_grad=True)
    saved = Saved()
    with saved.watch():
        whole = weight * 2
        y = (given @ whole).exp()
    total = saved.alive_bytes()
    assert total - saved.alive_bytes(storages([given])) == given.nbytes
    whole.untyped_storage().resize_(0)
    assert total - saved.alive_bytes() == 9 * 4
    del y  # nor does what is saved keep itself alive
    assert saved.alive_bytes(storages([given])) == 0


def one_rank_watches_no_memory() -> int:
    """Calls of ranks of which one has hooks of saved tensors of its own."""
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    options = {"inner": "eager", "strategies": ["metp"], "levers": []}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for _ in range(30):
        hooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooked if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
            compiled(**make_batch("plain", 2, 9)).loss.backward()
    return paradyse.stats(compiled).steps


def test_a_rank_that_cannot_watch_memory_sends_as_those_that_do(pool2: RankPool) -> None:
    assert pool2.run(one_rank_watches_no_memory, timeout_s=60) == [30, 30]
