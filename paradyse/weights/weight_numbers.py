"""What ranks of different groups, which trace a model each for itself, call its weights."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class WeightNumbers:
    """Of one axis: a number for each weight of models that groups train, equal on all ranks."""

    def __init__(self) -> None:
        self._numbers = WeakTensorKeyDictionary()
        self._next = 0

    def add(self, weights: Iterable[Tensor]) -> None:
        """Number those of ``weights`` that have no number yet.

        Args:
            weights: the same ones in the same order on every rank.
        """
        for w in weights:
            if w not in self._numbers:
                self._numbers[w] = self._next
                self._next += 1

    def __getitem__(self, weight: Tensor) -> int:
        """The number of ``weight``."""
        number: int = self._numbers[weight]
        return number
