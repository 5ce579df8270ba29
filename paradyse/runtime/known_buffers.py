"""Buffers whose values a program takes for known: causal masks that a model has registered.

A mask that is a buffer of the model hides by position, which only its values show. They are looked
at when a graph is captured, and again by every call in which the buffer may have changed, as its
counter of writes says. A write through ``.data`` is not counted by PyTorch, and is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.passes.mask_values import Band
from paradyse.torch_private import FakeTensor


def band_of(x: Any) -> Band | None:
    """The band that the mask ``x`` [.., n, n] of zeros and ones is; None for any other value."""
    if not isinstance(x, Tensor) or x.requires_grad or x.ndim < 2 or type(x) is not Tensor:
        return None
    n = x.shape[-1]
    if isinstance(x, FakeTensor) or x.device.type == "meta" or n < 2 or x.numel() != n * n:
        return None
    if x.shape[-2] != n or x.dtype.is_complex:
        return None
    table = x.detach().reshape(n, n)
    ones = table == 1
    if not bool((ones | (table == 0)).all()):
        return None
    for inside in (True, False):
        own = ones if inside else ~ones
        ahead, behind = int(own[0].sum()), int(own[:, 0].sum())
        if not ahead or not behind:
            continue
        if torch.equal(own, torch.ones_like(own).tril(ahead - 1).triu(1 - behind)):
            left, right = (None if m == n else m - 1 for m in (behind, ahead))
            return Band(left, right, inside)
    return None


class KnownBuffers:
    """What a program takes for known of its arguments.

    Args:
        arguments: placeholders of its graph.
    """

    def __init__(self, arguments: Sequence[fx.Node]) -> None:
        metas = {i: n.meta for i, n in enumerate(arguments) if n.meta.get("band") is not None}
        self.bands: dict[int, Band] = {i: meta["band"] for i, meta in metas.items()}
        self._uses = {i: meta["band_uses"] for i, meta in metas.items()}
        """Filled where a mask is read from one."""
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def check(self, args: Sequence[Any]) -> None:
        """See that they are as they were, without a look at the values of a buffer that nothing has
        written to since.

        Args:
            args: of a call.
        Raises:
            RuntimeError: one has other values.
        """
        for i, band in self.bands.items():
            if not self._uses[i]:  # a model may write to what no mask is read from
                continue
            x = args[i]
            # Tensors made under inference_mode count no writes: they are looked at by every call.
            version = None if x.is_inference() else x._version
            seen = self._seen.get(i)
            if seen is not None and version is not None and seen[1] == version and seen[0]() is x:
                continue
            if band_of(x) != band:
                raise RuntimeError(
                    f"a buffer {list(x.shape)} was {band} when the model was compiled, and its "
                    "values have changed since: call torch.compiler.reset() and compile it again. "
                    "If it is that of another model of equal code, give that one a process of its "
                    "own"
                )
            if version is not None:
                self._seen[i] = weakref.ref(x), version
