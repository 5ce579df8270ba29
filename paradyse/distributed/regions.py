"""Named regions: what a profiler's trace shows beside operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from paradyse.torch_private import profiler_is_on

_NOTHING: AbstractContextManager[Any] = nullcontext()

WAIT = "wait"
"""The first word of regions in which a rank waits for a message."""


def region(*words: str) -> AbstractContextManager[Any]:
    """Inside, the trace of a profiler has a region named by ``words``, without those that are
    empty, such as ``layers.0.attention megatron_cz`` or ``wait all_gather weights
    layers.0.mlp megatron_cz``. Where no profiler is on this costs a look at a flag."""
    return record_function(" ".join(filter(None, words))) if profiler_is_on() else _NOTHING
