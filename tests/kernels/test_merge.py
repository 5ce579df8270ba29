"""Partial attention put together: against softmax over all keys, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_device import (
    DEVICE,
    among_nan,
    kernels,
    poisoned_memory,
)
from torch import Tensor

from paradyse.kernels.attention import merge_partials
from paradyse.kernels.attention_core import stat_dtype
from paradyse.kernels.merge import merge
from paradyse.kernels.triton_merge import launch_merge

# float32: a few roundings of sums of two terms, on top of the lse's own rounding (scores of 1e4
# have an lse that is exact to 5e-4, so weights are exact to that). 16 bits: one rounding of each
# input and of the result.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
LARGE_LSE_ERROR = 1e-3


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, float64, of scores [B, H, S, K] and v [B, H, K, D]; no key: 0 and -inf."""
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p @ v, lse


def parts(
    sizes: tuple[int, int, int, int], scale: float
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Attention to 5 and to 7 keys, and to all 12, of rows of which some see nothing on either
    side or on both.
    """
    b, h, s, d = sizes
    scores = torch.randn(b, h, s, 12, dtype=torch.float64) * scale
    v = torch.randn(b, h, 12, d, dtype=torch.float64)
    kind = torch.randint(0, 5, (b, h, s))
    scores[..., :5].masked_fill_(((kind == 1) | (kind == 3))[..., None], -torch.inf)
    scores[..., 5:].masked_fill_(((kind == 2) | (kind == 3))[..., None], -torch.inf)
    split = [attention(scores[..., :5], v[:, :, :5]), attention(scores[..., 5:], v[:, :, 5:])]
    return split, attention(scores, v)


def given(out: Tensor, lse: Tensor, dtype: torch.dtype, token_major: bool) -> tuple[Tensor, Tensor]:
    return among_nan(out.to(dtype), token_major), lse.to(stat_dtype(dtype)).to(DEVICE)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm().clamp(min=1e-30))


SIZES = [(1, 1, 1, 1), (2, 3, 37, 17), (1, 2, 70, 80), (1, 1, 5, 256)]


@pytest.mark.parametrize("kernel", [pytest.param(launch_merge, marks=kernels), merge])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_merged_parts_are_attention_to_all_keys(kernel, scale: float, dtype: torch.dtype) -> None:
    for seed, sizes in enumerate(SIZES):
        torch.manual_seed(seed)
        (one, two), want = parts(sizes, scale)
        exact = stat_dtype(dtype)
        first, second = given(*one, dtype, seed % 2 == 0), given(*two, dtype, seed % 2 == 1)
        out, lse = kernel(*first, *second, exact)
        assert out.dtype == lse.dtype == exact
        lse_is_coarse = scale > 1 and exact == torch.float32
        bound = TOLERANCE[dtype] + (LARGE_LSE_ERROR if lse_is_coarse else 0)
        assert distance(out, want[0]) <= bound
        assert torch.equal(lse.cpu() == -torch.inf, want[1] == -torch.inf)
        torch.testing.assert_close(lse.cpu().double(), want[1], rtol=1e-6, atol=1e-6)
        assert (out.cpu()[want[1] == -torch.inf] == 0).all()


@kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernel_equals_the_plain_version(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    (one, two), _ = parts((2, 2, 19, 24), 3.0)
    first, second = given(*one, dtype, True), given(*two, dtype, False)
    want = merge_partials(first[0].to(first[1].dtype), first[1], *second)
    got = launch_merge(*first, *second, first[1].dtype)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


@kernels
def test_a_running_result_is_overwritten_and_only_that() -> None:
    torch.manual_seed(4)
    (one, two), want = parts((1, 2, 33, 20), 1.0)
    running, lse = given(*one, torch.float32, True)
    before = running._base.clone()  # type: ignore[union-attr]
    part, lse_i = given(*two, torch.bfloat16, True)
    out, _ = launch_merge(running, lse, part, lse_i, torch.float32)
    assert out.data_ptr() == running.data_ptr()
    assert distance(running, want[0]) < TOLERANCE[torch.bfloat16]
    around = running._base.isnan()  # type: ignore[union-attr]
    assert torch.equal(around, before.isnan())
    out, _ = launch_merge(running, lse, part, lse_i, torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.transpose(1, 2).is_contiguous()


@kernels
def test_rows_that_saw_nothing_are_not_read() -> None:
    lse = torch.tensor([-torch.inf, 0.5, -torch.inf], device=DEVICE).view(1, 1, 3)
    lse_i = torch.tensor([1.5, -torch.inf, -torch.inf], device=DEVICE).view(1, 1, 3)
    out = torch.tensor([torch.nan, 2.0, torch.nan], device=DEVICE).view(1, 1, 3, 1)
    out_i = torch.tensor([3.0, torch.nan, torch.nan], device=DEVICE).view(1, 1, 3, 1)
    merged, total = launch_merge(out, lse, out_i, lse_i, torch.float32)
    assert merged.flatten().tolist() == [3.0, 2.0, 0.0]
    assert total.flatten().tolist() == [1.5, 0.5, -torch.inf]
