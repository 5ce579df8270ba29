"""``paradyse::attention_colossal``: ring self-attention, which forms its rows of the scores whole.

Sequence parallelism (arXiv 2105.13120, section 3.2.2): keys go round the ring and fill [B, H, s, S]
scores, any mask or bias is added at once, then values go round and meet the probabilities. One
softmax over a whole row and no merging of partial results; the price is that block of memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named
from paradyse.kernels.attention_core import cap_scores, stat_dtype, times_keys, times_values
from paradyse.kernels.attention_mask import (
    MASKED,
    AttentionSpec,
    Tile,
    additive_mask,
    dropout_keep,
    position_intervals,
    run_positions,
)
from paradyse.kernels.attention_op import make_spec, register_gradient, token_major
from paradyse.strategies.attention.ring import ring_backward


def _colossal_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, axis: Axis, block_id: int
) -> tuple[Tensor, Tensor]:
    layout, p, seq_len, exact = (
        axis.layout(spec.seq_len),
        axis.size,
        spec.seq_len,
        stat_dtype(q.dtype),
    )
    (b, h, s, _), own = q.shape, layout.runs(axis.rank)
    rows = sum(
        max(0, min(n, seq_len - start)) for start, n in own
    )  # the rest is padding, at the end
    q_real = q[:, :, :rows].to(exact) * spec.scale
    scores = q.new_empty((b, h, rows, seq_len), dtype=exact)

    def ring(x: Tensor, visit: Callable[[Tensor, slice], None]) -> None:
        x = x.contiguous()
        for step in range(p):
            pending = collectives.ring_exchange([x], axis, block_id) if step + 1 < p else None
            offset = 0
            for start, n in layout.runs((axis.rank - step) % p):
                columns = slice(start, min(start + n, seq_len))
                if columns.start < columns.stop:
                    visit(x[:, :, offset : offset + columns.stop - start].to(exact), columns)
                offset += n
            if pending is not None:
                (x,) = pending.wait()

    def multiply_keys(keys: Tensor, columns: slice) -> None:
        scores[..., columns] = times_keys(q_real, keys)

    ring(k, multiply_keys)
    cap_scores(scores, spec.softcap)
    everyone, whole = slice(0, b), ((0, seq_len),)
    if rows:
        where = (own, whole, seq_len, spec.left, spec.right, spec.chunk)
        tile = Tile(0, rows, 0, seq_len, MASKED)
        mask = additive_mask(
            spec, tile, position_intervals(*where), everyone, True, own, whole, scores
        )
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
    return out.to(q.dtype), torch.cat([lse, padding], -1)


@torch.library.custom_op("paradyse::attention_colossal", mutates_args=())
def attention_colossal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    info: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    axis: str,
    head_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``paradyse::attention_ring``'s arguments and results, by whole rows of scores.

    Scores and probabilities share one [B, H, s, S] tensor, gone when forward ends: backward
    recomputes them from lse while keys and values go round, as ``ring_backward`` does.
    """
    spec = make_spec(
        int(info[0]),
        key_padding,
        document_ids,
        bias,
        seed,
        left,
        right,
        chunk,
        scale,
        softcap,
        dropout_p,
        head_ids,
    )
    out, lse = _colossal_forward(q, k, v, spec, axis_named(axis), int(info[1]))
    return token_major(out), lse


@torch.library.custom_op("paradyse::attention_colossal_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    info: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    axis: str,
    head_ids: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = make_spec(
        int(info[0]),
        key_padding,
        document_ids,
        bias,
        seed,
        left,
        right,
        chunk,
        scale,
        softcap,
        dropout_p,
        head_ids,
    )
    dq, dk, dv, d_bias = ring_backward(
        grad_out, q, k, v, out, lse, spec, axis_named(axis), int(info[1]), bias_grad
    )
    return token_major(dq), token_major(dk), token_major(dv), d_bias


register_gradient(attention_colossal, _backward)
