"""``head_exchange`` on a GPU: one pass from attention's tensors to a message, and one back.

A program copies a tile of tokens of one head. Message columns are, side by side, the n g query
heads and n KV heads of width D and the n KV heads of width DV that one rank computes.

A ``launch_`` function takes and returns what the function of ``head_exchange`` does: ``slots``,
``tensors``, ``message``, ``widths``. It runs on a CPU under Triton's interpreter. In kernels ``q``,
``k`` and ``v`` are ``Heads``, and ``place`` and ``row`` are int64 [ROWS].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.head_slots import HeadSlots
from paradyse.kernels.triton_heads import Heads, head_of, place_of, tile_options


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
def _program_rows(num_sequences, num_rows, ROWS: tl.constexpr):
    """The sequence and the rows of it that a program copies, and which of them there are; and which
    part of these rows, of those that the grid counts beside tiles of rows of all sequences.
    """
    blocks = tl.cdiv(num_rows, ROWS)
    tile, part = place_of(num_sequences * blocks)
    b = (tile // blocks).to(tl.int64)
    row = (tile % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return b, row, row < num_rows, part


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
def _send_keys(
    k, v, MESSAGE, place, index, b, head, row, there, real, query_heads, n, width, value_width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of KV head ``head`` to a message whose rows begin at ``place``, behind its query heads:
    of k where ``index`` < n, else of v. Zeros where the head is not ``real``.
    """
    if index < n:
        place += (query_heads + index) * width
        filled = tl.where(real, width, 0)
        _copy(head_of(k, b, head), row * k.stride_s, MESSAGE, place, there, filled, width, WIDTH)
    else:
        place += (query_heads + n) * width + (index - n) * value_width
        filled = tl.where(real, value_width, 0)
        source = head_of(v, b, head)
        _copy(source, row * v.stride_s, MESSAGE, place, there, filled, value_width, WIDTH)


