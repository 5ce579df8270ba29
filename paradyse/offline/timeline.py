"""A timeline: the bytes that are alive while tensors without memory pass through a block.

``Timeline`` records, after every operator, what the storages made so far take. The same block at
another length does the same operators on other sizes, each a polynomial of the length, so the
timelines of a few lengths give that of any length (``Growth``), and its peak exactly, although the
moment of the peak may differ between lengths.

What is made while a tile of tokens is computed is apart: it grows with the tile, and all else with
the tokens that a rank holds.

Buffers of operators that communicate count. Attention kernels are taken to allocate their results
alone, as a flash kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from paradyse.runtime.saved_memory import storages
from paradyse.strategies.tiles import inside_a_tile
from paradyse.torch_private import (
    StorageWeakRef,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    storage_key,
    tree_leaves,
)


class Timeline(TorchDispatchMode):
    """Bytes alive after each operator, of storages made since it was entered.

    Args:
        bodies: operator -> a function that computes it by operators that are seen one by one.
    """

    def __init__(self, bodies: Mapping[Any, Callable[..., Any]]):
        super().__init__()
        self.bodies = bodies
        self.alive_bytes: list[int] = []
        self.tile_bytes: list[int] = []
        """Of these, of storages made while a tile was computed."""
        self.flops = 0
        """Operations of matmuls, as ``torch.utils.flop_counter`` counts them."""
        self._made: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._given: set[int] = set()

    def given(self, values: Iterable[Any]) -> None:
        """Declare that ``values`` were there before, so that they do not count."""
        for key in storages(values):
            self._given.add(key)
            self._made.pop(key, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        body = self.bodies.get(func)
        if body is None:
            out = func(*args, **(kwargs or {}))
            count = flop_registry.get(func.overloadpacket)
            self.flops += count(*args, **(kwargs or {}), out_val=out) if count else 0
        else:
            with self:
                out = body(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x):
                storage, key = x.untyped_storage(), storage_key(x)
                if key not in self._given and key not in self._made:
                    self._made[key] = (StorageWeakRef(storage), storage.nbytes(), inside_a_tile())
        self.mark()
        return out

    def mark(self) -> None:
        """Record what is alive now."""
        for key in [k for k, (ref, *_) in self._made.items() if ref.expired()]:
            del self._made[key]
        self.alive_bytes.append(sum(n for _, n, _ in self._made.values()))
        self.tile_bytes.append(sum(n for _, n, in_tile in self._made.values() if in_tile))


@dataclass(frozen=True)
class Sample:
    """One block (or piece) under one strategy at one length, forward and backward."""

    saved_bytes: int
    timeline: tuple[int, ...]
    """Bytes alive after each operator; of tensors from before, only the block's input counts. Those
    made while a tile was computed are apart."""
    gathered_bytes: int
    """Bytes of weights that the block takes whole."""
    flops: int
    """Operations of its matmuls."""
    in_tile: tuple[int, ...] = ()
    """Beside each of ``timeline``, what was made while a tile was computed; (): there are none."""


@dataclass(frozen=True)
class Growth:
    """Saved bytes and timeline as polynomials of the tokens a rank holds of one sequence."""

    saved: np.ndarray
    """Coefficients [degree + 1], lowest first."""
    timeline: np.ndarray
    """Coefficients [operators, degree + 1]."""
    flops: np.ndarray
    """Coefficients [degree + 1]."""
    gathered_bytes: int
    """Bytes of weights that the block takes whole; sharded ones are freed after it."""
    in_tile: np.ndarray | None = None
    """Coefficients [operators, degree + 1] of what is beside ``timeline`` in tiles, by the tokens
    of all tiles that were measured."""

    def flops_at(self, tokens: int, num_sequences: int = 1) -> float:
        """Operations of the matmuls, forward and backward, with ``tokens`` on a rank, of
        ``num_sequences`` of equal length."""
        return float(self.flops @ _powers(tokens, num_sequences, len(self.flops)))

    def at(self, tokens: int, in_tiles: int = 0, num_sequences: int = 1) -> tuple[int, int]:
        """Saved bytes and peak bytes with ``tokens`` on a rank.

        Args:
            in_tiles: tokens of as many tiles as were measured.
            num_sequences: of equal length, which share these tokens; each has its own scores.
        """
        powers = _powers(tokens, num_sequences, len(self.saved))
        held = self.timeline @ powers
        if self.in_tile is not None:
            held = held + self.in_tile @ _powers(in_tiles, num_sequences, len(self.saved))
        return round(float(self.saved @ powers)), round(float(held.max()))


def _powers(tokens: int, num_sequences: int, count: int) -> np.ndarray:
    """The sums over sequences of 1, tokens, tokens^2 ...: ``count`` of them. What is the same at
    any length, such as copies of weights, is there once."""
    of_each = (tokens / num_sequences) ** np.arange(count)
    return of_each * np.where(np.arange(count) > 0, num_sequences, 1)


EXACT = 1e-6
"""By which share the last sample may be off: the rounding of the solution."""


def fit_growth(tokens: Sequence[int], samples: Sequence[Sample]) -> Growth:
    """The polynomials of degree ``len(samples) - 2`` through all samples but the last, which they
    must predict.

    Args:
        tokens: how many a rank holds in each sample.
        samples: of one block under one strategy.
    Raises:
        ValueError: the samples did not do the same operators, or the last one is off.
    """
    lengths = sorted({len(s.timeline) for s in samples})
    if len(lengths) > 1:
        raise ValueError(f"not the same operators at {list(tokens)} tokens: {lengths} of them")
    scale = float(tokens[0])  # solved in units of the shortest, so that powers stay small
    at = np.array(tokens, dtype=float) / scale
    powers = np.vander(at, len(samples) - 1, increasing=True)
    rows = [(s.saved_bytes, s.flops, *s.timeline, *s.in_tile) for s in samples]
    values = np.array(rows, dtype=float)
    found = np.linalg.solve(powers[:-1], values[:-1])
    off = np.abs(powers[-1] @ found - values[-1])
    if (off > EXACT * np.abs(values).max(0) + 1).any():
        raise ValueError(f"bytes are no polynomial of the length: off by {off.max():.0f}")
    coefficients = (found / scale ** np.arange(len(found))[:, None]).T
    moments, gathered = lengths[0], samples[-1].gathered_bytes
    timeline, in_tile = np.split(coefficients[2:], [moments])
    if not len(in_tile):
        return Growth(coefficients[0], np.unique(timeline, axis=0), coefficients[1], gathered)
    both = np.unique(np.concatenate([timeline, in_tile], axis=1), axis=0)
    timeline, in_tile = np.split(both, 2, axis=1)
    return Growth(coefficients[0], timeline, coefficients[1], gathered, in_tile)
