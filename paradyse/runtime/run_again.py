"""Calls that a checkpoint around them (``torch.utils.checkpoint``) makes again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import StopRecomputation, current_backward, top_saved_tensors_hooks


@contextmanager
def stops_behind(sharded: bool) -> Iterator[None]:
    """Inside, what a checkpoint raises once it has all tensors that it asks for waits for the end:
    in the midst of a call it would be this rank's failure, which ends the backward under way.

    Args:
        sharded: the call gathers weights, whose memory it gives back behind each block.
    Raises:
        NotImplementedError: it does, and the checkpoint would read them later.
    """
    hooks = top_saved_tensors_hooks() if current_backward() != -1 else None
    if hooks is None:
        yield
        return
    if sharded:
        raise NotImplementedError(
            "torch.utils.checkpoint(.., use_reentrant=False) around a call with sharded weights is "
            "not supported: it would hold all of them whole. Call "
            "model.gradient_checkpointing_enable(), or give a plan with recompute, which "
            "checkpoint block by block"
        )
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
