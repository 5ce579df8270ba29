"""One tile of attention: some rows against some keys, by plain PyTorch or by its flash kernel.

R and K count the rows and keys of a tile. ``q`` [B, H, R, D], ``k`` [B, Hk, K, D], ``v``
[B, Hk, K, Dv] and ``given`` are cut to a ``tile`` of a ``problem``, and H is a multiple of Hk.
``like`` gives dtype, device and (dim 1) the number of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paradyse.kernels.additive_mask import additive_mask
from paradyse.kernels.attention_mask import (
    DIAGONAL,
    MASKED,
    AttentionSpec,
    Intervals,
    Runs,
    Tile,
    dropout_keep,
    run_positions,
)
from paradyse.torch_private import cpu_flash, cpu_flash_backward


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and of accumulation for inputs of a ``dtype``: float64 for float64,
    else float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


Grads = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv, each of the shape of what it is the gradient of."""


def adjacent(x: Tensor) -> Tensor:
    """``x`` with adjacent elements along the last dim, and no broadcast ones."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def empty_like_heads(
    x: Tensor, width: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty tensor of the shape of ``x`` [B, H, S, D], laid out as [B, S, H, D]; ``width`` and
    ``dtype`` replace those of ``x``.
    """
    b, h, s, d = x.shape
    return x.new_empty((b, s, h, d if width is None else width), dtype=dtype).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """An empty log-sum-exp [B, H, S] of ``q`` [B, H, S, D], in ``stat_dtype``."""
    return q.new_empty(q.shape[:3], dtype=stat_dtype(q.dtype))


def placed(shares: list[Tensor], qkv: Sequence[Tensor], tile: Tile) -> Grads:
    """Gradients like ``qkv``: ``shares`` at the rows and keys of ``tile``, 0 elsewhere. ``shares``
    is emptied, so that each is gone before the next is placed."""

    def place(x: Tensor, at: slice) -> Tensor:
        share = shares.pop(0)[..., : x.shape[-1]]
        if share.shape == x.shape:
            return share.to(x.dtype)
        whole = empty_like_heads(x).zero_()
        whole[:, :, at] = share
        return whole

    q, k, v = qkv
    return place(q, tile.rows), place(k, tile.keys), place(v, tile.keys)


class Backward(NamedTuple):
    """What gradients are computed from: some queries, and some keys that they see."""

    grad_out: Tensor
    """[B, H, Sq, Dv]."""
    q: Tensor
    """[B, H, Sq, D]."""
    k: Tensor
    """[B, Hk, Sk, D]."""
    v: Tensor
    """[B, Hk, Sk, Dv]."""
    out: Tensor
    """[B, H, Sq, Dv], over *all* keys that the queries see, here or elsewhere."""
    lse: Tensor
    """[B, H, Sq] in ``stat_dtype``, over all these keys."""

    def cut(self, tile: Tile, batch: slice = slice(None)) -> Backward:
        """The rows and keys of ``tile`` of the sequences ``batch``."""
        rows, keys = tile.rows, tile.keys
        places = (rows, rows, keys, keys, rows, rows)
        return Backward(*(x[batch, :, at] for x, at in zip(self, places, strict=True)))

    def readable(self) -> Backward:
        """In memory that GPU kernels read: ``adjacent``, the lse contiguous."""
        return Backward._make([*map(adjacent, self[:5]), self.lse.contiguous()])


