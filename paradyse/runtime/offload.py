"""What blocks save for backward, on the host in between.

Everything that autograd saves of a block goes to pages of host memory as soon as it is saved, and
is gone from the device when the next block has run. It comes back while backward is one block
behind it, as activations do in ZeRO-Infinity (arXiv 2104.07857, section 5.1.2).

A tensor goes with the whole memory that it is a view of, once per block. Weights, tables that other
blocks read too, and small pieces of memory stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.strategies.host_memory import HostMemory, Wait, nothing
from paradyse.torch_private import is_traceable_wrapper_subclass, storage_key
from paradyse.weights.versions import Read

MIN_BYTES = 1 << 20
"""Memory of fewer bytes stays on the device. At 25 GB/s, of PCIe 4.0, this takes 40 us, no more
than Python takes to start the copy; and a block saves few such pieces."""

ALIGNMENT = 512
"""What the device's allocator rounds sizes up to; so no copy begins at an odd address."""


@dataclass(frozen=True)
class Moved:
    """A tensor whose memory was moved: what autograd keeps in its place."""

    block: SavedBlock
    index: int
    """Of its memory, among the block's."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        """The tensor, on the device."""
        memory = self.block.fetched(self.index)
        view = memory.new_empty(0, dtype=self.dtype)
        return view.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class SavedBlock:
    """What one block saves for backward. It lasts as long as autograd keeps any of it.

    Args:
        host: where it goes.
        stays: identities of memory that is not moved.
        before: what the block right before it saves, which comes back when this is read.
    """

    def __init__(self, host: HostMemory, stays: Collection[int], before: SavedBlock | None) -> None:
        self.host, self._stays = host, stays
        self._before: weakref.ref[SavedBlock] | None = None
        self._after: weakref.ref[SavedBlock] | None = None
        if before is not None:
            self._before, before._after = weakref.ref(before), weakref.ref(self)
        self._index: dict[int, int] = {}
        """Identity of memory -> its index; while the block runs forward."""
        self._starts: list[int] = []
        """Where each piece of memory begins, counted over all pages."""
        self._sizes: list[int] = []
        self._pages: list[Tensor] = []
        self._memory: list[Tensor] | None = []
        """Each piece of memory, uint8 [bytes]; None while it is on the host alone."""
        self._wait: Wait = nothing
        """For the copies that were started last."""

    def pack(self, x: Tensor) -> Read | Moved:
        """What autograd is to keep in place of ``x``."""
        if not self._moves(x):
            # An output would hold the node that saves it, and that the output.
            return Read.of(x.detach())
        key = storage_key(x)
        if key not in self._index:
            self._index[key] = len(self._sizes)
            memory = torch.empty(0, dtype=torch.uint8, device=x.device)
            self._move(memory.set_(x.untyped_storage()))
        layout = x.dtype, x.shape, x.stride(), x.storage_offset()
        return Moved(self, self._index[key], *layout)

    def _moves(self, x: Tensor) -> bool:
        return (
            x.device.type == self.host.device.type
            and not is_traceable_wrapper_subclass(x)
            and x.untyped_storage().nbytes() >= MIN_BYTES
            and storage_key(x) not in self._stays
        )

    def _move(self, memory: Tensor) -> None:
        assert self._memory is not None
        end = self._starts[-1] + self._sizes[-1] if self._sizes else 0
        self._starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        self._sizes.append(memory.numel())
        self._memory.append(memory)
        while len(self._pages) * self.host.page_bytes < self._starts[-1] + memory.numel():
            self._pages.append(self.host.take())
        parts = self._parts(len(self._sizes) - 1, memory)
        self._wait = self.host.copy((page, part) for part, page in parts)

    def _parts(self, index: int, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of ``memory``, the piece at ``index``, each with its part of a page."""
        return self.host.places(self._pages, self._starts[index], memory)

    def close(self) -> None:
        """The block's forward is over: memory may have the identity of some that is gone."""
        self._index.clear()

    def leave(self) -> None:
        """Keep it on the host alone."""
        self._wait()  # else what is copied could be written meanwhile
        self._wait, self._memory = nothing, None

    def fetch(self) -> None:
        """Start bringing it back to the device."""
        if self._memory is None:
            device = self.host.device
            found = [torch.empty(n, dtype=torch.uint8, device=device) for n in self._sizes]
            pairs = (pair for i, memory in enumerate(found) for pair in self._parts(i, memory))
            self._memory, self._wait = found, self.host.copy(pairs)

    def fetched(self, index: int) -> Tensor:
        """The piece of memory at ``index``, on the device: backward of the block has begun, and
        what the block before it saved starts coming."""
        self.fetch()
        assert self._memory is not None
        self._wait()
        self._wait = nothing
        after, before = (None if r is None else r() for r in (self._after, self._before))
        if after is not None:  # its graph is kept for another backward
            after.leave()
        if before is not None:
            before.fetch()
        return self._memory[index]

    def __del__(self) -> None:
        self._wait()  # else what is copied could be written meanwhile
        self.host.give(self._pages)


class SavedByCall:
    """What the blocks of one call save on the host.

    Args:
        host: where it goes.
    """

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self._last: SavedBlock | None = None

    @contextmanager
    def saving(self, stays: Collection[int]) -> Iterator[SavedBlock]:
        """Inside, the next block runs, and what autograd saves of it moves, except memory of the
        identities ``stays``."""
        block = SavedBlock(self.host, stays, self._last)
        try:
            with torch.autograd.graph.saved_tensors_hooks(block.pack, _unpack):
                yield block
        finally:
            block.close()
        self.settle()
        self._last = block

    def settle(self) -> None:
        """Let nothing of the last block be left on the device, such as before a block that saves
        nothing on the host."""
        if self._last is not None:
            self._last.leave()
            self._last = None


def _unpack(kept: Read | Moved) -> Tensor:
    return kept.get() if isinstance(kept, Moved) else kept.again()


class Inputs:
    """The inputs of a block that runs again in backward, as it asked for them the first time.

    Args:
        get: gives an input in a layout.
    """

    def __init__(self, get: Callable[[fx.Node, str], Any]) -> None:
        self._get = get
        self._known: dict[tuple[fx.Node, str], Any] = {}
        self._moved: dict[tuple[fx.Node, str], tuple[Moved, bool]] = {}
        """What lies on the host, and whether it needs a gradient."""

    def get(self, node: fx.Node, layout: str) -> Any:
        """The input ``node`` in ``layout``."""
        key = node, layout
        if key in self._moved:
            moved, needs = self._moved[key]
            return moved.get().requires_grad_(needs)
        if key not in self._known:
            x = self._get(node, layout)
            self._known[key] = Read.of(x) if isinstance(x, Tensor) else x
        known = self._known[key]
        return known.again() if isinstance(known, Read) else known

    def move(self, block: SavedBlock) -> None:
        """Keep them as ``block`` keeps what is saved, now that it has run for the first time."""
        for key, x in list(self._known.items()):
            kept = block.pack(x.tensor) if isinstance(x, Read) else x
            if isinstance(kept, Moved):
                self._moved[key] = kept, x.tensor.requires_grad
                del self._known[key]
