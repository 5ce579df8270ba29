"""Every rank computes the whole: exact, with no message but what ranks tell, and where it pays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import check, exact_dtype, make_batch, make_model, relative, run_step, whole
from torch import Tensor

import paradyse
from paradyse.distributed.agreement import Agreement
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import Started
from paradyse.distributed.failures import DroppedCallError, RanksDisagreeError
from paradyse.runtime import runs
from paradyse.types import REPLICATED
from paradyse.weights.same_gradients import Differed

LAYERS = {"num_hidden_layers": 2}


class Run:
    """A compiled model on one rank, under a plan that may be set before each call."""

    def __init__(
        self, family: str = "llama_odd", plan: Any = REPLICATED, inner: str = "eager", **how: Any
    ) -> None:
        torch._dynamo.reset()
        resolve_axis().session.forget(Differed)  # ranks that a case before made differ
        self.model = make_model(family, exact_dtype(family), **how)
        self.plan = plan
        options = {"plan": lambda workload: self.plan, "inner": inner}
        self.compiled: Any = torch.compile(
            self.model, backend="paradyse", dynamic=True, options=options
        )

    def step(self, seq_len: int, scale: float = 1.0) -> dict[str, Tensor]:
        """Gradients beside those that are there."""
        (self.compiled(**make_batch("plain", 2, seq_len)).loss * scale).backward()
        named = self.model.named_parameters()
        return {n: whole(p.grad) for n, p in named if p.grad is not None}


def num_started() -> int:
    """Messages of this rank, but those that compare calls."""
    return resolve_axis().session.of(Started).count


def compare(family: str, inner: str) -> list[int]:
    """Raises where a step alone is not eager's, or a step behind it under another plan; messages of
    each step alone."""
    run, counts = Run(family, inner=inner, **LAYERS), []
    for how, seq_len in (("plain", 13), ("left", 11), ("plain", 13), ("plain", 5)):
        batch = make_batch(how, 3, seq_len)
        want = run_step(run.model, run.model, batch, logits=True)
        for run.plan in (REPLICATED, "megatron_cz"):
            before = num_started()
            got = run_step(run.compiled, run.model, batch, logits=run.plan == REPLICATED)
            counts += [num_started() - before] * (run.plan == REPLICATED)
            check(got, want, exact_dtype(family), f"{how} {seq_len} {run.plan}")
    return counts


@pytest.mark.broad
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_step_is_that_of_one_device_and_sends_nothing(inner: str, pool2: RankPool) -> None:
    for counts in pool2.run(compare, "llama_odd", inner, timeout_s=100):
        assert counts == [0] * len(counts)


def told() -> list[str]:
    """What this rank tells the other in one step."""
    run = Run(num_hidden_layers=1)
    run.step(9)
    with patch.object(Agreement, "tell", autospec=True, side_effect=Agreement.tell) as tell:
        run.step(9)
    return [" ".join(call.args[1].split()[:2]) for call in tell.call_args_list]


def test_backward_is_told_of_with_its_gradients(pool2: RankPool) -> None:
    forward = ["calls the", "makes a", "ends forward"]  # a plan, as a function gives it
    for doing in pool2.run(told, timeout_s=60):
        assert doing == [*forward, "runs backward", "ends backward"], doing


def told_of_inputs() -> tuple[list[str], bool]:
    """The same of a backward that gives no weight a gradient, and whether those of the input are
    eager's."""
    run = Run(num_hidden_layers=1)
    run.model.requires_grad_(False)
    batch = make_batch("plain", 2, 9)
    embedded = run.model.get_input_embeddings()(batch.pop("input_ids"))
    grads, said = list[Tensor](), list[str]()
    for called in (run.model, run.compiled, run.compiled):
        x = embedded.detach().clone().requires_grad_()
        with patch.object(Agreement, "tell", autospec=True, side_effect=Agreement.tell) as tell:
            called(inputs_embeds=x, **batch).loss.backward()
        said = [" ".join(call.args[1].split()[:2]) for call in tell.call_args_list]
        assert x.grad is not None
        grads.append(x.grad)
    return said, all(relative(g, grads[0]) < 1e-12 for g in grads[1:])


