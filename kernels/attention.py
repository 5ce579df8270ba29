"""Exact attention between queries and keys whose global positions are known, forward and backward.

Order: which tiles to compute (``attention_core`` computes one), public functions.

No value of Sq x Sk elements exists. ``attention_backward`` takes the *final* output and
log-sum-exp, so a ring calls it once per visiting K/V shard and sums: P = exp(scores - lse) is then
right for any subset of keys (FlashAttention-2, arXiv 2307.08691, section 3.1; blockwise ring, arXiv
2310.01889). On a CPU most work goes to PyTorch's flash kernel, which is exact in float64, float32,
bfloat16 and float16; on CUDA to the Triton kernels of ``flash_runs``, but for what they refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.kernels.additive_mask import add_bias_gradient, bias_planes, join_sides, part_sides
from paradyse.kernels.alike_tiles import (
    add_keys,
    add_rows,
    cut_alike,
    in_batches,
    join_alike,
    put_rows,
    stacked_keys,
    stacked_rows,
)
from paradyse.kernels.attention_core import (
    Backward,
    Call,
    Grads,
    Problem,
    adjacent,
    empty_like_heads,
    empty_lse,
    placed,
    stat_dtype,
)
from paradyse.kernels.attention_mask import (
    AttentionSpec,
    Intervals,
    Runs,
    Tile,
    data_intervals,
    position_intervals,
    row_blocks,
    runs_len,
    segments,
)
from paradyse.kernels.library_attention import library_backward, library_forward
from paradyse.torch_private import FakeTensor, cpu_flash

_HAS_CPU_FLASH = cpu_flash is not None


# Which tiles


_MAX_ROWS = 1024
_MIN_PAIRS_PER_SEQUENCE = 192 * 192
"""Below this many scores a sequence, one masked call for the batch beats one call per sequence."""


@lru_cache(maxsize=64)
def _position_tiles(
    q_runs: Runs, kv_runs: Runs, spec: AttentionSpec, bytes_per_pair: int, blocked: bool
) -> tuple[Tile, ...]:
    intervals = position_intervals(q_runs, kv_runs, spec)
    if blocked:
        return row_blocks(intervals, bytes_per_pair, _MAX_ROWS)
    return tuple(join_alike(segments(intervals, bytes_per_pair), intervals))


def _problems(q: Tensor, k: Tensor, call: Call) -> list[Problem]:
    spec, (num_sequences, num_heads, num_rows, _) = call.spec, q.shape
    where = (call.q_runs, call.kv_runs, spec.positional)
    intervals = position_intervals(*where)
    data_mask = spec.key_padding is not None or spec.document_ids is not None
    enough = num_sequences == 1 or num_rows * k.shape[2] >= _MIN_PAIRS_PER_SEQUENCE
    if data_mask and spec.bias is None and not call.dense and enough:
        own = [
            data_intervals(intervals, spec, b, call.q_runs, call.kv_runs)
            for b in range(num_sequences)
        ]
        if all(x is not None for x in own):
            return _by_sequence([x for x in own if x is not None], q.element_size())
    if call.dense:  # scores, a copy or two, for every head
        per_pair = 2 * num_sequences * num_heads
    else:  # a mask
        per_pair = num_sequences if data_mask else 1
        per_pair = max(per_pair, bias_planes(spec, num_heads))
    blocked = call.dense or data_mask or spec.bias is not None
    itemsize = max(4, q.element_size()) if call.dense else q.element_size()  # float32 at least
    tiles = _position_tiles(*where, per_pair * itemsize, blocked)
    return [Problem(slice(0, num_sequences), intervals, tiles, data_mask)]


def _by_sequence(own: list[Intervals], itemsize: int) -> list[Problem]:
    """One problem for each stretch of sequences that are masked alike."""
    problems, begin = [], 0
    for b in range(1, len(own) + 1):
        if (
            b < len(own)
            and torch.equal(own[b].lo, own[begin].lo)
            and torch.equal(own[b].hi, own[begin].hi)
        ):
            continue
        tiles = tuple(join_alike(segments(own[begin], itemsize), own[begin]))
        problems.append(Problem(slice(begin, b), own[begin], tiles, False))
        begin = b
    return problems


def _of_each(problem: Problem, tile: Tile, k: Tensor) -> Iterator[tuple[slice, Tile]]:
    """Sequence by sequence the tiles that ``tile`` stands for, in batches."""
    per_key = 2 * k.shape[1] * k.shape[3] * k.element_size()
    for b in range(problem.batch.start, problem.batch.stop):
        for part in in_batches(tile, per_key):
            yield slice(b, b + 1), part


def _forward_alike(
    call: Call, problem: Problem, tile: Tile, qkv: list[Tensor], results: tuple[Tensor, Tensor]
) -> None:
    """Rows of both ``results`` that ``tile`` stands for."""
    out, lse = results
    for one, part in _of_each(problem, tile, qkv[1]):
        q, k, v = (x[one] for x in qkv)
        q, k, v = stacked_rows(q, part), stacked_keys(k, part), stacked_keys(v, part)
        o, s = call.forward(problem, part, q, k, v)
        put_rows(out[one], o[..., : out.shape[3]], part)
        put_rows(lse[one], s, part)


def _backward_alike(
    call: Call, problem: Problem, tile: Tile, given: Backward, grads: Sequence[Tensor]
) -> None:
    """Add to ``grads`` the shares of what ``tile`` stands for."""
    for one, part in _of_each(problem, tile, given.k):
        own = Backward._make(x[one] for x in given)
        dq, dk, dv = call.backward(problem, part, cut_alike(own, part))
        add_rows(grads[0][one], dq, part)
        add_keys(grads[1][one], dk, part)
        add_keys(grads[2][one], dv, part)


# Public functions


def merge_partials(out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    The weights are sigmoids of the difference of the lse, so they are in [0, 1] whatever the
    magnitude.

    Args:
        out, lse: [B, H, S, D] and [B, H, S], in ``stat_dtype``; lse is -inf where no key was seen.
        out_i, lse_i: the same over the other keys; out_i in any dtype.
    Returns:
        out and lse over all these keys, in ``stat_dtype``.
    """
    weight = torch.sigmoid(lse_i - lse).masked_fill_(lse_i == -torch.inf, 0)[..., None]
    return torch.lerp(out, out_i.to(out.dtype), weight), torch.logaddexp(lse, lse_i)


