"""Colossal: ring self-attention, which forms its rows of the scores whole.

Sequence parallelism (arXiv 2105.13120, section 3.2.2): keys go round the ring and fill [B, H, s, S]
scores, any mask or bias is added at once, then values go round and meet the probabilities. One
softmax over a whole row and no merging of partial results; the price is that block of memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.kernels.additive_mask import additive_mask
from paradyse.kernels.attention_core import cap_scores, stat_dtype, times_keys, times_values
from paradyse.kernels.attention_mask import (
    MASKED,
    Tile,
    dropout_keep,
    position_intervals,
    run_positions,
)
from paradyse.kernels.sinks import with_sinks
from paradyse.strategies.attention.method import Context


def forward(q: Tensor, k: Tensor, v: Tensor, at: Context) -> tuple[Tensor, list[Tensor]]:
    """``Method.forward``: arguments and results as of ``ring.forward``; the backward is the ring's.

    Scores and probabilities share one [B, H, s, S] tensor, gone when forward ends: backward
    recomputes them from lse while keys and values go round.

    Args:
        q: [B, H, s, D], this rank's tokens.
        k, v: [B, Hk, s, D] and [B, Hk, s, Dv].
        at: the call.
    Returns:
        out [B, H, s, Dv] in q's dtype, [lse [B, H, s] in ``stat_dtype``].
    """
    axis, spec, exact = at.axis, at.spec, stat_dtype(q.dtype)
    (queries, layout), p, seq_len = at.layouts, axis.size, spec.seq_len
    (b, h, s, _), own = q.shape, queries.runs(axis.rank)
    # The other rows are padding, at the end.
    rows = sum(max(0, min(n, spec.num_queries - start)) for start, n in own)
    q_real = q[:, :, :rows].to(exact) * spec.scale
    scores = q.new_empty((b, h, rows, seq_len), dtype=exact)

    def ring(x: Tensor, visit: Callable[[Tensor, slice], None]) -> None:
        x = x.contiguous()
        for step in range(p):
            pending = collectives.ring_exchange(x, axis, at.block_id) if step + 1 < p else None
            offset = 0
            for start, n in layout.runs((axis.rank - step) % p):
                columns = slice(start, min(start + n, seq_len))
                if columns.start < columns.stop:
                    visit(x[:, :, offset : offset + columns.stop - start].to(exact), columns)
                offset += n
            if pending is not None:
                x = pending.wait()

    def multiply_keys(keys: Tensor, columns: slice) -> None:
        scores[..., columns] = times_keys(q_real, keys)

    ring(k, multiply_keys)
    cap_scores(scores, spec.softcap)
    everyone, whole = slice(0, b), ((0, seq_len),)
    if rows:
        intervals = position_intervals(own, whole, spec.positional)
        tile = Tile(0, rows, 0, seq_len, MASKED)
        mask = additive_mask(spec, tile, intervals, everyone, True, own, whole, scores)
        assert mask is not None
        scores += mask
    highest = scores.amax(-1)  # in place from here on: the block is what the strategy costs
    scores.sub_(highest.masked_fill(highest == -torch.inf, 0)[..., None]).exp_()
    total = scores.sum(-1)
    lse = highest + total.log()
    if spec.dropout_p > 0:
        q_at, k_at = run_positions(own, q.device)[:rows], run_positions(whole, q.device)
        scores.mul_(dropout_keep(spec, everyone, h, q_at, k_at))
        scores.mul_(1 / (1 - spec.dropout_p) if spec.dropout_p < 1 else 0)
    out = q.new_zeros((b, h, s, v.shape[3]), dtype=exact)
    real = out[:, :, :rows]

    def multiply_values(values: Tensor, columns: slice) -> None:
        real.add_(times_values(scores[..., columns], values))

    ring(v, multiply_values)
    real.div_(total.masked_fill(total == 0, 1)[..., None])
    padding = lse.new_full((b, h, s - rows), -torch.inf)
    out, lse = with_sinks(out.to(q.dtype), torch.cat([lse, padding], -1), spec)
    return out, [lse]
