"""Masks of keys among a program's inputs: each must show every sequence a key.

A model that hides keys with a finite number lets a query attend to all keys alike where all are
hidden. Under padding by an input the passes take it that no sequence is all padding, and that is
looked at before each call: on a GPU without waiting for it, so that the call behind it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.device_events import event_on


class ShownKeys:
    """What of a program's arguments must show keys.

    Args:
        arguments: placeholders of its graph.
    """

    def __init__(self, arguments: Sequence[fx.Node]) -> None:
        self.places = tuple(i for i, n in enumerate(arguments) if n.meta.get("shows_keys"))
        self._earlier: dict[int, tuple[Tensor, Any]] = {}
        """Of masks on a GPU: whether the last one showed each sequence keys, and when that is
        known."""

    def check(self, args: Sequence[Any], names: Sequence[Any]) -> None:
        """See that each mask [B, S] among ``args`` shows every sequence a key.

        Args:
            names: of ``args``, for people.
        Raises:
            ValueError: one does not, in this call or, on a GPU, in the one before.
        """
        for i in self.places:
            shown = (args[i] != 0).any(1)
            when = "this call"
            if shown.is_cuda:
                when, shown = "the call before", self._later(i, shown)
            if not bool(shown.all()):
                which = ", ".join(map(str, (~shown).nonzero().flatten().tolist()))
                raise ValueError(
                    f"sequence {which} of the batch of {when} has no visible key in its mask "
                    f"(input {names[i]}): this model lets such queries attend to all keys "
                    "alike, which is not computed here. Leave such sequences out of the batch, or "
                    "give options={'passes_off': ['recover_masks']}, which is slower"
                )

    def _later(self, place: int, shown: Tensor) -> Tensor:
        """What ``shown`` was in the call before, while that of this call is on its way here."""
        known = torch.ones((), dtype=torch.bool)
        if place in self._earlier:
            known, event = self._earlier.pop(place)
            event.synchronize()
        copy = shown.to("cpu", non_blocking=True)
        self._earlier[place] = copy, event_on(shown.device)
        return known
