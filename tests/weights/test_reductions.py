"""Reductions of sharded tensors from their rows, against those of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from torch import Tensor, nn

import paradyse
from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.weights.layout import even_layout
from paradyse.weights.sharded_tensor import relayout

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, *d, **k: x.sum(*d, **k),
    "mean": lambda x, *d, **k: x.mean(*d, **k),
    "std": lambda x, *d, **k: x.std(*d, **k) if d else x.std(),
    "var": lambda x, *d, **k: x.var(*d, correction=0, **k) if d else x.var(correction=0),
    "var_mean": lambda x, *d, **k: torch.var_mean(x, *d, **k) if d else torch.var_mean(x),
    "std_mean": lambda x, *d, **k: torch.std_mean(x, *d, **k) if d else torch.std_mean(x),
    "amax": lambda x, *d, **k: x.amax(*d, **k) if d else x.max(),
    "amin": lambda x, *d, **k: x.amin(*d, **k) if d else x.min(),
    "abs max": lambda x, *d, **k: x.abs().amax(*d, **k) if d else x.abs().max(),
    "any": lambda x, *d, **k: (x > 1.5).any(*d, **k),
    "all": lambda x, *d, **k: (x > -1.5).all(*d, **k),
    "norm": lambda x, *d, **k: torch.linalg.vector_norm(x, 2, *d, **k),
    "norm 1": lambda x, *d, **k: torch.linalg.vector_norm(x, 1, *d, **k),
    "norm inf": lambda x, *d, **k: torch.linalg.vector_norm(x, math.inf, *d, **k),
    "norm -inf": lambda x, *d, **k: torch.linalg.vector_norm(x, -math.inf, *d, **k),
}
WHOLE_ONLY: dict[str, Callable[[Any], Any]] = {
    "isnan": lambda x: x.isnan().any(),
    "any is true": lambda x: torch._is_any_true(x > 1.5),
    "all are true": lambda x: torch._is_all_true(x < 2.5),
    "isfinite": lambda x: x.isfinite().all(),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "histc": lambda x: torch.histc(x, 7),
    "histc within": lambda x: torch.histc(x, 5, -1, 1),
    "aminmax": torch.aminmax,
    "sum of integers": lambda x: (x * 9).int().sum(),
    "in another dtype": lambda x: x.mean(dtype=torch.float64),
    "equal": lambda x: torch.tensor(torch.equal(x, x)),
    "not equal": lambda x: torch.tensor(torch.equal(x, x + (x == x.max()))),
    "as a number": lambda x: torch.tensor(float(x.mean())),
}


def same(got: Any, want: Any, what: str) -> None:
    got, want = ((v,) if isinstance(v, Tensor) else v for v in (got, want))
    for x, y in zip(got, want, strict=True):
        assert type(x) is Tensor, what
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=lambda m: f"{what}: {m}")


def weight(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> Any:
    """Sharded along ``dim``, and whole."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = nn.ParameterList([whole.clone()])
    x: Any = paradyse.shard(model)[0].detach()  # type: ignore[index]
    relayout(x, even_layout(resolve_axis(), shape[dim], dim))
    return x, whole


def reduced() -> int:
    """Over all dims and some; of rows that some of three ranks have none of. How many were held
    against each other."""
    num = 0
    for shape, dim in (((7, 5), 0), ((4, 7), 1), ((2, 3, 4), 0), ((5,), 0)):
        x, whole = weight(shape, dim)
        for name, reduce in REDUCTIONS.items():
            if shape[dim] < 3 and "-inf" in name:
                continue  # rows of nothing along other dims: PyTorch has no such norm
            for over in (
                (),
                *((d,) for d in range(-1, len(shape) - 1)),
                (tuple(range(len(shape))),),
            ):
                for keep in ({}, {"keepdim": True}) if over else ({},):
                    what = f"{name} of {shape}, dims {over}, {keep}, rows along {dim}"
                    same(reduce(x, *over, **keep), reduce(whole, *over, **keep), what)
                    num += 1
        for name, reduce in WHOLE_ONLY.items():
            same(reduce(x), reduce(whole), f"{name} of {shape}")
    return num


def test_they_are_those_of_the_whole_tensor(pool3: RankPool) -> None:
    assert min(pool3.run(reduced)) > 200


def spoilt() -> None:
    for value in (math.nan, math.inf):
        x, whole = weight((7, 3), 0)
        whole[6, 1] = value
        if resolve_axis().rank == 2:
            x.local[-1, 1] = value
        assert bool(x.isnan().any()) == math.isnan(value) and bool(x.isinf().any()) != math.isnan(
            value
        )
        for reduce in (Tensor.max, Tensor.sum, Tensor.mean, Tensor.norm):
            torch.testing.assert_close(reduce(x), reduce(whole), equal_nan=True)


def test_what_one_rank_has_all_ranks_see(pool3: RankPool) -> None:
    pool3.run(spoilt)


def sixteen_bits() -> None:
    x, whole = weight((64, 33), 0, torch.bfloat16)
    for reduce in (Tensor.sum, Tensor.mean, Tensor.std, Tensor.norm, Tensor.max):
        got, want = reduce(x), reduce(whole)
        assert got.dtype == want.dtype == torch.bfloat16
        assert abs(got.item() - want.item()) <= 2**-7 * abs(want.item()), reduce


def test_sixteen_bits_are_rounded_once(pool3: RankPool) -> None:
    pool3.run(sixteen_bits)


def sent() -> dict[str, int]:
    """Bytes that a rank sends for a reduction of a weight of 4 * 3,000 * 40 bytes."""
    x, _ = weight((3_000, 40), 0)
    found = {}
    for name, reduce in (("mean", Tensor.mean), ("std", Tensor.std), ("norm", Tensor.norm)):
        before = collectives.traffic(resolve_axis(), collectives.OPTIMIZER).sent_bytes.total()
        reduce(x)
        after = collectives.traffic(resolve_axis(), collectives.OPTIMIZER).sent_bytes.total()
        found[name] = after - before
    return found


def test_numbers_travel_and_rows_do_not(pool3: RankPool) -> None:
    for found in pool3.run(sent):
        assert 0 < max(found.values()) <= 64, found


def refused() -> None:
    x, _ = weight((7, 3), 0)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.mean(2)
    with pytest.raises(RuntimeError, match="infer output dtype"):
        x.int().mean()


def test_what_plain_tensors_refuse_is_refused(pool3: RankPool) -> None:
    pool3.run(refused)


def deviations_of_halves() -> None:
    """Whose squares are no halves."""
    for scale in (1e-4, 3000.0):
        x, whole = weight((7, 5), 0)
        x, whole = ((t * scale).half() for t in (x, whole))
        pairs = [(x.std(), whole.std()), *zip(torch.std_mean(x), torch.std_mean(whole))]
        for got, want in (*pairs, (x.std(1), whole.std(1))):
            torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)


def test_deviations_of_16_bits_are_rounded_once(pool3: RankPool) -> None:
    pool3.run(deviations_of_halves)