# Dense tiles: plain PyTorch, any device, dropout


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """``AttentionSpec.softcap`` of ``scores`` of any shape, in place; None for no ``softcap``."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _softmax_tile(
    q: Tensor, k: Tensor, mask: Tensor | None, spec: AttentionSpec, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Probabilities [B, H, R, K] of a tile and their log-sum-exp (or ``lse``, if the whole row's is
    given).
    """
    p = cap_scores(times_keys(q, k).mul_(spec.scale), spec.softcap)
    if mask is not None:
        p.add_(mask)
    if lse is None:
        highest = p.amax(-1)
        p.sub_(highest.masked_fill(highest == -torch.inf, 0)[..., None]).exp_()
        total = p.sum(-1)
        p.div_(total.masked_fill(total == 0, 1)[..., None])
        return p, highest + total.log()
    return p.sub_(lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp_(), lse


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, R, D] to [B, Hk, G R, D]: the heads of a group share K and V, so they become rows."""
    b, h, r, d = x.shape
    return x.reshape(b, kv_heads, h // kv_heads * r, d)


def times_keys(q: Tensor, k: Tensor) -> Tensor:
    """Products of ``q`` and ``k``: [B, H, R, D] x [B, Hk, K, D] -> [B, H, R, K]."""
    product = torch.matmul(_by_group(q, k.shape[1]), k.transpose(-1, -2))
    return product.view(*q.shape[:3], k.shape[2])


def times_values(p: Tensor, v: Tensor) -> Tensor:
    """Sums of ``v`` weighted by ``p``: [B, H, R, K] x [B, Hk, K, D] -> [B, H, R, D]."""
    return torch.matmul(_by_group(p, v.shape[1]), v).view(*p.shape[:3], v.shape[3])


def _times_rows(p: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """The transpose of p [B, H, R, K] times x [B, H, R, D], summed over a group's heads:
    [B, Hk, K, D].
    """
    return torch.matmul(_by_group(p, kv_heads).transpose(-1, -2), _by_group(x, kv_heads))


@dataclass(frozen=True)
class Problem:
    """The tiles of the sequences ``batch`` whose visible keys are the same."""

    batch: slice
    intervals: Intervals
    tiles: tuple[Tile, ...]
    data_mask: bool
    """Key padding and documents are not part of the intervals."""

    def is_one_tile(self, num_rows: int, num_keys: int) -> bool:
        """Whether one tile holds all of ``num_rows`` rows and ``num_keys`` keys."""
        bounds = [(t.r0, t.r1, t.k0, t.k1) for t in self.tiles]
        return bounds == [(0, num_rows, 0, num_keys)] and self.tiles[0].count == 1


@dataclass(frozen=True)
class Call:
    """The arguments that all tiles of one call share."""

    spec: AttentionSpec
    q_runs: Runs
    kv_runs: Runs
    dense: bool
    last_mask: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The latest mask that depends on positions alone, and the bounds of its rows."""

    def mask(self, problem: Problem, tile: Tile, like: Tensor) -> Tensor | None:
        """``additive_mask`` with all its keys in adjacent memory; one by position is kept."""
        plain = not problem.data_mask and self.spec.bias is None
        if plain and tile.kind != MASKED:
            return None
        if plain:  # the blocks of a sliding window have one mask between them
            bounds = problem.intervals.relative_to(tile)
            for known, mask in self.last_mask:
                if torch.equal(known, bounds):
                    return mask
        where = (tile, problem.intervals, problem.batch, problem.data_mask)
        mask = additive_mask(self.spec, *where, self.q_runs, self.kv_runs, like)
        if mask is not None and (mask.shape[-1] < tile.k1 - tile.k0 or mask.stride(-1) != 1):
            mask = mask.expand(*mask.shape[:3], tile.k1 - tile.k0).contiguous()
        if plain and mask is not None:
            self.last_mask[:] = [(bounds, mask)]
        return mask

    def _dropout(self, problem: Problem, tile: Tile, like: Tensor) -> Tensor | None:
        """Keep mask [B, H, R, K] scaled by 1/(1-p); None without dropout."""
        p = self.spec.dropout_p
        if p == 0:
            return None
        rows = run_positions(self.q_runs, like.device)[tile.r0 : tile.r1]
        keys = run_positions(self.kv_runs, like.device)[tile.k0 : tile.k1]
        keep = dropout_keep(self.spec, problem.batch, like.shape[1], rows, keys)
        return keep.to(like.dtype).mul_(1 / (1 - p) if p < 1 else 0)

    def forward(
        self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, R, Dv] and lse [B, H, R] of one tile."""
        mask = self.mask(problem, tile, q)
        if self.dense:
            p, lse = _softmax_tile(q, k, mask, self.spec, None)
            keep = self._dropout(problem, tile, q)
            return times_values(p if keep is None else p.mul_(keep), v), lse
        out, lse = cpu_flash(
            q, k, v, 0.0, tile.kind == DIAGONAL, attn_mask=mask, scale=self.spec.scale
        )
        if mask is not None:  # the kernel says 0 for a row that sees nothing
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return out, lse

    def backward(self, problem: Problem, tile: Tile, given: Backward) -> Grads:
        """The tile's share of dq, dk, dv."""
        grad, q, k, v, out, lse = given
        mask = self.mask(problem, tile, q)
        if self.dense:
            p, ds = self.score_gradient(problem, tile, given, mask)
            if (cap := self.spec.softcap) is not None:
                capped = times_keys(q, k).mul_(self.spec.scale / cap).tanh_()
                ds.mul_(capped.square_().neg_().add_(1))
            dq = times_values(ds, k).mul_(self.spec.scale)
            dk = _times_rows(ds, q, k.shape[1]).mul_(self.spec.scale)
            return dq, dk, _times_rows(p, grad, v.shape[1])
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(s - inf) = 0
        b, kv_heads, n, _ = k.shape
        group = q.shape[1] // kv_heads
        # The kernel splits work by KV head.
        expand = group > 1 and b * kv_heads < torch.get_num_threads()
        if expand:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        options = {"attn_mask": mask, "scale": self.spec.scale}
        causal = tile.kind == DIAGONAL
        dq, dk, dv = cpu_flash_backward(grad, q, k, v, out, lse, 0.0, causal, **options)
        if expand:
            dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def score_gradient(
        self, problem: Problem, tile: Tile, given: Backward, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Probabilities after dropout, and the gradient of the scores after softcap and bias, both
        [B, H, R, K]; ``mask`` is the tile's.
        """
        grad, q, k, v, out, lse = given
        p, _ = _softmax_tile(q, k, mask, self.spec, lse)
        ds = times_keys(grad, v)
        keep = self._dropout(problem, tile, q)
        if keep is not None:
            ds.mul_(keep)
        ds.sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
        return p if keep is None else p.mul_(keep), ds
