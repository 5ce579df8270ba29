"""What Ulysses' all-to-all sends and receives: tokens of all heads one way, heads of all tokens the
other.

``slots`` say which heads go to which rank. ``tensors`` are of queries alone or of queries, keys and
values, and ``widths`` those of their heads; 0 for queries leaves keys and values alone. A
``message`` is [p, B, s, W], slice r for or from rank r. Tokens are in the balanced order: rank r
holds chunks r and 2p-1-r; where s is odd, chunk r of p.

Order: the reference in plain PyTorch, the public functions. On CUDA each function is one
pass of a kernel (``triton_exchange``) from the tensors at hand to those that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.kernels.head_slots import HeadSlots
from paradyse.torch_private import FakeTensor

# Reference


def send_heads_reference(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_heads`` in plain PyTorch."""
    widths = [x.shape[3] for x in tensors]
    columns = slots.columns(widths)
    b, _, s, _ = tensors[0].shape
    message = tensors[0].new_empty(slots.num_ranks, b, s, sum(columns))
    spread = [slots.spread_queries, *[slots.spread_keys] * (len(tensors) - 1)]
    for place, f, x in zip(message.movedim(0, 2).split(columns, -1), spread, tensors):
        place.copy_(f(x.transpose(1, 2)))
    return message


def receive_tokens_reference(message: Tensor) -> Tensor:
    """``receive_tokens`` in plain PyTorch."""
    p, b, s, w = message.shape
    if p == 1:
        return message[0]
    if s % 2:
        return message.transpose(0, 1).reshape(b, p * s, w)
    halves = message.view(p, b, 2, s // 2, w)
    natural = message.new_empty(b, 2 * p, s // 2, w)
    natural[:, :p] = halves[:, :, 0].transpose(0, 1)
    natural[:, p:] = halves[:, :, 1].flip(0).transpose(0, 1)
    return natural.view(b, p * s, w)


def send_tokens_reference(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_tokens`` in plain PyTorch."""
    p, (b, _, n, _) = slots.num_ranks, tensors[0].shape
    heads, s = slots.message_heads(len(tensors)), n // p
    parts = [
        F.pad(x.transpose(1, 2), (0, 0, 0, h - x.shape[1])).flatten(2)
        for x, h in zip(tensors, heads)
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)  # [B, N, W]
    if p == 1:
        return whole[None]
    width = whole.shape[2]
    if s % 2:
        return whole.view(b, p, s, width).transpose(0, 1).contiguous()
    chunks = whole.view(b, 2 * p, s // 2, width)
    halves = torch.stack([chunks[:, :p], chunks[:, p:].flip(1)], 2)  # [B, p, 2, c, W]
    return halves.transpose(0, 1).reshape(p, b, s, width)


def receive_heads_reference(
    slots: HeadSlots, message: Tensor, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """``receive_heads`` in plain PyTorch."""
    parts = message.permute(1, 2, 0, 3).split(slots.columns(widths), -1)  # [B, s, p, ..]
    collect = [slots.collect_queries, *[slots.sum_keys] * (len(widths) - 1)]
    return tuple(f(x, w).transpose(1, 2) for f, x, w in zip(collect, parts, widths))


# Public functions


def _kernels(x: Tensor, widths: Sequence[int] = ()) -> ModuleType | None:
    """``triton_exchange`` on CUDA, for heads of these ``widths``, which has no place for any of 0.
    Imported late: Triton is for Linux only."""
    if not x.is_cuda or isinstance(x, FakeTensor) or 0 in widths:
        return None
    from paradyse.kernels import triton_exchange

    return triton_exchange


def send_heads(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """Every rank's heads of this rank's tokens.

    Args:
        tensors: [B, H, s, D] with query heads, then none or two of [B, Hk, s, D'] with KV heads.
    Returns:
        a message, side by side n g heads of the first tensor and n heads of each of the others;
        padding heads are 0.
    """
    if (kernels := _kernels(tensors[0], [x.shape[3] for x in tensors])) is not None:
        return kernels.launch_send_heads(slots, tensors)
    return send_heads_reference(slots, tensors)


def receive_tokens(message: Tensor) -> Tensor:
    """The tokens [B, p s, W] of a message in the sequence's order."""
    if (kernels := _kernels(message)) is not None:
        return kernels.launch_receive_tokens(message)
    return receive_tokens_reference(message)


def send_tokens(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """Every rank's tokens of this rank's heads, in the order in which that rank holds them.

    Args:
        tensors: [B, h g, N, D] with this rank's query heads, then none or two of [B, h, N, D'] with
            its KV heads; h of its n slots are real, it may be none.
    Returns:
        a message as of ``send_heads``; padding heads are 0.
    """
    if (kernels := _kernels(tensors[0], [x.shape[3] for x in tensors])) is not None:
        return kernels.launch_send_tokens(slots, tensors)
    return send_tokens_reference(slots, tensors)


def receive_heads(slots: HeadSlots, message: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The transpose of ``send_heads``: all heads of this rank's tokens; replicas of a KV head are
    summed, in float32 or better.

    Returns:
        [B, H, s, D], then [B, Hk, s, D'] of each other width.
    """
    if (kernels := _kernels(message, widths)) is not None:
        return kernels.launch_receive_heads(slots, message, widths)
    return receive_heads_reference(slots, message, widths)
