"""A backward under way: whether it came to its end, and what to take back where it did not."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from paradyse.distributed.collectives import CollectiveError
from paradyse.distributed.failures import DroppedCallError, lacked_memory, num_out_of_memory
from paradyse.torch_private import DisableTorchFunctionSubclass

RUNNING, ENDED, FAILED = "running", "ended", "failed"


def doing_backward(call: Any, outputs: Sequence[str]) -> str:
    """What ranks that run backward of ``call`` from ``outputs`` are doing, as errors say it."""
    return f"runs backward of {call.name} from {', '.join(outputs)}"


class Backward:
    """Held by a backward under way, which calls it at its end. One that is let go of before has
    failed on this rank: autograd has no other word for that."""

    def __init__(self, call: Any) -> None:
        self.call, self.state = call, RUNNING
        self.outputs: list[str] = []
        """Where gradients came to, of which the others were not told."""
        self.common: Mapping[str, Any] = {}
        """What they are to be told with these."""
        self.has_told = False
        """Whether the others were told that nothing is left to compute here."""
        held = (p() for p in call.parameters)
        with DisableTorchFunctionSubclass():
            self._without_gradient = [
                weakref.ref(p) for p in held if p is not None and p.grad is None
            ]
        self._num_out_of_memory = num_out_of_memory()

    def __call__(self) -> None:
        if self.state != RUNNING:  # another one of this backward was first
            return
        try:
            self.call.agreement.end_backward(self)
        except DroppedCallError:
            self._restore()
            raise

    def __del__(self) -> None:
        if self.state == RUNNING:
            with contextlib.suppress(DroppedCallError, CollectiveError):
                no_memory = lacked_memory(self._num_out_of_memory)
                self.call.agreement.fail_backward(self.call, no_memory)
        if self.state != ENDED:
            self._restore()

    def _restore(self) -> None:
        """Take back the gradients that this backward was the first to give."""
        self.state = ENDED
        for p in (p() for p in self._without_gradient):
            if p is not None:
                p.grad = None
