"""Backwards that send no gradients, and the one that sends them all: against each on its own."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import make_batch, make_model, relative, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_

import paradyse
from paradyse.runtime.registry import captures_of
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.partial_gradient import PartialGradient

EXACT = 1e-12
"""Of float64: the same sums, taken in another order."""
LENGTHS = (9, 10, 13)


class Run:
    """A compiled model on one rank, whose calls take ``plans`` in turn."""

    def __init__(self, plans: Sequence[Any], sharded: bool = True, **how: Any) -> None:
        dtype, mesh = how.get("dtype", torch.float64), how.get("mesh")
        config = {"num_hidden_layers": 1, "tie_word_embeddings": how.get("tied", False)}
        self.model = make_model("llama_odd", dtype, **config)
        for name, p in self.model.named_parameters():
            p.requires_grad_(not how.get("frozen") or "mlp" in name)
            if how.get("turned") and p.ndim == 2:
                p.data = p.data.t().contiguous().t()
                warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout")
        if sharded:
            paradyse.shard(self.model, mesh, **how.get("shard", {}))
        if how.get("checkpointing"):
            with warnings.catch_warnings():  # transformers 5.23 has a newer name for it
                warnings.simplefilter("ignore", FutureWarning)
                self.model.gradient_checkpointing_enable()
        self.plans, self.calls, self.autocast = plans, 0, how.get("autocast", False)
        options = {"plan": self.plan, "inner": "eager", "mesh": mesh}
        self.compiled: Any = torch.compile(self.model, backend="paradyse", options=options)

    def plan(self, workload: Any) -> Any:
        self.calls += 1
        return self.plans[(self.calls - 1) % len(self.plans)]

    def backward(self, length: int) -> None:
        with torch.autocast("cpu", enabled=self.autocast):
            loss = self.compiled(**make_batch("plain", 2, length)).loss
        loss.backward()

    def step(self, later: bool) -> dict[str, Tensor]:
        """Gradients of all batches."""
        self.calls, (*first, last) = 0, LENGTHS
        with paradyse.no_sync(self.model) if later else contextlib.nullcontext():
            for length in first:
                self.backward(length)
        self.backward(last)
        return self.grads()

    def grads(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {n: whole(p.grad) for n, p in named if p.grad is not None}

    def partial(self) -> list[str]:
        named = self.model.named_parameters()
        return [n for n, p in named if isinstance(p.grad, PartialGradient)]


def largest_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert got.keys() == want.keys() and got
    return max(relative(got[n], g) for n, g in want.items())


def errors(plans: Sequence[Any], sharded: bool, how: Mapping[str, Any]) -> float:
    run = Run(plans, sharded, **how)
    got = run.step(later=True)  # first, so that graphs are captured beside partial gradients
    assert not run.partial()
    run.model.zero_grad()
    return largest_error(got, run.step(later=False))


WORDS = {"attention": "megatron_ts", "mlp": "metp", "head": "vocabulary"}
CASES: dict[str, tuple[list[Any], bool, dict[str, Any]]] = {
    "whole": (["megatron_cz", "metp", "megatron_ts"], False, {}),
    "sharded": (["megatron_ts", "metp", "ulysses_z"], True, {}),
    "turned": (["megatron_cz", "metp", "megatron_ts"], False, {"turned": True}),
    "streamed": (["metp"], True, {"tied": True, "frozen": True}),
    "rows": (["megatron_ts"], True, {"shard": {"offload": "optimizer"}}),
    "words": ([WORDS, "megatron_cz"], True, {"tied": True}),
    "again": (["ulysses_z+recompute", "colossal_z"], True, {"checkpointing": True}),
}
"""Plans, whether weights are sharded, and how they are used."""


QUICK = {"whole", "sharded", "turned"}


@pytest.mark.broad
@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_gradients_are_those_of_calls_that_send(case: str, pool2: RankPool) -> None:
    assert max(pool2.run(errors, *CASES[case], timeout_s=100)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_of_three_ranks(case: str, pool3: RankPool) -> None:
    assert max(pool3.run(errors, *CASES[case], timeout_s=100)) < EXACT


@pytest.mark.slow
def test_one_rank_has_nothing_to_keep(pool1: RankPool) -> None:
    how = {"shard": {"offload": "optimizer"}}
    assert max(pool1.run(errors, ["megatron_cz"], True, how, timeout_s=100)) < EXACT


def sixteen_bits(reduce_dtype: torch.dtype | None) -> tuple[float, float, set[torch.dtype]]:
    """Errors of bfloat16 gradients of many equal calls, sent each and sent at once, and the dtypes
    that they were added up in."""
    found = []
    shard = {"reduce_dtype": reduce_dtype}
    run = Run(["megatron_cz", "megatron_ts"], dtype=torch.bfloat16, shard=shard)
    for later in (False, True):
        run.model.zero_grad()
        once = {}
        for i in range(33):
            last = i == 32
            with paradyse.no_sync(run.model) if later and not last else contextlib.nullcontext():
                run.calls = 0
                run.backward(9)
            if not later and i == 0:
                once = {n: g.double() * 33 for n, g in run.grads().items()}
                want = once
            if later and i == 31:
                grads: list[Any] = [p.grad for p in run.model.parameters()]
                dtypes = {x.dtype for g in grads for x in (g.own, g.rest) if x is not None}
        found.append(max(relative(g, want[n]) for n, g in run.grads().items()))
        assert {p.grad.dtype for p in run.model.parameters()} == {torch.bfloat16}
    return found[0], found[1], dtypes


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_sixteen_bits_are_added_up_in_32(reduce_dtype: Any, pool2: RankPool) -> None:
    """33 times a number of 8 bits: a sum that is rounded at every call misses it."""
    for each, at_once, dtypes in pool2.run(sixteen_bits, reduce_dtype, timeout_s=100):
        assert at_once < 2**-7 < each
        assert dtypes == {torch.float32}


def under_autocast() -> float:
    run = Run(["megatron_cz", "metp"], dtype=torch.float32, autocast=True)
    want = run.step(later=False)
    run.model.zero_grad()
    return largest_error(run.step(later=True), want)


@pytest.mark.slow
def test_autocast(pool2: RankPool) -> None:
    """The ranks' bfloat16 summands are the same, and added up in float32 either way."""
    assert max(pool2.run(under_autocast, timeout_s=100)) < 1e-6


