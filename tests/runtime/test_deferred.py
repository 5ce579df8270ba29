"""Outputs computed when first used."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, relative, run_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paradyse
from paradyse.runtime.deferred import DeferredTensor, defer

Ranks = Callable[[int], RankPool]


def make(calls: list[int], value: Tensor) -> DeferredTensor:
    """Twice ``value``, at first use."""

    def compute(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    return defer(compute, [value], value.shape, value.dtype, value.device)


def test_metadata_and_detaching_do_not_compute() -> None:
    calls: list[int] = []
    x = make(calls, torch.randn(2, 3, requires_grad=True))
    assert x.shape == (2, 3) and x.dtype == torch.float32 and x.ndim == 2 and x.size(1) == 3
    assert isinstance(x, torch.Tensor) and x.numel() == 6 and x.is_floating_point()
    assert x.requires_grad and x.grad_fn is not None and not x.is_leaf
    assert not x.detach().requires_grad
    assert not calls


def test_any_use_computes_once() -> None:
    calls: list[int] = []
    value = torch.randn(2, 3)
    x = make(calls, value)
    other = x.detach()
    assert torch.equal(x + 1, value * 2 + 1) and torch.equal(other, value * 2)
    assert torch.equal(torch.cat([x, x]), torch.cat([value, value]) * 2)
    assert x[0, 1].item() == value[0, 1].item() * 2 and x.tolist() == (value * 2).tolist()
    assert x.numpy().shape == (2, 3) and repr(x) == repr(value * 2)
    assert torch.equal(copy.deepcopy(x), value * 2)
    assert len(calls) == 1


@pytest.mark.parametrize("pulled", [False, True])
def test_second_derivatives_are_refused(pulled: bool) -> None:
    """Of the value, which is computed again in backward without a graph, there are none."""
    value = torch.ones(3, requires_grad=True)
    pull = (lambda grad: [grad * 2]) if pulled else None
    x = defer(lambda v: v * 2, [value], value.shape, value.dtype, value.device, pull)
    with pytest.raises(NotImplementedError, match=r"double backward \(create_graph=True\) through"):
        torch.autograd.grad(x.sum(), [value], create_graph=True)


def test_a_number_of_no_dim() -> None:
    x = make([], torch.tensor(1.5, requires_grad=True))
    assert x.item() == 3.0 and float(x.detach()) == 3.0


def test_gradients_flow_through() -> None:
    w = torch.randn(3, requires_grad=True)
    x = make([], w * 2)
    x.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 4.0))


def test_a_pull_takes_the_place_of_computing_again() -> None:
    calls: list[int] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 3

    w = torch.randn(3, requires_grad=True)
    x = defer(compute, [w], w.shape, w.dtype, w.device, lambda grad: (grad * 3,))
    x.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 3.0)) and len(calls) == 1


def test_a_loss_that_never_reads_it_costs_nothing() -> None:
    calls: list[int] = []
    w = torch.randn(3, requires_grad=True)
    x, loss = make(calls, w), w.sum()
    loss.backward()
    assert not calls and x.requires_grad


class Doubled(torch.autograd.Function):
    """An autograd function of a user's, which C++ calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return (x * x).mean()


def in_place(out: Any) -> Tensor:
    logits = out.logits
    logits /= 2
    logits[:, 0] = 1
    return out.loss + (logits * logits).mean()


