"""Messages that cross on their way between two ranks.

On gloo two ranks of a process group have one connection, on which a rank says what it is ready to
receive behind what it sends. Large messages between them would take turns, so those to lower ranks
go over a group of their own (``lanes.downward_group``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paradyse.distributed.axis import Axis
from paradyse.distributed.lanes import downward_group

CROSSING_BYTES = 1 << 19
"""On gloo, messages of so many bytes to a rank go over another process group than those from it.
Over links of 93 MB/s two ranks that exchange 4 MiB take 51 ms instead of 92, and 1 MiB 11 instead
of 17 to 21; one of 0.25 MiB is no faster."""


_CARRIED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64, torch.complex128),
}
"""Dtypes that both gloo and NCCL send; others travel as bytes."""


def as_carried(x: Tensor) -> Tensor:
    """``x`` [n], or its bytes [n itemsize] where no message carries its dtype."""
    return x if x.dtype in _CARRIED else x.view(torch.uint8)


def start_all_to_all(
    out: Tensor,
    x: Tensor,
    from_ranks: Sequence[int],
    to_ranks: Sequence[int],
    axis: Axis,
    most: int | None = None,
) -> list[Any]:
    """Start sending a part of ``x`` to every rank of ``axis``.

    Args:
        out: [sum of ``from_ranks``], filled with what comes from rank 0, then from rank 1, ...
        x: [sum of ``to_ranks``], what goes to rank 0, then to rank 1, ...
        from_ranks, to_ranks: elements, per rank.
        most: the largest number of elements between any two ranks, where it may be between others.
    Returns:
        what to wait for, of ``torch.distributed``.
    """
    if x.dtype not in _CARRIED:
        arrive, leave = ([n * x.itemsize for n in ns] for ns in (from_ranks, to_ranks))
        most = most and most * x.itemsize
        return start_all_to_all(as_carried(out), as_carried(x), arrive, leave, axis, most)
    split, rank = partial(dist.all_to_all_single, async_op=True), axis.rank
    downward = downward_group(axis)
    most = max(*from_ranks, *to_ranks) if most is None else most  # ranks go the same way
    if downward is None or most * x.itemsize < CROSSING_BYTES:
        return [split(out, x, [*from_ranks], [*to_ranks], group=axis.group)]
    sizes = [[sum(n[:rank]), n[rank], sum(n[rank + 1 :])] for n in (from_ranks, to_ranks)]
    (from_below, kept, from_above), (to_below, own, to_above) = (
        x.split(s) for x, s in zip((out, x), sizes, strict=True)
    )
    kept.copy_(own)

    def of_ranks(numbers: Sequence[int], below: bool) -> list[int]:
        return [n * (r != rank and (r < rank) == below) for r, n in enumerate(numbers)]

    up = of_ranks(from_ranks, below=True), of_ranks(to_ranks, below=False)
    down = of_ranks(from_ranks, below=False), of_ranks(to_ranks, below=True)
    return [
        split(from_below, to_above, *up, group=axis.group),
        split(from_above, to_below, *down, group=downward),
    ]