def _prepared(x: Tensor, width: int, dense: bool) -> Tensor:
    """In the dtype that the tiles compute in, of width ``width``, with adjacent elements along
    it.
    """
    if dense:
        return x.to(stat_dtype(x.dtype))
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return adjacent(x)


def _all_prepared(given: Backward, width: int, dense: bool) -> Backward:
    return Backward._make([*(_prepared(x, width, dense) for x in given[:5]), given.lse])


def _call(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> Call:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if (q.shape[2], k.shape[2]) != (runs_len(q_runs), runs_len(kv_runs)):
        raise ValueError(
            f"runs {q_runs}, {kv_runs} do not describe {q.shape[2]} queries, {k.shape[2]} keys"
        )
    for name in ("key_padding", "document_ids", "bias"):
        x = getattr(spec, name)
        by_sequence = x is not None and not (name == "bias" and x.dim() == 3)
        if by_sequence and x.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"{name} is {list(x.shape)}, but there are {q.shape[0]} sequences")
    if not 0 <= spec.dropout_p <= 1 or (spec.dropout_p > 0 and spec.seed is None):
        raise ValueError(
            f"dropout_p {spec.dropout_p} must be in [0, 1], and above 0 it needs a seed"
        )
    if spec.softcap is not None and not spec.softcap > 0:
        raise ValueError(f"softcap {spec.softcap} must be positive, or None")
    own = spec.dropout_p > 0 or spec.softcap is not None
    return Call(spec, q_runs, kv_runs, q.device.type != "cpu" or own or not _HAS_CPU_FLASH)


