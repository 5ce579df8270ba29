"""A call of a model: what its ranks compare from its forward to the end of its backward."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch.distributed as dist
from torch import nn

from paradyse.distributed.axis import Axis
from paradyse.distributed.collectives import CollectiveError
from paradyse.distributed.failures import (
    DroppedCallError,
    Failure,
    RankFailedError,
    first_line,
    is_out_of_memory,
    place_of,
)
from paradyse.distributed.running_backward import Backward, doing_backward

T = TypeVar("T")


class _Ranks(Protocol):
    """What a call asks of the agreement of its ranks, whose methods these are."""

    def tell(
        self, doing: str, facts: Mapping[str, Any], together: bool, common: Mapping[str, Any]
    ) -> None: ...

    def compare(self, doing: str, facts: Mapping[str, Any], together: bool = False) -> None: ...

    def fail(self, failure: Failure, together: bool) -> NoReturn: ...

    def listen(self) -> None: ...

    def watch_backward(self, call: Call) -> Backward: ...

    def compare_in_backward(self, call: Call, number: int) -> bool: ...

    def near_end_of_backward(self, call: Call) -> None: ...


@dataclass
class Call:
    """One call of a model, of which backward and reads of outputs are compared too."""

    agreement: _Ranks
    name: str
    trains: bool
    parameters: Sequence[weakref.ref[nn.Parameter]]
    at: tuple[Axis, int] | None = None
    """The axis and id of the block that is computed."""
    out_of_memory: Callable[[], None] = lambda: None
    """Called on every rank where one of them ran out of memory."""
    all_ended: bool = False
    """A message has told this rank that all ranks have done the work of the forward, so that they
    need not compare its end."""

    def forward(self, compute: Callable[[], T]) -> T:
        """``compute()``, the outputs of the call, once all ranks have theirs.

        Args:
            compute: runs the graph.

        Raises:
            OutOfMemoryError: a rank ran out of memory.
            RankFailedError: another rank raised something else; on this one its own error.
        """
        self.all_ended = False
        doing = f"forward of {self.name}"
        out = self._attempt(doing, compute, self.trains)
        if not self.all_ended:
            self.agreement.compare(f"ends {doing}", {}, self.trains)
        return out

    def _attempt(self, doing: str, compute: Callable[[], T], together: bool) -> T:
        try:
            return compute()
        except Exception as e:
            known = e.failures[0] if isinstance(e, DroppedCallError) and e.untold else None
            if known is None and isinstance(e, DroppedCallError | CollectiveError):
                raise
            place = "" if self.at is None else place_of(*self.at)
            traceback.clear_frames(e.__traceback__)  # what was computed is in nobody's way now
            what = first_line(e), is_out_of_memory(e)
            late = self.all_ended
            told = Failure(dist.get_rank(), doing, place, *what, is_late=late, call=self.name)
            try:
                self.agreement.fail(known or told, together)
            except RankFailedError:
                raise e from None
        finally:
            self.at = None

    def backward(self, output: str, common: Mapping[str, Any], at_once: bool = True) -> None:
        """Gradients reach ``output``, with what ranks have in ``common``: all come to the end of
        this backward, or none. Where one does something else, all raise before the first message.

        Args:
            output: its name.
            common: as of ``Agreement.compare``.
            at_once: the others are told now; else by ``have_same``, or at the end: no message that
                depends on it comes before.
        """
        if at_once:
            self.agreement.tell(doing_backward(self, [output]), {}, self.trains, common)
        running = self.agreement.watch_backward(self)
        if not at_once:
            running.outputs.append(output)
            running.common = common

    def have_same(self, number: int) -> bool:
        """Whether all ranks have this ``number`` in the backward under way; False where they were
        told of the backward before, as one message tells both.

        Raises:
            ValueError, DroppedCallError: as ``backward`` and ``forward``.
        """
        return self.agreement.compare_in_backward(self, number)

    def nears_end(self) -> None:
        """Right before the backward under way waits for gradients.

        Raises:
            DroppedCallError: as ``forward``.
        """
        self.agreement.near_end_of_backward(self)

    def read(self, output: str, compute: Callable[[], T]) -> T:
        """``output``, once all ranks have it.

        Args:
            compute: gathers it.

        Raises:
            ValueError: on every rank, where another one does something else.
            DroppedCallError: as ``forward``.
        """
        what = f"the output {output} of {self.name}"
        self.all_ended = False
        self.agreement.tell(f"reads {what}", {}, False, {})
        out = self._attempt(f"the read of {what}", compute, together=False)
        self.agreement.compare(f"ends the read of {what}", {})
        return out
