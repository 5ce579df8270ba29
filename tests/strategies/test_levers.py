"""Blocks that keep little for backward: exact under every strategy, and what they compute again."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import check, in_bfloat16, make_batch, make_model, relative, run_step, worst
from plans import PLANS, blocks_of, choose
from tiny import Tiny, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from paradyse.runtime import offload
from paradyse.runtime.frame import Frame
from paradyse.runtime.saved_memory import Saved
from paradyse.strategies import tiles
from paradyse.torch_private import TorchDispatchMode, tree_leaves
from paradyse.types import Plan

Ranks = Callable[[int], RankPool]

LEVERS = {"attention": "selective", "mlp": "tiled", "experts": "recompute"}
"""Kind of block -> the lever that is tried on it."""
RECOMPUTE = dict.fromkeys(LEVERS, "recompute")
OFFLOAD = dict.fromkeys(LEVERS, "offload")


@contextmanager
def small_tiles() -> Iterator[None]:
    """Inside, tiles have a few tokens, and the smallest tensors go to the host."""
    few = {"TILE_TOKENS": 4, "MIN_TILE_TOKENS": 2}
    with patch.multiple(tiles, **few), patch.object(offload, "MIN_BYTES", 1):
        yield


def with_levers(name: str, compiled: Any, levers: Mapping[str, str] = LEVERS) -> Plan:
    """The plan called ``name``, with the lever of its kind on each block that can have it."""
    blocks, points = blocks_of(compiled), []
    for block, strategy in zip(blocks, choose(name, blocks).strategies, strict=True):
        point = f"{strategy}+{levers.get(block.kind)}"
        can = block.kind in levers and not block.why_not(point)
        points.append(point if can else strategy)
    return Plan(tuple(points))


def compile_for(model: nn.Module, inner: str) -> tuple[Any, list[Any]]:
    """The compiled model, and the list of one plan that it takes."""
    torch._dynamo.reset()
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": inner}
    return torch.compile(model, backend="paradyse", options=options), current


def compare(
    family: str,
    inner: str = "eager",
    sharded: bool = False,
    plans: Sequence[str] = PLANS,
    shape: tuple[int, int] = (2, 13),
    checkpointing: bool = False,
    layers: int = 1,
    dtype: torch.dtype = torch.float64,
    how: str = "plain",
    levers: Mapping[str, str] = LEVERS,
) -> None:
    """Raises where a gradient differs from eager's."""
    import paradyse

    batch, size = make_batch(how, *shape), {"num_hidden_layers": layers}
    reference, model = (make_model(family, dtype, **size) for _ in range(2))
    want = run_step(reference, reference, batch)
    if sharded:
        paradyse.shard(model)
    if checkpointing:
        with warnings.catch_warnings():  # transformers 5.23 has a newer name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
    model.train()
    (compiled, current), tried = compile_for(model, inner), list[str]()
    with small_tiles():
        check(run_step(compiled, model, batch), want, dtype, "first")
        for name in plans:
            current[0] = with_levers(name, compiled, levers)
            tried.append(current[0].key)
            check(run_step(compiled, model, batch), want, dtype, name)
    assert "+" in "".join(tried)


SLOW = pytest.mark.slow


