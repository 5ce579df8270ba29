"""What the ranks of an axis have compared already, so that it need not be at every call.

It is of the axis, not of a graph: which calls make another graph depends on what Dynamo has seen on
a rank before, be it for another group of ranks, so that ranks may do so at different ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from paradyse.distributed.checksums import BatchChecksum
from paradyse.distributed.session import Recent


class Compared:
    """Of one axis, in its session; equal on all of its ranks."""

    def __init__(self) -> None:
        self.batch = BatchChecksum()
        """Of the latest call."""
        self.num_dropped = 0
        self._weights: Recent[Hashable, WeakTensorKeyDictionary] = Recent()
        """By what they were compared for."""

    def since(self, num_dropped: int) -> None:
        """Forget all where ranks have dropped another call than these ``num_dropped``: some may
        have counted it."""
        if num_dropped != self.num_dropped:
            self.batch, self.num_dropped = BatchChecksum(), num_dropped
            self._weights.clear()

    def has(self, what: Hashable, weights: Sequence[nn.Parameter]) -> bool:
        """Whether all of ``weights`` were compared for ``what``; from now on they are."""
        if what not in self._weights:
            self._weights[what] = WeakTensorKeyDictionary()
        known = self._weights[what]
        num = len(known)
        known.update((w, None) for w in weights)
        return len(known) == num > 0 or not weights
