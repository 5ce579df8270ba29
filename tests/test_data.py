"""Which samples a rank reads on a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES = 11


def read(shape: tuple[int, int], shuffle: bool, drop_last: bool) -> Any:
    """This rank's place in the mesh, and its samples of two epochs."""
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    mesh = init_device_mesh("cpu", shape)
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    sampler = paradyse.replica_sampler(data, mesh, shuffle=shuffle, drop_last=drop_last)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([int(x) for (batch,) in loader for x in batch])
    return paradyse.replica_of(mesh), epochs


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_group_reads_the_same_and_replicas_the_rest(
    shuffle: bool, drop_last: bool, pool4: RankPool
) -> None:
    places, samples = zip(*pool4.run(read, (2, 2), shuffle, drop_last))
    assert places == ((0, 2), (0, 2), (1, 2), (1, 2))
    assert samples[0] == samples[1] and samples[2] == samples[3]
    for epoch in range(2):
        first, second = samples[0][epoch], samples[2][epoch]
        assert len(first) == len(second) == (5 if drop_last else 6)
        together = set(first) | set(second)
        assert len(together) == (10 if drop_last else NUM_SAMPLES)
    assert (samples[0][0] != samples[0][1]) == shuffle


def test_one_group(pool2: RankPool) -> None:
    for place, epochs in pool2.run(read, (1, 2), False, False):
        assert place == (0, 1)
        assert epochs[0] == list(range(NUM_SAMPLES))
