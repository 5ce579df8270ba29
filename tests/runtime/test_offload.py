"""What blocks save on the host: exact, gone from the device in between, and from the host after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from host_pages import CountedMemory, counted_pages, pages_used
from models import relative, whole
from tiny import Tiny, tokens
from torch import Tensor

from paradyse.distributed.axis import resolve_axis
from paradyse.runtime import offload
from paradyse.runtime.offload import Inputs, Moved, SavedBlock, SavedByCall
from paradyse.strategies import host_memory, tiles
from paradyse.strategies.host_memory import HostMemories
from paradyse.torch_private import StorageWeakRef, storage_key
from paradyse.weights.versions import Read

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small to move, and it takes several pages."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 192)


Run = tuple[Tensor, list[Tensor], list[weakref.ref[SavedBlock]]]


def run(weights: list[Tensor], call: SavedByCall | None) -> Run:
    """The loss of a block for each weight, the blocks' inputs, and what they save."""
    x, inputs, saved = torch.linspace(-1, 1, 35).view(5, 7), list[Tensor](), []
    for w in weights:
        inputs.append(x)
        if call is None:
            x = (x @ w).exp().sin()
            continue
        with call.saving(()) as block:
            x = (x @ w).exp().sin()
        saved.append(weakref.ref(block))
        del block
    if call is not None:
        call.settle()
    return x.sum(), inputs, saved


def make_weights(num: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(7, 7).div(7).requires_grad_() for _ in range(num)]


def gradients(weights: list[Tensor], loss: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, weights, **options))


def test_gradients_are_bit_for_bit_those_without() -> None:
    weights, host = make_weights(3), CountedMemory(CPU)
    want = gradients(weights, run(weights, None)[0])
    loss, *_ = run(weights, SavedByCall(host))
    assert host.num_used > 3  # one block alone has several
    got = gradients(weights, loss)
    assert all(map(torch.equal, got, want))
    assert host.num_used == 0


def test_pages_are_used_again() -> None:
    weights, host = make_weights(3), CountedMemory(CPU)
    pages = set()
    for _ in range(3):
        loss, *_ = run(weights, SavedByCall(host))
        pages.add(host.num_used)
        gradients(weights, loss)
    (most,) = pages
    taken = [host.take().data_ptr() for _ in range(most)]
    assert len(set(taken)) == most and host.num_used == most
    assert host.num_made == most


def on_device(saved: list[weakref.ref[SavedBlock]]) -> tuple[bool, ...]:
    """Which blocks' memory is on the device, or on its way there or from there."""
    return tuple((block := ref()) is not None and block._memory is not None for ref in saved)


def test_memory_leaves_when_the_next_block_has_run() -> None:
    call, x, states = SavedByCall(CountedMemory(CPU)), torch.ones(5, 7), []
    saved: list[weakref.ref[SavedBlock]] = []
    for w in make_weights(3):
        with call.saving(()) as block:
            x = (x @ w).exp().sin()
        saved.append(weakref.ref(block))
        del block
        states.append(on_device(saved))
    assert states == [(True,), (False, True), (False, False, True)]
    call.settle()
    assert on_device(saved) == (False, False, False)
    assert all(ref() for ref in saved) and x.requires_grad


def test_memory_comes_back_one_block_ahead() -> None:
    weights, states = make_weights(3), list[tuple[bool, ...]]()
    loss, inputs, saved = run(weights, SavedByCall(CountedMemory(CPU)))
    for x in inputs[1:]:
        x.register_hook(lambda _: states.append(on_device(saved)))
    gradients(weights, loss)
    assert states == [(False, True, False), (True, False, False)]


def test_what_is_saved_is_freed_on_the_device() -> None:
    weights, host = make_weights(2), CountedMemory(CPU)
    seen: list[StorageWeakRef] = []
    move = SavedBlock._move

    def watched(self: SavedBlock, memory: Tensor) -> None:
        seen.append(StorageWeakRef(memory.untyped_storage()))
        move(self, memory)

    with patch.object(SavedBlock, "_move", watched):
        loss, inputs, _ = run(weights, SavedByCall(host))
    del inputs
    mine = set(map(storage_key, weights))
    freed = [ref.expired() for ref in seen if ref.cdata not in mine]
    assert len(freed) >= 4 and all(freed)
    assert loss.requires_grad


def test_views_of_one_memory_move_once_and_what_stays_does_not_move() -> None:
    host = CountedMemory(CPU)
    x, weight = torch.arange(60.0).view(5, 12), torch.ones(4)
    block = SavedBlock(host, {storage_key(weight)}, None)
    views = [x, x.t(), x[1:, 3:7], x.view(60)[7:]]
    packed = [block.pack(v) for v in views]
    assert {p.index for p in packed if isinstance(p, Moved)} == {0}
    assert host.num_used == 2  # of 192 bytes, for 240
    for p, v in zip(packed, views, strict=True):
        assert isinstance(p, Moved)
        back = p.get()
        assert torch.equal(back, v) and back.stride() == v.stride()
    kept = block.pack(weight)
    assert isinstance(kept, Read) and kept.again().data_ptr() == weight.data_ptr()
    with patch.object(offload, "MIN_BYTES", 1 << 20):
        assert isinstance(block.pack(torch.ones(1000)), Read)


def test_a_graph_that_is_kept_holds_two_blocks_at_most() -> None:
    weights, host = make_weights(4), CountedMemory(CPU)
    want = gradients(weights, run(weights, None)[0])
    loss, inputs, saved = run(weights, SavedByCall(host))
    del inputs
    for _ in range(2):
        got = gradients(weights, loss, retain_graph=True)
        assert all(map(torch.equal, got, want))
        assert all(ref() for ref in saved) and sum(on_device(saved)) <= 2
    assert host.num_used > 0
    del loss
    assert host.num_used == 0


