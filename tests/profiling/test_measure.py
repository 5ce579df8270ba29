"""A profile is whole, says what is sent and held, survives a kill, stops at the limit, and leaves
the model as it was.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankFailure, RankPool
from tiny import Tiny, tokens

from paradyse import profile, shard
from paradyse.planning.profile_file import MEASURED, OVER_LIMIT, Measurement, Profile, read_profile
from paradyse.profiling import measure as profiler
from paradyse.profiling.marks import StepTimes
from paradyse.profiling.steps import Steps
from paradyse.types import ATTENTION_STRATEGIES, DSP, HeadSpec, Workload

EAGER = {"inner": "eager"}
LENGTHS = (24, 40)
ATTENTION = {*ATTENTION_STRATEGIES} - {DSP}
"""Of one sequence alone, whose tokens have no dim to switch to."""
MLP = {"megatron_ts", "megatron_cz", "metp"}


def key(m: Measurement) -> tuple[str, str, int]:
    return m.kind, m.strategy, m.seq_len


def tiny_batch(batch: int, seq_len: int) -> dict[str, Any]:
    ids = tokens(batch, seq_len)
    return {"ids": ids, "labels": ids}


def make_tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def saved_by_hooks(call: Any, batch: dict[str, Any], weights: set[int]) -> int:
    """Bytes of distinct storages that autograd holds, weights not counted."""
    held: dict[int, int] = {}
    kept = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        kept.append(x)  # so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = call(**batch)
    num_bytes = sum(held.values())
    loss.backward()
    return num_bytes


def measure_all(path: str, lengths: tuple[int, ...], sharded: bool) -> dict[str, Any]:
    """A profile, and what can be held against it, by steps of the same model unwatched."""
    import paradyse
    from paradyse.runtime.frame import Frame
    from paradyse.runtime.frame_maker import current_frames

    model = make_tiny().eval()
    if sharded:
        paradyse.shard(model)
    before = torch.get_rng_state()
    found = profile(model, path, lengths, repeats=1, options=EAGER, make_batch=tiny_batch)
    clean = {
        "gradients": all(p.grad is None for p in model.parameters()),
        "mode": not model.training,
        "random state": torch.equal(before, torch.get_rng_state()),
        "frames": current_frames() is Frame,
    }
    current = ["megatron_ts"]
    options = {**EAGER, "plan": lambda workload: current[0]}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = tiny_batch(1, LENGTHS[-1])
    short = Tiny(layers=1)
    fewer = torch.compile(short, backend="paradyse", options=options)
    both = (*model.parameters(), *short.parameters())
    weights = set() if sharded else {p.untyped_storage().data_ptr() for p in both}
    saved = {}
    for current[0] in MLP:
        compiled(**batch).backward()
        if not sharded and current[0] != "metp":  # it runs its groups for their outputs alone
            fewer(**batch).backward()  # hooks would be traced
            saved[current[0]] = saved_by_hooks(compiled, batch, weights)
            saved[current[0]] -= saved_by_hooks(fewer, batch, weights)
    return {"profile": found, "clean": clean, "saved": saved}


def summed_in_32_bits(seq_len: int) -> Workload:
    model = shard(make_tiny().to(torch.bfloat16), reduce_dtype=torch.float32)
    return Steps(model, EAGER, 1, True, tiny_batch).workload(seq_len)


def test_gradients_are_priced_in_the_dtype_that_they_are_added_up_in(pool2: RankPool) -> None:
    expected = Workload(1, 24, torch.bfloat16, True, 2, reduce_dtype=torch.float32)
    assert pool2.run(summed_in_32_bits, 24) == [expected, expected]


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_block_strategy_and_length(sharded: bool, pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    lengths = LENGTHS[-1:] if sharded else LENGTHS
    results = pool2.run(measure_all, str(path), lengths, sharded, timeout_s=240)
    found: Profile = results[0]["profile"]
    assert all(r["profile"] == found for r in results) and read_profile(path) == found
    expected = {("attention", s, n) for s in ATTENTION for n in lengths}
    expected |= {("mlp", s, n) for s in MLP for n in lengths}
    expected |= {(kind, "", n) for kind in ("head", "rest") for n in lengths}
    rows = {key(m): m for m in found.measurements}
    assert rows.keys() == expected and len(rows) == len(found.measurements)
    assert found.header.sharded is sharded and found.header.num_ranks == 2
    for m in rows.values():
        assert m.outcome == MEASURED and m.forward_s > 0 and m.backward_s > 0
        assert m.saved_bytes > 0
    for r in results:
        assert all(r["clean"].values()), r["clean"]

    # One layer more is an attention and an MLP block more.
    for strategy in results[0]["saved"]:
        layer = sum(rows[k, strategy, LENGTHS[-1]].saved_bytes for k in ("attention", "mlp"))
        want = max(r["saved"][strategy] for r in results)
        assert layer == pytest.approx(want, rel=0.02), strategy


def measure_waits(path: str, sharded: bool) -> Profile:
    """Where all of a step passes in MLPs, as if these waited for the weights of all blocks."""
    import paradyse

    model, took = make_tiny(), Steps.times
    if sharded:
        paradyse.shard(model)

    def waiting(self: Steps, seq_len: int, plan: str) -> StepTimes:
        times = took(self, seq_len, plan)
        mlps = {i for i, of in self.part_of.items() if getattr(of, "kind", "") == "mlp"}
        seconds = {i: 4.0 if i in mlps else 1e-3 for i in times.forward_s}
        return StepTimes(seconds, {i: 2 * s for i, s in seconds.items()})

    Steps.times = waiting  # type: ignore[method-assign]
    try:
        given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch, "repeats": 1}
        return profile(model, path, (24,), strategies=["megatron_cz"], **given)
    finally:
        Steps.times = took  # type: ignore[method-assign]


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("sharded", [False, True])
def test_what_one_block_waits_for_another_s_weights(
    sharded: bool, pool2: RankPool, tmp_path: Path
) -> None:
    """Counts for both where weights are sharded; the sum is what was measured."""
    first, second = pool2.run(measure_waits, str(tmp_path / "p"), sharded, timeout_s=200)
    assert first == second
    rows = {m.kind: m for m in first.measurements}
    assert rows["attention"].forward_s + rows["mlp"].forward_s == pytest.approx(4.001)
    assert rows["attention"].backward_s + rows["mlp"].backward_s == pytest.approx(8.002)
    assert (rows["attention"].forward_s > 0.4) is sharded


def measure_until_killed(path: str) -> None:
    def progress(p: profiler.Progress) -> None:
        if p.done == len(ATTENTION_STRATEGIES) + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    given = {"options": EAGER, "make_batch": tiny_batch, "progress": progress}
    profile(make_tiny(), path, (9, 24), repeats=1, **given)


def count_steps(path: str) -> tuple[Profile, set[tuple[int, str]]]:
    """Goes on with a file; the lengths and strategies that were measured."""
    measured = set()
    times = Steps.times

    def counted(self: Steps, seq_len: int, plan: str) -> Any:
        measured.add((seq_len, plan))
        return times(self, seq_len, plan)

    Steps.times = counted  # type: ignore[method-assign]
    try:
        given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch}
        return profile(make_tiny(), path, (9, 24), repeats=1, **given), measured
    finally:
        Steps.times = times  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_killed_profile_is_gone_on_with(pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    with pytest.raises(RankFailure, match="rank 0 of 2 died"):
        pool2.run(measure_until_killed, str(path), timeout_s=120)
    first = path.read_bytes()
    kept = [key(m) for m in read_profile(path).measurements]
    assert len(kept) == len(ATTENTION) + len(MLP) + 2
    assert {seq_len for *_, seq_len in kept} == {9}
    with path.open("ab") as file:
        file.write(first.splitlines()[-1][:40])  # as if it had been killed while it wrote
    ((found, measured), _) = pool2.run(count_steps, str(path), timeout_s=120)
    assert path.read_bytes().startswith(first)
    assert measured == {(24, s) for s in ATTENTION_STRATEGIES}
    keys = [key(m) for m in found.measurements]
    assert len(keys) == len(set(keys)) == 2 * len(kept)
    ((again, measured), _) = pool2.run(count_steps, str(path), timeout_s=120)
    assert not measured and again == found


def measure_to_a_limit(folder: str) -> list[Profile]:
    """Over the limit at the first length; by prediction at the second; for want of memory."""
    model = make_tiny()
    static = 2 * sum(p.nbytes for p in model.parameters())

    def measured(name: str, limit: int | None) -> Profile:
        given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch, "repeats": 1}
        given |= {"strategies": ["megatron_cz"], "memory_limit": limit}
        return profile(model, f"{folder}/{name}", (16, 4096, 8192), **given)

    out = [measured("first", static + 1), measured("predicted", static + (2 << 20))]
    memory = Steps.memory

    def out_of_memory(self: Steps, seq_len: int, plan: str) -> Any:
        found = memory(self, seq_len, plan)
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("as if")
        return found

    Steps.memory = out_of_memory  # type: ignore[method-assign]
    try:
        return [*out, measured("none left", None)]
    finally:
        Steps.memory = memory  # type: ignore[method-assign]


@pytest.mark.broad
def test_the_memory_limit_is_recorded(pool2: RankPool, tmp_path: Path) -> None:
    results = pool2.run(measure_to_a_limit, str(tmp_path), timeout_s=200)
    assert results[0] == results[1]
    first, predicted, none_left = results[0]
    over = {(k, "megatron_cz", 16, OVER_LIMIT) for k in ("attention", "mlp")}
    assert {(*key(m), m.outcome) for m in first.measurements} == over
    assert {(*key(m), m.outcome) for m in none_left.measurements} == over
    assert {(*key(m), m.outcome) for m in predicted.measurements} == {
        *((k, "megatron_cz", 16, MEASURED) for k in ("attention", "mlp")),
        *((k, "", 16, MEASURED) for k in ("head", "rest")),
        *((k, "megatron_cz", 4096, OVER_LIMIT) for k in ("attention", "mlp")),
    }


def measure_where_one_rank_is_near_the_limit(path: str) -> Profile:
    """Only the second rank has so much that the second length would be over the limit."""
    model, real = make_tiny(), profiler.static_bytes
    static = real(model, training=True)
    if torch.distributed.get_rank() == 0:
        profiler.static_bytes = lambda *given: real(*given) - 2**40
    try:
        given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch, "repeats": 1}
        given |= {"strategies": ["megatron_cz"], "memory_limit": static + (2 << 20)}
        return profile(model, path, (16, 4096), **given)
    finally:
        profiler.static_bytes = real


def test_what_one_rank_foresees_to_be_over_the_limit_no_rank_runs(
    pool2: RankPool, tmp_path: Path
) -> None:
    found, same = pool2.run(measure_where_one_rank_is_near_the_limit, str(tmp_path / "p"))
    assert found == same
    outcomes = {(m.kind, m.seq_len): m.outcome for m in found.measurements}
    over = {("attention", 4096): OVER_LIMIT, ("mlp", 4096): OVER_LIMIT}
    assert outcomes == {(k, 16): MEASURED for k in ("attention", "mlp", "head", "rest")} | over


def test_what_several_heads_take_adds_up() -> None:
    """They are one part of a step, whose time, and what it keeps, are those of all of them."""
    row = profiler._Row.__new__(profiler._Row)
    head = HeadSpec(32, 64)
    row.samples, row.steps = (
        {},
        SimpleNamespace(  # type: ignore[assignment]
            part_of={-5: head, -6: head}, part=lambda of, name: ("", "head" if of else "rest", "")
        ),
    )
    for _ in range(3):
        row._note("megatron_cz", "forward_s", {-5: 1.0, -6: 2.0, -1: 0.5})
        row._note("megatron_cz", "saved_bytes", {-5: 10, -6: 20, -1: 5})
        row._note("megatron_cz", "workspace_bytes", {-5: 10, -6: 20, -1: 5})
    of_heads, rest = (row.samples["", kind, ""] for kind in ("head", "rest"))
    found = {field: profiler.SUMMARIES[field](values) for field, values in of_heads.items()}
    assert found == {"forward_s": 3.0, "saved_bytes": 30, "workspace_bytes": 20}
    assert rest["forward_s"] == [0.5] * 3


def measure_alone(path: str) -> Profile:
    """One rank, forward alone, a model that is no HuggingFace model and compiled already."""
    model = torch.compile(make_tiny(), backend="paradyse", options=EAGER)
    return profile(
        model, path, (9,), 2, training=False, repeats=1, options=EAGER, make_batch=tiny_batch
    )


def test_one_rank_and_forward_alone(pool1: RankPool, tmp_path: Path) -> None:
    (found,) = pool1.run(measure_alone, str(tmp_path / "p"), timeout_s=100)
    assert {key(m) for m in found.measurements} == {
        ("attention", "replicated", 9),
        ("mlp", "replicated", 9),
        ("head", "", 9),
        ("rest", "", 9),
    }
    for m in found.measurements:
        assert m.batch == 2 and not m.training and m.backward_s == 0


def measure_those(path: str, strategies: list[str]) -> set[str]:
    given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch, "repeats": 1}
    found = profile(make_tiny(), path, (24,), training=False, strategies=strategies, **given)
    return {m.strategy for m in found.measurements}


def test_strategies_that_a_run_has_not_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert measure_those(str(tmp_path / "a"), ["metp"]) == {"replicated", ""}
    assert "strategies metp are not measured on 1 rank(s), but replicated" in caplog.text


def measure_another(path: str) -> tuple[str, str]:
    """A second model's profile in the file of the first; the inner compiler from outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARADYSE_OPTIONS", "inner=eager")
        names = {"repeats": 1, "training": False, "make_batch": tiny_batch}
        header = profile(make_tiny(), path, (9,), **names).header
        with pytest.raises(ValueError, match="a profile of another model") as error:
            profile(Tiny(hidden=16).eval(), path, (9,), **names)
    return header.inner, str(error.value)


