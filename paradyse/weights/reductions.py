"""Sums, means, extrema and spreads of sharded tensors, from what each rank has of its own rows.

A reduction that takes in the dim whose rows are spread sends a number (or one for each index that
is left) per rank; any other is computed from the rows and joined along that dim. Results are plain
tensors, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.agreement import compare
from paradyse.distributed.collectives import OPTIMIZER
from paradyse.weights.norms import joined_norms, local_norms

aten = torch.ops.aten

Dims = Sequence[int] | int | None


def every_rank(x: Tensor, like: Any) -> Tensor:
    """``x``, computed from the rows of the sharded ``like``, of every rank, stacked: [p, ...].

    It lies where ``x`` does.
    """
    every = collectives.all_gather(x.to(like.used_on), like.placement.axis, OPTIMIZER)
    return every.to(x.device)


class _Reduced:
    """Which dims of a sharded tensor ``x`` a reduction takes in.

    Args:
        dims: as aten's; None or none of them: all.
    """

    def __init__(self, x: Any, dims: Dims, keepdim: bool = False) -> None:
        listed = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
        for d in listed:
            if not -x.ndim <= d < x.ndim:
                raise IndexError(
                    f"Dimension out of range (expected to be in range of [{-x.ndim}, "
                    f"{x.ndim - 1}], but got {d})"
                )
        self.x, self.keepdim = x, keepdim
        self.dims = sorted({d % x.ndim for d in listed})
        self.spread = x.placement.dim in self.dims
        """Whether the reduction needs all ranks' rows."""
        self.num_own = math.prod(x.local.shape[d] for d in self.dims)
        """Elements of the rank's rows in each result."""

    def combine(
        self, of: Callable[[Tensor], Tensor], nothing: Any, join: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The whole result.

        Args:
            of: this rank's part of its rows, which keeps no dim unless told to.
            nothing: what changes no result that it is joined with: the part of no rows.
            join: parts of all ranks, [p, ...], to what all have.
        """
        x = self.x
        compare(x.placement.axis, "reduces a sharded tensor")
        if not self.spread:
            return self._joined_rows(of(x.local))
        mine = of(x.local) if self.num_own else self._part(of, nothing)
        return join(every_rank(mine, x))

    def _part(self, of: Callable[[Tensor], Tensor], nothing: Any) -> Tensor:
        """What ``of`` would give, filled with ``nothing``."""
        sizes = [1 if d in self.dims else n for d, n in enumerate(self.x.local.shape)]
        like = of(self.x.local.new_zeros(sizes))
        return torch.full_like(like, nothing)

    def _joined_rows(self, own: Tensor) -> Tensor:
        """``own``, which has the rank's rows, with all ranks' rows."""
        x = self.x
        left = [d for d in range(x.ndim) if self.keepdim or d not in self.dims]
        at = left.index(x.placement.dim)
        size = [1 if d in self.dims else x.shape[d] for d in left]
        layout = replace(x.placement, dim=at)
        longest = max(layout.num_rows)
        padded = own.new_zeros([*size[:at], longest, *size[at + 1 :]])
        padded.narrow(at, 0, own.shape[at]).copy_(own)
        whole = own.new_empty(size)
        for rank, rows in enumerate(every_rank(padded, x).unbind(0)):
            layout.put(whole, rank, rows.narrow(at, 0, layout.num_rows[rank]))
        return whole


def _wide(x: Any) -> torch.dtype | None:
    """In which sums of ``x`` are taken: rounded once, as of one tensor."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return None
    return torch.promote_types(x.dtype, torch.float32)


def _sum(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    over = _Reduced(x, dim, keepdim)
    wide = torch.promote_types(dtype, torch.float32) if dtype in _SHORT else dtype or _wide(x)

    def own(rows: Tensor) -> Tensor:
        return rows.sum(over.dims, keepdim, dtype=wide)

    total = over.combine(own, 0, lambda every: every.sum(0))
    given = dtype or (x.dtype if wide is not None else total.dtype)
    return total.to(given)


_SHORT = (torch.float16, torch.bfloat16)


def _mean(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not ((dtype or x.dtype).is_floating_point or (dtype or x.dtype).is_complex):
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {dtype or x.dtype}"
        )
    over = _Reduced(x, dim, keepdim)
    num = math.prod(x.shape[d] for d in over.dims)
    wide = torch.promote_types(dtype or x.dtype, torch.float32)
    return (_sum(x, dim, keepdim, dtype=wide) / num).to(dtype or x.dtype)


def _moments(x: Any, dim: Dims, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, joined from each rank's (Chan, Golub, LeVeque 1979, formula 1.5), not
    rounded to the dtype of ``x`` yet."""
    over = _Reduced(x, dim, keepdim)
    num, wide = math.prod(x.shape[d] for d in over.dims), _wide(x)
    free = max(num - (1 if correction is None else correction), 0)

    def spread(rows: Tensor) -> Tensor:
        """Squares summed, mean and number of the rank's elements, [3, ...]."""
        var, mean = torch.var_mean(rows.to(wide), over.dims, correction=0, keepdim=keepdim)
        return torch.stack([var * over.num_own, mean, torch.full_like(var, over.num_own)])

    def join(every: Tensor) -> Tensor:
        squares, means, counts = every.unbind(1)
        mean = (means * counts).sum(0) / num
        squares = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        return torch.stack([squares / free, mean])

    def apart(rows: Tensor) -> Tensor:
        mean = rows.to(wide).mean(over.dims, keepdim=True)
        squares = (rows.to(wide) - mean).square().sum(over.dims, keepdim)
        return squares / free

    if over.spread:
        var, mean = over.combine(spread, 0, join).unbind(0)
    else:
        var, mean = over.combine(apart, 0, join), _mean(x, dim, keepdim, dtype=wide)
    return var, mean


def _var(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].to(x.dtype)


def _std(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].sqrt().to(x.dtype)


def _var_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = _moments(x, dim, correction, keepdim)
    return var.to(x.dtype), mean.to(x.dtype)


def _std_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = _moments(x, dim, correction, keepdim)
    return var.sqrt().to(x.dtype), mean.to(x.dtype)


def _limit(dtype: torch.dtype, largest: bool) -> Any:
    if dtype == torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


def _amax(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    over = _Reduced(x, dim, keepdim)
    return over.combine(
        lambda rows: rows.amax(over.dims, keepdim), _limit(x.dtype, False), lambda e: e.amax(0)
    )


def _amin(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    over = _Reduced(x, dim, keepdim)
    return over.combine(
        lambda rows: rows.amin(over.dims, keepdim), _limit(x.dtype, True), lambda e: e.amin(0)
    )


def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return _amin(x, dim, keepdim), _amax(x, dim, keepdim)


def _any(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    over = _Reduced(x, dim, keepdim)
    return over.combine(
        lambda rows: torch.any(rows.bool(), over.dims, keepdim), False, lambda e: e.any(0)
    )


def _all(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    over = _Reduced(x, dim, keepdim)
    return over.combine(
        lambda rows: torch.all(rows.bool(), over.dims, keepdim), True, lambda e: e.all(0)
    )


def _count_nonzero(x: Any, dim: Dims = None) -> Tensor:
    over = _Reduced(x, dim)
    return over.combine(lambda rows: torch.count_nonzero(rows, over.dims), 0, lambda e: e.sum(0))


def _norm(
    x: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    over, given = _Reduced(x, dim, keepdim), dtype or x.dtype
    ord, exact = float(ord), torch.promote_types(given, torch.float32)

    def own(rows: Tensor) -> Tensor:
        if len(over.dims) == rows.ndim and not keepdim:
            return local_norms([rows], ord, exact)[0]
        return torch.linalg.vector_norm(rows, ord, over.dims, keepdim, dtype=exact)

    def join(every: Tensor) -> Tensor:
        return joined_norms(every.reshape(len(every), -1), ord).view(every.shape[1:])

    return over.combine(own, math.inf if ord < 0 else 0, join).to(given)


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    low, high = min, max
    if low == high:
        low, high = _amin(x).item(), _amax(x).item()
        if low == high:  # as of a plain tensor
            low, high = low - 1, high + 1
    over = _Reduced(x, None)
    return over.combine(lambda rows: torch.histc(rows, bins, low, high), 0, lambda e: e.sum(0))


def _equal(x: Any, other: Any) -> bool:
    return x.shape == other.shape and bool(_all(x == other))


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.max.default: _amax,
    aten.min.default: _amin,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.aminmax.default: _aminmax,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten._is_any_true.default: _any,  # of each gradient under detect_anomaly
    aten.all.default: _all,
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten._is_all_true.default: _all,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.linalg_vector_norm.default: _norm,
    aten.histc.default: _histc,
    aten.equal.default: _equal,
}
"""Operators that reduce a sharded tensor from its rows; any other takes the whole tensor."""
