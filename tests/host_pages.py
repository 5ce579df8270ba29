"""Host memory that counts its pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from paradyse.distributed.axis import resolve_axis
from paradyse.strategies import host_memory
from paradyse.strategies.host_memory import HostMemories, HostMemory


class CountedMemory(HostMemory):
    """Counts the pages that it has made, and those in use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_made = self.num_used = 0

    def make(self) -> Tensor:
        self.num_made += 1
        return super().make()

    def take(self) -> Tensor:
        self.num_used += 1
        return super().take()

    def give(self, pages: Iterable[Tensor]) -> None:
        given = list(pages)
        self.num_used -= len(given)
        super().give(given)


@contextmanager
def counted_pages() -> Iterator[None]:
    """Inside, the host memory of this rank's devices is new and counts its pages."""
    session = resolve_axis().session
    session.forget(HostMemories)
    try:
        with patch.object(host_memory, "HostMemory", CountedMemory):
            yield
    finally:
        session.forget(HostMemories)


def pages_used(device: torch.device) -> int:
    """Of ``device``, inside ``counted_pages``."""
    host = resolve_axis().session.of(HostMemories)[device]
    assert isinstance(host, CountedMemory)
    return host.num_used
