"""What optimizers hold of weights: known once they have stepped."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paradyse.weights.sharded_tensor import lies_on_host, rows_here

MOMENTS = 2
"""States of its size that an optimizer is taken to hold of a trained weight, as Adam does, until it
has stepped."""


def state_bytes(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> int:
    """Bytes that ``optimizer`` holds, where the weights lie, of what this rank has of those
    ``weights`` that it trains. One that had no gradient yet counts as the others."""
    trained = {id(w) for group in optimizer.param_groups for w in group["params"]}
    mine = [w for w in weights if w.requires_grad and id(w) in trained]
    states = ((w, optimizer.state.get(w)) for w in mine)
    known = {w: _tensors(x) for w, x in states if isinstance(x, Tensor) or x}
    held = sum(
        rows_here(x).nbytes for w, state in known.items() for x in state if x.device == w.device
    )
    total, seen = (sum(rows_here(w).nbytes for w in of) for of in (mine, known))
    return held * total // seen if seen else 0


def _tensors(state: Any) -> list[Tensor]:
    """Those of what an optimizer holds of a weight: a dict, in PyTorch's own, or one tensor."""
    values = state.values() if isinstance(state, Mapping) else [state]
    return [x for x in values if isinstance(x, Tensor)]


class OptimizersSeen:
    """The optimizers of a model that have stepped.

    Args:
        weights: of the model.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = [weakref.ref(w) for w in weights]
        self._held: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        """What those hold that are still there: of weights on the device, and of those on the
        host."""
        self.count = 0
        """Of those that have stepped."""

    def add(self, optimizer: Optimizer) -> bool:
        """Note what ``optimizer`` holds, which has stepped; whether it is the first time, and the
        optimizer one of the model's."""
        if optimizer in self._held:
            return False
        weights = [w for w in (ref() for ref in self._weights) if w is not None]
        ours = set(map(id, weights))
        if not any(id(w) in ours for group in optimizer.param_groups for w in group["params"]):
            return False
        sides = ([w for w in weights if lies_on_host(w) == host] for host in (False, True))
        self._held[optimizer] = [state_bytes(optimizer, side) for side in sides]
        self.count += 1
        return True

    def idle_bytes(self) -> int:
        """Of ``static_bytes`` of the device, what a model that nobody trains does not have:
        gradients and ``MOMENTS``, while no optimizer has stepped."""
        weights = (w for w in (ref() for ref in self._weights) if w is not None)
        trained = [w for w in weights if w.requires_grad and not lies_on_host(w)]
        return 0 if self.count else (1 + MOMENTS) * sum(rows_here(w).nbytes for w in trained)

    def static_bytes(self, on_host: bool = False) -> int:
        """Bytes on this rank of the weights, of the gradients of trained ones, and of what
        optimizers hold: as ``MOMENTS`` says while none has stepped.

        Args:
            on_host: of weights that lie on the host, with all that belongs to them; else of others.
        """
        weights = [w for w in (ref() for ref in self._weights) if w is not None]
        weights = [w for w in weights if lies_on_host(w) == on_host]
        trained = sum(rows_here(w).nbytes for w in weights if w.requires_grad)
        held = sum(sides[on_host] for sides in self._held.values())
        states = held if self.count else MOMENTS * trained
        return sum(rows_here(w).nbytes for w in weights) + trained + states