@pytest.mark.broad(but="1-gpt2-options0")
@pytest.mark.parametrize(
    ("nproc", "family", "options"),
    [
        (1, "gpt2", {"plans": ("megatron_cz",)}),
        (2, "llama_odd", {"sharded": True, "plans": ("megatron_cz", "megatron_ts")}),
        pytest.param(2, "llama_odd", {"layers": 2}, marks=SLOW),
        pytest.param(2, "bert", {"inner": "aot_eager"}, marks=SLOW),
        pytest.param(
            2, "gpt2", {"sharded": True, "inner": "inductor", "dtype": torch.float32}, marks=SLOW
        ),
        pytest.param(2, "gpt2", {"checkpointing": True, "sharded": True}, marks=SLOW),
        pytest.param(2, "mixtral", {"dtype": torch.float32}, marks=SLOW),
        pytest.param(2, "opt", {"shape": (3, 7)}, marks=SLOW),
        pytest.param(3, "llama_odd", {"shape": (1, 29)}, marks=SLOW),
        pytest.param(3, "gpt2", {"sharded": True, "shape": (3, 2), "layers": 2}, marks=SLOW),
        pytest.param(4, "llama_odd", {"sharded": True, "shape": (3, 31)}, marks=SLOW),
        pytest.param(4, "bert", {}, marks=SLOW),
        pytest.param(2, "mistral", {"how": "left", "layers": 2}, marks=SLOW),
        pytest.param(2, "phi3", {"how": "packed", "shape": (1, 19)}, marks=SLOW),
        pytest.param(2, "olmo2", {"how": "right", "sharded": True}, marks=SLOW),
        pytest.param(3, "gemma3", {"how": "left", "layers": 2, "dtype": torch.float32}, marks=SLOW),
        pytest.param(2, "neox", {"levers": {"mlp": "tiled"}, "how": "packed"}, marks=SLOW),
        pytest.param(
            2, "falcon", {"levers": {"attention": "selective"}, "how": "left"}, marks=SLOW
        ),
        pytest.param(2, "qwen3", {"levers": RECOMPUTE, "how": "left"}, marks=SLOW),
        pytest.param(3, "mistral", {"levers": RECOMPUTE, "how": "packed"}, marks=SLOW),
        pytest.param(4, "gpt2", {"levers": RECOMPUTE, "sharded": True}, marks=SLOW),
        pytest.param(2, "llama", {"levers": OFFLOAD, "how": "left", "layers": 2}, marks=SLOW),
        pytest.param(3, "gpt2", {"levers": OFFLOAD, "how": "packed"}, marks=SLOW),
        pytest.param(4, "bert", {"levers": OFFLOAD, "how": "right", "sharded": True}, marks=SLOW),
    ],
)
def test_exact(nproc: int, family: str, options: dict[str, Any], ranks: Ranks) -> None:
    ranks(nproc).run(partial(compare, family, **options), timeout_s=300)


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Which operators run, how often, and the most tokens that have all columns at once."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.num_runs: Counter[str] = Counter()
        self.num_tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_runs[str(func).removesuffix(".default")] += 1
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] == self.num_columns:
                self.num_tokens = max(self.num_tokens, x.numel() // self.num_columns)
        return out


COLUMNS, TOKENS = 300, 160
"""Of an MLP, and of a batch: more than any weight has rows."""


def operators_of(plan: str, kinds: Sequence[str]) -> tuple[Operators, Operators, int]:
    """Those of forward and of backward, and the bytes that are kept between the two."""
    model = make_model("gpt2", n_inner=COLUMNS, n_positions=TOKENS, n_layer=1)
    batch = make_batch("plain", 1, TOKENS)
    compiled, current = compile_for(model, "eager")
    split = torch.distributed.get_world_size() if plan == "megatron_ts" else 1
    forward, backward = Operators(COLUMNS // split), Operators(COLUMNS // split)

    def run_watched(frame: Frame) -> Any:  # Dynamo must not see the mode
        with forward:
            return run(frame)

    with small_tiles():
        run_step(compiled, model, batch)
        current[0] = with_levers(plan, compiled, {kind: LEVERS[kind] for kind in kinds})
        run_step(compiled, model, batch)
        run, saved = Frame.run, Saved()
        with patch.object(Frame, "run", run_watched), saved.watch():
            loss = compiled(**batch).loss
        num_bytes = saved.num_bytes(model.parameters())
        with backward:
            loss.backward()
    return forward, backward, num_bytes


def count_operators(plan: str) -> list[tuple[Counter[str], Counter[str], int, int]]:
    """Without levers and with them: what runs in both passes, the most tokens that have all columns
    at once, and the bytes kept for backward."""
    found = []
    for kinds in ((), ("attention", "mlp")):
        forward, backward, num_bytes = operators_of(plan, kinds)
        num_tokens = max(forward.num_tokens, backward.num_tokens)
        found.append((forward.num_runs, backward.num_runs, num_tokens, num_bytes))
    return found


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "plan", "attention"),
    [
        (2, "megatron_ts", "paradyse.attention"),
        pytest.param(1, "megatron_cz", "paradyse.attention", marks=SLOW),
        pytest.param(2, "megatron_cz", "paradyse.attention_across_ranks", marks=SLOW),
        pytest.param(2, "colossal_z", "paradyse.attention_across_ranks", marks=SLOW),
    ],
)
def test_what_is_kept_and_what_is_computed_again(
    nproc: int, plan: str, attention: str, ranks: Ranks
) -> None:
    rows, share = (TOKENS, nproc) if plan == "megatron_ts" else (TOKENS // nproc, 1)
    columns, qkv, hidden = COLUMNS // share, 3 * 64 // share, 64
    for plain, levered in ranks(nproc).run(count_operators, plan, timeout_s=200):
        for forward, backward, *_ in (plain, levered):
            assert (forward[attention], backward[attention]) == (1, 0)
            assert backward[attention + "_backward"] == 1
            # of each message its gradient; what the block's last linear sends is not sent again
            for op in ("paradyse.gather_linears", "paradyse.linear_scatter"):
                assert forward[op] == backward[op + "_backward"]
                assert (forward[op] > 1) == (plan == "megatron_ts")
            assert not backward["paradyse.linear_scatter"]
        assert levered[2] < rows <= plain[2]
        # of attention the norm and q, k, v are gone; of the MLP the norm, and both sides of GELU
        assert plain[3] - levered[3] >= 4 * rows * (hidden + qkv + hidden + 2 * columns)


def with_dropout(
    plans: Sequence[str], inner: str, levers: Mapping[str, str], sharded: bool
) -> list[tuple[float, str]]:
    """Errors with levers against none, from the same random state."""
    import paradyse

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    model = make_model("gpt2", torch.float64, n_layer=1, **rates)
    if sharded:
        paradyse.shard(model)
    batch = make_batch("plain", 2, 11)
    compiled, current = compile_for(model, inner)
    steps: dict[tuple[str, bool], Any] = {}
    with small_tiles():
        run_step(compiled, model, batch)
        for plan, on in product(plans, (False, True)):
            current[0] = with_levers(plan, compiled, levers) if on else plan
            torch.manual_seed(5)
            steps[plan, on] = run_step(compiled, model, batch)
    return [worst(steps[plan, True], steps[plan, False]) for plan in plans]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "inner", "levers", "sharded"),
    [
        (2, "eager", LEVERS, False),
        pytest.param(1, "inductor", LEVERS, False, marks=SLOW),
        pytest.param(2, "inductor", LEVERS, False, marks=SLOW),
        pytest.param(2, "eager", RECOMPUTE, True, marks=SLOW),
        pytest.param(3, "eager", OFFLOAD, False, marks=SLOW),
        pytest.param(4, "eager", LEVERS, True, marks=SLOW),
    ],
)
def test_dropout_is_that_of_the_whole_sequence(
    nproc: int, inner: str, levers: Mapping[str, str], sharded: bool, ranks: Ranks
) -> None:
    given = ("megatron_cz", "megatron_ts"), inner, levers, sharded
    for errors in ranks(nproc).run(with_dropout, *given, timeout_s=300):
        assert max(error for error, _ in errors) < 1e-9, errors


