"""Attention of known positions against its definition with dense scores, and the one-rank
operator.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import dense_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import paradyse.kernels.attention as kernel
import paradyse.kernels.attention_mask as masks
import paradyse.kernels.attention_op  # noqa: F401  registers the operator
from paradyse.kernels.alike_tiles import join_alike
from paradyse.kernels.attention import (
    attention_backward,
    attention_forward,
    bias_gradient,
    merge_partials,
)
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec, Runs, dropout_keep, run_positions

# Relative norms. float64: sums of a few hundred terms. float32: the project's bound is 1e-4; ours
# is tighter.
# bfloat16: one rounding of each tile's output (2^-8) on top of inputs that both sides share.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}

WHOLE = "whole sequence"
LAYOUTS: dict[str, Any] = {
    WHOLE: lambda s: (((0, s),), ((0, s),)),
    "padded at the end": lambda s: (((0, s + 3),), ((0, s + 3),)),
    "ring, own keys": lambda s: (_balanced(s, 0), _balanced(s, 0)),
    "ring, keys of rank 0": lambda s: (_balanced(s, 1), _balanced(s, 0)),
    "ring, keys of rank 1": lambda s: (_balanced(s, 0), _balanced(s, 1)),
}


def _balanced(s: int, rank: int) -> Runs:
    c = -(-s // 4)
    return (rank * c, c), ((3 - rank) * c, c)


POSITIONS: dict[str, dict[str, int]] = {
    "full": {},
    "causal": {"right": 0},
    "window": {"left": 5, "right": 0},
    "wide window": {"left": 40, "right": 0},
    "both sides": {"left": 4, "right": 3},
    "ahead": {"right": 7},
    "chunks": {"right": 0, "chunk": 32},
    "small chunks, both ways": {"chunk": 7},
}


def data(name: str, b: int, s: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    at = torch.arange(s)
    return {
        "": {},
        "left padding": {"key_padding": at >= torch.randint(0, s, (b, 1))},
        "right padding": {"key_padding": at <= torch.randint(0, s, (b, 1))},
        "holes": {"key_padding": torch.rand(b, s) > 0.3},
        "nothing": {"key_padding": torch.zeros(b, s, dtype=torch.bool)},
        "packed": {"document_ids": (torch.rand(b, s) < 0.04).cumsum(1)},
        "packed alike": {"document_ids": (torch.rand(1, s) < 0.04).cumsum(1).expand(b, s)},
        "mixed documents": {"document_ids": torch.randint(0, 3, (b, s))},
        "one row for all": {
            "key_padding": at[None] >= s // 4,
            "document_ids": (torch.rand(1, s) < 0.04).cumsum(1),
        },
        "packed, padded": {
            "document_ids": (torch.rand(b, s) < 0.04).cumsum(1),
            "key_padding": at >= torch.randint(0, s, (b, 1)),
        },
    }[name]


DATA = [
    "",
    "left padding",
    "right padding",
    "holes",
    "nothing",
    "packed",
    "packed alike",
    "mixed documents",
    "packed, padded",
    "one row for all",
]


def make(
    b: int, h: int, h_kv: int, n_q: int, n_k: int, d: int, dv: int, dtype: Any
) -> list[Tensor]:
    """q, k, v and a gradient of out, laid out as a model has them."""
    shapes = [(b, n_q, h, d), (b, n_k, h_kv, d), (b, n_k, h_kv, dv), (b, n_q, h, dv)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]


def relative(got: Tensor, want: Tensor, floor: float = 1e-6) -> float:
    """Difference in norm, relative to ``want`` or to ``floor``: a row with one key has gradient 0
    for q.
    """
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=max(floor, 1e-30)))


def check(
    spec: AttentionSpec,
    runs: tuple[Runs, Runs],
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Output, lse and every gradient against the reference; padding tokens hold NaN."""
    torch.manual_seed(0)
    b, h, h_kv, d, dv = sizes
    n_q, n_k = (sum(n for _, n in r) for r in runs)
    q, k, v, grad = make(b, h, h_kv, n_q, n_k, d, dv, dtype)
    bias = spec.bias
    learned = bias is not None and bias.is_floating_point()
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    ins = [*exact, bias.requires_grad_()] if learned and bias is not None else exact
    out0, lse0 = dense_attention(*exact, *map(run_positions, runs), spec)
    grads0 = torch.autograd.grad(out0, ins, grad.double())
    pad_q, pad_k = (run_positions(r) >= spec.seq_len for r in runs)
    for x, pad in ((q, pad_q), (grad, pad_q), (k, pad_k), (v, pad_k)):
        x[:, :, pad] = torch.nan
    with torch.no_grad():
        out, lse = attention_forward(q, k, v, *runs, spec)
        given = Backward(grad, q, k, v, out, lse)
        grads = [*attention_backward(given, *runs, spec)]
        if learned:
            grads.append(bias_gradient(given, *runs, spec))
    assert out.dtype == dtype and lse.dtype == kernel.stat_dtype(dtype)
    assert torch.equal(lse == -torch.inf, lse0 == -torch.inf)
    seen = lse0 > -torch.inf
    assert relative(lse[seen], lse0[seen]) <= TOLERANCE[dtype]
    floor = float(grad[:, :, ~pad_q].double().norm()) * max(1.0, spec.scale) / 100
    for name, got, want in zip(
        ("out", "dq", "dk", "dv", "dbias"), [out, *grads], [out0, *grads0], strict=False
    ):
        assert got.shape == want.shape
        assert relative(got, want, floor) <= TOLERANCE[dtype], name


