"""Whether weights change between forward and what reads them again: backward, or a late output.

Autograd raises where a tensor that it saved was written to since: PyTorch counts the writes to each
(``_version``). Below a tensor subclass it does not, so those to rows are counted here; and it does
not compare the counts of what hooks keep in a saved tensor's place, nor of what is not saved at
all, as weights that are gathered anew and what a block reads that runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version


def count_write(written: Iterable[Any]) -> None:
    """The rows of those of ``written`` that are sharded tensors have been written to."""
    shards = [x for x in written if hasattr(x, "placement")]
    increment_version([*shards, *(x.local for x in shards)])


def version_of(x: Tensor) -> int:
    """How often ``x`` has been written to; 0 of what was made in inference mode, where PyTorch does
    not count."""
    return 0 if x.is_inference() else x._version


@dataclass(frozen=True)
class Read:
    """A tensor that forward has read, for backward to read again."""

    tensor: Tensor
    version: int
    """How often it had been written to when forward read it."""

    @staticmethod
    def of(x: Tensor) -> Read:
        """``x`` as it is now."""
        return Read(x, version_of(x))

    def again(self) -> Tensor:
        """The tensor, as it was.

        Raises:
            RuntimeError: it has been written to since.
        """
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a weight, buffer or other tensor of shape {list(self.tensor.shape)} was changed "
                "in place after the forward that this backward belongs to (by an optimizer's step, "
                "load_state_dict, ...), and backward reads it again: gradients would be those of "
                "other values. Call backward() before it changes, or forward once more"
            )
        return self.tensor
