"""What goes between the host and a device, seen without one."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paradyse.torch_private import TorchDispatchMode, tree_leaves

MAKERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""They copy what Python has, and no dispatch mode sees them."""


class HostTraffic:
    """Notes, while it is entered, what copies between host and device. "meta" stands for the
    device: reading one of its values raises."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        """Name of an operator or function -> copies."""
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Functions(self.found))
        self._modes.enter_context(_Operators(self.found))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._modes.close()


class _Functions(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKERS and out.device.type == "meta" and not isinstance(args[-1], Tensor):
            self.found[func.__name__] += 1
        return out


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)}
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if copies and {"cpu", "meta"} <= given | made:
            self.found[str(func)] += 1
        return out
