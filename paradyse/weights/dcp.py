"""What ``torch.distributed.checkpoint`` asks of a sharded tensor: which boxes of it lie here.

Each stretch of rows is one chunk, so a checkpoint can be read onto any other number of ranks or
layout. Ranks of a data-parallel axis hold equal chunks, of which one is written: an item is told
by its name and offsets.

The protocol (``torch.distributed._checkpointable``, ``planner_helpers``, ``find_tensor_shard``) is
not public; tried on torch 2.13 (``tests/test_checkpoint.py`` fails if nothing calls it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paradyse.weights.layout import ShardLayout


def _stretches(
    layout: ShardLayout, shape: torch.Size
) -> Iterator[tuple[torch.Size, torch.Size, int]]:
    """Offsets and sizes of each stretch of the rank's rows, and where in these it starts."""
    at = 0
    for start, n in layout.runs[layout.axis.rank]:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[layout.dim], sizes[layout.dim] = start, n
        yield torch.Size(offsets), torch.Size(sizes), at
        at += n


def chunk_list(layout: ShardLayout, shape: torch.Size) -> list[Any]:
    """``ChunkStorageMetadata`` of each stretch; none where the rank holds no rows."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in _stretches(layout, shape)]


def write_items(local: Tensor, layout: ShardLayout, shape: torch.Size, name: str) -> list[Any]:
    """A ``WriteItem`` for each stretch, under ``name``."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunk_list(layout, shape)
    ]


def chunk_of(local: Tensor, layout: ShardLayout, shape: torch.Size, index: Any) -> Tensor:
    """The rows at the ``MetadataIndex``: a view of ``local``, so that what is read lands there.

    Raises:
        ValueError: no stretch of this rank starts at the offsets.
    """
    for offsets, sizes, at in _stretches(layout, shape):
        if offsets == index.offset:
            return local.narrow(layout.dim, at, sizes[layout.dim])
    raise ValueError(
        f"{index.fqn}: this rank holds no rows of {list(shape)} at {list(index.offset or ())}"
    )
