"""The beginning of a backward through one call of a program."""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.distributed.agreement import Call
from paradyse.distributed.facts import NO_SYNC
from paradyse.weights.no_sync import GradientSync


def begin_backward(call: Call | None, sync: GradientSync, output: str, grad: Tensor) -> None:
    """A hook of an output, before backward computes anything else: ranks are told.

    Args:
        call: whose output it is; None where ranks are not compared.
        sync: of the call.
        output: its name.
        grad: its gradient.
    Raises:
        NotImplementedError: backward makes a graph of its own (``create_graph=True``).
        ValueError, DroppedCallError: as ``Call.backward``.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "double backward (create_graph=True) through a model that is split over ranks is not "
            "supported: its second derivatives would be wrong. Call backward without create_graph, "
            "or compute what needs it, such as a gradient penalty, with a copy of the model that "
            "is neither compiled nor sharded"
        )
    gradients = {NO_SYNC: sync.begin()}
    if call is not None:
        call.backward(output, gradients)