def test_backward_without_weights_is_told_of_at_its_end(pool2: RankPool) -> None:
    for said, is_exact in pool2.run(told_of_inputs, timeout_s=60):
        assert said[-2:] == ["runs backward", "ends backward"] and is_exact


class LostError(Exception):
    """Of one rank, in its backward."""


def lose(grad: Tensor) -> None:
    raise LostError


def astray() -> list[str]:
    """What this rank raises where the last one goes astray, and whether a step behind is exact."""
    run, said = Run(num_hidden_layers=1), []
    batch = make_batch("plain", 2, 9)
    want, odd = run_step(run.model, run.model, batch), dist.get_rank() == 1
    for way in ("another call", "another output", "an error"):
        out = run.compiled(**batch)
        try:
            if odd and way == "another call":
                run.compiled(**batch)
            elif odd and way == "another output":
                out.logits.sum().backward()
            else:
                if odd:
                    run.model.get_input_embeddings().weight.register_hook(lose)
                out.loss.backward()
        except (RanksDisagreeError, DroppedCallError, LostError) as e:
            said.append(f"{type(e).__name__}: {e}")
        del out
        run.model.zero_grad()
        if way != "an error":
            check(run_step(run.compiled, run.model, batch), want, torch.float64)
    return said


def test_a_rank_that_goes_astray_is_named(pool2: RankPool) -> None:
    first, odd = pool2.run(astray, timeout_s=60)
    for call, output, _ in (first, odd):
        assert "rank 0: runs backward of training call" in call
        assert "rank 1: calls the model" in call
        assert "rank 0: runs backward" in output and "from div" in output, output
        assert "rank 1: runs backward" in output and "from linear" in output, output
    assert odd[2].startswith("LostError")
    assert first[2].startswith("OutOfMemoryError") and "rank 1" in first[2], first[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bert", "gemma3", "mixtral"])
def test_of_other_families_on_three_ranks(family: str, pool3: RankPool) -> None:
    pool3.run(compare, family, "eager", timeout_s=100)


def steps_of(plans: Sequence[str], later: Sequence[bool]) -> dict[str, Tensor]:
    """Gradients of one step under each of ``plans``, in turn; of those of ``later`` without
    messages."""
    run = Run(num_hidden_layers=1)
    found: dict[str, Tensor] = {}
    for n, (run.plan, kept) in enumerate(zip(plans, later, strict=True)):
        with paradyse.no_sync(run.model) if kept else contextlib.nullcontext():
            found = run.step(9 + n)
    return found


def accumulated() -> None:
    """Raises where plans in turn, and gradients kept back, do not give what one plan does."""
    want = steps_of(["megatron_cz"] * 4, [False] * 4)
    for plans in ([REPLICATED] * 4, [REPLICATED, "metp"] * 2, ["megatron_ts", REPLICATED] * 2):
        for later in ([False] * 4, [True, True, True, False], [False, True, True, False]):
            for n, grad in steps_of(plans, later).items():
                torch.testing.assert_close(grad, want[n], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradients_add_up_over_plans_and_no_sync(pool2: RankPool) -> None:
    pool2.run(accumulated, timeout_s=100)


def apart() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of this rank where ranks compute other ones, and without that."""
    run = Run(num_hidden_layers=1)
    off = run.step(9, scale=1 + 0.1 * dist.get_rank())
    run.model.zero_grad()
    return list(off.values()), list(run.step(9).values())


def test_all_ranks_go_on_from_the_same_bits(pool2: RankPool) -> None:
    """Arithmetic may differ between devices: what is trained must not."""
    results = pool2.run(apart, timeout_s=60)
    for grads, plain in results:
        for mine, first, g in zip(grads, results[0][0], plain, strict=True):
            assert torch.equal(mine, first)
            assert relative(mine, g * 1.05) < 1e-6


def apart_and_kept_back(plans: Sequence[str]) -> list[Tensor]:
    """Gradients of this rank, where ranks compute other ones whole, and send them later with those
    that they share the work of."""
    run = Run(num_hidden_layers=1)
    found: dict[str, Tensor] = {}
    for run.plan, kept in zip(plans, (True, False), strict=True):
        with paradyse.no_sync(run.model) if kept else contextlib.nullcontext():
            off = 1 + 0.1 * dist.get_rank() * (run.plan == REPLICATED)
            found = run.step(9, scale=off)
    return list(found.values())


@pytest.mark.parametrize(
    "plans",
    [
        (REPLICATED, "megatron_cz"),
        pytest.param(("megatron_cz", REPLICATED), marks=pytest.mark.slow),
    ],
)
def test_gradients_kept_back_are_the_same_bits_as_well(
    plans: Sequence[str], pool2: RankPool
) -> None:
    mine, other = pool2.run(apart_and_kept_back, plans, timeout_s=60)
    assert mine and all(map(torch.equal, mine, other))


def dropped() -> list[float]:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.3)
    run, losses = Run("bert", **drops), []
    run.model.train()
    for run.plan in (REPLICATED, "ulysses_z"):
        torch.manual_seed(5)
        losses.append(run.compiled(**make_batch("plain", 2, 13)).loss.item())
    return losses


@pytest.mark.broad
def test_dropout_is_that_of_plans_that_split(pool2: RankPool) -> None:
    for alone, split in pool2.run(dropped, timeout_s=60):
        assert alone == pytest.approx(split, rel=1e-9)


def fused() -> None:
    """Raises where blocks that run as one are not eager's, or do not run as one."""
    with patch.object(runs, "FUSE_AFTER", 1):
        run = Run(inner="aot_eager", **LAYERS)
        batch = make_batch("plain", 2, 13)
        want = run_step(run.model, run.model, batch)
        by, again = (
            patch.object(runs.Run, name, autospec=True, side_effect=getattr(runs.Run, name))
            for name in ("__call__", "on_values")  # of a run that has computed something
        )
        with by as ran, again as ran_again:
            for _ in range(3):
                check(run_step(run.compiled, run.model, batch), want, torch.float64)
    assert (ran.call_count, ran_again.call_count) == (1, 1)


@pytest.mark.slow
def test_blocks_run_together(pool2: RankPool) -> None:
    pool2.run(fused, timeout_s=100)


def chosen(sharded: bool, options: dict[str, Any]) -> tuple[list[str], str]:
    """What the first two lengths are computed by, and what ``explain`` says of the shorter one."""
    torch._dynamo.reset()
    model = make_model("llama")
    if sharded:
        paradyse.shard(model)
    options = {"inner": "eager", **options}
    compiled = torch.compile(model, backend="paradyse", dynamic=True, options=options)
    for seq_len in (16, 2048):
        compiled(**make_batch("plain", 1, seq_len)).loss.backward()
    plans = paradyse.stats(compiled).plan_per_length
    return [plans[16], plans[2048]], str(paradyse.explain(compiled, 1, 16))


@pytest.mark.broad
def test_auto_computes_short_sequences_whole_on_every_rank(pool2: RankPool) -> None:
    for (short, long), text in pool2.run(chosen, False, {}, timeout_s=100):
        assert REPLICATED in short and REPLICATED not in long
        assert REPLICATED in text and "this is the plan" in text
    for (short, _), _ in pool2.run(chosen, False, {"strategies": ["megatron_cz"]}):
        assert REPLICATED not in short
    for (short, _), text in pool2.run(chosen, True, {}):
        assert REPLICATED not in short and "weights are sharded" in text


def refused(sharded: bool, plan: Any) -> str:
    torch._dynamo.reset()
    model = make_model("llama_odd")
    if sharded:
        paradyse.shard(model)
    options = {"inner": "eager", "plan": plan}
    compiled = torch.compile(model, backend="paradyse", options=options)
    try:
        compiled(**make_batch("plain", 1, 16))
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.broad
def test_what_cannot_be_computed_so_is_an_error(pool2: RankPool) -> None:
    for text in pool2.run(refused, True, REPLICATED):
        assert "weights are sharded" in text and "'auto'" in text
    for text in pool2.run(refused, False, {"attention": REPLICATED, "mlp": "metp"}):
        assert "either all whole on every rank or none" in text
    assert pool2.run(refused, False, REPLICATED) == ["", ""]
