"""Blocks whose attention goes in chunks: exact; device and host hold no more than said."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from host_pages import counted_pages, pages_used
from models import check, in_bfloat16, make_batch, make_model, relative, run_step, worst
from plans import blocks_of
from tiny import Tiny, tokens
from torch import Tensor, nn

from paradyse.distributed.axis import resolve_axis
from paradyse.runtime import offload
from paradyse.runtime.frame import Frame
from paradyse.strategies import chunked, host_memory, tiles
from paradyse.strategies.host_memory import HostMemories
from paradyse.torch_private import TorchDispatchMode, tree_leaves
from paradyse.types import ATTENTION_STRATEGIES, Plan

Ranks = Callable[[int], RankPool]

CHUNKED = {"attention": "ulysses_z+chunked", "mlp": "ulysses_z+tiled"}
MOVED = {kind: f"{point}+offload" for kind, point in CHUNKED.items()}
AGAIN = {"attention": "ulysses_z+recompute+chunked+offload", "mlp": "ulysses_z+selective"}
ALONE = {"attention": "ulysses_z+chunked", "mlp": "megatron_ts"}
CPU = torch.device("cpu")
SLOW = pytest.mark.slow


@contextmanager
def few_tokens(most: int = 4) -> Iterator[None]:
    """Inside, tiles and chunks have ``most`` tokens of a rank, and little fits on a page."""
    with (
        patch.multiple(tiles, CHUNK_TOKENS=most, TILE_TOKENS=most, MIN_TILE_TOKENS=2),
        patch.object(host_memory, "PAGE_BYTES", 192),
        patch.object(offload, "MIN_BYTES", 1),
        counted_pages(),
    ):
        yield


def compile_for(model: nn.Module, inner: str = "eager") -> tuple[Any, list[Any]]:
    """The compiled model, and the list of one plan that it takes."""
    torch._dynamo.reset()
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": inner}
    return torch.compile(model, backend="paradyse", options=options), current


def compare(
    family: str,
    how: str = "plain",
    shape: tuple[int, int] = (2, 13),
    inner: str = "eager",
    sharded: bool = False,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[str]:
    """Raises where a gradient differs from eager's; what the attention block cannot have."""
    import paradyse

    batch = make_batch(how, *shape)
    reference, model = (make_model(family, dtype, num_hidden_layers=1) for _ in range(2))
    want = run_step(reference, reference, batch)
    if sharded:
        paradyse.shard(model)
    if checkpointing:
        with warnings.catch_warnings():  # transformers 5.23 has a newer name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
    model.train()
    compiled, current = compile_for(model, inner)
    with few_tokens():
        check(run_step(compiled, model, batch), want, dtype, "first")
        kinds = [b.kind for b in blocks_of(compiled)]
        for plan in (CHUNKED, AGAIN, MOVED, ALONE):
            current[0] = plan if isinstance(plan, str) else Plan(tuple(plan[k] for k in kinds))
            check(run_step(compiled, model, batch), want, dtype, f"{plan}")
            assert pages_used(CPU) == 0
    return [at for b in blocks_of(compiled) for at in b.refused_levers if "chunked" in at]


@pytest.mark.broad(but="1-llama_odd-options0")
@pytest.mark.parametrize(
    ("nproc", "family", "options"),
    [
        (1, "llama_odd", {"how": "left", "shape": (3, 11)}),
        (2, "mistral", {"how": "packed", "shape": (1, 17), "sharded": True}),
        pytest.param(2, "llama_odd", {"sharded": True}, marks=SLOW),
        pytest.param(1, "gpt2", {"inner": "aot_eager"}, marks=SLOW),
        pytest.param(1, "bert", {"shape": (1, 9)}, marks=SLOW),
        pytest.param(2, "bert", {"how": "right", "shape": (3, 11)}, marks=SLOW),
        pytest.param(2, "gpt2", {"checkpointing": True, "sharded": True}, marks=SLOW),
        pytest.param(2, "qwen3", {"how": "left", "shape": (2, 19)}, marks=SLOW),
        pytest.param(
            2, "gpt2", {"sharded": True, "inner": "inductor", "dtype": torch.float32}, marks=SLOW
        ),
        pytest.param(3, "llama_odd", {"shape": (1, 29)}, marks=SLOW),
        pytest.param(3, "gpt2", {"sharded": True, "shape": (3, 2)}, marks=SLOW),
        pytest.param(4, "llama_odd", {"sharded": True, "shape": (3, 31)}, marks=SLOW),
    ],
)
def test_exact(nproc: int, family: str, options: dict[str, Any], ranks: Ranks) -> None:
    for refused in ranks(nproc).run(partial(compare, family, **options), timeout_s=300):
        assert refused == [f"{s}+chunked" for s in ATTENTION_STRATEGIES if s != "ulysses_z"]


