"""Small tensors that many calls read: made once, kept on the device where they are read.

Layers, steps of a ring and training steps ask for the same positions, bounds and head numbers.
Made on the host they would be copied at each call, for which a GPU's host waits.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from paradyse.torch_private import FakeTensor, tree_leaves

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""Of one cache: of the longest sequences it holds the bounds of a few, of usual ones those that a
ring of any size asks for."""


@dataclass
class _Entry:
    value: Any
    num_bytes: int
    versions: tuple[int, ...] = ()
    """Of the tensors that the value was made of, how often they had been written to."""
    watches: Sequence[Any] = ()
    """Of the same tensors: what lets go of the value with them."""


class Kept:
    """What was made last, by key, of at most ``MOST_BYTES``.

    Args:
        tensors: what of a value has its tensors, whose sizes are counted.
    """

    def __init__(self, tensors: Callable[[Any], Any] = lambda value: value) -> None:
        self._tensors = tensors
        self._found: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, as ``make`` gives it. Tensors without memory are not kept."""
        if key in self._found:
            self._found.move_to_end(key)
            kept: T = self._found[key].value
            return kept
        with torch.inference_mode(False):
            value = make()
        leaves = [x for x in tree_leaves(self._tensors(value)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in leaves):
            num_bytes = sum(x.nbytes for x in leaves)
            self._found[key] = _Entry(value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > MOST_BYTES and len(self._found) > 1:
                self.forget(next(iter(self._found)))
        return value

    def forget(self, key: Hashable) -> None:
        """Let go of the value of ``key``, if it is here."""
        entry = self._found.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
            for watch in entry.watches:
                watch.detach()

    def clear(self) -> None:
        """Let go of all."""
        for key in [*self._found]:
            self.forget(key)

    def get_of(self, key: Hashable, given: Sequence[Tensor | None], make: Callable[[], T]) -> T:
        """``get`` of a value that ``make`` makes of tensors too.

        Args:
            key: what else it is made of.
            given: the tensors; it is kept until one of them is written to or is no more. Of those
                of inference mode, which count no writes, nothing is kept. Neither does what a
                collective fills, or a write through ``.data``: give an alias that lives for as long
                as there is none.
            make: as of ``get``.
        """
        there = [x for x in given if x is not None]
        if any(x.is_inference() for x in there):
            return make()
        whole = key, *(None if x is None else id(x) for x in given)
        versions = tuple(x._version for x in there)
        known = self._found.get(whole)
        if known is not None and known.versions != versions:
            self.forget(whole)
        value = self.get(whole, make)
        entry = self._found.get(whole)
        if entry is not None and not entry.watches:
            entry.versions = versions
            # With the tensor goes the value, as the next tensor may have its identity.
            entry.watches = [weakref.finalize(x, self.forget, whole) for x in there]
        return value