def whole_calls(sharded: bool) -> float:
    """Batches of one token, which every rank computes whole: the first, another one inside, and the
    last, behind which nothing may be left to send."""
    run, found, lengths = Run(["megatron_cz", "megatron_ts"], sharded), [], (1, 9, 1, 10, 1)
    for later in (True, False):
        run.model.zero_grad()
        with paradyse.no_sync(run.model) if later else contextlib.nullcontext():
            for length in lengths[:-1]:
                run.backward(length)
        run.backward(lengths[-1])
        assert not run.partial()
        found.append(run.grads())
    return largest_error(*found)


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("sharded", [False, True])
def test_the_last_batch_may_be_one_that_is_computed_whole(sharded: bool, pool2: RankPool) -> None:
    assert max(pool2.run(whole_calls, sharded, timeout_s=100)) < EXACT


def two_replicas() -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))


def over_replicas(sharded: bool) -> float:
    return errors(["megatron_cz", "megatron_ts"], sharded, {"mesh": two_replicas()})


def replicas_that_plan_apart(sharded: bool) -> float:
    """Each has plans of its own, under which other parts of a weight's gradient are summed."""
    mesh, cz, ts = two_replicas(), "megatron_cz", "megatron_ts"
    plans = ([cz], [cz]) if mesh.get_local_rank("data") else ([ts], [ts, cz, cz])
    return max(errors(p, sharded, {"mesh": mesh}) for p in plans)


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_may_plan_apart(sharded: bool, pool4: RankPool) -> None:
    assert max(pool4.run(replicas_that_plan_apart, sharded, timeout_s=100)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas(sharded: bool, pool4: RankPool) -> None:
    assert max(pool4.run(over_replicas, sharded, timeout_s=100)) < EXACT


@pytest.mark.slow
def test_replicas_of_one_rank(pool2: RankPool) -> None:
    assert max(pool2.run(over_replicas, False, timeout_s=100)) < EXACT


def messages(plan: str, sharded: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes that a rank sends in backward, by kind: inside, then outside; and of all weights."""

    def sent() -> Counter[str]:
        return Counter(paradyse.stats(run.compiled).bytes_per_collective)

    run, found = Run([plan], sharded), []
    for later in (True, False):
        loss = run.compiled(**make_batch("plain", 2, 9)).loss
        before = sent()
        with paradyse.no_sync(run.model) if later else contextlib.nullcontext():
            loss.backward()
        found.append(dict(sent() - before))
    return found[0], found[1], sum(p.numel() * 8 for p in run.model.parameters())


@pytest.mark.broad(but="megatron_cz-True-reduce_scatter")
@pytest.mark.parametrize(
    ("plan", "sharded", "kind"),
    [
        ("megatron_cz", True, "reduce_scatter"),
        pytest.param("metp", True, "reduce", marks=pytest.mark.slow),
        ("megatron_cz", False, "all_reduce"),
    ],
)
def test_gradients_travel_once(plan: str, sharded: bool, kind: str, pool2: RankPool) -> None:
    """A rank of two sends half of what it sums in one direction, all of it in a sum for both."""
    for inside, outside, size in pool2.run(messages, plan, sharded, timeout_s=100):
        assert kind not in inside
        sent = outside["reduce_scatter" if sharded else "all_reduce"]
        assert 0.95 < sent / size * (2 if sharded else 1) < 1.05


def refused(sharded: bool) -> float:
    """What would use gradients raises, changes nothing, and they are as before."""
    run = Run(["megatron_cz"], sharded)
    want = run.step(later=False)
    run.model.zero_grad()
    weights = list(run.model.parameters())
    before = [whole(p) for p in weights]
    optimizer = torch.optim.AdamW(weights)
    with paradyse.no_sync(run.model):
        for length in LENGTHS[:-1]:
            run.backward(length)
    assert run.partial()
    with pytest.raises(RuntimeError, match="AdamW cannot step: gradients that paradyse.no_sync"):
        optimizer.step()
    assert not optimizer.state
    for foreach in (None, False):
        with pytest.raises(NotImplementedError, match=r"outside paradyse\.no_sync, and clip"):
            clip_grad_norm_(weights, 1.0, foreach=foreach)
    assert all(torch.equal(whole(p), old) for p, old in zip(weights, before, strict=True))
    run.backward(LENGTHS[-1])
    clip_grad_norm_(weights, 1e9)
    error = largest_error(run.grads(), want)
    optimizer.step()
    return error


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_partial_gradients_are_not_used(sharded: bool, pool2: RankPool) -> None:
    assert max(pool2.run(refused, sharded, timeout_s=100)) < EXACT


def cleared() -> list[float]:
    """Errors after ``zero_grad`` inside, and where gradients were there before."""
    run = Run(["megatron_cz", "megatron_ts", "metp"])
    want, found = run.step(later=False), []
    for set_to_none, later in product((True, False), repeat=2):
        run.model.zero_grad(set_to_none=True)
        with paradyse.no_sync(run.model):
            run.backward(17)
            run.model.zero_grad(set_to_none)
        found.append(largest_error(run.step(later=later), want))
        assert not run.partial()
    twice = run.step(later=True)
    found.append(largest_error(twice, {n: 2 * g for n, g in want.items()}))
    return found


@pytest.mark.broad
def test_cleared_gradients_are_gone_and_others_stay(pool2: RankPool) -> None:
    for found in pool2.run(cleared, timeout_s=100):
        assert max(found) < EXACT


def into_the_same_tensors(sharded: bool) -> tuple[bool, float]:
    """Whether ``.grad`` are the tensors that they were before a step, and how far they are off."""
    run, other = Run(["megatron_cz", "ulysses_z"], sharded), Run(["megatron_cz"], sharded)
    want = other.step(later=False)
    weights = [*run.model.parameters()]
    flat = torch.zeros(sum(p.numel() for p in weights), dtype=torch.float64)
    for p, x in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.grad = torch.zeros_like(p) if sharded else x.view_as(p)
    before = [p.grad for p in weights]
    run.step(later=True)
    run.model.zero_grad(set_to_none=False)
    got = run.step(later=True)
    if not sharded:
        parts = flat.split([p.numel() for p in weights])
        names = [name for name, _ in run.model.named_parameters()]
        assert all(torch.equal(x, got[n].flatten()) for n, x in zip(names, parts, strict=True))
    kept = all(p.grad is g for p, g in zip(weights, before, strict=True))
    return kept, largest_error(got, want)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_arrive_in_the_tensors_that_stood_there(sharded: bool, pool2: RankPool) -> None:
    for kept, off in pool2.run(into_the_same_tensors, sharded, timeout_s=60):
        assert kept and off < EXACT


def of_two_models() -> tuple[float, bool]:
    """A backward of another model sends what waits, but not of a model inside."""
    run, other = Run(["megatron_cz"]), Run(["megatron_cz"])
    run.backward(9)
    want = run.grads()
    run.model.zero_grad()
    with paradyse.no_sync(run.model):
        run.backward(9)
        other.backward(10)
        stays = bool(run.partial()) and not other.partial()
    other.backward(10)
    return largest_error(run.grads(), want), stays


@pytest.mark.broad
def test_any_backward_over_the_ranks_sends(pool2: RankPool) -> None:
    """Weights that the last call does not use, such as a tower for images, are not forgotten."""
    for error, stays in pool2.run(of_two_models, timeout_s=100):
        assert error < EXACT and stays


def on_one_rank(what: str) -> float:
    """Rank 1 alone does ``what``; all raise, and go on."""
    run, odd = Run(["megatron_cz"]), dist.get_rank() == 1
    want = run.step(later=False)
    run.model.zero_grad()
    told = "disagree on what becomes of gradients: rank 0: {}, rank 1: {}. enter paradyse.no_sync"
    if what == "enters":
        answers = "sent at once", "kept back with 0 of earlier calls"
        with paradyse.no_sync(run.model) if odd else contextlib.nullcontext():
            with pytest.raises(ValueError, match=told.format(*answers)):
                run.backward(9)
        loss = run.compiled(**make_batch("plain", 2, 9)).loss
        with paradyse.no_sync(run.model) if odd else contextlib.nullcontext():
            with pytest.raises(ValueError, match=told.format(*answers)):
                loss.backward()
    else:
        with paradyse.no_sync(run.model):
            run.backward(9)
        num = len(run.partial())
        if odd:
            run.model.zero_grad()
        answers = f"sent with {num} of earlier calls", "sent at once"
        with pytest.raises(ValueError, match=told.format(*answers)):
            run.backward(9)
    run.model.zero_grad()
    return largest_error(run.step(later=True), want)


@pytest.mark.broad
@pytest.mark.parametrize("what", ["enters", pytest.param("clears", marks=pytest.mark.slow)])
def test_ranks_are_inside_together(what: str, pool2: RankPool) -> None:
    assert max(pool2.run(on_one_rank, what, timeout_s=100)) < EXACT


def planned(sharded: bool) -> tuple[int, int, int]:
    """What plans count with more inside, in the last call and after it, by their guard."""
    run = Run(["megatron_cz"], sharded, dtype=torch.bfloat16)
    run.backward(9)
    (graph,) = next(iter(captures_of(run.compiled))).graphs.values()
    choice = graph.choice
    guard, planner = choice.guard, choice.planner
    asked: list[Any] = []
    chosen = guard._plan
    guard._plan = lambda work: asked.append(work) or chosen(work)
    run.step(later=True)
    run.backward(9)
    assert [w.keeps_gradients for w in asked] == [True, True, True, False]
    plan = chosen(asked[0])
    alone, inside = (
        planner.predict(plan, choice.workload(2, 9, True, keeps))[1] for keeps in (False, True)
    )
    numel = sum(p.numel() for p in run.model.parameters())
    return inside - alone, sum(p.numel() * 2 for p in run.model.parameters()), numel


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_plans_count_with_whole_gradients(sharded: bool, pool2: RankPool) -> None:
    """In 32 bits; a whole weight has a gradient of its own size anyway."""
    for more, weights, numel in pool2.run(planned, sharded, timeout_s=100):
        assert more == 4 * numel - (0 if sharded else weights)


def fails_at_the_end(sharded: bool) -> tuple[str, float]:
    """Rank 1 fails while it sends what has piled up: what this rank raises, and it goes on."""
    run, found = Run(["megatron_cz"], sharded), ""
    sends = GradientSync._summed

    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory for a message")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSync, "_summed", fail if dist.get_rank() == 1 else sends)
        try:
            run.step(later=True)
        except RuntimeError as e:
            found = f"{type(e).__name__}: {e}"
    run.model.zero_grad()
    want = run.step(later=False)
    run.model.zero_grad()
    return found, largest_error(run.step(later=True), want)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_fail_together_where_gradients_are_sent(sharded: bool, pool2: RankPool) -> None:
    (other, a), (own, b) = pool2.run(fails_at_the_end, sharded, timeout_s=100)
    assert own == "RuntimeError: no memory for a message"
    assert "rank 1 failed in backward of training call 3" in other or "OutOfMemory" in other
    assert max(a, b) < EXACT


def hooks_and_finalizers() -> list[int]:
    run, held = Run(["ulysses_z"]), []
    for _ in range(3):
        with paradyse.no_sync(run.model):
            run.backward(9)
        run.backward(9)
        held.append(len(weakref.finalize._registry))  # type: ignore[attr-defined]
    return held


def test_nothing_is_left_of_an_accumulation(pool2: RankPool) -> None:
    for first, *more in pool2.run(hooks_and_finalizers):
        assert more == [first, first]


def test_messages_of_a_backward_that_failed_are_not_waited_for_by_the_next() -> None:
    sync, waits, fails = GradientSync(), list[str](), [True]

    class Message:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> list[Tensor]:
            waits.append(self.name)
            return [torch.zeros(2)]

    def begin(grad: Tensor) -> None:
        sync.begin()
        assert sync._ends is not None
        sync._ends.append(Message("first" if fails else "second"))  # type: ignore[arg-type]

    def go_on(grad: Tensor) -> None:
        if fails:
            raise ZeroDivisionError(fails.pop())

    y = torch.ones(2, requires_grad=True).exp()
    y.register_hook(go_on)
    z = y * 2
    z.register_hook(begin)
    with pytest.raises(ZeroDivisionError):
        z.sum().backward(retain_graph=True)
    z.sum().backward()
    assert waits == ["second"]
