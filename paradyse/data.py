"""Which batches a rank reads: those of its sequence group, equal on all ranks of the group."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from paradyse.distributed.axis import resolve_replicas


def replica_of(mesh: DeviceMesh | None = None) -> tuple[int, int]:
    """Which replica this rank belongs to, and how many there are.

    All ranks of a sequence group belong to one replica and must read the same batches; different
    replicas read different ones. It serves to split data that ``replica_sampler`` does not fit,
    such as streams.

    Args:
        mesh: as the option of the backend: 1-D and None have one replica.
    Returns:
        The replica's index, from 0, and how many there are.
    Raises:
        ValueError: ``mesh`` is no mesh, has more than two dims or other ranks than there are.

    Example:

        replica, num_replicas = paradyse.replica_of(mesh)
        mine = itertools.islice(stream, replica, None, num_replicas)
    """
    axis = resolve_replicas(mesh)
    return axis.rank, axis.size


def replica_sampler(
    dataset: Dataset[Any],
    mesh: DeviceMesh | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[Any]:
    """A sampler that gives each replica samples of its own, the same ones on all of its ranks.

    Args:
        dataset: with a length. All replicas get equally many samples: some are repeated, or with
            ``drop_last`` left out, where the length does not divide.
        mesh: as the option of the backend.
        shuffle: whether to draw a new order for each epoch; else the dataset's order.
        seed: of the shuffle; the same on every rank.
    Returns:
        A ``DistributedSampler`` of as many replicas as the mesh has.
    Raises:
        ValueError: the dataset has no length, or ``mesh`` is none as of ``replica_of``.

    Example:

        sampler = paradyse.replica_sampler(dataset, mesh)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        for epoch in range(num_epochs):
            sampler.set_epoch(epoch)  # another order
            for batch in loader:
                model(**batch).loss.backward()
    """
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"give a dataset with a length, not {type(dataset).__name__}; of a stream, "
            "paradyse.replica_of tells which part this replica is to read"
        )
    replica, num_replicas = replica_of(mesh)
    return DistributedSampler(
        dataset, num_replicas, replica, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
