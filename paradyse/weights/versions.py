"""Whether weights change between forward and what reads them again: backward, or a late output.

Autograd raises where a tensor that it saved was written to since: PyTorch counts the writes to each
(``_version``). Below a tensor subclass it does not, so those to rows are counted here; and weights
that backward gathers anew are not saved, so their counts are compared here.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def check_unchanged(weights: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Whether nobody has written to ``weights``, which are sharded, since forward has read them.

    Args:
        weights: that backward reads.
        versions: what ``_version`` of each was in forward.
    Raises:
        RuntimeError: one has another version now.
    """
    for weight, version in zip(weights, versions, strict=True):
        if weight._version != version:
            raise RuntimeError(
                f"a sharded weight of shape {list(weight.shape)} was changed in place after the "
                "forward that this backward belongs to (by an optimizer's step, load_state_dict, "
                "...): gradients would be those of other weights. Call backward() before weights "
                "change, or forward once more"
            )
