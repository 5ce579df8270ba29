"""Outputs that are computed at first use: logits and caches that a training loop rarely reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_map_only,
)

_METADATA = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.ndim.__get__,
    Tensor.layout.__get__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.numel,
}
"""Questions that the shape and dtype answer."""


class DeferredTensor(torch.Tensor):
    """A tensor whose value is made by ``compute`` at first use; shape and dtype are known before.

    The computation is collective where the value is split over ranks, so every rank must use it,
    as every line of the program is run by every rank. Gradients flow through it.
    """

    _compute: Callable[[], Tensor] | None
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: type,
        compute: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        out = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        out._compute = compute
        out._value = None
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``, as for all tensor subclasses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(DeferredTensor, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DeferredTensor, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


@torch.compiler.disable
def materialize(x: DeferredTensor) -> Tensor:
    """The value of ``x``, computed now if it has not been."""
    with DisableTorchFunctionSubclass():
        if x._value is None:
            assert x._compute is not None
            x._value = x._compute()
            x._compute = None
        return x._value
