# mypy: allow-untyped-defs, allow-incomplete-defs
"""``head_exchange`` on a GPU: one pass from attention's tensors to a message, and one back.

A program copies a tile of tokens of one head. Message columns are, side by side, the n g query
heads and n KV heads of width D and the n KV heads of width DV that one rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.head_slots import HeadSlots

TILE = 4096
"""Elements that one program copies."""


@triton.jit
def _copy(SOURCE, source_row, PLACE, place_row, there, filled, width, WIDTH: tl.constexpr):
    """Rows from offsets ``source_row`` to ``place_row``, both int64 [ROWS]: their first ``filled``
    elements, then 0 up to ``width``.
    """
    column = tl.arange(0, WIDTH)[None, :]
    read = there[:, None] & (column < filled)
    x = tl.load(SOURCE + source_row[:, None] + column, mask=read, other=0.0)
    tl.store(PLACE + place_row[:, None] + column, x, mask=there[:, None] & (column < width))


@triton.jit
def _program_rows(num_rows, ROWS: tl.constexpr):
    """The sequence and the rows of it that a program copies, and which of them there are."""
    blocks = tl.cdiv(num_rows, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return b, row, row < num_rows


@triton.jit
def _balanced_position(row, rows_per_rank, chunk, num_ranks):
    """Rank, row of the rank, and global position of the rows of all ranks, one rank after the
    other.
    """
    rank = row // rows_per_rank
    local = row % rows_per_rank
    first = local < chunk
    at = tl.where(first, rank, 2 * num_ranks - 1 - rank) * chunk
    return rank, local, at + local - tl.where(first, 0, chunk)


@triton.jit
def send_heads_kernel(
    Q, K, V, MESSAGE,
    num_sequences, num_rows, width, value_width,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    num_kv_heads, group, replicas, slots_per_rank, heads_per_slot,
    HAS_KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens of all sequences, heads of the message of all ranks."""
    n, g = slots_per_rank, heads_per_slot
    query_heads = n * g
    heads, columns = query_heads, query_heads * width
    if HAS_KEYS:
        heads += 2 * n
        columns += n * (width + value_width)
    b, row, there = _program_rows(num_rows, ROWS)
    rank, part = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    place = ((rank * num_sequences + b) * num_rows + row) * columns
    if part < query_heads:
        slot, member = rank * n + part // g, part % g
        in_group = slot % replicas * g + member
        filled = tl.where((slot < num_kv_heads * replicas) & (in_group < group), width, 0)
        head = slot // replicas * group + in_group
        source = b * q_b + head * q_h + row * q_s
        _copy(Q, source, MESSAGE, place + part * width, there, filled, width, WIDTH)
    if HAS_KEYS:
        if (part >= query_heads) & (part < query_heads + n):
            slot = rank * n + part - query_heads
            filled = tl.where(slot < num_kv_heads * replicas, width, 0)
            source = b * k_b + slot // replicas * k_h + row * k_s
            _copy(K, source, MESSAGE, place + part * width, there, filled, width, WIDTH)
        if part >= query_heads + n:
            index = part - query_heads - n
            slot = rank * n + index
            filled = tl.where(slot < num_kv_heads * replicas, value_width, 0)
            source = b * v_b + slot // replicas * v_h + row * v_s
            place += (query_heads + n) * width + index * value_width
            _copy(V, source, MESSAGE, place, there, filled, value_width, WIDTH)


