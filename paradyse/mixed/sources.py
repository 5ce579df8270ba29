"""Where sequences of mixed lengths come from: a dataset, or batches that are made already.

Of an ``epoch``, by its number, a source gives batches; ``number`` is that of a sequence in it, and
``numbers`` those of several.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paradyse.mixed.sequences import checked, sequences_of

Batch = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers of its sequences, and tokens of each."""


class Samples(Protocol):
    """Sequences by index, such as of a list or of a dataset of HuggingFace's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = Samples | torch.utils.data.Dataset[Any]
"""What has a length, and for each index a sequence. PyTorch's ``Dataset`` declares no length."""


class Source(Protocol):
    """Sequences by number, and which of them are a batch."""

    is_read_by_all: bool
    """Whether every rank goes through the batches; else the first one alone does."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the order of its batches goes by, beside the epoch and what it does not know."""
        ...

    def batches(self, epoch: int) -> Generator[Batch, None, None]:
        """Those of an epoch.

        Raises:
            ValueError: a batch has no sequences, or what they hold makes no sense.
        """
        ...

    def sequence(self, number: int) -> dict[str, Tensor]:
        """Sequence ``number``: "input_ids" [S] and "labels" [S].

        Raises:
            ValueError: it is empty, has other dims, or is not held.
        """
        ...

    def checksum(self, numbers: Sequence[int]) -> int:
        """Of what the sequences hold that a rank has read by itself; 0: there are none."""
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """These sequences are not asked for again."""
        ...


class Dataset:
    """Batches of a dataset, each of its sequences until they have enough tokens.

    Args: as of ``MixedBatches``.
    """

    is_read_by_all = False

    def __init__(self, dataset: Any, tokens_per_step: int, shuffle: bool, seed: int):
        listed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not listed or not len(dataset):
            raise ValueError(
                f"give a dataset with a length of at least 1, not {type(dataset).__name__}; where "
                "it gives whole batches, leave tokens_per_step out"
            )
        if isinstance(tokens_per_step, bool) or not isinstance(tokens_per_step, int):
            raise ValueError(f"tokens_per_step={tokens_per_step!r}: give a whole number")
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={tokens_per_step}: give at least 1")
        self._dataset, self._tokens = dataset, tokens_per_step
        self._shuffle, self._seed = shuffle, seed

    @property
    def facts(self) -> dict[str, Any]:
        order = {"seed": self._seed} if self._shuffle else {}
        number = {"sequences": len(self._dataset), "tokens_per_step": self._tokens}
        return {**number, "shuffle": self._shuffle, **order}

    def batches(self, epoch: int) -> Generator[Batch, None, None]:
        """Sequences of the epoch's order until they have enough tokens, and so on."""
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        numbers, lengths = list[int](), list[int]()
        for i in order:
            length = len(self.sequence(i)["input_ids"])
            if numbers and sum(lengths) + length > self._tokens:
                yield tuple(numbers), tuple(lengths)
                numbers, lengths = [], []
            numbers.append(i)
            lengths.append(length)
        if numbers:
            yield tuple(numbers), tuple(lengths)

    def sequence(self, number: int) -> dict[str, Tensor]:
        return checked(self._dataset[number], number)

    def checksum(self, numbers: Sequence[int]) -> int:
        return 0

    def forget(self, numbers: Sequence[int]) -> None:
        pass


class Loader:
    """Batches that a loader gives, equal ones on all ranks. Its sequences are numbered in each
    epoch anew.

    Args:
        loader: of batches as ``sequences_of`` takes them; each pass over it is an epoch.
    """

    is_read_by_all = True

    def __init__(self, loader: Any):
        if not hasattr(loader, "__iter__"):
            raise ValueError(
                f"give tokens_per_step, or a loader of batches, not {type(loader).__name__}"
            )
        self._loader: Iterable[Any] = loader
        self._held: dict[int, dict[str, Tensor]] = {}

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    def batches(self, epoch: int) -> Generator[Batch, None, None]:
        """The loader's.

        Raises:
            ValueError: as ``sequences_of``; or a batch has no sequences.
        """
        self._held.clear()
        first = 0
        for batch in self._loader:
            found = [checked(s, i) for i, s in enumerate(sequences_of(batch), first)]
            if not found:
                raise ValueError("a batch without sequences: give at least one")
            numbers = tuple(range(first, first + len(found)))
            self._held.update(zip(numbers, found, strict=True))
            first += len(found)
            yield numbers, tuple(len(s["input_ids"]) for s in found)

    def sequence(self, number: int) -> dict[str, Tensor]:
        """One of a batch that is not forgotten.

        Raises:
            ValueError: it is.
        """
        if number not in self._held:
            raise ValueError(
                f"sequence {number} is not in a batch under way: give MixedBatches a dataset, such "
                "as paradyse.sequences_of(batch), and tokens_per_step"
            )
        return self._held[number]

    def checksum(self, numbers: Sequence[int]) -> int:
        found = 0
        for number in numbers:
            for x in self._held[number].values():
                found = zlib.crc32(x.cpu().contiguous().numpy().tobytes(), found)
        return found

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