def with_dropout(inner: str) -> tuple[float, str]:
    """The error against attention at once, from the same random state."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    model = make_model("gpt2", torch.float64, n_layer=1, **rates)
    batch, steps = make_batch("plain", 2, 11), []
    compiled, current = compile_for(model, inner)
    with few_tokens():
        run_step(compiled, model, batch)
        for current[0] in ("ulysses_z", CHUNKED):
            torch.manual_seed(5)
            steps.append(run_step(compiled, model, batch))
    return worst(steps[1], steps[0])


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "inner"), [(2, "eager"), pytest.param(1, "inductor", marks=SLOW)]
)
def test_dropout_is_that_of_the_whole_sequence(nproc: int, inner: str, ranks: Ranks) -> None:
    for error, what in ranks(nproc).run(with_dropout, inner, timeout_s=300):
        assert error < 1e-9, what


class Biased(Tiny):
    """Adds a learned bias to the scores, and is given it as a mask."""

    def __init__(self, seq_len: int) -> None:
        super().__init__(layers=1)
        torch.manual_seed(1)
        self.bias = nn.Parameter(torch.randn(1, self.heads, seq_len, seq_len))

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Any = None) -> Any:
        return super().forward(ids, labels, self.bias)


def with_a_learned_bias() -> list[float]:
    """Errors of gradients, where all weights are learned and where the bias alone is."""
    torch.manual_seed(0)
    model, ids = Biased(13).double(), tokens(2, 13)
    compiled, current = compile_for(model)
    found = []
    with few_tokens():
        compiled(ids, ids)
        current[0] = CHUNKED
        for names in ([n for n, _ in model.named_parameters()], ["bias"]):
            weights = []
            for name, p in model.named_parameters():
                p.requires_grad_(name in names)
                weights += [p] * p.requires_grad
            want = torch.autograd.grad(model(ids, ids), weights)
            got = torch.autograd.grad(compiled(ids, ids), weights)
            found.append(max(relative(a, b) for a, b in zip(got, want, strict=True)))
    return found


@pytest.mark.parametrize("nproc", [1, pytest.param(3, marks=SLOW)])
def test_a_learned_bias_has_its_whole_gradient(nproc: int, ranks: Ranks) -> None:
    for errors in ranks(nproc).run(with_a_learned_bias, timeout_s=200):
        assert max(errors) < 1e-9, errors


class Heads(TorchDispatchMode):  # type: ignore[misc]
    """The most elements of a value with heads apart, or of a message of queries, keys and
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.ndim == 4:
                self.most = max(self.most, x.numel())
        return out


WIDE, LONG, CHUNK = 64, 160, 20
"""Columns of all heads, tokens of the sequence, and those of a rank in a chunk."""


def most_elements(plan: Any) -> int:
    """Of a value with heads apart, in a step."""
    model = make_model("gpt2", n_positions=LONG, n_layer=1, n_embd=WIDE)
    batch, watch = make_batch("plain", 1, LONG), Heads()
    compiled, current = compile_for(model)

    def run_watched(frame: Frame) -> Any:  # Dynamo must not see the mode
        with watch:
            return run(frame)

    with few_tokens(CHUNK):
        run_step(compiled, model, batch)
        current[0] = plan
        run_step(compiled, model, batch)
        run = Frame.run
        with patch.object(Frame, "run", run_watched):
            loss = compiled(**batch).loss
        with watch:
            loss.backward()
    return watch.most


@pytest.mark.broad
@pytest.mark.parametrize("nproc", [2, pytest.param(1, marks=SLOW)])
def test_heads_of_a_chunk_exist_and_never_those_of_the_sequence(nproc: int, ranks: Ranks) -> None:
    own = WIDE // nproc  # columns of the heads that a rank computes
    together = 3 if nproc > 1 else 1  # queries, keys and values in a message
    for most in ranks(nproc).run(most_elements, CHUNKED, timeout_s=200):
        assert most == own * CHUNK * nproc * together
    for most in ranks(nproc).run(most_elements, "ulysses_z", timeout_s=200):
        assert most >= own * LONG


def kept_and_given_back() -> None:
    model, ids = Tiny(layers=2).double(), tokens(1, 13)
    weights = list(model.parameters())
    want = torch.autograd.grad(model(ids, ids), weights)
    compiled, current = compile_for(model)
    with few_tokens():
        compiled(ids, ids)
        current[0] = CHUNKED
        with torch.no_grad():
            compiled(ids, ids)
            assert pages_used(CPU) == 0
        loss = compiled(ids, ids)
        kept = pages_used(CPU)
        assert kept > 0
        for again in (True, False):
            got = torch.autograd.grad(loss, weights, retain_graph=again)
            assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < 1e-9
            assert pages_used(CPU) == kept * again
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        current[0] = {kind: point.removesuffix("+offload") for kind, point in AGAIN.items()}
        loss = compiled(ids, ids)
        assert pages_used(CPU) == 0  # nothing stays that is made again
        loss.backward()
        assert pages_used(CPU) == 0
        current[0] = CHUNKED
        del loss
        loss = compiled(ids, ids)
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]