@triton.jit
def _send_heads_kernel(
    q, k, v, MESSAGE, num_sequences, num_rows, width, value_width, columns, heads,
    num_kv_heads, group, replicas, slots_per_rank, heads_per_slot,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens of all sequences, heads of the message of all ranks."""
    n, g = slots_per_rank, heads_per_slot
    query_heads = n * g
    b, row, there, part = _program_rows(num_sequences, num_rows, ROWS)
    rank, part = (part // heads).to(tl.int64), part % heads
    place = ((rank * num_sequences + b) * num_rows + row) * columns
    if part < query_heads:
        slot, member = rank * n + part // g, part % g
        in_group = slot % replicas * g + member
        filled = tl.where((slot < num_kv_heads * replicas) & (in_group < group), width, 0)
        source = head_of(q, b, slot // replicas * group + in_group)
        begin = place + part * width
        _copy(source, row * q.stride_s, MESSAGE, begin, there, filled, width, WIDTH)
    else:
        index = part - query_heads
        slot = rank * n + index % n
        head, real = slot // replicas, slot < num_kv_heads * replicas
        _send_keys(
            k, v, MESSAGE, place, index, b, head, row, there, real, query_heads, n, width,
            value_width, WIDTH,
        )  # fmt: skip


@triton.jit
def _receive_tokens_kernel(
    MESSAGE, TOKENS, num_sequences, rows_per_rank, chunk, num_ranks, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of all sequences, tiles of columns."""
    num_rows = rows_per_rank * num_ranks
    b, row, there, part = _program_rows(num_sequences, num_rows, ROWS)
    rank, local, position = _balanced_position(row, rows_per_rank, chunk, num_ranks)
    begin = part.to(tl.int64) * WIDTH
    source = ((rank * num_sequences + b) * rows_per_rank + local) * columns + begin
    place = (b * num_rows + position) * columns + begin
    rest = columns - begin
    _copy(MESSAGE, source, TOKENS, place, there, rest, rest, WIDTH)


@triton.jit
def _send_tokens_kernel(
    q, k, v, MESSAGE, num_sequences, rows_per_rank, chunk, num_ranks, width, value_width,
    columns, slots_per_rank, real_slots, heads_per_slot,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of all sequences, heads of a message. Rows count rank by rank."""
    n, g = slots_per_rank, heads_per_slot
    query_heads = n * g
    num_rows = rows_per_rank * num_ranks
    b, row, there, part = _program_rows(num_sequences, num_rows, ROWS)
    rank, local, position = _balanced_position(row, rows_per_rank, chunk, num_ranks)
    part = part.to(tl.int64)
    place = ((rank * num_sequences + b) * rows_per_rank + local) * columns
    if part < query_heads:
        filled = tl.where(part < real_slots * g, width, 0)
        source, begin = head_of(q, b, part), place + part * width
        _copy(source, position * q.stride_s, MESSAGE, begin, there, filled, width, WIDTH)
    else:
        index = part - query_heads
        slot = index % n
        _send_keys(
            k, v, MESSAGE, place, index, b, slot, position, there, slot < real_slots,
            query_heads, n, width, value_width, WIDTH,
        )  # fmt: skip


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
def _receive_heads_kernel(
    MESSAGE, Q, K, V,
    num_sequences, num_rows, width, value_width, columns,
    num_heads, num_kv_heads, group, slots_per_rank, heads_per_slot,
    REPLICAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens of all sequences, heads of all results, which are [B, s, heads, D]."""
    n, g = slots_per_rank, heads_per_slot
    b, row, there, part = _program_rows(num_sequences, num_rows, ROWS)
    token = b * num_rows + row
    head = part.to(tl.int64)
    if head < num_heads:
        in_group = head % group
        slot = head // group * REPLICAS + in_group // g
        rank, at = slot // n, slot % n * g + in_group % g
        source = ((rank * num_sequences + b) * num_rows + row) * columns + at * width
        place = (token * num_heads + head) * width
        _copy(MESSAGE, source, Q, place, there, width, width, WIDTH)
    elif head < num_heads + num_kv_heads:
        key_head = head - num_heads
        place = (token * num_kv_heads + key_head) * width
        _sum_replicas(
            MESSAGE, b, row, there, key_head, n * g * width, width, K, place,
            num_sequences, num_rows, columns, n, REPLICAS, WIDTH, SUM,
        )  # fmt: skip
    else:
        value_head = head - num_heads - num_kv_heads
        place = (token * num_kv_heads + value_head) * value_width
        _sum_replicas(
            MESSAGE, b, row, there, value_head, n * (g + 1) * width, value_width, V, place,
            num_sequences, num_rows, columns, n, REPLICAS, WIDTH, SUM,
        )  # fmt: skip


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with adjacent elements along heads' widths; the first again for those that are
    not there, which no program reads.
    """
    if len(tensors) not in (1, 3):
        raise ValueError(
            f"a message is of queries, or of q, k, v: 1 or 3 tensors, not {len(tensors)}"
        )
    found = [x if x.stride(3) == 1 else x.contiguous() for x in tensors]
    return found * (3 // len(found))


def launch_send_heads(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_heads``."""
    q, k, v = _three(tensors)
    b, _, s, d = q.shape
    p, widths = slots.num_ranks, [x.shape[3] for x in tensors]
    message = q.new_empty(p, b, s, sum(slots.columns(widths)))
    tile = tile_options(max(widths))
    if message.numel():
        heads = sum(slots.message_heads(len(tensors)))
        grid = (b * triton.cdiv(s, tile["ROWS"]) * p * heads,)
        _send_heads_kernel[grid](
            *map(Heads.of, (q, k, v)), message, b, s, d, v.shape[3], message.shape[3], heads,
            slots.num_kv_heads, slots.group, slots.replicas, slots.slots_per_rank,
            slots.heads_per_slot, **tile,
        )  # fmt: skip
    return message


def _chunk(rows_per_rank: int, num_ranks: int) -> int:
    """Tokens in a chunk of the balanced order; one rank, and an odd number of tokens, is one."""
    return rows_per_rank if num_ranks == 1 or rows_per_rank % 2 else rows_per_rank // 2


def launch_receive_tokens(message: Tensor) -> Tensor:
    """``receive_tokens``."""
    p, b, s, w = message.shape
    if p == 1:
        return message[0]
    message = message.contiguous()
    tokens = message.new_empty(b, p * s, w)
    tile = tile_options(min(w, 1024))
    if tokens.numel():
        grid = (b * triton.cdiv(p * s, tile["ROWS"]) * triton.cdiv(w, tile["WIDTH"]),)
        _receive_tokens_kernel[grid](message, tokens, b, s, _chunk(s, p), p, w, **tile)
    return tokens


def launch_send_tokens(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_tokens``."""
    q, k, v = _three(tensors)
    b, h, n, d = q.shape
    p, widths = slots.num_ranks, [x.shape[3] for x in tensors]
    s = n // p
    message = q.new_empty(p, b, s, sum(slots.columns(widths)))
    tile = tile_options(max(widths))
    if message.numel():
        grid = (b * triton.cdiv(n, tile["ROWS"]) * sum(slots.message_heads(len(tensors))),)
        _send_tokens_kernel[grid](
            *map(Heads.of, (q, k, v)), message, b, s, _chunk(s, p), p, d, v.shape[3],
            message.shape[3], slots.slots_per_rank, h // slots.heads_per_slot,
            slots.heads_per_slot, **tile,
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
    q, k, v = _three(results)
    tile = tile_options(max(widths))
    if message.numel():
        grid = (b * triton.cdiv(s, tile["ROWS"]) * sum(heads),)
        _receive_heads_kernel[grid](
            message, q, k, v, b, s, widths[0], widths[-1], message.shape[3],
            slots.num_heads, slots.num_kv_heads, slots.group, slots.slots_per_rank,
            slots.heads_per_slot, REPLICAS=slots.replicas,
            SUM=tl.float64 if message.dtype == torch.float64 else tl.float32, **tile,
        )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in results)
