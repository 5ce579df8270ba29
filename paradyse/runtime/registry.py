"""The captures of this process, found by the parameters of their model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_CAPTURES: list[weakref.ref[Any]] = []


def register(capture: Any) -> None:
    """Have ``captures_of`` find ``capture`` (a ``backend.Capture``) for as long as it lives."""
    _CAPTURES.append(weakref.ref(capture))


def captures_of(model: Any, whole: bool = False) -> Iterator[Any]:
    """The captures made so far of graphs with ``model``'s parameters.

    Args:
        whole: those of which nothing is split; else those that are programs.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"give the compiled model, not {type(model).__name__}")
    mine = {id(p) for p in model.parameters()}
    for ref in list(_CAPTURES):
        capture = ref()
        if capture is None:
            _CAPTURES.remove(ref)
        elif whole == (capture.fallback is not None) and any(
            id(p()) in mine for p in capture.parameters if p() is not None
        ):
            yield capture
