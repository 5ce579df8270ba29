"""Memory that autograd keeps for backward, as its hooks see it.

Uses ``torch.multiprocessing.reductions``, ``torch.utils._python_dispatch`` and functions of
``torch._C._autograd``, which are not public; tried on torch 2.13 (``tests/test_online.py``
holds what is found against what the CPU's allocator tells a profiler).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Identity -> bytes of the memory of the tensors among ``values``, each once."""
    return {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in values
        if isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)
    }


@dataclass
class Saved:
    """Memory that autograd keeps for backward, seen by its hooks."""

    found: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    """Identity -> the memory, its bytes."""

    def watch(self) -> AbstractContextManager[Any]:
        """Inside, every tensor saved is recorded."""

        def pack(x: Tensor) -> Tensor:
            if not is_traceable_wrapper_subclass(x):
                storage = x.untyped_storage()
                self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return x.detach()  # an output would hold the node that saves it, and that the output

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    def num_bytes(self, but: Iterable[Any]) -> int:
        """Of all memory that is still kept, without that of ``but``."""
        others = storages(but)
        return sum(
            n for key, (ref, n) in self.found.items() if key not in others and not ref.expired()
        )

    def alive_bytes(self, but: Iterable[int] = ()) -> int:
        """What is still kept takes now: memory that was emptied since takes none.

        Args:
            but: identities not to count.
        """
        for key in [k for k, (ref, _) in self.found.items() if ref.expired()]:
            del self.found[key]
        alive = [ref for key, (ref, _) in self.found.items() if key not in set(but)]
        found = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in alive)
        return sum(storage.nbytes() for storage in found if storage is not None)


def may_watch() -> bool:
    """Whether nobody else's hooks take what autograd saves, or forbid them."""
    functions: Any = torch._C._autograd
    enabled = functions._saved_tensors_hooks_is_enabled()
    return bool(enabled) and functions._top_saved_tensors_default_hooks(False) is None
