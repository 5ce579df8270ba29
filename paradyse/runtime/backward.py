"""The beginning of a backward through one call of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.calls import Call
from paradyse.distributed.facts import NO_SYNC
from paradyse.torch_private import at_end_of_backward, current_backward
from paradyse.weights.no_sync import AT_ONCE, GradientSync


def begin_backward(
    call: Call | None, sync: GradientSync, output: str, grad: Tensor, compares: bool = False
) -> None:
    """A hook of an output, before backward computes anything else: ranks are told.

    Args:
        call: whose output it is; None where ranks are not compared.
        sync: of the call.
        output: its name.
        grad: its gradient.
        compares: backward sends nothing before it compares gradients that every rank has whole, and
            tells of itself then.
    Raises:
        NotImplementedError: backward makes a graph of its own (``create_graph=True``).
        ValueError, DroppedCallError: as ``Call.backward``.
    """
    refuse_second_derivatives("a model that is split over ranks")
    state = sync.begin(call)
    if call is not None:
        call.backward(output, {NO_SYNC: state}, at_once=not compares or state != AT_ONCE)


def refuse_second_derivatives(what: str) -> None:
    """Within a backward, ``what`` of which none can be made.

    Raises:
        NotImplementedError: this one makes a graph of its own (``create_graph=True``).
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"double backward (create_graph=True) through {what} is not supported: its second "
            "derivatives would be wrong. Call backward without create_graph, or compute what needs "
            "it, such as a gradient penalty, with a copy of the model that is neither compiled nor "
            "sharded"
        )


def refuse_inside_backward() -> None:
    """As a graph is compiled that reads no weight, of which ranks would compare the inputs.

    Raises:
        RuntimeError: it is a part of a backward, as where ``backward()`` is called inside the
            function that was compiled: Dynamo follows what the engine calls, too.
    """
    if current_backward() != -1 and not torch.is_grad_enabled():  # it is, where calls run again
        raise RuntimeError(
            "backward() was called inside a function compiled by this backend, or by another one "
            'on what this one gave: compile the model, torch.compile(model, backend="paradyse"), '
            "and call it and backward() outside"
        )


class BeginOnce:
    """``begin_backward`` of one call in a group, for the first output that each backward comes to.
    On one rank gradients of the loss pass through the logits, and on several they do not; groups of
    all sizes are to tell the same, and have other names for outputs.

    Args:
        call, sync: as of ``begin_backward``.
    """

    def __init__(self, call: Call | None, sync: GradientSync) -> None:
        self._call, self._sync, self._has_begun = call, sync, False

    def __call__(self, grad: Tensor) -> None:
        """A hook of an output, whose gradient is ``grad``."""
        if not self._has_begun:
            self._has_begun = True
            at_end_of_backward(self._end)
            begin_backward(self._call, self._sync, "its outputs", grad)

    def _end(self) -> None:
        self._has_begun = False


def send_kept(call: Call, sync: GradientSync, outputs: Sequence[Any]) -> None:
    """Have a backward through a call that every rank computes whole send the gradients that
    ``no_sync`` has kept back, if there are any then: of its own it sends nothing.

    Args:
        call, sync: as of ``begin_backward``.
        outputs: of the call.
    """
    begin = BeginOnce(call, sync)

    def begin_if_kept(grad: Tensor) -> None:
        if sync.sends:
            begin(grad)

    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(begin_if_kept)