def test_the_host_keeps_what_backward_needs_and_nothing_after_it(pool1: RankPool) -> None:
    pool1.run(kept_and_given_back, timeout_s=200)


def failing() -> None:
    """A step that fails between forward and backward of attention leaves nothing on the host."""
    model, ids = Tiny(layers=1).double(), tokens(1, 13)
    compiled, current = compile_for(model)

    def fail(*args: Any) -> Any:
        raise ArithmeticError("in attention")

    with few_tokens():
        compiled(ids, ids)
        current[0] = CHUNKED
        with (
            patch("paradyse.strategies.chunked.attend", fail),
            pytest.raises(ArithmeticError),
        ):
            compiled(ids, ids)
        assert pages_used(CPU) == 0
        loss = compiled(ids, ids)
        with (
            patch("paradyse.strategies.chunked.attend_backward", fail),
            pytest.raises(ArithmeticError),
        ):
            loss.backward()
        del loss
        gc.collect()
        assert pages_used(CPU) == 0


def test_errors_leave_nothing_on_the_host(pool1: RankPool) -> None:
    pool1.run(failing, timeout_s=200)


def frozen(names: Sequence[str]) -> list[float]:
    """Errors of gradients where weights are frozen but for ``names``, and backward runs under
    autocast."""
    model, batch = make_model("gpt2", torch.float64, n_layer=1), make_batch("plain", 2, 9)
    compiled, current = compile_for(model)
    with few_tokens():
        run_step(compiled, model, batch)
        current[0] = CHUNKED
        for name, p in model.named_parameters():
            p.requires_grad_(any(n in name for n in names))
        want = run_step(model, model, batch)
        model.zero_grad()
        loss = compiled(**batch).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == want.grads.keys()
    return [relative(grads[n], g) for n, g in want.grads.items()]


@pytest.mark.broad
@pytest.mark.parametrize(
    "names", [("attn.c_proj",), pytest.param(("ln_1", "attn.c_attn"), marks=SLOW)]
)
def test_frozen_weights(names: Sequence[str], pool1: RankPool) -> None:
    for errors in pool1.run(frozen, names, timeout_s=200):
        assert max(errors) < 1e-6, errors


def under_autocast() -> tuple[float, float]:
    """The error, and eager's own, in bfloat16 against float32."""
    model, batch = make_model("gpt2", n_layer=1), make_batch("plain", 2, 11)

    exact = run_step(model, model, batch)
    eager, _ = worst(run_step(in_bfloat16(model), model, batch), exact)
    compiled, current = compile_for(model, "aot_eager")
    with few_tokens():
        run_step(in_bfloat16(compiled), model, batch)
        current[0] = CHUNKED
        return worst(run_step(in_bfloat16(compiled), model, batch), exact)[0], eager


@SLOW
def test_autocast(pool2: RankPool) -> None:
    for error, eager in pool2.run(under_autocast, timeout_s=300):
        assert error < 2 * eager


@pytest.mark.gpu
@counted_pages()
def test_on_a_gpu_heads_of_the_sequence_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 2048)
    torch.manual_seed(0)
    device = torch.device("cuda")
    model, ids = Tiny(hidden=256, layers=6).to(device), tokens(1, 16384).to(device)
    grads, held = [], []
    for levers in ("", "+chunked", "+chunked+offload"):
        torch._dynamo.reset()
        plan = {"attention": f"ulysses_z{levers}", "mlp": "ulysses_z+tiled"}
        options = {"plan": plan, "inner": "aot_eager"}
        compiled = torch.compile(model, backend="paradyse", options=options)
        for _ in range(2):
            model.zero_grad()
            loss = compiled(ids, ids)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in grads[1:]:
        assert max(relative(a, b) for a, b in zip(other, grads[0], strict=True)) < 1e-4
    assert held[5] < held[3] < held[1]
    device = torch.device("cuda", 0)
    assert pages_used(device) == 0
    host = resolve_axis().session.of(HostMemories)[device]
    page = host.take()
    assert page.is_pinned()
    host.give([page])


def test_a_copy_of_what_is_kept_is_refused_in_words() -> None:
    """Hooks of saved tensors may give backward a copy of each."""
    kept: Any = object()
    carrier = chunked._carry(kept)
    assert chunked._carried(carrier.detach()) is kept
    with pytest.raises(RuntimeError, match="save_on_cpu.*leave chunked out of levers="):
        chunked._carried(carrier.clone())
