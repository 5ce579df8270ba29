"""Measurements of a model's blocks on a machine, as a file of JSON lines.

The first line says what was measured on (``Setting``), each further one is one ``Measurement``. Lines
are appended as they are measured, so a run that is killed leaves a file that can be gone on with.
Cost models are fitted when the file is loaded; nothing fitted is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA = 1
"""Version of the file's fields."""

MEASURED, OVER_LIMIT = "measured", "over the memory limit"
"""Outcomes of a measurement."""


@dataclass(frozen=True)
class Setting:
    """What the measurements of one file were made on."""

    versions: Mapping[str, str]
    """Of paradyse, python, torch, triton."""
    device: str
    """Name of the device, such as "NVIDIA H100 80GB HBM3" or "cpu, AMD EPYC, 2 cores"."""
    num_ranks: int
    dtype: str
    """Of weights and activations: "float32", "bfloat16"."""
    sharded: bool
    """Weights at rest were 1/p on each rank."""
    inner: str
    """Compiler of the pieces."""
    machine: Mapping[str, object]
    """Fields of ``cost.Machine``: rates of a rank, latency and bandwidth of each collective."""
    memory_limit: int | None = None
    """Bytes of a rank at which measuring stopped; None: none was set."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class Measurement:
    """One block under one strategy at one workload; times are medians, of the slowest rank."""

    structure: str
    """``BlockSpec.structure``: blocks of equal structure cost the same."""
    kind: str
    """``attention`` or ``mlp``; ``rest`` for all that is not in a block."""
    strategy: str
    """A variant's name (``cost.canonical_strategy``); "" for ``rest``."""
    batch: int
    seq_len: int
    training: bool
    """Whether gradients were computed."""
    outcome: str = MEASURED
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    """Held from forward to backward, weights and their gradients not counted."""
    workspace_bytes: int = 0
    """The most held beyond that while the block ran, forward or backward."""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Per collective, by a rank."""
    messages: Mapping[str, int] = field(default_factory=dict)
    """Per collective."""
