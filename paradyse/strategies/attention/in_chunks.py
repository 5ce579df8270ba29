"""Attention between chunks of a sequence whose queries, keys and values lie on the host.

FPDT (arXiv 2408.16978, section 4): of a chunk of queries, which stays, the keys come chunk by
chunk, fetched one ahead, and the partial results are merged. Backward goes over the pairs in the
same order, as it is the keys' gradients then that come and go: with grouped heads these are the
smaller ones. Pairs that see nothing are passed over.

Rows on the host are [B, h, D] for each token, h being the heads that the rank computes; kernels
take [B, h, n, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paradyse.distributed.axis import Runs
from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import Backward, stat_dtype
from paradyse.kernels.attention_mask import AttentionSpec, kind_of_pair
from paradyse.kernels.merge import merge
from paradyse.kernels.sinks import sink_gradient, with_sinks
from paradyse.strategies.host_memory import Fetched, HostRows, one_ahead

Run = tuple[int, int]
"""A stretch of positions: (start, length)."""


@dataclass(frozen=True)
class Kept:
    """What forward leaves on the host for backward, a row for each token of the sequence."""

    q: HostRows
    """[B, h, D], of h query heads."""
    k: HostRows
    """[B, hk, D], of hk KV heads."""
    v: HostRows
    """[B, hk, Dv]."""
    out: HostRows
    """[B, h, Dv]."""
    lse: HostRows
    """[B, h], in ``stat_dtype``."""


def by_heads(rows: Tensor) -> Tensor:
    """A view of ``rows`` [n, B, h, ..] as [B, h, n, ..]."""
    return rows.movedim(0, 2)


def by_tokens(x: Tensor) -> Tensor:
    """A view of ``x`` [B, h, n, ..] as rows [n, B, h, ..]."""
    return x.movedim(2, 0)


def may_see(spec: AttentionSpec, queries: Run, keys: Run) -> bool:
    """Whether a query of ``queries`` may see a key of ``keys`` by position; what padding and
    documents hide is not looked at.

    Args:
        spec: of the whole sequence.
    """
    q, k = ((a, min(a + n, spec.seq_len)) for a, n in (queries, keys))
    return kind_of_pair(q, k, spec) is not None


class _Pairs:
    """Each chunk of queries, with the chunks of keys that it sees.

    Args:
        q, k, v: on the host.
        chunks: of the sequence.
        spec: of the whole sequence.
    """

    def __init__(
        self, q: HostRows, k: HostRows, v: HostRows, chunks: Runs, spec: AttentionSpec
    ) -> None:
        seen: list[list[Run]] = [[] for _ in chunks]
        if q.shape[1]:  # else the rank has no head
            seen = [[keys for keys in chunks if may_see(spec, own, keys)] for own in chunks]
        self.seen = list(zip(chunks, seen, strict=True))

        def read(run: Run) -> list[Fetched]:
            return [k.read((run,)), v.read((run,))]

        self._coming = one_ahead(partial(read, run) for runs in seen for run in runs)

    def next_keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the next pair, [B, hk, n, D] each."""
        k, v = next(self._coming)
        return by_heads(k), by_heads(v)


def attend(
    q: HostRows, k: HostRows, v: HostRows, chunks: Runs, spec: AttentionSpec
) -> tuple[HostRows, HostRows]:
    """Attention of a whole sequence, chunk by chunk.

    Args:
        q, k, v: as of ``Kept``.
        chunks: of the sequence, padding included, one behind the other.
        spec: mask, scale, softcap and dropout of the whole sequence.
    Returns:
        out and lse as of ``Kept``; of queries that see nothing 0 and -inf.
    """
    exact = stat_dtype(q.dtype)
    out = HostRows(q.host, q.num_rows, (*q.shape[:2], v.shape[2]), q.dtype)
    lse = HostRows(q.host, q.num_rows, q.shape[:2], exact)
    pairs = _Pairs(q, k, v, chunks, spec)
    for own, seen in pairs.seen:
        runs = (own,)
        if not seen:
            out.fill(own, 0)
            lse.fill(own, -torch.inf)
            continue
        queries = by_heads(q.read(runs).get())
        found: tuple[Tensor, Tensor] | None = None
        for keys in seen:
            part = attention_forward(queries, *pairs.next_keys(), runs, (keys,), spec)
            found = part if found is None else merge(*found, *part)
            del part
        assert found is not None
        for rows, x in zip((out, lse), with_sinks(*found, spec), strict=True):
            rows.write(runs, by_tokens(x))
    for rows in (out, lse):
        rows.settle()
    return out, lse


def attend_backward(
    kept: Kept, d_out: HostRows, chunks: Runs, spec: AttentionSpec, bias_grad: bool
) -> tuple[tuple[HostRows, HostRows, HostRows], Tensor | None, Tensor | None]:
    """Gradients through ``attend``.

    Args:
        kept: what it read and gave.
        d_out: the gradient of ``kept.out``, like it.
        chunks, spec: as it had them.
        bias_grad: whether the bias of ``spec`` needs a gradient.
    Returns:
        those of q, like it, and of k and v, in ``stat_dtype``; and what the rank's heads add to
        the gradients of the bias and of the sinks, None where that is nothing or, of the bias, not
        asked for.
    """
    q, k, v = kept.q, kept.k, kept.v
    exact = stat_dtype(q.dtype)
    dq, dk, dv = q.empty_like(), k.empty_like(exact), v.empty_like(exact)
    sums = dk, dv
    begun: set[Run] = set()
    """Chunks of keys of which there are sums."""
    d_bias: Tensor | None = None
    d_sinks: Tensor | None = None
    pairs = _Pairs(q, k, v, chunks, spec)
    for own, seen in pairs.seen:
        runs = (own,)
        if not seen:
            dq.fill(own, 0)
            continue
        reads = [x.read(runs) for x in (d_out, q, kept.out, kept.lse)]
        grad, queries, out, lse = (by_heads(x.get()) for x in reads)
        if spec.sinks is not None:
            more = sink_gradient(grad, out, lse, spec)
            d_sinks = more if d_sinks is None else d_sinks + more
        total: Tensor | None = None
        for keys in seen:
            # these come while the pair is computed, whose shares are then added
            former = [x.read((keys,)) for x in sums if keys in begun]
            begun.add(keys)
            args = Backward(grad, queries, *pairs.next_keys(), out, lse), runs, (keys,), spec
            share, *shares = attention_backward(*args)
            total = share.to(exact) if total is None else total.add_(share)
            if bias_grad:
                more = bias_gradient(*args)
                d_bias = more if d_bias is None else d_bias + more
            del args, share
            for i, x in enumerate(shares):
                rows = by_tokens(x)
                sums[i].write((keys,), former[i].get().add_(rows) if former else rows)
            del shares, x, rows
        assert total is not None
        dq.write(runs, by_tokens(total))
    for run in set(chunks) - begun:
        for unseen in sums:
            unseen.fill(run, 0)
    for done in (dq, dk, dv):
        done.settle()
    return (dq, dk, dv), d_bias, d_sinks
