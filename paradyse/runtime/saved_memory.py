"""Memory that autograd keeps for backward, as its hooks see it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import (
    StorageWeakRef,
    is_traceable_wrapper_subclass,
    storage_bytes,
    storage_key,
)
from paradyse.weights.versions import Read


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Identity -> bytes of the memory of the tensors among ``values``, each once."""
    return {
        storage_key(x): x.untyped_storage().nbytes()
        for x in values
        if isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)
    }


@dataclass
class Saved:
    """Memory that autograd keeps for backward, seen by its hooks."""

    found: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    """Identity of a piece of memory -> the piece and its bytes."""

    def watch(self) -> AbstractContextManager[Any]:
        """Inside, every tensor saved is recorded."""

        def pack(x: Tensor) -> Read:
            if not is_traceable_wrapper_subclass(x):
                storage = x.untyped_storage()
                self.found[storage_key(x)] = (StorageWeakRef(storage), storage.nbytes())
            # An output would hold the node that saves it, and that the output.
            return Read.of(x.detach())

        return torch.autograd.graph.saved_tensors_hooks(pack, Read.again)

    def num_bytes(self, but: Iterable[Any]) -> int:
        """Bytes of all memory that is still kept, without that of ``but``."""
        others = storages(but)
        return sum(
            n for key, (ref, n) in self.found.items() if key not in others and not ref.expired()
        )

    def alive_bytes(self, but: Iterable[int] = ()) -> int:
        """Bytes that what is still kept takes now; memory that was emptied since takes none.

        Args:
            but: identities not to count.
        """
        for key in [k for k, (ref, _) in self.found.items() if ref.expired()]:
            del self.found[key]
        others = set(but)
        alive = [ref for key, (ref, _) in self.found.items() if key not in others]
        return sum(storage_bytes(ref) for ref in alive)