class Gains(Tiny):
    """An MLP whose columns are scaled by a learned gain for each position."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.gains = nn.Parameter(torch.linspace(0.5, 2, 64))

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Any = None) -> Tensor:
        x = self.embed(ids)
        layer, gains = self.layers[0], self.gains[: ids.shape[1], None]
        qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + layer["proj"](o.transpose(1, 2).flatten(2))
        return x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))) * gains)


def gains_of_positions() -> list[tuple[str, float]]:
    """(plan, error of every gradient) where a tile reads what lies whole on every rank."""
    torch.manual_seed(0)
    model, ids = Gains().double(), tokens(2, 13)
    weights = list(model.parameters())

    def gradients(call: Any) -> list[Tensor]:
        out = call(ids)
        given = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found = torch.autograd.grad((out * given).sum(), weights, allow_unused=True)
        return [g if g is not None else torch.zeros_like(w) for g, w in zip(found, weights)]

    want, found = gradients(model), []
    compiled, current = compile_for(model, "eager")
    with small_tiles():
        for plan in ("colossal_z", "megatron_ts"):
            gradients(compiled)
            current[0] = with_levers(plan, compiled)
            got = gradients(compiled)
            found.append((plan, max(relative(a, b) for a, b in zip(got, want, strict=True))))
    kinds = [b.kind for b in blocks_of(compiled)]
    assert kinds == ["attention", "mlp"], kinds
    return found


@pytest.mark.broad
def test_a_tile_takes_its_rows_of_what_is_whole_on_every_rank(pool2: RankPool) -> None:
    for found in pool2.run(gains_of_positions, timeout_s=200):
        assert max(error for _, error in found) < 1e-9, found


def without_gradients() -> list[float]:
    """Errors: of losses without gradients, and of gradients where most weights are frozen and
    backward runs under autocast."""
    model, batch = make_model("gpt2", torch.float64), make_batch("plain", 2, 9)
    compiled, current = compile_for(model, "eager")
    with small_tiles():
        run_step(compiled, model, batch)
        current[0] = with_levers("megatron_cz", compiled)
        with torch.no_grad():
            off = abs(compiled(**batch).loss.item() - model(**batch).loss.item())
        for name, p in model.named_parameters():
            p.requires_grad_("h.0.attn.c_attn" in name or "h.1.mlp.c_proj" in name)
        want = run_step(model, model, batch)
        model.zero_grad()
        loss = compiled(**batch).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == want.grads.keys()
    return [off, *(relative(grads[n], g) for n, g in want.grads.items())]


@SLOW
def test_without_gradients_with_frozen_weights_and_backward_under_autocast(
    pool1: RankPool,
) -> None:
    for errors in pool1.run(without_gradients, timeout_s=200):
        assert max(errors) < 1e-6, errors


def twice() -> None:
    model, batch = make_model("gpt2", n_layer=1), make_batch("plain", 1, 9)
    compiled, current = compile_for(model, "eager")
    with small_tiles():
        run_step(compiled, model, batch)
        current[0] = with_levers("megatron_cz", compiled)
        run_step(compiled, model, batch)
        weights = list(model.parameters())
        grads = torch.autograd.grad(compiled(**batch).loss, weights, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]


@SLOW
def test_second_derivatives_are_refused(pool1: RankPool) -> None:
    pool1.run(twice, timeout_s=200)


def under_autocast(
    plans: Sequence[str], levers: Mapping[str, str]
) -> list[tuple[str, float, float]]:
    """(plan, its error, eager's own error) in bfloat16, against float32."""
    model, batch = make_model("gpt2", n_layer=1), make_batch("plain", 2, 11)

    exact = run_step(model, model, batch)
    eager, _ = worst(run_step(in_bfloat16(model), model, batch), exact)
    compiled, current = compile_for(model, "aot_eager")
    found = []
    with small_tiles():
        run_step(in_bfloat16(compiled), model, batch)
        for plan in plans:
            current[0] = with_levers(plan, compiled, levers)
            found.append(
                (plan, worst(run_step(in_bfloat16(compiled), model, batch), exact)[0], eager)
            )
    return found


@SLOW
@pytest.mark.parametrize("levers", [LEVERS, RECOMPUTE, OFFLOAD])
def test_autocast(levers: Mapping[str, str], pool2: RankPool) -> None:
    for found in pool2.run(under_autocast, ("megatron_cz", "megatron_ts"), levers, timeout_s=300):
        for plan, error, eager in found:
            assert error < 2 * eager, (plan, error, eager)


def refused_levers() -> list[dict[str, str]]:
    model, batch = make_model("llama", num_hidden_layers=1), make_batch("plain", 1, 9)
    compiled, _ = compile_for(model, "eager")
    run_step(compiled, model, batch)
    return [dict(b.refused_levers) for b in blocks_of(compiled)]


def test_strategies_that_keep_as_little_anyway_say_so(pool2: RankPool) -> None:
    for attention, mlp in pool2.run(refused_levers, timeout_s=200):
        rings = ("megatron_cz", "colossal_z", "metp")
        chunked = {f"{s}+chunked": attention.pop(f"{s}+chunked") for s in rings}
        assert all("go round" in why for why in chunked.values())
        assert "gathers all tokens" in attention.pop("megatron_ts+chunked")
        assert "as a whole" in attention.pop("dsp+chunked")
        assert "own tokens" in attention.pop("dsp+selective")
        assert attention.keys() == {"ulysses_z+selective", "metp+selective"}
        assert "exchanged" in attention["ulysses_z+selective"]
        assert mlp.keys() == {"metp+selective", "metp+tiled"}
        assert "go round" in mlp["metp+tiled"]
