"""Plain causal and full attention, and windows over whole sequences, by PyTorch's own CUDA kernels,
where ``selection`` says so.

Order: which part of a call is plain, the kernels, public functions. Both kernels give the log-sum-
exp, and their backward takes the final one, so parts of a ring compose as with our own.

``q``, ``k``, ``v``, ``given``, ``q_runs``, ``kv_runs`` and ``spec`` are as of the public
functions of ``attention``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paradyse.kernels.attention_core import Backward, Grads, adjacent, empty_like_heads, placed
from paradyse.kernels.attention_mask import (
    DIAGONAL,
    MASKED,
    AttentionSpec,
    Runs,
    Tile,
    kind_of_pair,
)
from paradyse.kernels.attention_mask import FULL as FULL_TILE
from paradyse.kernels.selection import (
    ATEN_FLASH,
    BACKWARD,
    CAUSAL,
    CUDNN,
    FORWARD,
    FULL,
    WINDOW,
    capability_of,
    choose,
    flash_holds,
    settled,
)
from paradyse.torch_private import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_window,
    flash_window_backward,
)

# Which part is plain


def _by_position_alone(spec: AttentionSpec) -> bool:
    data = (spec.key_padding, spec.document_ids, spec.bias, spec.softcap)
    return all(x is None for x in data) and spec.dropout_p == 0


def _stretches(runs: Runs, seq_len: int) -> list[tuple[int, int, tuple[int, int]]]:
    """(first index, end index, [first, end) of the positions) of each run, without padding."""
    found, index = [], 0
    for start, n in runs:
        real = max(0, min(n, seq_len - start))
        if real:
            found.append((index, index + real, (start, start + real)))
        index += n
    return found


def plain_tile(q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Tile | None:
    """The one tile without a mask that is all of a call: every pair in it is visible, or row i of
    it sees keys 0..i; every pair outside is hidden. None where there is no such tile.

    So it is of every step of a ring in the balanced order under a causal mask, and of a whole
    sequence. From the runs alone, without a look at any position.
    """
    if not _by_position_alone(spec):
        return None
    rows, keys = _stretches(q_runs, spec.num_queries), _stretches(kv_runs, spec.seq_len)
    if not rows or not keys:
        return None
    whole = rows[-1][2][1] - rows[0][2][0]
    near = (spec.left is None or spec.left >= whole - 1) and (
        spec.chunk is None or rows[0][2][0] // spec.chunk == (rows[-1][2][1] - 1) // spec.chunk
    )
    if q_runs == kv_runs and spec.right == 0 and near:
        ascending = all(a[2][1] <= b[2][0] for a, b in itertools.pairwise(rows))
        end = rows[-1][1]
        if ascending and end == sum(b - a for a, b, _ in rows):
            return Tile(0, end, 0, end, DIAGONAL)
    seen = [[kind_of_pair(q, k, spec) for *_, k in keys] for *_, q in rows]
    some = [i for i, row in enumerate(seen) if any(row)]
    if not some or any(x == MASKED for row in seen for x in row):
        return None
    columns = [j for j, x in enumerate(seen[some[0]]) if x]
    alike = all(seen[i] == seen[some[0]] for i in range(some[0], some[-1] + 1))
    tile = Tile(
        rows[some[0]][0], rows[some[-1]][1], keys[columns[0]][0], keys[columns[-1]][1], FULL_TILE
    )
    # A gap, of hidden stretches or of padding between two runs, is none of the tile.
    num_rows = sum(rows[i][1] - rows[i][0] for i in some)
    num_keys = sum(keys[j][1] - keys[j][0] for j in columns)
    if not alike or num_rows != tile.r1 - tile.r0 or num_keys != tile.k1 - tile.k0:
        return None
    return tile


def window_tile(q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Tile | None:
    """The one tile of a call whose queries and keys are the same stretch of positions, and which
    hides no more than keys too far behind or ahead; None where it is no such call.
    """
    if not _by_position_alone(spec):
        return None
    rows, keys = _stretches(q_runs, spec.seq_len), _stretches(kv_runs, spec.seq_len)
    if len(rows) != 1 or rows != keys or (spec.left is None and spec.right is None):
        return None
    begin, end, (first, last) = rows[0]
    if spec.chunk is not None and first // spec.chunk != (last - 1) // spec.chunk:
        return None
    return Tile(begin, end, begin, end, MASKED)


# Kernels


@cache
def _seed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for a seed of dropout where there is none; nobody writes to it."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _flash_window_forward(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] as of all kernels here; ``left`` and ``right`` -1 for no bound."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths: Any = (None, None, q.shape[1], k.shape[1])
    window = {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = flash_window(q, k, v, *lengths, 0.0, False, False, scale=scale, **window)
    return out.transpose(1, 2), lse


def _flash_window_backward(given: Backward, left: int, right: int, scale: float) -> Grads:
    *tensors, lse = given
    parts = [x.transpose(1, 2) for x in tensors]
    q, k = parts[1:3]
    unread = _seed((2,), torch.uint64, q.device), _seed((), torch.uint64, q.device)
    lengths: Any = (None, None, q.shape[1], k.shape[1])
    window = {"window_size_left": left, "window_size_right": right}
    dq, dk, dv = flash_window_backward(
        *parts, lse, *lengths, 0.0, False, *unread, scale=scale, **window
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


WINDOW_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Grads]]] = {
    ATEN_FLASH: (_flash_window_forward, _flash_window_backward),
}
"""Forward, of q, k, v, left, right, scale, and backward, of ``given`` in their place."""


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(given: Backward, causal: bool, scale: float) -> Grads:
    _, q, k, *_ = given
    unread = _seed((2,), torch.uint64, q.device), _seed((), torch.uint64, q.device)
    lengths: Any = (None, None, q.shape[2], k.shape[2])
    dq, dk, dv = flash_attention_backward(*given, *lengths, 0.0, causal, *unread, scale=scale)
    return dq, dk, dv


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(given: Backward, causal: bool, scale: float) -> Grads:
    *others, lse = given
    q, k = given.q, given.k
    unread = (_seed((), torch.int64, q.device),) * 2
    lengths: Any = (None, None, None, q.shape[2], k.shape[2])
    dq, dk, dv = cudnn_attention_backward(
        *others, lse[..., None], *unread, *lengths, 0.0, causal, scale=scale
    )
    return dq, dk, dv


FORWARD_KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    ATEN_FLASH: _flash_forward,
    CUDNN: _cudnn_forward,
}
"""(q, k, v, causal, scale) -> out [B, H, Sq, D], lse [B, H, Sq] float32, natural logarithm."""

BACKWARD_KERNELS: dict[str, Callable[[Backward, bool, float], Grads]] = {
    ATEN_FLASH: _flash_backward,
    CUDNN: _cudnn_backward,
}
"""Of the tile, whether it is causal, and the scale of the scores; ``given`` is ``readable``."""


# Public functions


def selected_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_runs: Runs,
    kv_runs: Runs,
    spec: AttentionSpec,
    direction: str,
) -> tuple[Tile, str] | None:
    """The tile that is all of this call, and the library's kernel for it.

    Args:
        direction: one of ``selection.DIRECTIONS``.
    Returns:
        None where Triton's kernels take the call.
    """
    if q.shape[3] != v.shape[3] or not spec.scale > 0:  # of which a row's maximum is known
        return None
    tile = plain_tile(q_runs, kv_runs, spec) or window_tile(q_runs, kv_runs, spec)
    if tile is None:
        return None
    mask = {DIAGONAL: CAUSAL, FULL_TILE: FULL, MASKED: WINDOW}[tile.kind]
    rows, keys = tile.r1 - tile.r0, tile.k1 - tile.k0
    choice = choose(capability_of(q.device), q.dtype, q.shape[3], mask, direction, keys)
    shape = direction, mask, q.dtype, q.device, *q.shape[:2], k.shape[1], q.shape[3], rows, keys
    kernel = settled(choice, shape, q.shape[0] * q.shape[1] * rows * keys)
    if kernel == ATEN_FLASH and not flash_holds(q.shape[0], q.shape[1], rows, q.shape[3]):
        return None
    return (tile, kernel) if kernel in FORWARD_KERNELS else None


def _given(tile: Tile, kernel: str, spec: AttentionSpec) -> tuple[Any, Any, tuple[Any, ...]]:
    """Forward and backward of ``kernel`` for ``tile``, and what both take besides tensors."""
    if tile.kind == MASKED:
        limits = (-1 if x is None else x for x in (spec.left, spec.right))
        return *WINDOW_KERNELS[kernel], (*limits, spec.scale)
    given = tile.kind == DIAGONAL, spec.scale
    return FORWARD_KERNELS[kernel], BACKWARD_KERNELS[kernel], given


def library_forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> tuple[Tensor, Tensor] | None:
    """``attention_forward`` by a kernel of PyTorch's; None where it is not the one to use."""
    selected = selected_tile(q, k, v, q_runs, kv_runs, spec, FORWARD)
    if selected is None:
        return None
    tile, kernel = selected
    rows, keys = tile.rows, tile.keys
    parts = (adjacent(x) for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys]))
    run, _, given = _given(tile, kernel, spec)
    out, lse = run(*parts, *given)
    if (tile.r0, tile.r1) == (0, q.shape[2]):
        return out, lse
    whole = empty_like_heads(q).zero_()
    whole_lse = lse.new_full(q.shape[:3], -torch.inf)
    whole[:, :, rows] = out
    whole_lse[:, :, rows] = lse
    return whole, whole_lse


def library_backward(
    given: Backward, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> Grads | None:
    """``attention_backward`` by a kernel of PyTorch's; None where it is not the one to use."""
    q, k, v = qkv = given.q, given.k, given.v
    selected = selected_tile(q, k, v, q_runs, kv_runs, spec, BACKWARD)
    if selected is None:
        return None
    tile, kernel = selected
    x = given.cut(tile)
    part = Backward(x.grad_out.to(q.dtype), x.q, x.k, x.v, x.out.to(q.dtype), x.lse).readable()
    _, run, limits = _given(tile, kernel, spec)
    return placed(list(run(part, *limits)), qkv, tile)
