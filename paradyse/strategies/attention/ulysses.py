"""Ulysses: an all-to-all turns the split of the sequence into a split of the heads.

DeepSpeed-Ulysses (arXiv 2309.14509), for any numbers of heads and ranks: ``head_exchange`` says
which heads go where, and packs and unpacks the messages. Where these are large, heads go in turns
(``deal_in_turns``): those of one are on their way while attention is computed over another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, Runs
from paradyse.distributed.collectives import Pending
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
from paradyse.strategies.groups.heads import deal_heads, deal_in_turns


def _no_queries(k: Tensor, num_heads: int) -> Tensor:
    """[B, H, s, 0], in place of the queries for the tokens of ``k`` [B, Hk, s, D]."""
    return k.new_empty(k.shape[0], num_heads, k.shape[2], 0)


def _heads(x: Tensor, width: int, real: int) -> Tensor:
    """[B, N, h' width] to [B, h, N, width], a view without padding heads."""
    return x.unflatten(2, (-1, width))[:, :, :real].transpose(1, 2)


def _parts(qkv: Sequence[Tensor], across: bool) -> list[list[Tensor]]:
    """What is sent together: ``qkv``; ``across``: q alone, and k and v, which have another number
    of tokens."""
    q, k, v = qkv
    return [[q], [_no_queries(k, q.shape[1]), k, v]] if across else [[q, k, v]]


@dataclass(frozen=True)
class OwnHeads:
    """One rank's part of the work, or of one turn of it, of whose heads alone ``slots`` then are:
    its slots, and the widths of the message [.., n (g D + D + Dv)] of q, k, v.
    """

    slots: HeadSlots
    axis: Axis
    block_id: int
    key_width: int
    value_width: int
    turn: int = 0
    turns: int = 1

    @staticmethod
    def of(num_heads: int, value_width: int, at: Context) -> OwnHeads:
        """Those of the call ``at``, whose queries have ``num_heads`` heads and whose values are
        ``value_width`` wide.
        """
        slots = deal_heads(num_heads, at.num_kv_heads, at.axis.size)
        return OwnHeads(slots, at.axis, at.block_id, at.key_width, value_width)

    @staticmethod
    def in_turns(
        out_shape: Sequence[int], num_keys: int, itemsize: int, at: Context
    ) -> list[OwnHeads]:
        """Those of each turn of the call ``at``.

        Args:
            out_shape: [B, H, s, Dv], of the output on each rank.
            num_keys: that each rank holds.
            itemsize: bytes of an element of queries, keys and values.
        """
        b, num_heads, s, value_width = out_shape
        whole = OwnHeads.of(num_heads, value_width, at)
        of_queries, *of_keys = whole.slots.columns(whole.widths)
        num_bytes = b * (s * of_queries + num_keys * sum(of_keys)) * itemsize
        on_host = collectives.waits_on_host(at.axis)
        slots, turns = deal_in_turns(whole.slots, num_bytes, on_host)
        return [replace(whole, slots=slots, turn=i, turns=turns) for i in range(turns)]

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The heads of this turn, of ``tensors`` [B, all heads, ..]: queries, or queries, keys and
        values."""
        return [x.tensor_split(self.turns, 1)[self.turn] for x in tensors]

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
        came = self.start_gather(tensors).wait()
        start_held(self.axis)
        return receive_tokens(came)

    def start_gather(self, tensors: Sequence[Tensor]) -> Pending:
        """Start what ``gather`` sends of ``tensors``, for ``receive_tokens``."""
        message = send_heads(self.slots, tensors)
        return collectives.start_exchange(message, self.axis, self.block_id)

    def scatter(self, tensors: Sequence[Tensor], widths: Sequence[int]) -> tuple[Tensor, ...]:
        """The transpose of ``gather``: all heads of the rank's tokens, [B, H, s, D] each.

        Args:
            tensors: the rank's own heads of all tokens, [B, h, N, D].
            widths: of the heads of each.
        """
        return self.start_scatter(tensors, widths).wait()

    def start_scatter(self, tensors: Sequence[Tensor], widths: Sequence[int]) -> Pending:
        """Start ``scatter`` of ``tensors`` of ``widths``."""
        message = send_tokens(self.slots, tensors)
        sent = collectives.start_exchange(message, self.axis, self.block_id)
        return sent.then(lambda came: receive_heads(self.slots, came, widths))

    def start_scatter_all(self, q: Tensor, k: Tensor, v: Tensor, across: bool) -> list[Pending]:
        """Start ``scatter`` of ``q``, ``k`` and ``v``; ``across`` as of ``_parts``."""
        if not across:
            return [self.start_scatter((q, k, v), self.widths)]
        of_keys = self.start_scatter((_no_queries(k, self.real[0]), k, v), (0, *self.widths[1:]))
        return [self.start_scatter((q,), self.widths[:1]), of_keys.then(lambda came: came[1:])]

    def heads(self, gathered: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Views of ``gathered``, [B, N, n (g D + D + Dv)] or two of such, of what ``_parts`` gives,
        as real heads of q, k, v, [B, h, N, D].
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
        """``spec`` for the heads that this rank computes in this turn, on ``device``.

        Raises:
            ValueError: a bias of another number of heads.
        """
        first, num_heads = self.turn * self.slots.num_heads, self.turns * self.slots.num_heads
        ids = self.slots.head_ids(self.axis.rank, device, first)
        if spec.head_ids is not None:
            ids = spec.head_ids.to(device).index_select(0, ids)
        else:
            spec.head_bias(num_heads)  # raises for another number
            spec.head_sinks(num_heads)
        return replace(spec, head_ids=ids)


def _gathered(
    turns: Sequence[OwnHeads], parts: Sequence[Sequence[Sequence[Tensor]]]
) -> Iterator[list[Tensor]]:
    """What ``gather`` gives of the ``parts`` of each of ``turns``, one turn after the other: it
    starts when the one before is there, as two turns at once would come together, and late. What
    was held back starts when the last one is there. What is given is not held here meanwhile."""

    def start(i: int) -> list[Pending]:
        return [turns[i].start_gather(tensors) for tensors in parts[i]]

    coming = start(0)
    for i, own in enumerate(turns):
        came = [message.wait() for message in coming]
        coming = start(i + 1) if i + 1 < len(turns) else []
        if not coming:
            start_held(own.axis)
        yield [receive_tokens(came.pop(0)) for _ in parts[i]]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``parts`` of each turn as one, along ``dim``."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _joined_heads(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` [B, h, N, D] of each turn as one, laid out as ``token_major``."""
    if len(parts) == 1:
        return token_major(parts[0])
    return torch.cat([x.transpose(1, 2) for x in parts], 2).transpose(1, 2)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """``part`` added to ``total``, which may be written to, if there is one."""
    return part if total is None else total.add_(part)


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
        gradients to send. Heads come turn by turn, and so do the columns of the message.
    Raises:
        ValueError: a bias of another number of heads.
    """
    turns = OwnHeads.in_turns((*q.shape[:3], v.shape[3]), k.shape[2], q.itemsize, at)
    specs = [own.spec(at.spec, q.device) for own in turns]  # raises before anything is sent
    outs, lses, messages = list[Tensor](), list[Tensor](), list[list[Tensor]]()
    coming = list[Pending]()
    parts = [_parts(own.share((q, k, v)), at.across) for own in turns]
    for own, spec, gathered in zip(turns, specs, _gathered(turns, parts), strict=True):
        if own.real[0]:
            args = (*own.heads(gathered), *_whole(gathered), spec)
            out_h, lse = with_sinks(*attention_forward(*args), spec)
            del args
        else:
            out_h = q.new_empty(q.shape[0], 0, gathered[0].shape[1], v.shape[3])
            lse = empty_lse(out_h)
        coming.append(own.start_scatter((out_h,), (v.shape[3],)))
        outs.append(out_h)
        lses.append(lse)
        messages.append(gathered)
    kept = [_joined(lses, 1).contiguous(), _joined_heads(outs)]
    kept += [_joined(x, -1) for x in zip(*messages, strict=True)]
    del outs, lses, messages, gathered, out_h, lse
    return _joined_heads([message.wait()[0] for message in coming]), kept


def _whole(gathered: Sequence[Tensor]) -> tuple[Runs, Runs]:
    """Positions of the queries and of the keys of what ``_parts`` gives, ``gathered``."""
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
    num_keys, itemsize = saved[-1].shape[1] // at.axis.size, saved[1].itemsize
    turns = OwnHeads.in_turns(grad_out.shape, num_keys, itemsize, at)
    shares = [x.tensor_split(len(turns), 1) for x in saved[:2]]
    shares += [x.tensor_split(len(turns), -1) for x in saved[2:]]
    coming = list[list[Pending]]()
    d_bias: Tensor | None = None
    d_sinks: Tensor | None = None
    grads = _gathered(turns, [[own.share([grad_out])] for own in turns])
    for own, (lse, out_h, *gathered) in zip(turns, zip(*shares, strict=True), strict=True):
        grad_h, d_heads = own.output_heads(*next(grads)), own.heads(gathered)
        if own.real[0]:
            given = Backward(grad_h, *d_heads, out_h, lse.contiguous())
            spec = own.spec(at.spec, grad_out.device)
            args = (given, *_whole(gathered), spec)
            d_heads = attention_backward(*args)
            if spec.sinks is not None:
                d_sinks = _added(d_sinks, sink_gradient(grad_h, out_h, lse, spec))
            if bias_grad:
                d_bias = _added(d_bias, bias_gradient(*args))
            del args, given
        del grad_h
        coming.append(own.start_scatter_all(*d_heads, at.across))
        del d_heads
    found = [[x for message in of for x in message.wait()] for of in coming]
    coming.clear()
    dq, dk, dv = (_joined_heads(x) for x in zip(*found, strict=True))
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
