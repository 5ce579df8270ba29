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

from paradyse.weights.layout import Shard


def _boxes(x: Shard) -> Iterator[tuple[torch.Size, torch.Size, int]]:
    """Offsets and sizes of each stretch of this rank's rows of ``x``, and where the rank has it."""
    dim, shape = x.placement.dim, x.shape
    for start, n, at in x.placement.stretches(x.placement.axis.rank):
        offsets = [start if d == dim else 0 for d in range(len(shape))]
        yield torch.Size(offsets), torch.Size((*shape[:dim], n, *shape[dim + 1 :])), at


def chunk_list(x: Shard) -> list[Any]:
    """``ChunkStorageMetadata`` of each stretch of ``x`` here; none where the rank has no rows."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in _boxes(x)]


def write_items(x: Shard, name: str) -> list[Any]:
    """A ``WriteItem`` for each stretch of ``x`` here, under ``name``."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(x.local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.shape),
        )
        for chunk in chunk_list(x)
    ]


def chunk_of(x: Shard, index: Any) -> Tensor:
    """The rows of ``x`` at ``index``, a ``MetadataIndex``: a view, so that reading fills ``x``.

    Raises:
        ValueError: no stretch of this rank starts at the offsets.
    """
    for offsets, sizes, at in _boxes(x):
        if offsets == index.offset:
            return x.local.narrow(x.placement.dim, at, sizes[x.placement.dim])
    raise ValueError(
        f"{index.fqn}: this rank holds no rows of {list(x.shape)} at {list(index.offset or ())}"
    )