def with_a_hook(out: Any) -> Tensor:
    """Gradients of the loss do not pass through the logits, as in all compiled graphs."""
    out.logits.register_hook(lambda grad: grad * 3)
    return (out.logits**2).mean()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "autograd function": lambda out: out.loss + Doubled.apply(out.logits).mean(),
    "autograd function alone": lambda out: Doubled.apply(out.logits).mean(),
    "reentrant checkpoint": lambda out: (
        out.loss + checkpoint(lambda x: (x * x).mean(), out.logits, use_reentrant=True)
    ),
    "checkpoint": lambda out: checkpoint(lambda x: (x * x).mean(), out.logits, use_reentrant=False),
    "vmap": lambda out: torch.func.vmap(lambda x: (x * x).mean())(out.logits).sum(),
    "functional gradient": lambda out: torch.func.grad(lambda x: (x**3).mean())(out.logits).sum(),
    "scripted": lambda out: out.loss + scripted(out.logits),
    "in place": in_place,
    "a hook": with_a_hook,
    "detached": lambda out: out.loss * out.logits.detach().mean() + out.logits.mean(),
    "twice": lambda out: out.logits.exp().mean() + out.logits.softmax(-1)[..., 0].mean(),
    "module": lambda out: nn.Softmax(-1)(out.logits)[..., 3].mean(),
}


def train_on_what_is_read(names: list[str], sharded: bool) -> None:
    reference, model = (make_model("llama", num_hidden_layers=1) for _ in range(2))
    if sharded:
        paradyse.shard(model)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 3, 13)
    for name in names:
        want = run_step(reference, reference, batch, LOSSES[name])
        check(run_step(compiled, model, batch, LOSSES[name]), want, what=name)


