"""What ``torch.distributed.checkpoint`` asks of a sharded tensor: which boxes of it lie here.

Each stretch of rows is one chunk, so a checkpoint can be read onto any other number of ranks or
layout. Ranks of a data-parallel axis hold equal chunks, of which one is written: the name and the
offsets identify a chunk.

The protocol (``torch.distributed._checkpointable``, ``planner_helpers``, ``find_tensor_shard``) is
not public; tried on torch 2.13 (``tests/checkpoint/test_checkpoint.py`` fails if nothing calls it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paradyse.weights.layout import ShardLayout


def _boxes(layout: ShardLayout, shape: torch.Size) -> Iterator[tuple[torch.Size, torch.Size, int]]:
    """Offsets and sizes of each stretch of this rank's rows, and where the rank has it."""
    before, after = [0] * layout.dim, [0] * (len(shape) - layout.dim - 1)
    for start, n, at in layout.stretches(layout.axis.rank):
        sizes = (*shape[: layout.dim], n, *shape[layout.dim + 1 :])
        yield torch.Size((*before, start, *after)), torch.Size(sizes), at


def chunk_list(layout: ShardLayout, shape: torch.Size) -> list[Any]:
    """``ChunkStorageMetadata`` of each stretch of this rank; none where it holds no rows.

    Args:
        layout: of the tensor.
        shape: of the whole tensor.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in _boxes(layout, shape)]


def write_items(local: Tensor, layout: ShardLayout, shape: torch.Size, name: str) -> list[Any]:
    """A ``WriteItem`` for each stretch of this rank.

    Args:
        local: the rank's rows.
        layout: of the tensor.
        shape: of the whole tensor.
        name: of the tensor in the checkpoint.
    """
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
    """The rows at ``index``: a view of ``local``, so that what is read into it lands there.

    Args:
        local: the rank's rows.
        layout: of the tensor.
        shape: of the whole tensor.
        index: a ``MetadataIndex``: name and offsets of a chunk.
    Raises:
        ValueError: no stretch of this rank starts at the offsets.
    """
    for offsets, sizes, at in _boxes(layout, shape):
        if offsets == index.offset:
            return local.narrow(layout.dim, at, sizes[layout.dim])
    raise ValueError(
        f"{index.fqn}: this rank holds no rows of {list(shape)} at {list(index.offset or ())}"
    )
