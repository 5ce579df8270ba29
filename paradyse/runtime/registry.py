"""The captures of this process, found by the parameters of their model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from paradyse.distributed.axis import live_axes


class _Captures(list["weakref.ref[Any]"]):
    """Captures of graphs that run on one axis."""


def register(capture: Any) -> None:
    """Have ``captures_of`` find ``capture`` (a ``backend.Capture``) for as long as it and its
    process group live."""
    capture.axis.session.of(_Captures).append(weakref.ref(capture))


def check_compiled(model: torch.nn.Module) -> None:
    """Raise if ``model``, which has run, was compiled with another backend than this.

    Raises:
        ValueError: it was.
    """
    if not any(captures_of(model)) and not any(captures_of(model, whole=True)):
        raise ValueError(
            "the model was compiled with another backend than paradyse, so that nothing sums "
            "gradients over the ranks; give the model as it is, or compile it with "
            'backend="paradyse". Or nothing of it was called through the model itself: call '
            "model(...), not model.forward or a method of it"
        )


def captures_of(model: Any, whole: bool = False) -> Iterator[Any]:
    """The captures so far of graphs that were called with some of ``model``'s parameters.

    Args:
        model: compiled or not.
        whole: find the captures of which nothing is split; else those that are programs.
    Raises:
        ValueError: ``model`` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"give the compiled model, not {type(model).__name__}")
    mine = list(model.parameters())
    for axis in live_axes():
        known = axis.session.of(_Captures)
        alive = [(ref, ref()) for ref in known]
        known[:] = [ref for ref, capture in alive if capture is not None]
        for _, capture in alive:
            if (
                capture is not None
                and whole == (capture.fallback is not None)
                and capture.weights.have(mine)
            ):
                yield capture
