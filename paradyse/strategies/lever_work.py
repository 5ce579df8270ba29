"""What levers change of the work of a block: what it keeps for backward, where, and what it does
again.

Nothing is counted anew here. ``counted`` gives a strategy's own ``Work`` at another workload, so
that what runs again in backward is the forward of that strategy, and what a tile of tokens holds
is what so short a sequence does. What a block does not keep it needs again while it runs: saved and
workspace together stay, but for tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from paradyse.strategies.head import head_tile_tokens
from paradyse.strategies.tiles import chunk_tokens, tile_tokens
from paradyse.strategies.work import (
    EXCHANGE_OPS,
    GATHER_OPS,
    PIECE_OPS,
    Work,
    count_chunk_pairs,
)
from paradyse.types import HEAD, REPLICATED, VOCABULARY, BlockSpec, HeadSpec, Workload

MOVE_OPS = 300
"""Python time of what autograd's hooks do for a block, and of starting its copies, in launches of a
small operator: an estimate, not measured."""

PAIR_OPS = 60
"""The same of a pair of chunks: fetching keys, attention, merging, and copies of sums in backward.

Thread time (``time.thread_time``) of a pair of 8 tokens each, beyond one chunk of all: 140 us
forward, 165 us backward; a small add takes 2.6 us."""

Counted = Callable[[Workload], Work]

LABEL_BYTES = 8
"""Of the number of a word."""


def num_tiles(work: Work, most: int | None = None) -> int:
    """How many tiles the rank's tokens make in ``work``; of ``most`` tokens of a sequence, by
    default ``tile_tokens``."""
    return -(-work.local_len // (most or tile_tokens(work.workload.batch)))


def recompute(work: Work, counted: Counted) -> None:
    """Change ``work``: the block's input alone is kept, and backward begins with the forward, whose
    messages are sent again; weights are gathered in backward anyway.
    """
    if work.back:
        work.repeat(counted(replace(work.workload, training=False)))
        work.keep_only(work.stream_bytes)
        work.runs_again = 1


def selective(work: Work, counted: Counted) -> None:
    """Change ``work``: the block's input and what attention made are kept; what comes before
    attention or the activation runs again, with the tokens gathered for it, but neither attention
    nor the last linear, nor the message behind that.
    """
    if work.back:
        _repeat_first_part(work, counted)
        work.keep_only(work.stream_bytes + work.attended_bytes)


def tiled(work: Work, counted: Counted) -> None:
    """Change ``work``: as ``selective``, over tiles of tokens one after the other, with messages
    of their own. One tile's values exist at a time, the gradients of input and output whole, and
    those of 16-bit weights are summed in float32.
    """
    tile = _in_tiles(work, counted, tile_tokens(work.workload.batch))
    work.workspace_bytes += tile.saved_bytes + tile.workspace_bytes


def chunked(work: Work, counted: Counted) -> None:
    """Change ``work``: as ``tiled`` before attention and behind it. What attention reads and gives
    is kept on the host, and comes from there: queries once, keys and values for each chunk of
    queries that sees them, in backward with their gradients, which are summed in float32 and go
    back each time. What is on the host while the block runs, and no longer, is not counted there.

    Copies of keys hide behind attention, all others are waited for: of a Llama of 1.1 billion
    parameters at 32,768 tokens, two chunks, an H100 waits for 0.64 s of 0.73 s of copies, which is
    as much as queries, outputs and what is first sent take.
    """
    most = chunk_tokens(work.workload.batch)
    tile, tiles = _in_tiles(work, counted, most), num_tiles(work, most)
    work.exchange = None  # each chunk's heads go at once
    pairs = count_chunk_pairs(work.block.mask, tiles, most * work.p)
    wide = max(4, work.itemsize) / work.itemsize
    q, kv, lse = _own_heads_bytes(work)
    visits, passes = pairs / tiles * kv, 1 + work.back + work.runs_again
    forward = 4 * q + kv + lse
    # of queries d_out and dq both ways, what forward left, its output for what lies behind
    backward = work.back * (7 * q + lse)
    waited = forward, backward + work.runs_again * forward
    fetched = visits, visits * (work.back * (1 + 2 * wide) + work.runs_again)
    work.copy(waited[0] + fetched[0], waited[1] + fetched[1], waited)
    work.moved_bytes += 3 * wide * (pairs / tiles * q * passes + visits * work.back)
    work.num_ops += (pairs * PAIR_OPS + (tiles - 1) * EXCHANGE_OPS) * passes
    chunk_q, chunk_kv, _ = _own_heads_bytes(tile)
    of_pair = (2 + 2 * wide) * chunk_q + 2 * chunk_kv
    if work.back:
        of_pair = (4 + wide) * chunk_q + (3 + 2 * wide) * chunk_kv
    work.workspace_bytes += max(tile.saved_bytes + tile.workspace_bytes, of_pair)
    if work.back and not work.runs_again:
        work.host_bytes += 2 * q + kv + lse


def offload(work: Work, counted: Counted) -> None:
    """Change ``work``: what the block keeps is on the device while it runs, and on the host in
    between. As much again is on the device of the block before it: on its way to the host in
    forward, and back in backward.
    """
    if work.back:
        moved, work.saved_bytes = work.saved_bytes, 0.0
        work.host_bytes += moved
        work.workspace_bytes += 2 * moved
        work.copy(forward=moved, backward=moved)
        work.num_ops += MOVE_OPS


def _in_tiles(work: Work, counted: Counted, most: int) -> Work:
    """Change ``work``: over tiles of at most so many tokens of a sequence, which are computed again
    in backward; the workspace has no tile's values yet.

    Returns:
        the work of one tile.
    """
    w, tiles = work.workload, num_tiles(work, most)
    if work.back:
        _repeat_first_part(work, counted)
    for collective in work.messages:
        work.messages[collective] *= tiles
    work.num_ops += (tiles - 1) * PIECE_OPS * (1 + work.back)
    work.saved_bytes = work.stream_bytes
    work.workspace_bytes = (1 + work.back) * work.stream_bytes
    if work.back:
        work.workspace_bytes += work.block.num_weight_elements * max(0, 4 - work.itemsize)
    return counted(replace(w, seq_len=min(w.seq_len, most * work.p)))


def _own_heads_bytes(work: Work) -> tuple[float, float, float]:
    """Bytes of the queries of a rank's own heads over the whole sequence of ``work``, which are
    those of attention's output too, of their keys and values, and of their log-sum-exps."""
    q, kv = (work.heads_bytes(n * work.p) for n in (work.own_heads, 2 * work.own_kv))
    return q, kv, q / work.itemsize / work.block.head_dim * max(4, work.itemsize)


