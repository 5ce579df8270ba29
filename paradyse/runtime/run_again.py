"""Calls that a checkpoint around them (``torch.utils.checkpoint``) makes again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import StopRecomputation, current_backward, top_saved_tensors_hooks


@contextmanager
def stops_behind() -> Iterator[None]:
    """Inside, what a checkpoint raises once it has all tensors that it asks for waits for the end:
    in the midst of a call it would be this rank's failure, which ends the backward under way."""
    hooks = top_saved_tensors_hooks() if current_backward() != -1 else None
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    stopped: list[Exception] = []

    def kept(x: Tensor) -> Any:
        if not stopped:
            try:
                return pack(x)
            except StopRecomputation as e:
                stopped.append(e)
        return x

    with torch.autograd.graph.saved_tensors_hooks(kept, unpack):
        yield
    if stopped:
        raise stopped[0]
