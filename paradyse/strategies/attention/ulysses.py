"""Ulysses: an all-to-all turns the split of the sequence into a split of the heads.

DeepSpeed-Ulysses (arXiv 2309.14509), for any numbers of heads and ranks: ``head_exchange`` says
which heads go where, and packs and unpacks the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, Runs
from paradyse.distributed.held import start_held
from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import Backward, empty_lse
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.attention_op import token_major
from paradyse.kernels.head_exchange import (
    receive_heads,
    receive_tokens,
    send_heads,
    send_tokens,
)
from paradyse.kernels.head_slots import HeadSlots
from paradyse.kernels.sinks import sink_gradient, with_sinks
from paradyse.strategies.attention.method import Context
from paradyse.strategies.groups.heads import deal_heads


def _no_queries(k: Tensor, num_heads: int) -> Tensor:
    """[B, H, s, 0], in place of the queries for the tokens of ``k`` [B, Hk, s, D]."""
    return k.new_empty(k.shape[0], num_heads, k.shape[2], 0)


def _heads(x: Tensor, width: int, real: int) -> Tensor:
    """[B, N, h' width] to [B, h, N, width], a view without padding heads."""
    return x.unflatten(2, (-1, width))[:, :, :real].transpose(1, 2)


@dataclass(frozen=True)
class OwnHeads:
    """One rank's part of the work: its slots, and the widths of the message [.., n (g D + D + Dv)]
    of q, k, v.
    """

    slots: HeadSlots
    axis: Axis
    block_id: int
    key_width: int
    value_width: int

    @staticmethod
    def of(num_heads: int, value_width: int, at: Context) -> OwnHeads:
        """Those of the call ``at``, whose queries have ``num_heads`` heads and whose values are
        ``value_width`` wide.
        """
        slots = deal_heads(num_heads, at.num_kv_heads, at.axis.size)
        return OwnHeads(slots, at.axis, at.block_id, at.key_width, value_width)

    @property
    def real(self) -> tuple[int, int]:
        """Query heads and KV heads that this rank computes."""
        n = self.slots.real_slots(self.axis.rank)
        return n * self.slots.heads_per_slot, n

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of the heads of q, k and v."""
        return self.key_width, self.key_width, self.value_width

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rank's own heads of the tokens of all ranks, [B, N, W] with padding heads, N = p s.

        Args:
            tensors: all heads of the rank's s tokens, [B, H, s, D]; with queries alone, or with
                queries, keys and values.
        """
        came = self._exchange(send_heads(self.slots, tensors))
        start_held(self.axis)
        return receive_tokens(came)

    def scatter(self, tensors: Sequence[Tensor], widths: Sequence[int]) -> tuple[Tensor, ...]:
        """The transpose of ``gather``: all heads of the rank's tokens, [B, H, s, D] each.

        Args:
            tensors: the rank's own heads of all tokens, [B, h, N, D].
            widths: of the heads of each.
        """
        return receive_heads(self.slots, self._exchange(send_tokens(self.slots, tensors)), widths)

    def gather_all(self, q: Tensor, k: Tensor, v: Tensor, across: bool) -> list[Tensor]:
        """What ``gather`` gives of ``q``, ``k`` and ``v``; ``across``: of q alone, and of k and v,
        which have another number of tokens."""
        if not across:
            return [self.gather((q, k, v))]
        return [self.gather((q,)), self.gather((_no_queries(k, self.slots.num_heads), k, v))]

    def scatter_all(self, q: Tensor, k: Tensor, v: Tensor, across: bool) -> tuple[Tensor, ...]:
        """The transpose of ``gather_all``, of ``q``, ``k`` and ``v``; ``across`` as there."""
        if not across:
            return self.scatter((q, k, v), self.widths)
        none = _no_queries(k, self.real[0])
        _, dk, dv = self.scatter((none, k, v), (0, *self.widths[1:]))
        return *self.scatter((q,), self.widths[:1]), dk, dv

    def heads(self, gathered: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Views of ``gathered``, [B, N, n (g D + D + Dv)] or two of such, as ``gather_all`` gave
        them, as real heads of q, k, v, [B, h, N, D].
        """
        h, h_kv = self.real
        columns = self.slots.columns(self.widths)
        if len(gathered) == 1:
            parts = gathered[0].split(columns, -1)
        else:
            parts = (gathered[0], *gathered[1].split(columns[1:], -1))
        q, k, v = (_heads(*x) for x in zip(parts, self.widths, (h, h_kv, h_kv)))
        return q, k, v

    def output_heads(self, out: Tensor) -> Tensor:
        """A view of ``out`` [B, N, n g Dv], as gathered, as real heads [B, h, N, Dv] of attention's
        output or of its gradient.
        """
        return _heads(out, self.value_width, self.real[0])

    def spec(self, spec: AttentionSpec, device: torch.device) -> AttentionSpec:
        """``spec`` for the heads that this rank computes, on ``device``.

        Raises:
            ValueError: a bias of another number of heads.
        """
        ids, num_heads = self.slots.head_ids(self.axis.rank, device), self.slots.num_heads
        if spec.head_ids is not None:
            ids = spec.head_ids.to(device).index_select(0, ids)
        else:
            spec.head_bias(num_heads)  # raises for another number
            spec.head_sinks(num_heads)
        return replace(spec, head_ids=ids)

    def _exchange(self, message: Tensor) -> Tensor:
        """Slice i of ``message`` [p, ..] to rank i; what they sent."""
        if self.axis.size == 1:
            return message
        return collectives.all_to_all(message, self.axis, self.block_id)


def forward(q: Tensor, k: Tensor, v: Tensor, at: Context) -> tuple[Tensor, list[Tensor]]:
    """``Method.forward``.

    Args:
        q: [B, H, s, D], this rank's tokens.
        k, v: [B, Hk, s, D] and [B, Hk, s, Dv].
        at: the call.
    Returns:
        this rank's out [B, H, s, Dv]; then, of its own heads over the whole sequence of N = p s
        tokens, lse [B, h, N], out [B, h, N, Dv] and the message [B, N, n (g D + D + Dv)] that
        brought q, k, v (two, where keys are of another sequence): for backward, which so has only
        gradients to send.
    Raises:
        ValueError: a bias of another number of heads.
    """
    own = OwnHeads.of(q.shape[1], v.shape[3], at)
    spec = own.spec(at.spec, q.device)
    gathered = own.gather_all(q, k, v, at.across)
    runs = _whole(gathered)
    if own.real[0]:
        out_h, lse = with_sinks(*attention_forward(*own.heads(gathered), *runs, spec), spec)
    else:
        out_h = q.new_empty(q.shape[0], 0, gathered[0].shape[1], v.shape[3])
        lse = empty_lse(out_h)
    (out,) = own.scatter((out_h,), (v.shape[3],))
    return out, [lse.contiguous(), token_major(out_h), *gathered]


def _whole(gathered: Sequence[Tensor]) -> tuple[Runs, Runs]:
    """Positions of the queries and of the keys of ``OwnHeads.gather_all``."""
    return ((0, gathered[0].shape[1]),), ((0, gathered[-1].shape[1]),)


def backward(
    grad_out: Tensor, saved: Sequence[Tensor], at: Context, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``Method.backward``, from what ``forward`` gives for it alone.

    Args:
        grad_out: [B, H, s, Dv].
        saved: lse, out and the message, or two.
        at: the call.
        bias_grad: whether the bias needs a gradient.
    Returns:
        dq, dk, dv, and this rank's shares of the gradients of bias and sinks; None where it
        computes no head.
    """
    lse, out_h, *gathered = saved
    own, runs = OwnHeads.of(grad_out.shape[1], grad_out.shape[3], at), _whole(gathered)
    grad_h = own.output_heads(own.gather((grad_out,)))
    d_heads, d_bias, d_sinks = own.heads(gathered), None, None
    if own.real[0]:
        given, spec = Backward(grad_h, *d_heads, out_h, lse), own.spec(at.spec, grad_out.device)
        args = (given, *runs, spec)
        d_heads = attention_backward(*args)
        d_sinks = sink_gradient(grad_h, out_h, lse, spec) if spec.sinks is not None else None
        d_bias = bias_gradient(*args) if bias_grad else None
        del args, given
    del grad_h
    dq, dk, dv = own.scatter_all(*d_heads, at.across)
    return dq, dk, dv, d_bias, d_sinks


def fake_kept(q: Tensor, k: Tensor, v: Tensor, axis: Axis, across: bool) -> list[Tensor]:
    """``Method.fake_kept``: empty tensors for what ``forward`` keeps of ``q``, ``k`` and ``v`` on
    this rank of ``axis``; ``across``: keys are of another sequence.
    """
    slots = deal_heads(q.shape[1], k.shape[1], axis.size)
    b, _, s, d = q.shape
    n, g, dv = slots.slots_per_rank, slots.heads_per_slot, v.shape[3]
    out_h = q.new_empty((b, s * axis.size, slots.real_slots(axis.rank) * g, dv)).transpose(1, 2)
    of_keys, kept = n * (d + dv), [empty_lse(out_h), out_h]
    wide = n * g * d + (0 if across else of_keys)
    kept.append(q.new_empty((b, s * axis.size, wide)))
    if across:
        kept.append(q.new_empty((b, k.shape[2] * axis.size, of_keys)))
    return kept