@pytest.fixture(params=["flash", "dense", "tiny tiles"])
def core(request: Any, monkeypatch: Any) -> str:
    """The CPU's flash kernel; plain PyTorch; either of them in many small tiles."""
    if request.param == "dense":
        monkeypatch.setattr(kernel, "_HAS_CPU_FLASH", False)
    if request.param == "tiny tiles":
        kernel._position_tiles.cache_clear()
        monkeypatch.setattr(masks, "TILE_BYTES", 20_000)
        monkeypatch.setattr(masks, "_SHORT", 0)
        monkeypatch.setattr(kernel, "_MIN_PAIRS_PER_SEQUENCE", 0)
        request.addfinalizer(kernel._position_tiles.cache_clear)
    return request.param


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mask(core: str, layout: str, positions: str) -> None:
    s, b = 131, 3
    for name in DATA:
        spec = AttentionSpec(s, 0.3, **POSITIONS[positions], **data(name, b, s))
        check(spec, LAYOUTS[layout](s), (b, 4, 2, 8, 8))


@pytest.mark.parametrize("s", [1, 2, 3, 17, 257])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 4, 4), (2, 6, 3, 7, 5), (3, 5, 5, 3, 9), (1, 8, 1, 16, 16)]
)
def test_odd_sizes_and_grouped_heads(core: str, s: int, sizes: tuple[int, ...]) -> None:
    for layout in LAYOUTS.values():
        check(AttentionSpec(s, 0.5, right=0), layout(s), sizes)


