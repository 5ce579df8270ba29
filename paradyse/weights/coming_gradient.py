"""A gradient whose message is under way, so that backward goes on meanwhile.

Autograd takes it as it takes any gradient, and puts it into ``.grad``. Whatever reads it, such as
the sum with a gradient that is there already, waits for the message and has the values. When
backward ends, plain gradients stand in its place (``GradientSync``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.collectives import Pending
from paradyse.torch_private import disabled_torch_function, make_wrapper_subclass, tree_map_only

aten = torch.ops.aten

_SAME = (aten.detach.default, aten.alias.default)
"""What autograd does with a gradient that it keeps as it is."""


class ComingGradient(Tensor):
    """A gradient that ``message`` brings, a list of them, as number ``index``.

    Args:
        like: has its shape, dtype and device.
    """

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: Tensor, message: Pending, index: int) -> ComingGradient:
        out: ComingGradient = make_wrapper_subclass(
            cls, tuple(like.shape), dtype=like.dtype, device=like.device
        )
        out._message, out._index = message, index
        return out

    _message: Pending
    _index: int

    def value(self) -> Tensor:
        """The gradient itself, which is waited for.

        Raises:
            CollectiveError: its message failed.
        """
        value: Tensor = self._message.wait()[self._index]
        return value

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ComingGradient({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            x = args[0]
            return ComingGradient(x, x._message, x._index)
        args, kwargs = tree_map_only(ComingGradient, lambda x: x.value(), (args, kwargs or {}))
        return func(*args, **kwargs)
