"""Small tensors that many calls read: made once, kept on the device where they are read.

Layers, steps of a ring and training steps ask for the same positions, bounds and head numbers.
Made on the host they would be copied at each call, for which a GPU's host waits.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paradyse.torch_private import FakeTensor, tree_leaves

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""Of one cache: of the longest sequences it holds the bounds of a few, of usual ones those that a
ring of any size asks for."""


class Kept:
    """What was made last, by key, of at most ``MOST_BYTES``.

    Args:
        tensors: what of a value has its tensors, whose sizes are counted.
    """

    def __init__(self, tensors: Callable[[Any], Any] = lambda value: value) -> None:
        self._tensors = tensors
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, as ``make`` gives it. Tensors without memory are not kept."""
        if key in self._found:
            self._found.move_to_end(key)
            kept: T = self._found[key][0]
            return kept
        with torch.inference_mode(False):
            value = make()
        leaves = [x for x in tree_leaves(self._tensors(value)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in leaves):
            num_bytes = sum(x.nbytes for x in leaves)
            self._found[key] = value, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > MOST_BYTES and len(self._found) > 1:
                self.forget(next(iter(self._found)))
        return value

    def forget(self, key: Hashable) -> None:
        """Let go of the value of ``key``, if it is here."""
        self._num_bytes -= self._found.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Let go of all."""
        self._found.clear()
        self._num_bytes = 0

    def get_of(self, key: Hashable, given: Sequence[Tensor | None], make: Callable[[], T]) -> T:
        """``get`` of a value that ``make`` makes of tensors too.

        Args:
            key: what else it is made of.
            given: the tensors; it is kept until one of them is written to or is no more. Of those
                of inference mode, which count no writes, nothing is kept.
            make: as of ``get``.
        """
        there = [x for x in given if x is not None]
        if any(x.is_inference() for x in there):
            return make()
        whole = key, *((id(x), x._version) if x is not None else None for x in given)

        def make_and_watch() -> T:
            for x in there:  # the next tensor may have its identity
                weakref.finalize(x, self.forget, whole)
            return make()

        return self.get(whole, make_and_watch)