@triton.jit
def receive_tokens_kernel(
    MESSAGE, TOKENS, num_sequences, rows_per_rank, chunk, num_ranks, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of all sequences, tiles of columns."""
    num_rows = rows_per_rank * num_ranks
    b, row, there = _program_rows(num_rows, ROWS)
    rank, local, position = _balanced_position(row, rows_per_rank, chunk, num_ranks)
    begin = tl.program_id(1).to(tl.int64) * WIDTH
    source = ((rank * num_sequences + b) * rows_per_rank + local) * columns + begin
    place = (b * num_rows + position) * columns + begin
    rest = columns - begin
    _copy(MESSAGE, source, TOKENS, place, there, rest, rest, WIDTH)


@triton.jit
def send_tokens_kernel(
    Q, K, V, MESSAGE,
    num_sequences, rows_per_rank, chunk, num_ranks, width, value_width,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    slots_per_rank, real_slots, heads_per_slot,
    HAS_KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of all sequences, heads of a message. Rows count rank by rank."""
    n, g = slots_per_rank, heads_per_slot
    query_heads = n * g
    columns = query_heads * width
    if HAS_KEYS:
        columns += n * (width + value_width)
    num_rows = rows_per_rank * num_ranks
    b, row, there = _program_rows(num_rows, ROWS)
    rank, local, position = _balanced_position(row, rows_per_rank, chunk, num_ranks)
    part = tl.program_id(1).to(tl.int64)
    place = ((rank * num_sequences + b) * rows_per_rank + local) * columns
    if part < query_heads:
        source = b * q_b + part * q_h + position * q_s
        filled = tl.where(part < real_slots * g, width, 0)
        _copy(Q, source, MESSAGE, place + part * width, there, filled, width, WIDTH)
    if HAS_KEYS:
        if (part >= query_heads) & (part < query_heads + n):
            index = part - query_heads
            source = b * k_b + index * k_h + position * k_s
            filled = tl.where(index < real_slots, width, 0)
            _copy(K, source, MESSAGE, place + part * width, there, filled, width, WIDTH)
        if part >= query_heads + n:
            index = part - query_heads - n
            source = b * v_b + index * v_h + position * v_s
            place += (query_heads + n) * width + index * value_width
            filled = tl.where(index < real_slots, value_width, 0)
            _copy(V, source, MESSAGE, place, there, filled, value_width, WIDTH)


@triton.jit
def _sum_replicas(
    MESSAGE, b, row, there, head, first_column, width, PLACE, place,
    num_sequences, num_rows, columns, slots_per_rank,
    REPLICAS: tl.constexpr, WIDTH: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Rows of one KV head: the sum of what came back for each of its replicas."""
    column = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (column < width)
    total = tl.zeros((row.shape[0], WIDTH), SUM)
    for replica in range(REPLICAS):
        slot = head * REPLICAS + replica
        rank, index = slot // slots_per_rank, slot % slots_per_rank
        source = ((rank * num_sequences + b) * num_rows + row) * columns
        source += first_column + index * width
        x = tl.load(MESSAGE + source[:, None] + column, mask=inside, other=0.0)
        total += x.to(SUM)
    tl.store(PLACE + place[:, None] + column, total.to(PLACE.dtype.element_ty), mask=inside)


@triton.jit
def receive_heads_kernel(
    MESSAGE, Q, K, V,
    num_sequences, num_rows, width, value_width,
    num_heads, num_kv_heads, group, slots_per_rank, heads_per_slot,
    REPLICAS: tl.constexpr, HAS_KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens of all sequences, heads of all results, which are [B, s, heads, D]."""
    n, g = slots_per_rank, heads_per_slot
    columns = n * g * width
    if HAS_KEYS:
        columns += n * (width + value_width)
    b, row, there = _program_rows(num_rows, ROWS)
    token = b * num_rows + row
    head = tl.program_id(1).to(tl.int64)
    if head < num_heads:
        in_group = head % group
        slot = head // group * REPLICAS + in_group // g
        rank, at = slot // n, slot % n * g + in_group % g
        source = ((rank * num_sequences + b) * num_rows + row) * columns + at * width
        place = (token * num_heads + head) * width
        _copy(MESSAGE, source, Q, place, there, width, width, WIDTH)
    if HAS_KEYS:
        if (head >= num_heads) & (head < num_heads + num_kv_heads):
            key_head = head - num_heads
            place = (token * num_kv_heads + key_head) * width
            _sum_replicas(
                MESSAGE, b, row, there, key_head, n * g * width, width, K, place,
                num_sequences, num_rows, columns, n, REPLICAS, WIDTH, SUM,
            )  # fmt: skip
        if head >= num_heads + num_kv_heads:
            value_head = head - num_heads - num_kv_heads
            place = (token * num_kv_heads + value_head) * value_width
            _sum_replicas(
                MESSAGE, b, row, there, value_head, n * (g + 1) * width, value_width, V, place,
                num_sequences, num_rows, columns, n, REPLICAS, WIDTH, SUM,
            )  # fmt: skip


def tile_options(width: int) -> dict[str, int]:
    """Options of a launch: rows and columns of a program's tile of rows of ``width`` elements."""
    columns = triton.next_power_of_2(max(width, 1))
    # Fusion is set because its default depends on Triton's version.
    return {"ROWS": max(1, TILE // columns), "WIDTH": columns, "enable_fp_fusion": True}


def _three(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The tensors with adjacent elements along heads' widths; the first again for those that are
    not there.
    """
    if len(tensors) not in (1, 3):
        raise ValueError(
            f"a message is of queries, or of q, k, v: 1 or 3 tensors, not {len(tensors)}"
        )
    found = [x if x.stride(3) == 1 else x.contiguous() for x in tensors]
    return found * (3 // len(found)), len(tensors) == 3


def launch_send_heads(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_heads``; this and the others run on a CPU under Triton's interpreter."""
    (q, k, v), has_keys = _three(tensors)
    b, _, s, d = q.shape
    p, widths = slots.num_ranks, [x.shape[3] for x in tensors]
    message = q.new_empty(p, b, s, sum(slots.columns(widths)))
    tile = tile_options(max(widths))
    if message.numel():
        grid = (b * triton.cdiv(s, tile["ROWS"]), p * sum(slots.message_heads(len(tensors))))
        send_heads_kernel[grid](
            q, k, v, message, b, s, d, v.shape[3],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            slots.num_kv_heads, slots.group, slots.replicas, slots.slots_per_rank,
            slots.heads_per_slot, HAS_KEYS=has_keys, **tile,
        )  # fmt: skip
    return message


def _chunk(rows_per_rank: int, num_ranks: int) -> int:
    """Tokens in a chunk of the balanced order; one rank holds one chunk."""
    return rows_per_rank if num_ranks == 1 else rows_per_rank // 2


def launch_receive_tokens(message: Tensor) -> Tensor:
    """``receive_tokens``."""
    p, b, s, w = message.shape
    if p == 1:
        return message[0]
    message = message.contiguous()
    tokens = message.new_empty(b, p * s, w)
    tile = tile_options(min(w, 1024))
    if tokens.numel():
        grid = (b * triton.cdiv(p * s, tile["ROWS"]), triton.cdiv(w, tile["WIDTH"]))
        receive_tokens_kernel[grid](message, tokens, b, s, _chunk(s, p), p, w, **tile)
    return tokens


def launch_send_tokens(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_tokens``."""
    (q, k, v), has_keys = _three(tensors)
    b, h, n, d = q.shape
    p, widths = slots.num_ranks, [x.shape[3] for x in tensors]
    s = n // p
    message = q.new_empty(p, b, s, sum(slots.columns(widths)))
    tile = tile_options(max(widths))
    if message.numel():
        grid = (b * triton.cdiv(n, tile["ROWS"]), sum(slots.message_heads(len(tensors))))
        send_tokens_kernel[grid](
            q, k, v, message, b, s, _chunk(s, p), p, d, v.shape[3],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            slots.slots_per_rank, h // slots.heads_per_slot, slots.heads_per_slot,
            HAS_KEYS=has_keys, **tile,
        )  # fmt: skip
    return message


def launch_receive_heads(
    slots: HeadSlots, message: Tensor, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """``receive_heads``."""
    message = message.contiguous()
    _, b, s, _ = message.shape
    heads = [slots.num_heads, *[slots.num_kv_heads] * (len(widths) - 1)]
    results = [message.new_empty(b, s, h, w) for h, w in zip(heads, widths)]
    (q, k, v), has_keys = _three(results)
    tile = tile_options(max(widths))
    if message.numel():
        grid = (b * triton.cdiv(s, tile["ROWS"]), sum(heads))
        receive_heads_kernel[grid](
            message, q, k, v, b, s, widths[0], widths[-1],
            slots.num_heads, slots.num_kv_heads, slots.group, slots.slots_per_rank,
            slots.heads_per_slot, REPLICAS=slots.replicas, HAS_KEYS=has_keys,
            SUM=tl.float64 if message.dtype == torch.float64 else tl.float32, **tile,
        )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in results)