@pytest.mark.broad
def test_a_file_is_of_one_model(pool1: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "p"
    ((inner, told),) = pool1.run(measure_another, str(path), timeout_s=100)
    assert inner == "eager" and "give another file" in told
    assert len(read_profile(path).measurements) == 4


@pytest.mark.broad
def test_a_terminal_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one line, which the next one takes the place of; a pipe gets nothing."""
    given = {"lengths": [4], "options": EAGER, "make_batch": tiny_batch, "repeats": 1}
    for terminal, written in (
        (True, "\r\x1b[K0/1  4 tokens, replicated\r\x1b[K1/1  measured\n"),
        (False, ""),
    ):
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)  # noqa: B023
        profile(make_tiny(), tmp_path / f"{terminal}.jsonl", **given)
        assert capsys.readouterr().err == written


def measure_levers(path: str) -> Profile:
    levers = ("tiled", "recompute")
    return profile(
        make_tiny(), path, (24,), repeats=1, options=EAGER, make_batch=tiny_batch, levers=levers
    )


def test_points_with_levers_are_measured_where_they_are_asked_for(
    pool1: RankPool, tmp_path: Path
) -> None:
    (found,) = pool1.run(measure_levers, str(tmp_path / "p"), timeout_s=100)
    rows = {(m.kind, m.strategy): m for m in found.measurements}
    attention = {("attention", f"replicated{v}") for v in ("", "+recompute")}
    mlp = {("mlp", f"replicated{v}") for v in ("", "+tiled", "+recompute")}
    assert rows.keys() == attention | mlp | {("head", ""), ("head", "tiled"), ("rest", "")}
    kept = Tiny().embed.weight[:24].nbytes  # the block's input
    for kind, lever in (("attention", "recompute"), ("mlp", "tiled"), ("mlp", "recompute")):
        plain, levered = (rows[kind, f"replicated{v}"] for v in ("", f"+{lever}"))
        assert levered.saved_bytes < plain.saved_bytes and levered.saved_bytes <= 1.1 * kept
    with pytest.raises(ValueError, match="levers: unknown lever 'tile'"):
        profile(make_tiny(), tmp_path / "q", (24,), levers=["recompute+tile"])
    with pytest.raises(ValueError, match="levers: unknown lever 'recomput'"):
        profile(make_tiny(), tmp_path / "q", (24,), levers="recomput")


def a_callback_that_fails(path: str) -> str:
    def fail(now: Any) -> None:
        raise KeyError("of the callback")

    with pytest.raises(RuntimeError) as error:
        given = {"options": EAGER, "make_batch": tiny_batch, "progress": fail}
        profile(make_tiny(), path, [8], repeats=1, **given)
    return str(error.value)


def test_all_ranks_hear_of_a_callback_that_fails(pool2: RankPool, tmp_path: Path) -> None:
    """It is called on the first rank."""
    for text in pool2.run(a_callback_that_fails, str(tmp_path / "p.jsonl"), timeout_s=60):
        assert text == "KeyError: 'of the callback'"


class UnderAutocast(Tiny):
    """Enters autocast by itself."""

    def forward(self, *given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*given, **named)


def test_a_profile_goes_on_where_the_model_enters_autocast(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = UnderAutocast(layers=1), tmp_path / "p.jsonl"
    given: dict[str, Any] = {"repeats": 1, "options": EAGER, "make_batch": tiny_batch}
    for lengths in ([8], [8, 12]):
        found = profile(model, path, lengths, **given)
    assert found.header.dtype == "bfloat16"
    assert {m.seq_len for m in found.measurements} == {8, 12}
    path.write_text("no profile")
    with pytest.raises(ValueError, match="this is not a profile"):
        profile(model, path, [8], **given)