@pytest.mark.parametrize("name", ["", "left padding", "packed"])
@pytest.mark.parametrize("reach", [(99, 0), (70, 80)])
def test_blocks_of_a_window(reach: tuple[int, int], name: str) -> None:
    s = 700
    spec = AttentionSpec(s, 0.3, *reach, **data(name, 2, s))
    for layout in (WHOLE, "ring, own keys"):
        check(spec, LAYOUTS[layout](s), (2, 4, 2, 8, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["full", "causal", "window", "chunks"])
def test_dtypes(core: str, positions: str, dtype: torch.dtype) -> None:
    for name in ("", "left padding", "packed"):
        spec = AttentionSpec(150, 0.35, **POSITIONS[positions], **data(name, 2, 150))
        check(spec, LAYOUTS["padded at the end"](150), (2, 4, 2, 8, 8), dtype)


@pytest.mark.broad(but="flash-full-shape0")
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 0), (3, 1, 0, 0), (1, 4, 0, 0), (3, 4, 1, 0), (1, 4, 0, 1)]
)
@pytest.mark.parametrize("positions", ["full", "causal", "window"])
def test_bias(core: str, shape: tuple[int, ...], positions: str) -> None:
    """Added or boolean, broadcast along any dim; the gradient of a learned one has its shape."""
    s = 67
    full = tuple(n or s for n in shape)
    for layout, name in itertools.product(LAYOUTS.values(), ("", "holes")):
        for bias in (torch.randn(full, dtype=torch.float64), torch.rand(full) > 0.3):
            spec = AttentionSpec(s, 0.3, **POSITIONS[positions], **data(name, 3, s), bias=bias)
            check(spec, layout(s), (3, 4, 2, 8, 8))


@pytest.mark.broad(but="flash-ring, keys of rank 0")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_softcap(core: str, layout: str, positions: str) -> None:
    """Of scores far beyond it and far below."""
    s, b = 67, 3
    added = torch.randn(1, 4, s, s, dtype=torch.float64)
    for softcap, scale in ((0.5, 1.0), (30.0, 0.3)):
        for name, bias in (("", None), ("packed, padded", None), ("nothing", None), ("", added)):
            given = {**POSITIONS[positions], **data(name, b, s), "bias": bias}
            spec = AttentionSpec(s, scale, softcap=softcap, **given)
            check(spec, LAYOUTS[layout](s), (b, 4, 2, 8, 8))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("positions", ["full", "causal", "window"])
def test_bias_by_distance(core: str, heads: int, positions: str) -> None:
    """As if it stood for every pair; its gradient is a sum over pairs of one distance."""
    for s, (layout, name) in itertools.product(
        (1, 67), itertools.product(LAYOUTS.values(), ("", "holes"))
    ):
        bias = torch.randn(heads, 2, s, dtype=torch.float64)
        spec = AttentionSpec(s, 0.3, **POSITIONS[positions], **data(name, 3, s), bias=bias)
        check(spec, layout(s), (3, 4, 2, 8, 8))


def test_bias_by_distance_of_heads_picked_by_global_index() -> None:
    s, ids = 33, torch.tensor([4, 5, 1, 7])
    bias = torch.randn(6, 2, s, dtype=torch.float64)
    spec = AttentionSpec(s, 0.3, right=0, bias=bias, head_ids=ids)
    grad, runs, given = torch.randn(2, 4, s, 8, dtype=torch.float64), ((0, s),), []
    q, k, v, _ = make(2, 4, 2, s, s, 8, 8, torch.float64)
    for one in (spec, replace(spec, bias=bias[ids.clamp(max=5)], head_ids=None)):
        results = attention_forward(q, k, v, runs, runs, one)
        given.append((*results, bias_gradient(Backward(grad, q, k, v, *results), runs, runs, one)))
    (out, _, d_bias), (out0, _, d_bias0) = given
    torch.testing.assert_close(out, out0)
    assert d_bias[[0, 2, 3]].count_nonzero() == 0
    torch.testing.assert_close(d_bias[[4, 5, 1]], d_bias0[:3])  # head 7 is padding


