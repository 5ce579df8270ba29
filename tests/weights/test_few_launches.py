"""Gathering a block's weights, and scattering their gradients, is a few launches: as many for eight
ranks as for two, and for a layer as for one weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from paradyse.offline.capture import fake_world
from paradyse.torch_private import TorchDispatchMode
from paradyse.weights.layout import even_layout
from paradyse.weights.shard_comm import gather_shards, scatter_gradients
from paradyse.weights.sharded_tensor import ShardedTensor

LAYER = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)} | {
    "gate": (176, 64),
    "up": (176, 64),
    "down": (64, 176),
    "norm": (64,),
}
"""Name of a weight -> its shape: a Llama's layer."""


class Launches(TorchDispatchMode):
    """Counts operators that would launch something on a device: all but views and new memory."""

    FREE = {"new_empty", "empty_like", "view", "slice", "select", "split", "split_with_sizes"}
    FREE |= {"unbind"}

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] += name not in self.FREE
        return func(*args, **(kwargs or {}))


def launches(num_ranks: int, names: list[str]) -> tuple[Counter[str], ...]:
    """Of a gather of the weights ``names`` and of the scatter of their gradients."""
    with fake_world(num_ranks) as axis:
        shapes = [LAYER[n] for n in names]
        layouts = [even_layout(axis, shape[0]) for shape in shapes]
        pairs = zip(layouts, shapes, strict=True)
        shards = [ShardedTensor(x.take_own(torch.ones(s)), x, s) for x, s in pairs]
        wholes, gradients = ([torch.ones(s) for s in shapes] for _ in range(2))
        with torch.no_grad(), Launches() as gather:
            gather_shards(shards, 0, wholes)
        with torch.no_grad(), Launches() as scatter:
            scatter_gradients(gradients, shards, 0)
        return gather.found, scatter.found


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_as_many_for_a_layer_on_eight_ranks_as_for_two_weights_on_two(num_ranks: int) -> None:
    """The message, copies to or from it, and what puts the rank's own rows together."""
    gather, scatter = launches(num_ranks, list(LAYER))
    assert (gather, scatter) == launches(2, ["q", "k"])
    assert gather.total() == 3 and scatter.total() == 2


def test_launches_are_counted() -> None:
    with Launches() as counted:
        x = torch.ones(4)
        x.view(2, 2).split(1)
        x.copy_(x + 1)
    assert counted.found.total() == 3
