"""One rank fails in the middle of a call: all ranks drop the call, and are in step again.

The rank that fails has not sent what the others wait for, or will wait for. All tell each other
how many messages they have started; whoever has started fewer takes part in the rest with
unspecified values, and what is received is dropped with the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paradyse.distributed.axis import Axis, device_of
from paradyse.distributed.collectives import CollectiveError, Message, Started, traffic

_LACK_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""In the text of plain ``RuntimeError``s: of the CPU, of pinned pages, and of what takes a GPU's
memory beside PyTorch's allocator."""


class DroppedCallError(Exception):
    """All ranks have dropped the call and are in step."""

    failures: tuple[Failure, ...] = ()
    """What was told of, where a rank failed."""
    untold: bool = False
    """It comes from ranks that compute something else beside; those that share this call are to be
    told."""


class RanksDisagreeError(DroppedCallError, ValueError):
    """Ranks do different things, or hold different ones; the text says which does what."""


class RankFailedError(DroppedCallError, CollectiveError):
    """Another rank raised an error; the text says which rank, where and what."""


class OutOfMemoryError(DroppedCallError, torch.OutOfMemoryError):
    """A rank ran out of memory; the text says which and where. It is raised on every rank.

    Args:
        text: the message.
        may_repeat: every rank is still in the call that failed, so that all may make it again.
    """

    def __init__(self, text: str, may_repeat: bool = False) -> None:
        super().__init__(text)
        self.may_repeat = may_repeat


@dataclass(frozen=True)
class Failure:
    """What one rank tells the others."""

    rank: int
    """In the world."""
    doing: str
    place: str
    """The block, where it is known."""
    error: str
    out_of_memory: bool
    holds_graph: bool = False
    """The rank lets go of what it computed only once its caller has: in backward."""
    is_late: bool = False
    """Other ranks may have ended the call before."""
    call: str = ""
    """The name of the call that failed, in forward or in backward."""
    elsewhere: bool = False
    """In a group of ranks that computes other sequences than the group that hears of it."""

    def __str__(self) -> str:
        what = "ran out of memory" if self.out_of_memory else "failed"
        return f"rank {self.rank} {what} in {self.doing}{self.place} ({self.error})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory could not be had, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(text in str(error) for text in _LACK_MEMORY)


def error_of(failures: Sequence[Failure]) -> DroppedCallError:
    """What every rank raises for ``failures``, of one or several ranks."""
    told = "; ".join(dict.fromkeys(map(str, failures)))
    step = "All ranks dropped this call and are in step"
    error: DroppedCallError = RankFailedError(f"{told}. {step}; see that rank's own error")
    if any(f.out_of_memory for f in failures):
        error = OutOfMemoryError(
            # accelerate's find_executable_batch_size looks for " out of memory."
            f"{told}: out of memory. {step}: a loop may catch torch.OutOfMemoryError on every "
            "rank, clear the gradients and go on with the next batch; shorter or fewer sequences, "
            "more ranks or paradyse.shard need less memory",
            may_repeat=not any(f.is_late for f in failures),
        )
    error.failures = tuple(failures)
    return error


class Dropped:
    """What this rank has dropped, in the session of the world."""

    def __init__(self) -> None:
        self.failures: tuple[Failure, ...] = ()
        """Of what was dropped last; none where ranks disagreed."""
        self.times: Counter[tuple[int, ...]] = Counter()
        """By the ranks that dropped something together: how often."""
        self.heard: Failure | None = None
        """In another group of ranks, which ends what this one computes."""

    def note(self, group: Any, failures: Sequence[Failure] = ()) -> None:
        """The ranks of the process ``group`` have dropped a call, for ``failures``."""
        self.failures = tuple(failures)
        self.times[tuple(dist.get_process_group_ranks(group))] += 1


def num_out_of_memory() -> int:
    """How often this process could not have memory on a GPU."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return sum(int(torch.cuda.memory_stats(i).get("num_ooms", 0)) for i in gpus)


def lacked_memory(before: int) -> bool:
    """Whether a backward that failed has run out of memory, by ``num_out_of_memory`` of ``before``
    it. On a CPU nobody counts: there it is what has most likely happened to one rank alone."""
    return not torch.cuda.is_available() or num_out_of_memory() > before


def first_line(error: BaseException) -> str:
    """Kind and text of ``error``, for ``Failure.error``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def started(axes: Sequence[Axis]) -> dict[str, tuple[int, list[Message]]]:
    """The messages that this rank has started on ``axes``, by their names: how many in all, and
    the latest of them."""
    held = {a.name: a.session.of(Started) for a in axes}
    return {name: (s.count, list(s.latest)) for name, s in held.items()}


def catch_up(axis: Axis, told: Sequence[Mapping[str, tuple[int, list[Message]]]]) -> None:
    """Take part in the messages on ``axis`` that another rank has started and this one has not.

    Where the host does not wait for messages, as on NCCL, the others may have started all of a
    call. They go on a stream of their own: those of one axis wait for no message of another, which
    another rank may have started before.

    Args:
        told: what ``started`` gives on every rank that is in the same call.
    Raises:
        CollectiveError: some of them nobody remembers.
    """
    count, latest = max((t[axis.name] for t in told if axis.name in t), key=lambda s: s[0])
    missing = count - axis.session.of(Started).count
    if missing > len(latest):
        raise CollectiveError(
            f"it is {missing} messages behind, and the latest {len(latest)} are known"
        )
    device = device_of(axis.group) if missing else torch.device("cpu")
    with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):
        for message in latest[len(latest) - missing :]:
            message.take_part(axis)


def place_of(axis: Axis, block_id: int) -> str:
    """The block ``block_id`` of ``axis`` and its strategy, for ``Failure.place``."""
    block = traffic(axis, block_id)
    return f", block '{block.name}'" + (f" ({block.strategy})" if block.strategy else "")