def test_errors_leave_nothing_on_the_host() -> None:
    weights, host = make_weights(3), CountedMemory(CPU)

    def fail(grad: Tensor) -> None:
        raise RuntimeError("in backward")

    loss, inputs, _ = run(weights, SavedByCall(host))
    inputs[1].register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        gradients(weights, loss)
    del loss, inputs
    gc.collect()
    assert host.num_used == 0
    call = SavedByCall(host)
    with pytest.raises(RuntimeError, match="in forward"), call.saving(()):
        (torch.ones(5, 7) @ weights[0]).exp()
        raise RuntimeError("in forward")
    gc.collect()
    assert host.num_used == 0


def test_inputs_are_asked_for_once_and_need_gradients_as_before() -> None:
    asked = []

    def get(node: Any, layout: str) -> Any:
        asked.append((node, layout))
        return {"x": torch.ones(9).requires_grad_(), "n": 3, "table": torch.zeros(9)}[node]

    inputs, block = Inputs(get), SavedBlock(CountedMemory(CPU), (), None)
    for _ in range(2):
        found = [inputs.get(n, "s") for n in ("x", "n", "table")]  # type: ignore[arg-type]
    assert len(asked) == 3
    inputs.move(block)
    block.leave()
    again = [inputs.get(n, "s") for n in ("x", "n", "table")]  # type: ignore[arg-type]
    assert len(asked) == 3 and again[1] == 3
    for x, y in zip(found[::2], again[::2], strict=True):
        assert torch.equal(x, y) and x.requires_grad == y.requires_grad
        assert x.data_ptr() != y.data_ptr()


PLANS = (
    {"attention": "megatron_cz+offload", "mlp": "megatron_cz+offload"},
    {"attention": "ulysses_z+recompute+offload", "mlp": "megatron_ts+tiled+offload"},
    {"attention": "megatron_ts+selective+offload", "mlp": "metp+recompute+offload"},
    {"attention": "metp+offload", "mlp": "megatron_cz+selective+offload"},
    {"attention": "colossal_z+offload", "mlp": "megatron_cz+recompute"},
)


@contextmanager
def small_here() -> Iterator[None]:
    """As ``small``, on a rank, with tiles of a few tokens; pages are counted."""
    with (
        patch.object(offload, "MIN_BYTES", 1),
        patch.object(host_memory, "PAGE_BYTES", 1 << 12),
        patch.multiple(tiles, TILE_TOKENS=4, MIN_TILE_TOKENS=2),
        counted_pages(),
    ):
        yield


def train(sharded: bool, inner: str) -> list[tuple[float, int, int]]:
    """Per plan the worst error of a gradient, and the pages in use before and after backward."""
    import paradyse

    torch.manual_seed(0)
    reference, model = Tiny().double(), Tiny().double()
    model.load_state_dict(reference.state_dict())
    ids = tokens(2, 13)
    loss = reference(ids, ids)
    want = torch.autograd.grad(loss, list(reference.parameters()))
    if sharded:
        paradyse.shard(model)
    current: list[Any] = [PLANS[0]]
    options = {"plan": lambda workload: current[0], "inner": inner}
    compiled, found = torch.compile(model, backend="paradyse", options=options), []
    with small_here():
        for current[0] in PLANS:
            model.zero_grad()
            loss = compiled(ids, ids)
            before = pages_used(CPU)
            loss.backward()
            del loss
            grads = [whole(p.grad) for p in model.parameters()]
            worst = max(relative(a, b) for a, b in zip(grads, want, strict=True))
            found.append((worst, before, pages_used(CPU)))
    return found


@pytest.mark.broad(but="1-False-eager")
@pytest.mark.parametrize(
    ("nproc", "sharded", "inner"),
    [
        (1, False, "eager"),
        (2, True, "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product((1, 2, 3), (False, True), ("aot_eager",))
        ),
        pytest.param(2, True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_exact_under_every_strategy(nproc: int, sharded: bool, inner: str, ranks: Any) -> None:
    for found in ranks(nproc).run(train, sharded, inner, timeout_s=300):
        for plan, (error, before, after) in zip(PLANS, found, strict=True):
            assert error < 1e-9, plan
            assert before > 0 and after == 0, plan


@pytest.mark.gpu
@counted_pages()
def test_on_a_gpu_memory_goes_to_pinned_pages_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1 << 16)
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 1 << 20)
    torch.manual_seed(0)
    device, layers = torch.device("cuda"), 6
    model = Tiny(hidden=256, layers=layers).to(device)
    ids, grads, held = tokens(4, 2048).to(device), [], []
    for levers in ("", "+offload", "+recompute+offload"):
        torch._dynamo.reset()
        options = {"plan": f"megatron_cz{levers}", "inner": "aot_eager"}
        compiled = torch.compile(model, backend="paradyse", options=options)
        for _ in range(2):
            model.zero_grad()
            loss = compiled(ids, ids)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in grads[1:]:
        assert max(relative(a, b) for a, b in zip(other, grads[0], strict=True)) < 1e-5
    assert max(held[3], held[5]) < held[1] / 2
    device = torch.device("cuda", 0)
    assert pages_used(device) == 0
    host = resolve_axis().session.of(HostMemories)[device]
    page = host.take()
    assert page.is_pinned()
    host.give([page])