def test_bias_heads_are_picked_by_global_index() -> None:
    s, ids = 33, torch.tensor([4, 5, 1, 0])
    bias = torch.randn(1, 6, s, s, dtype=torch.float64)
    check(AttentionSpec(s, 0.3, bias=bias, head_ids=ids), (((0, s),), ((0, s),)), (2, 4, 2, 8, 8))
    with pytest.raises(ValueError, match="6 heads, the query 4"):
        check(AttentionSpec(s, 0.3, bias=bias), (((0, s),), ((0, s),)), (2, 4, 2, 8, 8))


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("positions", ["full", "causal", "wide window"])
def test_subsets_of_keys_compose(p: int, positions: str) -> None:
    """Merged partial outputs are the output; gradients from the final output and lse add up."""
    s, b = 61, 2
    spec = AttentionSpec(s, 0.3, **POSITIONS[positions], **data("packed, padded", b, s))
    q, k, v, grad = make(b, 4, 2, s, s, 8, 8, torch.float64)
    whole: Runs = ((0, s),)
    out0, lse0 = attention_forward(q, k, v, whole, whole, spec)
    grads0 = attention_backward(Backward(grad, q, k, v, out0, lse0), whole, whole, spec)
    cuts = [s * i // p for i in range(p + 1)]
    parts = [(((a, e - a),), slice(a, e)) for a, e in itertools.pairwise(cuts)]
    out, lse = torch.zeros_like(out0), torch.full_like(lse0, -torch.inf)
    for runs, at in parts:
        part = attention_forward(q, k[:, :, at], v[:, :, at], whole, runs, spec)
        out, lse = merge_partials(out, lse, *part)
    torch.testing.assert_close((out, lse), (out0, lse0), rtol=1e-12, atol=1e-12)
    given = Backward(grad, q, k, v, out, lse)
    each = [
        attention_backward(given._replace(k=k[:, :, at], v=v[:, :, at]), whole, runs, spec)
        for runs, at in parts
    ]
    dq, dk, dv = zip(*each, strict=True)
    got = sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)
    torch.testing.assert_close(got, grads0, rtol=1e-12, atol=1e-12)


def test_merge_is_safe_at_any_magnitude() -> None:
    one, two = torch.ones(1, 1, 6, 2), torch.full((1, 1, 6, 2), 2.0)
    inf = torch.inf
    lse = torch.tensor([[[1e4, -1e4, 1e4, -inf, 3.0, -inf]]])
    lse_i = torch.tensor([[[-1e4, 1e4, 1e4, -inf, -inf, 5.0]]])
    out, merged = merge_partials(one, lse, two, lse_i)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.0, 2.0, 1.5, 1.0, 1.0, 2.0]))
    torch.testing.assert_close(merged, torch.logaddexp(lse, lse_i))
    assert not merged.isnan().any()


def test_scores_of_any_magnitude(core: str) -> None:
    check(AttentionSpec(40, 150.0, right=0), (((0, 40),), ((0, 40),)), (1, 2, 1, 8, 8))


# Dropout


def dropped(p: float, **kwargs: Any) -> AttentionSpec:
    return AttentionSpec(53, 0.3, dropout_p=p, seed=torch.tensor(2**40 + 11), **kwargs)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_has_the_gradients_of_its_mask(layout: str, p: float) -> None:
    bias = torch.randn(1, 1, 53, 53, dtype=torch.float64)
    check(dropped(p, right=0), LAYOUTS[layout](53), (2, 4, 2, 8, 5))
    check(
        dropped(p, left=9, **data("holes", 2, 53), bias=bias), LAYOUTS[layout](53), (2, 4, 2, 8, 5)
    )


def test_dropout_does_not_depend_on_the_split() -> None:
    spec, at, everyone = dropped(0.4), torch.arange(53), slice(0, 3)
    whole = dropout_keep(spec, everyone, 6, at, at)
    heads = torch.tensor([4, 1])
    mine = dropped(0.4, head_ids=heads, sequence_ids=torch.tensor([2, 1, 0]))
    part = dropout_keep(mine, slice(1, 3), 2, at[20:30], at[7:50])
    assert torch.equal(part, whole[[1, 0]][:, heads, 20:30, 7:50])
    other = AttentionSpec(53, 0.3, dropout_p=0.4, seed=torch.tensor(2**40 + 12))
    assert (dropout_keep(other, everyone, 6, at, at) == whole).float().mean() < 0.6


