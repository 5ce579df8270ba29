"""The Triton kernels of attention against its definition in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_device import (
    DEVICE,
    among_nan,
    kernels,
    poisoned_memory,
)
from reference import dense_attention, visible_pairs
from torch import Tensor

from paradyse.kernels import flash_plan
from paradyse.kernels.attention import merge_partials
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec, Runs, run_positions
from paradyse.kernels.flash_plan import refusal
from paradyse.kernels.flash_runs import backward, forward
from paradyse.kernels.flash_tiles import GROUP, MAX_SEGMENTS, describe_mask

# Relative norms. Sums of a few hundred terms in float32; for the others one rounding of
# probabilities and of the result (2^-11, 2^-8) on top of inputs that both sides share.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative(got: Tensor, want: Tensor, floor: float = 1e-30) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=floor))


def make(sizes: tuple[int, ...], n_q: int, n_k: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient of out of fresh random values, laid out as a model has them."""
    b, h, h_kv, d, dv = sizes
    shapes = [(b, n_q, h, d), (b, n_k, h_kv, d), (b, n_k, h_kv, dv), (b, n_q, h, dv)]
    return [torch.randn(x, device=DEVICE).to(dtype).transpose(1, 2) for x in shapes]


def check(
    spec: AttentionSpec,
    q_runs: Runs,
    kv_runs: Runs,
    sizes: tuple[int, ...] = (2, 1, 1, 16, 16),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Output, lse and every gradient; tokens past the end hold NaN, as does all around inputs."""
    i, j = at(q_runs), at(kv_runs)
    q, k, v, grad = (among_nan(x) for x in make(sizes, len(i), len(j), dtype))
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out0, lse0 = dense_attention(*exact, i, j, spec)
    grads0 = torch.autograd.grad(out0, exact, grad.double())
    for x, positions in ((q, i), (grad, i), (k, j), (v, j)):
        x[:, :, positions >= spec.seq_len] = torch.nan
    with poisoned_memory():
        out, lse = forward(q, k, v, q_runs, kv_runs, spec)
        grads = backward(Backward(grad, q, k, v, out, lse), q_runs, kv_runs, spec)
    assert out.dtype == dtype and not out.isnan().any()
    unseen = lse0 == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen) and (out[unseen] == 0).all()
    assert (grads[0][unseen] == 0).all()
    assert relative(lse[~unseen], lse0[~unseen]) <= min(TOLERANCE[dtype], TOLERANCE[torch.float32])
    floor = float(grad[:, :, i < spec.seq_len].double().norm()) * max(1.0, spec.scale)
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), (out0, *grads0), strict=True
    ):
        assert got.shape == want.shape
        assert relative(got, want, floor) <= TOLERANCE[dtype], name


def at(runs: Runs) -> Tensor:
    return run_positions(runs, DEVICE)


def balanced(s: int, rank: int) -> Runs:
    c = -(-s // 4)
    return (rank * c, c), ((3 - rank) * c, c)


def mask(name: str, s: int, b: int = 2) -> dict[str, Any]:
    positions = torch.arange(s, device=DEVICE)
    ends = torch.randint(0, s, (b, 1), device=DEVICE)
    breaks = torch.rand(b, s, device=DEVICE) < 0.08
    return {
        "full": {},
        "causal": {"right": 0},
        "window": {"left": 9, "right": 0},
        "both sides": {"left": 4, "right": 3},
        "chunks": {"right": 0, "chunk": 11},
        "left padding": {"right": 0, "key_padding": positions >= ends},
        "right padding": {"key_padding": positions <= ends},
        "holes": {"left": 20, "key_padding": torch.rand(b, s, device=DEVICE) > 0.3},
        "nothing": {"key_padding": torch.zeros(b, s, dtype=torch.bool, device=DEVICE)},
        "packed": {"right": 0, "document_ids": breaks.cumsum(1)},
        "packed, padded": {
            "right": 0,
            "document_ids": breaks[:1].cumsum(1).int(),
            "key_padding": positions >= ends,
        },
        "mixed documents": {
            "left": 30,
            "document_ids": torch.randint(0, 3, (b, s), device=DEVICE) << 40,
        },
    }[name]


MASKS = (
    "full",
    "causal",
    "window",
    "both sides",
    "chunks",
    "left padding",
    "right padding",
    "holes",
    "nothing",
    "packed",
    "packed, padded",
    "mixed documents",
)


@kernels
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    """A whole sequence whose last tokens are padding; no length fills a tile."""
    s = 40
    whole = ((0, s + 3),)
    check(AttentionSpec(s, 0.3, **mask(name, s)), whole, whole)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_the_least_number_hides_see_all_keys_alike(dtype: torch.dtype) -> None:
    """As a softmax has it, to which a key is hidden that others are not hidden beside."""
    s, runs, low = 20, ((0, 20),), torch.finfo(dtype).min
    q, k, v, _ = make((1, 1, 1, 16, 16), s, s, dtype)
    bias = torch.full((1, 1, s, s), low, dtype=dtype, device=DEVICE).triu(1)
    bias[:, :, :3] = low
    out, lse = forward(q, k, v, runs, runs, AttentionSpec(s, 0.25, bias=bias))
    assert lse.isfinite().all()
    scores = (q @ k.mT).double() * 0.25 + bias.double()
    assert relative(out, scores.softmax(-1) @ v.double()) < TOLERANCE[dtype]
    assert relative(out[:, :, :3], v.mean(2, True).expand(-1, -1, 3, -1)) < TOLERANCE[dtype]


FAR = 2**26
"""Elements between rows, of which 40 reach beyond what 31 bits count; their memory is not touched,
and so not there, but for the rows."""


def far_apart(x: Tensor) -> Tensor:
    """``x`` [1, H, s, D] with ``FAR`` elements between its rows, as of a million tokens of many
    heads."""
    _, h, s, d = x.shape
    memory = torch.empty(s * FAR, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (s * FAR, d, FAR, 1)).copy_(x)


@kernels
def test_rows_that_lie_beyond_31_bits_are_found() -> None:
    s, sizes = 40, (1, 2, 1, 16, 16)
    whole, spec = ((0, s),), AttentionSpec(40, 0.3, right=0)
    q, k, v, grad = make(sizes, s, s, torch.bfloat16)
    out, lse = forward(q, k, v, whole, whole, spec)
    want = backward(Backward(grad, q, k, v, out, lse), whole, whole, spec)
    q, k, v, grad = map(far_apart, (q, k, v, grad))
    assert q[0, 0, -1].data_ptr() - q.data_ptr() > 2**31 * q.element_size()
    far, far_lse = forward(q, k, v, whole, whole, spec)
    assert torch.equal(far, out) and torch.equal(far_lse, lse)
    got = backward(Backward(grad, q, k, v, far_apart(out), lse), whole, whole, spec)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@kernels
@pytest.mark.parametrize("name", ["causal", "window", "packed, padded"])
def test_positions_of_a_ring_and_shuffled_ones(name: str) -> None:
    s = 61
    spec = AttentionSpec(s, 0.3, **mask(name, s))
    check(spec, balanced(s, 0), balanced(s, 1))
    check(spec, ((3, 7),), tuple((x, 1) for x in torch.randperm(s).tolist()))


@kernels
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (1, 4, 2, 16, 16)),
        (torch.float16, (1, 2, 2, 20, 16)),
        (torch.float32, (2, 3, 1, 33, 5)),
        (torch.bfloat16, (1, 1, 1, 80, 96)),
        (torch.float32, (1, 2, 1, 200, 256)),
    ],
)
def test_dtypes_widths_and_grouped_heads(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    whole = ((0, 35),)
    check(AttentionSpec(35, sizes[3] ** -0.5, right=0), whole, whole, sizes, dtype)


@kernels
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_dk_and_dv_one_after_the_other(dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide heads have them: the same bits as together, whatever a thread has registers for."""
    runs, found = ((0, 35),), []
    seed = torch.tensor(7, device=DEVICE) if dropout_p else None
    spec = AttentionSpec(35, 0.3, right=0, softcap=4.0, dropout_p=dropout_p, seed=seed)
    q, k, v, grad = make((2, 4, 2, 40, 24), 35, 35, torch.float32)
    out, lse = forward(q, k, v, runs, runs, spec)
    for registers, launches in ((1 << 20, 1), (0, 2)):
        monkeypatch.setattr(flash_plan, "SUM_REGISTERS", registers)
        assert len(flash_plan.sums_of_keys(flash_plan.Config(16, 32, 1, 1), (40, 24))) == launches
        found.append(backward(Backward(grad, q, k, v, out, lse), runs, runs, spec))
    for together, apart in zip(*found, strict=True):
        assert together.abs().sum() > 0 and torch.equal(together, apart)


@kernels
@pytest.mark.parametrize("n", [1, 16, 33])
def test_lengths(n: int) -> None:
    check(AttentionSpec(n, 0.5, right=0), ((0, n),), ((0, n),), (1, 1, 1, 16, 16))


@kernels
def test_softcap() -> None:
    whole = ((0, 40),)
    check(AttentionSpec(40, 2.0, right=0, softcap=5.0), whole, whole)
    check(AttentionSpec(40, 2.0, **mask("holes", 40), softcap=5.0), whole, whole)


@kernels
@pytest.mark.parametrize("shape", [(1, 2, 40, 40), (2, 1, 40, 1), (1, 3, 1, 40)])
def test_bias(shape: tuple[int, ...]) -> None:
    heads = torch.tensor([2, 0], device=DEVICE) if shape[1] == 3 else None
    softcap = 3.0 if shape[0] == 2 else None
    for bias in (torch.randn(shape, device=DEVICE), torch.rand(shape, device=DEVICE) > 0.3):
        spec = AttentionSpec(40, 0.3, right=0, bias=bias, head_ids=heads, softcap=softcap)
        check(spec, ((0, 20),), ((0, 40),), (2, 2, 1, 16, 16))


@kernels
@pytest.mark.parametrize("runs", [((0, 20),), ((30, 12), (10, 4))])
def test_bias_by_distance(runs: Runs) -> None:
    """Of all heads or of some of them, at positions past the end too."""
    for softcap, bias in ((None, torch.randn(1, 2, 40)), (3.0, torch.randn(3, 2, 40))):
        heads = torch.tensor([2, 0], device=DEVICE) if len(bias) == 3 else None
        given = {"bias": bias.to(DEVICE), "head_ids": heads, "softcap": softcap}
        check(AttentionSpec(40, 0.3, right=0, **given), runs, ((0, 44),), (2, 2, 1, 16, 16))


@kernels
def test_scores_of_any_magnitude() -> None:
    i = torch.arange(40, device=DEVICE)
    q, k, v, _ = make((1, 1, 1, 16, 16), 40, 40, torch.float32)
    q, k = q.round(), k.round()  # so that scores of 1e4 are exact
    spec = AttentionSpec(40, 1024.0, right=0)
    out, lse = forward(q, k, v, ((0, 40),), ((0, 40),), spec)
    out0, lse0 = dense_attention(q.double(), k.double(), v.double(), i, i, spec)
    assert lse0.abs().max() > 1e4
    assert relative(lse, lse0) < 2e-7
    # 2e-3: float32 holds scores of 1e4 in base 2 to 1e-3.
    assert relative(out, out0) < 2e-3


@kernels
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_drops_the_pairs_of_the_definition(p: float) -> None:
    """Which know nothing of tiles, ranks or which of the heads are here."""
    s, seed = 45, torch.tensor(2**40 + 11)
    heads = torch.tensor([5, 1], device=DEVICE)
    ids = torch.tensor([3, 7], device=DEVICE)
    spec = AttentionSpec(s, 0.3, right=0, dropout_p=p, seed=seed, head_ids=heads, sequence_ids=ids)
    check(spec, balanced(s, 1), balanced(s, 0), (2, 2, 1, 16, 16))
    if p < 1:
        spec = AttentionSpec(s, 0.3, left=30, dropout_p=p, seed=seed.to(DEVICE), softcap=4.0)
        check(spec, ((0, s),), ((0, s),))


@kernels
@pytest.mark.parametrize("name", ["causal", "packed, padded"])
def test_subsets_of_keys_compose(name: str) -> None:
    """Merged partial outputs are the output; gradients from the final out and lse add up."""
    s, cut = 52, 23
    spec = AttentionSpec(s, 0.3, **mask(name, s))
    q, k, v, grad = make((2, 1, 1, 16, 16), s, s, torch.float32)
    i = torch.arange(s, device=DEVICE)
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out0, lse0 = dense_attention(*exact, i, i, spec)
    grads0 = torch.autograd.grad(out0, exact, grad.double())
    out, lse = torch.zeros_like(out0).float(), torch.full_like(lse0, -torch.inf).float()
    whole = ((0, s),)
    parts = [(k[:, :, :cut], v[:, :, :cut], whole, ((0, cut),), spec)]
    parts += [(k[:, :, cut:], v[:, :, cut:], whole, ((cut, s - cut),), spec)]
    for part in parts:
        out, lse = merge_partials(out, lse, *forward(q, *part))
    each = [backward(Backward(grad, q, *part[:2], out, lse), *part[2:]) for part in parts]
    dq, dk, dv = zip(*each, strict=True)
    got = (out, sum(dq), torch.cat(dk, 2), torch.cat(dv, 2))
    for x, want in zip(got, (out0, *grads0), strict=True):
        assert relative(x, want) < TOLERANCE[torch.float32]


@kernels
def test_gradients_are_the_same_in_every_run() -> None:
    s = 40
    where = (((0, s),), ((0, s),), AttentionSpec(s, 0.3, **mask("left padding", s, 1)))
    q, k, v, grad = make((1, 4, 1, 16, 16), s, s, torch.float32)
    out, lse = forward(q, k, v, *where)
    first, again = (backward(Backward(grad, q, k, v, out, lse), *where) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_refusals_name_the_value() -> None:
    x = torch.zeros(1, 1, 20, 16, dtype=torch.float64)
    assert "dtype torch.float64" in (refusal(x, x, x, 0.3) or "")
    assert "scale -1.0: must be positive" in (refusal(x.float(), x, x, -1.0) or "")
    wide = torch.zeros(1, 1, 1, 257)
    assert "head widths 257, 16: at most 256" in (refusal(wide, wide, x, 0.3) or "")


# Tiles


def kinds_of_table(table: Tensor, inner: int) -> Tensor:
    """[masks, outer, inner]: 2 full, 1 partial, 0 not visited, as the kernels read the table."""
    kinds = torch.zeros(*table.shape[:2], inner, dtype=torch.int64)
    for b, row in itertools.product(range(table.shape[0]), range(table.shape[1])):
        entry = table[b, row].tolist()
        assert entry[1] == 0
        full = entry[4 : 4 + 2 * entry[0]]
        begin = 4 + 2 * MAX_SEGMENTS + 2 * entry[3]
        partial = entry[begin : begin + 2 * entry[2]]
        for kind, flat in ((2, full), (1, partial)):
            for a, e in zip(flat[::2], flat[1::2], strict=True):
                assert 0 <= a < e <= inner and (kinds[b, row, a:e] == 0).all()
                kinds[b, row, a:e] = kind
    return kinds


def kinds_by_definition(i: Tensor, j: Tensor, spec: AttentionSpec, m: int, n: int) -> Tensor:
    visible = visible_pairs(i, j, spec)[:, 0].cpu()
    pad = (0, -len(j) % n, 0, -len(i) % m)
    tiles = torch.nn.functional.pad(visible, pad).unflatten(2, (-1, n)).unflatten(1, (-1, m))
    share = tiles.double().mean((2, 4))
    return (share > 0).long() + (share == 1).long()


@kernels
@pytest.mark.parametrize("name", ["full", "causal", "window", "chunks", "left padding", "packed"])
@pytest.mark.parametrize("transposed", [False, True])
def test_exactly_the_visible_tiles_are_visited(name: str, transposed: bool) -> None:
    s, m, n = 250, 32, 16
    spec = AttentionSpec(s, 0.3, **mask(name, s))
    whole: Runs = ((0, s),)
    ring = balanced(256, 0), balanced(256, 1)  # whose runs begin at tiles
    for q_runs, kv_runs in ((whole, whole), ring):
        i, j = at(q_runs), at(kv_runs)
        table = describe_mask(i, j, spec).segments(m, n, transposed, True)
        want = kinds_by_definition(i, j, spec, m, n)
        want = want.mT if transposed else want
        got = kinds_of_table(table.cpu(), want.shape[2])
        # Documents that end inside a tile of queries and one of keys may share neither.
        assert ((got == want) | ((name == "packed") & (want == 0) & (got == 1))).all()
        assert (got > 0).sum() <= 1.1 * (want > 0).sum()


@kernels
def test_causal_costs_half_and_a_window_its_width() -> None:
    s, tile = 512, 16
    i = torch.arange(s, device=DEVICE)
    number = s // tile
    causal = describe_mask(i, i, AttentionSpec(s, 1.0, right=0)).segments(tile, tile, False, True)
    kinds = kinds_of_table(causal.cpu(), number)
    assert (kinds == 1).sum() == number and (kinds == 2).sum() == number * (number - 1) // 2
    spec = AttentionSpec(s, 1.0, left=63, right=0)
    window = describe_mask(i, i, spec).segments(tile, tile, False, True)
    assert (kinds_of_table(window.cpu(), number) > 0).sum() <= number * (64 // tile + 1)


@kernels
def test_more_segments_than_fit_are_visited_as_one() -> None:
    s = 4 * GROUP * MAX_SEGMENTS
    i = torch.arange(s, device=DEVICE)
    spec = AttentionSpec(s, 1.0, document_ids=(i // GROUP % 2)[None])
    table = describe_mask(i[:GROUP], i, spec).segments(GROUP, GROUP, False, True)
    want = torch.ones(1, 1, s // GROUP)
    want[..., -1] = 0  # a tile of the other document
    assert torch.equal(kinds_of_table(table.cpu(), s // GROUP), want.long())


@kernels
def test_hidden_tiles_are_not_read() -> None:
    s = 96
    q, k, v, grad = make((1, 1, 1, 16, 16), s, s, torch.float32)
    k[:, :, 64:], v[:, :, 64:] = torch.nan, torch.nan
    spec = AttentionSpec(s, 0.3, right=0)
    where = (((0, 64),), ((0, s),), spec)
    out, lse = forward(q[:, :, :64], k, v, *where)
    dq, dk, dv = backward(Backward(grad[:, :, :64], q[:, :, :64], k, v, out, lse), *where)
    assert not any(x.isnan().any() for x in (out, lse, dq, dk, dv))
    assert (dk[:, :, 64:] == 0).all() and (dv[:, :, 64:] == 0).all()