@pytest.mark.broad(but="1-False")
@pytest.mark.parametrize(
    ("nproc", "sharded"),
    [(1, False), (2, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_gradients_of_losses_that_read_the_logits_in_cpp(
    nproc: int, sharded: bool, ranks: Ranks
) -> None:
    ranks(nproc).run(train_on_what_is_read, list(LOSSES), sharded, timeout_s=200)


def ask_autograd() -> None:
    model = make_model("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 3, 13)
    found = []
    for fn in (model, compiled):
        logits = fn(**batch).logits
        logits.retain_grad()
        loss = (logits**2).mean()
        loss.backward(retain_graph=True)
        (asked,) = torch.autograd.grad(loss, logits)
        found += [logits.grad, asked]
    assert relative(found[2], found[0]) <= 1e-4 and relative(found[3], found[1]) <= 1e-4


def test_what_is_asked_of_autograd(ranks: Ranks) -> None:
    ranks(2).run(ask_autograd, timeout_s=200)


class Logits(nn.Module):
    """A model that returns a tuple of tensors, as hooks of modules ask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(inputs_embeds=x, labels=labels)
        return out.loss, out.logits


def train_with_module_hooks() -> None:
    module = Logits(make_model("llama", num_hidden_layers=1))
    x = torch.randn(3, 13, module.model.config.hidden_size, requires_grad=True)
    batch = {"x": x, "labels": make_batch("plain", 3, 13)["labels"]}
    seen: list[list[Tensor]] = []
    module.register_full_backward_hook(
        lambda module, inputs, outputs: seen.append([g.clone() for g in outputs])
    )

    def loss_of(out: tuple[Tensor, Tensor]) -> Tensor:
        return out[0] + Doubled.apply(out[1]).mean()

    compiled = torch.compile(module, backend="paradyse", options={"inner": "eager"})
    # By position: hooks look for inputs that require gradients among these alone.
    want, got = (
        run_step(lambda c=c, **b: c(b["x"], b["labels"]), module, batch, loss_of)
        for c in (module, compiled)
    )
    check(got, want)
    assert len(seen) == 2
    assert all(relative(g, w) <= 1e-4 for w, g in zip(*seen, strict=True))


def test_backward_hooks_of_a_module(ranks: Ranks) -> None:
    ranks(2).run(train_with_module_hooks, timeout_s=200)


def differentiate_twice(strategy: str) -> str:
    model = make_model("llama", num_hidden_layers=1)
    options = {"inner": "eager", "plan": strategy}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 3, 13)
    out = compiled(**batch)
    heard = []
    for value in (out.loss, out.logits.mean()):
        try:
            torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        except NotImplementedError as e:
            heard.append(str(e))
    assert len(heard) == 2
    return heard[0]


STRATEGIES = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")


@pytest.mark.broad(but="metp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_double_backward_is_refused(strategy: str, ranks: Ranks) -> None:
    for text in ranks(2).run(differentiate_twice, strategy, timeout_s=200):
        assert "create_graph=True" in text and "neither compiled nor sharded" in text


def whose_logits_stay() -> list[str]:
    """Heads whose logits are there when the call's outputs are gone, and nobody has searched for
    garbage."""
    model, batch, stayed = make_model("llama", num_hidden_layers=1), make_batch("plain", 3, 13), []
    for levers in ("", "tiled"):
        options = {"plan": {"head": levers} if levers else "auto", "inner": "eager"}
        compiled = torch.compile(model, backend="paradyse", options=options)
        gc.collect()
        gc.disable()
        out = compiled(**batch)
        logits = weakref.ref(out.logits)
        out.loss.backward()
        del out
        stayed += [levers] if logits() is not None else []
        gc.enable()
    return stayed


@pytest.mark.broad(but="1")
@pytest.mark.parametrize("nproc", [1, 2])
def test_logits_go_with_the_outputs(nproc: int, ranks: Ranks) -> None:
    """With them goes what they would be made of: a frame that held them would hold the tokens of
    one step while others run."""
    assert ranks(nproc).run(whose_logits_stay, timeout_s=200) == [[]] * nproc


@pytest.mark.parametrize("train", [False, True])
def test_what_is_read_behind_a_write_to_an_input_is_an_error(train: bool) -> None:
    x = torch.ones(3, requires_grad=train).clone()
    early, late = make([], x), make([], x)
    assert early.sum() == 6
    with torch.no_grad():
        x.zero_()
    assert early.sum() == 6  # what was read stays
    with pytest.raises(RuntimeError, match="inputs of the call, or other outputs"):
        late.sum()


@pytest.mark.parametrize("train", [False, True])
def test_what_is_made_of_another_late_output(train: bool) -> None:
    """It may be read before that one or behind it, but not behind a write to it."""
    for reads_first in (False, True):
        first = make([], torch.ones(3, requires_grad=train).clone())
        second, late = make([], first), make([], first)
        if reads_first:
            assert first.sum() == 6
        assert second.sum() == 12
        first *= 3
        assert first.sum() == 18 and second.sum() == 12
        with pytest.raises(RuntimeError, match="inputs of the call, or other outputs"):
            late.sum()


def read_late(replicas: int, sharded: bool) -> list[str]:
    """What is said of logits and of a cache that are read behind an optimizer's step."""
    torch._dynamo.reset()
    model, said = make_model("llama", use_cache=True), []
    shape = replicas, torch.distributed.get_world_size() // replicas
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    if sharded:
        paradyse.shard(model, mesh)
    plan = {"attention": ["megatron_cz"] * 2, "mlp": ["megatron_cz"] * 2, "head": "tiled"}
    options = {"inner": "eager", "plan": plan, "mesh": mesh}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = compiled(**make_batch("plain", 2, 9))
    early, keys = out.logits.clone(), out.past_key_values.layers[0].keys + 0
    out.loss.backward()
    optimizer.step()
    assert torch.equal(out.logits, early)  # what was read stays
    assert torch.equal(out.past_key_values.layers[0].keys, keys)
    out = compiled(**make_batch("plain", 2, 9))
    out.loss.backward()
    optimizer.step()
    for read in (lambda: out.logits + 0, lambda: out.past_key_values.layers[1].keys + 0):
        try:
            read()
            said.append("")
        except RuntimeError as e:
            said.append(str(e))
    return said


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_read_after_a_step_is_not_of_other_weights(sharded: bool, pool2: RankPool) -> None:
    for logits, cache in pool2.run(read_late, 1, sharded, timeout_s=100):
        assert "read after weights that it is made of were changed" in logits
        assert "read after weights that it is made of were changed" in cache


@pytest.mark.parametrize("sharded", [False, True])
def test_what_replicas_read_after_a_step_is_not_either(sharded: bool, pool2: RankPool) -> None:
    for logits, _ in pool2.run(read_late, 2, sharded, timeout_s=100):
        assert "read after weights that it is made of were changed" in logits
