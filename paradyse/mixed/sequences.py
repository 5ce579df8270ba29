"""The sequences of a batch that was padded or packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.token_scores import IGNORED

_BY_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens")
_NEEDLESS = ("cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")
"""What collators add that follows from the rest."""

_KNOWN = "sequences of mixed lengths have input_ids and labels alone; leave it out"


def sequences_of(
    batch: Mapping[str, Any] | Iterable[dict[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """The sequences of ``batch`` one by one, without padding.

    Args:
        batch: a list of samples, each a dict of "input_ids" [S] and what there is of the same by
            token below, one dim less; or a dict of "input_ids" [B, S] and what there is of
            "labels" [B, S], "attention_mask" [B, S] (0: padding, on either side), "position_ids"
            [B, S] or [1, S]
            (0, 1, 2, .. in each sequence) and "cu_seq_lens_q" [N + 1] (bounds of the sequences of
            the one row). Without bounds and without positions a row is a sequence.
    Returns:
        Of each sequence "input_ids" [S] and "labels" [S], in the batch's order.
    Raises:
        ValueError: the batch has no ids, or another argument, or a sample another array, or as many
            values as tokens; shapes do not match, padding is inside a sequence or is a target,
            positions do not count from 0, or bounds make no sense.

    Example:

        ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        sequences = paradyse.sequences_of({"input_ids": ids, "attention_mask": mask})
        assert [len(s["input_ids"]) for s in sequences] == [3, 2]
    """
    if not isinstance(batch, Mapping):
        return [s for i, sample in enumerate(batch) for s in _of_sample(sample, f"sequence {i}")]
    unknown = sorted({*batch} - {*_BY_TOKEN, *_BOUNDS, *_NEEDLESS})
    if unknown:
        raise ValueError(f"a batch with {', '.join(unknown)}: {_KNOWN}")
    ids = _ids_of(batch, "a batch")
    if ids.ndim != 2:
        raise ValueError(
            f"input_ids {list(ids.shape)}: give [batch, tokens]; or, where these are the samples "
            "of a dataset, give MixedBatches tokens_per_step"
        )
    there = {name: batch[name] for name in _BY_TOKEN if batch.get(name) is not None}
    rows = {name: _like(ids, name, x) for name, x in there.items()}
    bounds = next((batch[name] for name in _BOUNDS if name in batch), None)
    if bounds is not None:
        return _between(rows, torch.as_tensor(bounds).tolist())
    found = list[dict[str, Tensor]]()
    for number in range(len(ids)):
        row = _without_padding({name: x[number] for name, x in rows.items()}, f"row {number}")
        found += _cut(row, _starts(row, f"row {number}"))
    return found


def checked(given: Mapping[str, Any], number: int) -> dict[str, Tensor]:
    """A sequence as ``given``, with labels and without padding.

    Args:
        given: a sample as ``sequences_of`` takes it.
        number: of the sequence, for what is told of it.
    Returns:
        "input_ids" [S] and "labels" [S].
    Raises:
        ValueError: as ``sequences_of``; or it is no sequence of at least 1 token, but none or more.
    """
    found = _of_sample(given, f"sequence {number}")
    if len(found) != 1:
        what = "padding alone" if not found else f"{len(found)} sequences, by their position_ids"
        raise ValueError(
            f"sequence {number} is {what}: take samples apart by paradyse.sequences_of first"
        )
    return found[0]


def _of_sample(given: Mapping[str, Any], where: str) -> list[dict[str, Tensor]]:
    """The sequences of a sample: one, unless positions start again, or all is padding."""
    ids = _ids_of(given, where)
    there = [name for name in _BY_TOKEN if given.get(name) is not None]
    row = {name: torch.as_tensor(given[name]) for name in there}
    if ids.ndim != 1 or not len(ids) or any(x.shape != ids.shape for x in row.values()):
        shapes = " and ".join(f"{name} {list(x.shape)}" for name, x in row.items())
        raise ValueError(
            f"{where} has {shapes}: give all with the same one dim, of at least 1 token"
        )
    row = {name: _integers(x, f"{where} has {name}") for name, x in row.items()}
    unknown = sorted(name for name in {*given} - {*_BY_TOKEN} if _is_for_model(given[name], ids))
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}: {_KNOWN}")
    row = _without_padding(row, where)
    return _cut(row, _starts(row, where))


def _ids_of(given: Mapping[str, Any], where: str) -> Tensor:
    if "input_ids" not in given:
        raise ValueError(
            f"{where} has no input_ids, but {', '.join(map(str, given)) or 'nothing'}: tokenize "
            "it first"
        )
    return torch.as_tensor(given["input_ids"])


def _is_for_model(value: Any, ids: Tensor) -> bool:
    """Whether ``value`` may be an argument of a model: an array, or something for each of ``ids``.
    Texts and numbers are not."""
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return False
    return bool(value.ndim > 0 if hasattr(value, "ndim") else len(value) == len(ids))


def _like(ids: Tensor, name: str, given: Any) -> Tensor:
    """``given`` [B, S], as large as ``ids``, also where it has one row for all."""
    x = torch.as_tensor(given)
    if x.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"{name} {list(x.shape)}: give {list(ids.shape)}, as input_ids have")
    return _integers(x, name).expand(ids.shape)


def _integers(x: Tensor, what: str) -> Tensor:
    """``x`` as int64, which losses ask of labels; memory maps often have 16 bits.

    Raises:
        ValueError: they are no whole numbers.
    """
    if x.is_floating_point():
        raise ValueError(f"{what} of {x.dtype}: give whole numbers")
    return x.long()


def _between(rows: Mapping[str, Tensor], bounds: list[int]) -> list[dict[str, Tensor]]:
    """The sequences between ``bounds`` of the one row of ``rows``."""
    count, length = rows["input_ids"].shape
    ascend = all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
    if count != 1 or bounds[:1] != [0] or bounds[-1] != length or not ascend:
        raise ValueError(
            f"cu_seq_lens {bounds} of input_ids {[count, length]}: give ascending numbers from 0 "
            "to the length of the one row"
        )
    if not bool(rows.get("attention_mask", torch.ones(1)).all()):
        raise ValueError("cu_seq_lens and padding: leave the padding, or the bounds, out")
    return _cut({name: x[0] for name, x in rows.items()}, bounds)


def _without_padding(row: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """``row`` of a batch where its attention_mask is 1."""
    if "attention_mask" not in row:
        return row
    mask = row["attention_mask"]
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{where}: attention_mask has other values than 0 and 1")
    (seen,) = mask.nonzero(as_tuple=True)
    if len(seen) and len(seen) != seen[-1] - seen[0] + 1:
        raise ValueError(f"{where} has padding inside: pad on the left or on the right")
    if "labels" in row and bool((row["labels"][mask == 0] != IGNORED).any()):
        raise ValueError(f"{where} has labels at padding: give {IGNORED} there")
    return {name: x[seen] for name, x in row.items()}


def _starts(row: Mapping[str, Tensor], where: str) -> list[int]:
    """Where the sequences of ``row`` start, by its positions, and where the last one ends."""
    length = len(row["input_ids"])
    if "position_ids" not in row:
        return [0, length]
    places = row["position_ids"]
    starts = [*(places == 0).nonzero()[:, 0].tolist(), length]
    counted = [torch.arange(b - a) for a, b in zip(starts, starts[1:], strict=False)]
    if not torch.equal(places.cpu(), torch.cat([*counted, torch.arange(0)])):
        raise ValueError(f"{where}: position_ids do not count from 0 in each sequence")
    return starts


def _cut(row: Mapping[str, Tensor], bounds: Sequence[int]) -> list[dict[str, Tensor]]:
    """``row`` between ``bounds``, without parts that are empty."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    pairs = zip(bounds, bounds[1:], strict=False)
    return [{"input_ids": ids[a:b], "labels": labels[a:b]} for a, b in pairs if a < b]