def test_dropout_is_fair_and_uncorrelated() -> None:
    spec = AttentionSpec(512, 1.0, dropout_p=0.3, seed=torch.tensor(5))
    at = torch.arange(512)
    keep = dropout_keep(spec, slice(0, 2), 4, at, at).double()
    # 5 sigma of the mean of n fair draws.
    assert abs(keep.mean() - 0.7) < 5 * (0.21 / keep.numel()) ** 0.5
    for dims in ((2, 3), (0, 1, 3), (0, 1, 2)):
        share = keep.mean(dims)
        sigma = (0.21 * share.numel() / keep.numel()) ** 0.5
        assert (share - 0.7).abs().max() < 5.5 * sigma
        assert abs(share.std() / sigma - 1) < 0.6
    centred = (keep - 0.7) / 0.21**0.5
    for shift, dim in itertools.product((1, 2, 64), (2, 3)):
        products = (centred * centred.roll(shift, dim)).mean()
        assert abs(products) < 5 / keep.numel() ** 0.5
    assert abs((centred[:, 0] * centred[:, 1]).mean()) < 5 / keep[:, 0].numel() ** 0.5
    assert abs((centred[0] * centred[1]).mean()) < 5 / keep[0].numel() ** 0.5


# What is computed


class Largest(TorchDispatchMode):
    """The most elements that any tensor produced here has, memory behind it included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("name", ["", "left padding", "holes", "packed", "mixed documents"])
@pytest.mark.parametrize("positions", ["full", "causal", "wide window", "chunks"])
def test_nothing_has_s_times_s_elements(positions: str, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(masks, "TILE_BYTES", 2**20)
    kernel._position_tiles.cache_clear()
    s: int = 1500
    spec = AttentionSpec(s, 0.3, **POSITIONS[positions], **data(name, 2, s))
    q, k, v, grad = make(2, 2, 1, s, s, 8, 8, torch.float32)
    whole: Runs = ((0, s),)
    with Largest() as largest:
        out, lse = attention_forward(q, k, v, whole, whole, spec)
        attention_backward(Backward(grad, q, k, v, out, lse), whole, whole, spec)
    kernel._position_tiles.cache_clear()
    assert largest.elements < s * s / 4


def plan(q_runs: Runs, kv_runs: Runs, seq_len: int, **positions: Any) -> tuple[masks.Tile, ...]:
    where = (positions.get("left"), positions.get("right"), positions.get("chunk"))
    spec = AttentionSpec(seq_len, 1.0, *where)
    intervals = masks.position_intervals(q_runs, kv_runs, spec)
    return tuple(join_alike(masks.segments(intervals, 4), intervals))


def test_plain_cases_are_one_call_without_a_mask() -> None:
    whole: Runs = ((0, 256),)
    assert plan(whole, whole, 256, right=0) == (masks.Tile(0, 256, 0, 256, "diagonal"),)
    assert plan(whole, whole, 256) == (masks.Tile(0, 256, 0, 256, "full"),)
    near, far = _balanced(100, 0), _balanced(100, 1)
    assert plan(near, near, 100, right=0) == (masks.Tile(0, 50, 0, 50, "diagonal"),)
    assert plan(far, near, 100, right=0) == (masks.Tile(0, 50, 0, 25, "full"),)
    assert plan(near, far, 100, right=0) == (masks.Tile(25, 50, 0, 50, "full"),)


@pytest.mark.parametrize("window", [16, 200, 1024])
def test_windows_skip_what_they_hide(window: int) -> None:
    n = 8192
    tiles = plan(((0, n),), ((0, n),), n, left=window - 1, right=0)
    area = sum(t.num_rows * t.num_keys * t.count for t in tiles)
    assert area < n * (window + 128)
    assert len(tiles) < 32  # calls of the kernel: blocks of a window go together
    assert plan(((0, 64),), ((4096, 64),), n, left=window - 1, right=0) == ()


# The operator


def operator_args(name: str, s: int = 29) -> tuple[Any, ...]:
    d = data(name, 2, s)
    return (d.get("key_padding"), d.get("document_ids"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operator_is_well_formed(dtype: torch.dtype) -> None:
    q, k, v, _ = make(2, 4, 2, 29, 29, 8, 8, dtype)
    ins = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.randn(1, 4, 29, 29, dtype=dtype, requires_grad=True)
    for rest in (
        (None, None, None, None, -1, 0, -1, 0.3, 2.0, 0.0),
        (*operator_args("packed, padded"), None, None, 4, 0, -1, 0.3, 0.0, 0.0),
        (
            None,
            None,
            bias,
            torch.tensor(3),
            -1,
            -1,
            8,
            0.3,
            0.0,
            0.1,
            torch.arange(4),
            torch.tensor([29, 0]),
            torch.randn(4, dtype=dtype, requires_grad=True),
        ),
    ):
        torch.library.opcheck(torch.ops.paradyse.attention.default, (*ins, *rest))


def test_operator_matches_scaled_dot_product_attention() -> None:
    q, k, v, grad = (x.requires_grad_() for x in make(2, 6, 3, 37, 37, 8, 8, torch.float64))
    out, lse = torch.ops.paradyse.attention(
        q, k, v, None, None, None, None, -1, 0, -1, 8**-0.5, 0.0, 0.0
    )
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert not lse.requires_grad
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(got, torch.autograd.grad(want, (q, k, v), grad))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_operator_compiles_once_for_all_lengths(backend: str) -> None:
    compiles = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def block(x: Tensor, info: Tensor) -> Tensor:
        q = (x * 2).unflatten(-1, (4, 8)).transpose(1, 2)
        rest = (None, None, None, None, -1, 0, -1, 0.3, 0.0, 0.0, None, info)
        return torch.ops.paradyse.attention(q, q, q, *rest)[0].transpose(1, 2).flatten(2) + x

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=compiles, dynamic=True)
    for n in (11, 24, 37):
        x, info = torch.randn(2, n, 32, requires_grad=True), torch.tensor([n - 2, 0])
        got, want = compiled(x, info), block(x, info)
        torch.testing.assert_close(got, want)
        grad = torch.randn_like(x)
        dx, dx0 = (torch.autograd.grad(y, x, grad)[0] for y in (got, want))
        torch.testing.assert_close(dx, dx0)
    assert compiles.frame_count == 1


def test_errors_name_the_value() -> None:
    q, k, v, _ = make(2, 4, 2, 29, 29, 8, 8, torch.float32)
    op, plain = torch.ops.paradyse.attention, (-1, 0, -1, 0.3, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"4 query heads are no multiple of 3"):
        op(q, torch.randn(2, 3, 29, 8), torch.randn(2, 3, 29, 8), None, None, None, None, *plain)
    with pytest.raises(ValueError, match=r"key_padding is \[2, 30\], but the sequence has 29"):
        op(q, k, v, torch.ones(2, 30, dtype=torch.bool), None, None, None, *plain)
    with pytest.raises(ValueError, match=r"bias is \[1, 1, 29, 28\]"):
        op(q, k, v, None, None, torch.zeros(1, 1, 29, 28), None, *plain)
    with pytest.raises(ValueError, match=r"key_padding is \[3, 29\], but there are 2 sequences"):
        op(q, k, v, torch.ones(3, 29, dtype=torch.bool), None, None, None, *plain)
    with pytest.raises(ValueError, match="needs a seed"):
        op(q, k, v, None, None, None, None, -1, 0, -1, 0.3, 0.0, 0.5)
    with pytest.raises(ValueError, match="softcap -1.0 must be positive"):
        runs = ((0, 29),)
        attention_forward(q, k, v, runs, runs, AttentionSpec(29, 0.3, softcap=-1.0))
    with pytest.raises(ValueError, match="one dtype"):
        op(q, k.bfloat16(), v, None, None, None, None, *plain)
