"""The weights that a graph is called with.

Dynamo has models of equal code share one graph, such as a model that is trained and the one that it
is compared with: whose call it is, its weights say.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paradyse.distributed.checksums import checksum
from paradyse.weights.sharded_tensor import ShardedTensor, rows_here


class CallWeights:
    """The parameters among the inputs of one graph, of the latest call.

    Args:
        inputs: of the call that the graph was made for.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        kinds = (nn.Parameter, ShardedTensor)
        self._at = tuple(i for i, e in enumerate(inputs) if isinstance(e, kinds))
        self.sharded = tuple(i for i in self._at if isinstance(inputs[i], ShardedTensor))
        """Which inputs are sharded."""
        self._seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.refs: Sequence[weakref.ref[nn.Parameter]] = []
        self._hold(inputs)

    def are_of(self, args: Sequence[Any]) -> bool:
        """Whether ``args`` of a call have the weights of the call before."""
        return all(ref() is args[i] for ref, i in zip(self.refs, self._at, strict=True))

    def take(self, args: Sequence[Any]) -> bool:
        """The graph is called with ``args``; whether some of the weights were not seen before."""
        known = len(self._seen)
        self._hold(args)
        return len(self._seen) > known

    def _hold(self, args: Sequence[Any]) -> None:
        self.refs = [weakref.ref(args[i]) for i in self._at]
        self._seen.update((args[i], None) for i in self._at)

    def held(self) -> list[nn.Parameter]:
        """Those of the latest call that still live."""
        return [w for w in (ref() for ref in self.refs) if w is not None]

    def shards(self) -> dict[int, ShardedTensor]:
        """Those of the latest call that are sharded and still live, by their place among inputs."""
        held = {i: ref() for i, ref in zip(self._at, self.refs, strict=True) if i in self.sharded}
        return {i: w for i, w in held.items() if isinstance(w, ShardedTensor)}

    def have(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the graph was called with some of ``parameters``."""
        return any(p in self._seen for p in parameters)

    def checksum(self, sharded: bool) -> int:
        """Of those that every rank of the axis holds whole; and of the rank's rows of the others if
        ``sharded``."""
        held = [w for w in self.held() if sharded or not isinstance(w, ShardedTensor)]
        rows = [rows_here(w).detach() for w in held]
        rows = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in rows]
        sums = [_sum(x).cpu() for x in rows]
        return checksum([torch.stack(sums)]) if sums else 0


_PIECE = 1 << 24
"""Elements that are in float64 at a time."""


def _sum(x: Tensor) -> Tensor:
    """Of the elements of ``x``, in float64."""
    if x.numel() <= _PIECE:
        return x.double().sum()
    return torch.stack([piece.double().sum() for piece in x.reshape(-1).split(_PIECE)]).sum()