def _triton_kernels(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> ModuleType | None:
    """``flash_runs`` where it computes this call. Imported late: Triton is for Linux only."""
    if q.device.type != "cuda":
        return None
    from paradyse.kernels import flash_runs

    return flash_runs if flash_runs.supports(q, k, v, spec) else None


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys.

    Args:
        q: [B, H, Sq, D], whose positions are ``q_runs``.
        k, v: [B, Hk, Sk, D] and [B, Hk, Sk, Dv], whose ascending positions are ``kv_runs``. Query
            head h uses key head h // (H // Hk).
        spec: mask, scale, softcap and dropout of the whole sequence.
    Returns:
        out [B, H, Sq, Dv] in q's dtype, and lse [B, H, Sq] (``stat_dtype``): log of the sum of
        exp(scores) over the visible keys. A row that sees no key here has out 0 and lse -inf.
    Raises:
        ValueError: heads that do not divide, runs that do not fit the tensors, dropout without a
            seed.
    """
    call = _call(q, k, v, q_runs, kv_runs, spec)
    if isinstance(q, FakeTensor):  # a dry run: what a flash kernel allocates
        return empty_like_heads(q, v.shape[-1]), empty_lse(q)
    if q.is_cuda:
        found = library_forward(q, k, v, q_runs, kv_runs, spec)
        if found is not None:
            return found
    kernels = _triton_kernels(q, k, v, spec)
    if kernels is not None:
        return kernels.forward(q, k, v, q_runs, kv_runs, spec)
    dtype, width, value_width = q.dtype, max(q.shape[-1], v.shape[-1]), v.shape[-1]
    qkv = [_prepared(x, width, call.dense) for x in (q, k, v)]
    problems = _problems(q, k, call)
    if len(problems) == 1 and problems[0].is_one_tile(q.shape[2], k.shape[2]):
        out, lse = call.forward(problems[0], problems[0].tiles[0], *qkv)
        return out[..., :value_width].to(dtype), lse
    out, lse = empty_like_heads(q, value_width).zero_(), empty_lse(q).fill_(-torch.inf)
    pending: tuple[Tensor, Tensor] | None = None
    for problem in problems:
        for i, tile in enumerate(problem.tiles):
            if tile.count > 1:
                _forward_alike(call, problem, tile, qkv, (out, lse))
                continue
            places = (tile.rows, tile.keys, tile.keys)
            parts = [x[problem.batch, :, at] for x, at in zip(qkv, places, strict=True)]
            o, s = call.forward(problem, tile, *parts)
            if pending is not None:
                o, s = merge_partials(*pending, o, s)
                pending = None
            if i + 1 < len(problem.tiles) and not problem.tiles[i + 1].first:
                pending = o.to(s.dtype), s
                continue
            out[problem.batch, :, tile.rows] = o[..., :value_width]
            lse[problem.batch, :, tile.rows] = s
    return out, lse


def attention_backward(given: Backward, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Grads:
    """Gradients through these keys.

    Args:
        given: of these queries and keys.
        q_runs, kv_runs, spec: as ``attention_forward`` had them, which also says what is raised.
    Returns:
        dq, dk, dv, like q, k, v: dq is these keys' share of the sum, dk and dv these queries'.
    """
    qkv = q, k, v = given.q, given.k, given.v
    call = _call(q, k, v, q_runs, kv_runs, spec)
    if isinstance(q, FakeTensor):
        dq, dk, dv = map(empty_like_heads, qkv)
        return dq, dk, dv
    if q.is_cuda:
        found = library_backward(given, q_runs, kv_runs, spec)
        if found is not None:
            return found
    kernels = _triton_kernels(q, k, v, spec)
    if kernels is not None:
        return kernels.backward(given, q_runs, kv_runs, spec)
    given = _all_prepared(given, max(q.shape[-1], v.shape[-1]), call.dense)
    problems = _problems(q, k, call)
    if len(problems) == 1 and len(problems[0].tiles) == 1 and problems[0].tiles[0].count == 1:
        tile = problems[0].tiles[0]
        return placed(list(call.backward(problems[0], tile, given.cut(tile))), qkv, tile)
    exact = stat_dtype(q.dtype)
    grads = tuple(empty_like_heads(x, dtype=exact).zero_() for x in given[1:4])
    for problem in problems:
        for tile in problem.tiles:
            if tile.count > 1:
                _backward_alike(call, problem, tile, given, grads)
                continue
            shares = call.backward(problem, tile, given.cut(tile, problem.batch))
            places = (tile.rows, tile.keys, tile.keys)
            for grad, at, share in zip(grads, places, shares, strict=True):
                grad[problem.batch, :, at].add_(share)
    dq, dk, dv = (g[..., : x.shape[-1]].to(x.dtype) for g, x in zip(grads, qkv, strict=True))
    return dq, dk, dv


def bias_gradient(given: Backward, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Tensor:
    """Gradient of a learned float ``spec.bias`` through these queries and keys, as T5 needs it.

    Args:
        given, q_runs, kv_runs, spec: the arguments of ``attention_backward``.
    Returns:
        a tensor of the bias's shape and dtype.
    """
    assert spec.bias is not None
    if isinstance(given.q, FakeTensor):
        return torch.empty_like(spec.bias)
    call = Call(spec, q_runs, kv_runs, dense=True)
    given = _all_prepared(given, 0, True)
    q, k = given.q, given.k
    total = torch.zeros(spec.bias.shape, dtype=stat_dtype(q.dtype), device=q.device)
    total = join_sides(total) if total.dim() == 3 else total
    for problem in _problems(q, k, call):
        for tile in problem.tiles:
            mask = call.mask(problem, tile, q)
            _, ds = call.score_gradient(problem, tile, given.cut(tile), mask)
            add_bias_gradient(total, ds, spec, tile, problem.batch, q_runs, kv_runs)
    total = part_sides(total) if spec.bias.dim() == 3 else total
    return total.to(spec.bias.dtype)
