"""Host memory beside the device's: pages of it, copies there and back, and rows that lie there.

On CUDA pages are pinned and copied by a stream of their own, beside what the device computes;
elsewhere they are plain memory, copied at once, which spares nothing there but does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from paradyse.distributed.axis import Runs

PAGE_BYTES = 1 << 25
"""Of a page of host memory. PyTorch's allocator gives pinned memory in powers of two; a block
leaves half of its last page empty, on average."""

Pairs = Iterable[tuple[Tensor, Tensor]]
"""What is copied to, and what is copied: uint8 [n], each on the device or on the host."""

Wait = Callable[[], None]
"""Has the present stream wait for copies."""


def nothing() -> None:
    """There is nothing to wait for."""


def copy_now(pairs: Pairs) -> Wait:
    """Copy ``pairs``, where device and host are the same memory."""
    for to, of in pairs:
        to.copy_(of)
    return nothing


class SideStream:
    """Copies between the host and a CUDA ``device`` beside what runs on it, in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, pairs: Pairs) -> Wait:
        """Start copying ``pairs``, behind what the present stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)


class HostMemory:
    """Pages of host memory for the copies of one ``device``: never more than were in use at once.

    Pages that are given back while they are still read may be taken at once: what is copied to them
    then comes later in the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.page_bytes = device, PAGE_BYTES
        self._free: list[Tensor] = []

    @cached_property
    def copy(self) -> Callable[[Pairs], Wait]:
        """Starts copies."""
        return SideStream(self.device) if self.device.type == "cuda" else copy_now

    def take(self) -> Tensor:
        """A page, uint8 [page_bytes]."""
        return self._free.pop() if self._free else self.make()

    def make(self) -> Tensor:
        """A new page, uint8 [page_bytes]."""
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # others may write to it later
            return torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=pinned)

    def give(self, pages: Iterable[Tensor]) -> None:
        """Take ``pages`` back."""
        self._free.extend(pages)

    def places(
        self, pages: Sequence[Tensor], start: int, memory: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of ``memory``, uint8 [n], each with its place in ``pages``, where it begins at byte
        ``start``, counted over all of them."""
        at = 0
        while at < memory.numel():
            page, offset = divmod(start + at, self.page_bytes)
            n = min(self.page_bytes - offset, memory.numel() - at)
            yield memory[at : at + n], pages[page][offset : offset + n]
            at += n


class HostMemories(dict[torch.device, HostMemory]):
    """Of each device that ranks of an axis compute on in this process."""

    def __missing__(self, device: torch.device) -> HostMemory:
        made = self[device] = HostMemory(device)
        return made


class Fetched:
    """A tensor on its way from the host.

    Args:
        x: where it goes.
        wait: for the copies.
    """

    def __init__(self, x: Tensor, wait: Wait) -> None:
        self._x: list[Tensor] = [x]
        self._wait = wait

    def get(self) -> Tensor:
        """The tensor, on the device, once: nothing here keeps it any longer."""
        self._wait()
        self._wait = nothing
        return self._x.pop()

    def __del__(self) -> None:
        self._wait()  # else the copies could write what is there next


def one_ahead(reads: Iterable[Callable[[], Sequence[Fetched]]]) -> Iterator[list[Tensor]]:
    """What each of ``reads`` starts to fetch, in turn; the next read is started before. Whoever
    lets go of a result before it asks for the next one has two of them on the device."""
    coming: Sequence[Fetched] | None = None
    for read in reads:
        here, coming = coming, read()
        if here is not None:
            yield [x.get() for x in here]
    if coming is not None:
        yield [x.get() for x in coming]


class HostRows:
    """Rows of equal shape and dtype on the host, such as one for each token of a sequence.

    Args:
        host: where they lie.
        num_rows: how many.
        shape: of a row.
        dtype: of a row.
    """

    def __init__(
        self, host: HostMemory, num_rows: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.host, self.num_rows, self.shape, self.dtype = host, num_rows, tuple(shape), dtype
        self.row_bytes = math.prod(shape) * dtype.itemsize
        num_pages = -(-num_rows * self.row_bytes // host.page_bytes)
        self._pages = [host.take() for _ in range(num_pages)]
        self._writing: tuple[Tensor | None, Wait] = (None, nothing)
        """What is on its way here."""

    def empty_like(self, dtype: torch.dtype | None = None) -> HostRows:
        """As many rows of this shape, of unspecified values; ``dtype`` replaces theirs."""
        return HostRows(self.host, self.num_rows, self.shape, dtype or self.dtype)

    def write(self, runs: Runs, rows: Tensor) -> None:
        """Start copying ``rows`` to ``runs`` of places.

        Args:
            rows: [n, *shape] on the device, of any dtype, in the order of ``runs``.
        """
        rows = rows.to(self.dtype).contiguous()
        self.settle()  # so that of each only two are on the device: this and the one before it
        wait = self.host.copy((page, part) for part, page in self._pairs(runs, rows))
        self._writing = rows, wait

    def fill(self, run: tuple[int, int], value: float) -> None:
        """Write ``value`` to all of the rows ``run``, (start, n)."""
        shape = (run[1], *self.shape)
        self.write((run,), torch.full(shape, value, dtype=self.dtype, device=self.host.device))

    def read(self, runs: Runs) -> Fetched:
        """Start copying the rows at ``runs`` of places to the device, [n, *shape] in their
        order."""
        shape = (sum(n for _, n in runs), *self.shape)
        rows = torch.empty(shape, dtype=self.dtype, device=self.host.device)
        return Fetched(rows, self.host.copy(self._pairs(runs, rows)))

    def _pairs(self, runs: Runs, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of ``rows``, each with its place on the host."""
        memory, at = rows.view(-1).view(torch.uint8), 0
        for start, n in runs:
            size = n * self.row_bytes
            part = memory[at : at + size]
            yield from self.host.places(self._pages, start * self.row_bytes, part)
            at += size

    def settle(self) -> None:
        """Keep nothing on the device of what is on its way here."""
        self._writing[1]()  # else what is copied could be written meanwhile
        self._writing = (None, nothing)

    def __del__(self) -> None:
        self.settle()
        self.host.give(self._pages)
