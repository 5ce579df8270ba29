"""Numbers that ranks compare in place of tensors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.device_events import event_on

BATCH = "the batch (checksum)"
EARLIER_BATCH = "the batch of the call before (checksum)"
"""What errors call them."""


class BatchChecksum:
    """The fact that batches are equal. Of a batch on a GPU it is known one call later: the host
    does not wait for the device."""

    def __init__(self) -> None:
        self._earlier: tuple[Tensor, Any] | None = None

    def fact(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The checksum of ``tensors``, or of those of the call before where these are on a GPU."""
        if not any(t.is_cuda for t in tensors):
            return {BATCH: checksum(tensors)}
        known = 0
        if self._earlier is not None:
            copy, event = self._earlier
            event.synchronize()
            known = int(copy)
        total = _checksum(tensors)
        self._earlier = total.to("cpu", non_blocking=True), event_on(total.device)
        return {EARLIER_BATCH: known}


_MOST = (1 << 32) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL_BYTES = 1 << 20
"""On the host tensors of so many bytes have a CRC-32, of which one call does all."""

_SAMPLE = 1 << 16
"""Elements of a tensor whose places count in its checksum; of larger ones, spread evenly."""


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that equal ``tensors`` share and different ones, in practice, do not."""
    if all(t.device.type == "cpu" and t.nbytes <= _SMALL_BYTES for t in tensors):
        total = 0
        for t in tensors:
            total = zlib.crc32(_bits(t).numpy().data, total * 31 + t.numel() & _MOST)
        return total
    return int(_checksum(tensors))


def _bits(t: Tensor) -> Tensor:
    """The elements of ``t`` as integers of their size, [elements]."""
    real = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    return real.reshape(-1).contiguous().view(_INTEGERS[real.element_size()])


def repeatable(device: torch.device) -> bool:
    """Whether ranks that compute the same on ``device`` are expected to get the same bits: on a CPU
    they are; operators of a GPU that add up in any order do so in as many ways, unless they are
    told not to (``torch.use_deterministic_algorithms``)."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """[n, 2] int64, for each of the n ``tensors`` what equal ones share and others, in practice, do
    not: the sum of its bits, taken as 64-bit integers, and that of their squares, modulo 2^64. Two
    values that differ by as much up and down leave the first as it is, not the second."""
    return torch.stack([total for t in tensors for total in _sums(_words(t))]).view(-1, 2)


def _words(t: Tensor) -> Tensor:
    """The bits of ``t`` as 64-bit integers, zeros behind them."""
    bits = _bits(t)
    if short := -bits.nbytes % 8:
        bits = torch.nn.functional.pad(bits, (0, short // bits.itemsize))
    if bits.storage_offset() * bits.itemsize % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


def _sums(words: Tensor) -> tuple[Tensor, Tensor]:
    on_host = words.device.type == "cpu"
    return words.sum(), torch.dot(words, words) if on_host else (words * words).sum()


@torch.no_grad()
def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    total = torch.zeros((), dtype=torch.int64, device=device)  # nothing waits for the device
    for i, t in enumerate(tensors):
        bits = _bits(t)
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].to(torch.int64)
        placed = sample * torch.arange(1, sample.numel() + 1, device=sample.device)
        here = bits.sum(dtype=torch.int64) + placed.sum() * (2 * i + 1) + bits.numel()
        total = total * 31 + here.to(total.device)
    return total