def _repeat_first_part(work: Work, counted: Counted) -> None:
    forward = replace(work.workload, training=False)
    again, messages = Work(work.block, forward), counted(forward)
    again.surround()
    columns = work.block.hidden + work.columns * work.up_share
    again.project(work.tokens, work.padded_weights * work.up_share, columns, 1)
    work.flops += again.flops
    work.moved_bytes += again.moved_bytes
    work.send("all_gather", messages.sent_bytes["all_gather"], messages.messages["all_gather"])


LEVER_WORK: Mapping[str, Callable[[Work, Counted], None]] = {
    "recompute": recompute,
    "selective": selective,
    "tiled": tiled,
    "chunked": chunked,
    "offload": offload,
}
"""By lever of a block, in the order of ``LEVERS``."""


def count_head(
    head: HeadSpec, levers: str, workload: Workload, sharded: bool, repeatable: bool = False
) -> Work:
    """What the last linear, its loss and the embedding's look-up do on one rank.

    Args:
        head: its widths.
        levers: as of ``Plan.head``. Under any of them gradients are computed with each tile's
            forward, and wait in float32; nothing is done again. ``vocabulary``: a rank multiplies
            the tokens of all ranks by its rows of the weight. ``replicated``: every rank
            multiplies all tokens, without levers.
        workload: batch, length, dtype, number of ranks, training or not.
        sharded: 1/p of the weight on each rank at rest; False: whole on every rank.
        repeatable: as ``Machine.repeatable``.
    """
    n = head.hidden * head.vocabulary
    block = BlockSpec(HEAD, HEAD, 0, "", hidden=head.hidden, num_weight_elements=n)
    alone = levers == REPLICATED
    work = Work(block, replace(workload, num_ranks=1) if alone else workload)
    levers = "" if alone else levers
    by_rows = VOCABULARY in levers
    share = work.p if by_rows else 1
    tokens = work.tokens * share
    passes, wide = 1 + 2 * work.back, max(4, work.itemsize)
    width = head.vocabulary / share
    work.project(tokens, n / share, head.hidden + width, passes)
    # to float32, its maximum, exponentials and their sum; the gradient from these
    work.moved_bytes += tokens * width * wide * (4 + 3 * work.back)
    most = head_tile_tokens(workload.batch) if "tiled" in levers else work.local_len
    tiles, rows = -(-work.local_len // most), workload.batch * min(work.local_len, most)
    work.num_ops += tiles * PIECE_OPS * (1 + work.back)
    narrow = work.itemsize if work.itemsize < 4 else 0
    # logits, their logarithms or exponentials; where gradients are made with them, a gradient too
    held = (3 if levers else 2) * wide + narrow
    work.workspace_bytes = rows * share * width * held
    work.saved_bytes = work.x_bytes
    if levers and work.back:
        work.saved_bytes += n / share * (wide - work.itemsize)
        work.workspace_bytes += work.x_bytes  # beside its gradient, which is what is saved
    if by_rows:
        _share_words(work, tiles, rows, wide)
    work.p = workload.num_ranks
    _fetch_tables(work, head, levers, sharded, repeatable and alone)
    return work


def _share_words(work: Work, tiles: int, rows: int, wide: int) -> None:
    """Count what ranks send that have other words each, in so many ``tiles`` of ``rows`` tokens of
    each rank: tokens and labels, four numbers a token, and the tokens' gradients."""
    p, passes = work.p, 1 + work.back
    work.send("all_gather", (p - 1) * (work.x_bytes + LABEL_BYTES * work.tokens), 2 * tiles)
    work.send("all_to_all", (p - 1) * work.tokens * 4 * wide * passes, passes * tiles)
    if work.back:
        work.send("reduce_scatter", (p - 1) * work.x_bytes, tiles)
    work.num_ops += 2 * GATHER_OPS * tiles * passes
    work.moved_bytes += 4 * p * work.x_bytes * passes
    work.workspace_bytes += p * rows * work.block.hidden * work.itemsize * passes


def _fetch_tables(work: Work, head: HeadSpec, levers: str, sharded: bool, compared: bool) -> None:
    """Count what brings together the weight of ``head``, those of embeddings, their gradients;
    those of whole weights may be ``compared``."""
    n = work.block.num_weight_elements
    if not sharded:
        work.fetch_weights("whole", sharded, compared)
    elif VOCABULARY in levers:
        work.workspace_bytes += n / work.p * work.itemsize * work.back
        _look_up(work, head.num_looked_up)
    else:
        work.workspace_bytes += n * work.itemsize * (1 + work.back)
        work.ahead_bytes += n * work.itemsize
        _send_table(work, n, gathers=1 if levers else 1 + work.back)
        _send_table(work, head.num_looked_up, gathers=1)


def _send_table(work: Work, num_elements: int, gathers: int) -> None:
    """Count what a sharded table of so many elements sends that ranks need whole."""
    num_bytes = num_elements * work.itemsize * (work.p - 1) / work.p
    if num_elements:
        work.send("all_gather", num_bytes * gathers, gathers, ahead=True)
        work.send("reduce_scatter", num_bytes * work.back, work.back, ahead=True)


def _look_up(work: Work, num_elements: int) -> None:
    """Count what ranks send that look tokens up in their rows of tables of so many elements: words
    and what is found, and in backward words and its gradient."""
    if not num_elements:
        return
    p, back, tiles = work.p, work.back, num_tiles(work)
    words_bytes, found_bytes = ((p - 1) * n for n in (LABEL_BYTES * work.tokens, work.x_bytes))
    work.send("reduce_scatter", found_bytes, tiles)
    work.send(
        "all_gather", words_bytes + back * (words_bytes + found_bytes), tiles * (1 + 2 * back)
    )
    work.num_ops += 2 * GATHER_OPS * tiles * (1 + back)
    work.moved_bytes += 4 * p * work.x_bytes * (1 + back)
