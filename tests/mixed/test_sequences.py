"""Padded and packed batches are taken apart into the sequences that were put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_training import dataset_of
from torch import Tensor

import paradyse
from paradyse.mixed.sequences import checked
from paradyse.token_scores import IGNORED

LENGTHS = [5, 2, 7, 1, 3]


def padded(samples: list[dict[str, Tensor]], side: str = "right") -> dict[str, Tensor]:
    """One batch [B, S] with its mask; labels of padding are ignored."""
    longest = max(len(s["input_ids"]) for s in samples)
    fill = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    rows: dict[str, list[Tensor]] = {name: [] for name in fill}
    for s in samples:
        row = {**s, "attention_mask": torch.ones_like(s["input_ids"])}
        for name, value in fill.items():
            more = torch.full((longest - len(row[name]),), value)
            parts = [row[name], more] if side == "right" else [more, row[name]]
            rows[name].append(torch.cat(parts))
    return {name: torch.stack(of) for name, of in rows.items()}


def packed(samples: list[dict[str, Tensor]], bounds: bool) -> dict[str, Any]:
    """One row by HuggingFace's own collator."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=bounds, return_position_ids=not bounds
    )
    return dict(collate([{k: v.tolist() for k, v in s.items()} for s in samples]))


def same(found: list[dict[str, Tensor]], want: list[dict[str, Tensor]], first: bool) -> bool:
    """Whether tokens and labels are equal; ``first``: with the first label of each sequence."""
    start = 0 if first else 1
    return len(found) == len(want) and all(
        torch.equal(f["input_ids"], w["input_ids"])
        and torch.equal(f["labels"][start:], w["labels"][start:])
        for f, w in zip(found, want, strict=True)
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("labels", [True, False])
def test_padded(side: str, labels: bool) -> None:
    want = dataset_of(LENGTHS)
    batch = padded(want, side)
    if not labels:
        del batch["labels"]
        want = [{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in want]
    assert same(paradyse.sequences_of(batch), want, True)


@pytest.mark.parametrize("bounds", [True, False])
def test_packed(bounds: bool) -> None:
    want = dataset_of(LENGTHS)
    assert same(paradyse.sequences_of(packed(want, bounds)), want, False)


def test_padded_rows_of_packed_sequences() -> None:
    want = dataset_of(LENGTHS)
    rows = []
    for of in (want[:2], want[2:4], want[4:]):
        row = {name: torch.cat([s[name] for s in of]) for name in of[0]}
        row["position_ids"] = torch.cat([torch.arange(len(s["input_ids"])) for s in of])
        rows.append(row)
    batch = padded([{k: r[k] for k in ("input_ids", "labels")} for r in rows])
    places = [r["position_ids"] for r in rows]
    batch["position_ids"] = torch.nn.utils.rnn.pad_sequence(places, batch_first=True)
    assert same(paradyse.sequences_of(batch), want, True)


def test_rows_without_a_mask_are_sequences() -> None:
    ids = torch.arange(6).view(2, 3)
    assert [s["input_ids"].tolist() for s in paradyse.sequences_of({"input_ids": ids})] == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_samples_are_left_as_they_are() -> None:
    want = dataset_of(LENGTHS)
    assert same(paradyse.sequences_of(want), want, True)


def test_a_row_that_is_all_padding_has_no_sequence() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    batch = {"input_ids": torch.ones(2, 2, dtype=torch.int64), "attention_mask": mask}
    assert len(paradyse.sequences_of(batch)) == 1


def test_samples_are_taken_apart_as_rows_are() -> None:
    """Tokenized to one length, and packed; what is no token of theirs may stand beside it."""
    rows = padded(dataset_of(LENGTHS))
    samples = [
        {name: x[i].tolist() for name, x in rows.items()} | {"text": "x" * 7, "number": i}
        for i in range(len(LENGTHS))
    ]
    want = dataset_of(LENGTHS)
    assert same(paradyse.sequences_of(samples), want, True)
    assert same([checked(s, i) for i, s in enumerate(samples)], want, True)
    packed_sample = {k: x[0] for k, x in packed(want, False).items()}
    assert same(paradyse.sequences_of([packed_sample]), want, False)
    with pytest.raises(ValueError, match="sequence 3 is 5 sequences, by their position_ids"):
        checked(packed_sample, 3)


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "segments": ({"token_type_ids": [0, 0, 1]}, "sequence 4 has token_type_ids: sequences of"),
    "pictures": ({"pixel_values": torch.ones(2, 5)}, "sequence 4 has pixel_values: sequences of"),
    "padding inside": ({"attention_mask": [1, 0, 1]}, "sequence 4 has padding inside"),
    "a longer mask": ({"attention_mask": [1] * 4}, r"input_ids \[3\] and attention_mask \[4\]"),
    "padding alone": ({"attention_mask": [0] * 3}, "sequence 4 is padding alone"),
    "no token": ({"input_ids": []}, r"input_ids \[0\]: give all with the same one dim"),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_samples_that_are_refused(what: str) -> None:
    more, words = SAMPLES[what]
    with pytest.raises(ValueError, match=words):
        checked({"input_ids": [5, 6, 7], **more}, 4)


def test_what_is_not_tokenized_is_refused() -> None:
    for given in ([{"text": "hello"}], {"labels": torch.ones(1, 3, dtype=torch.int64)}):
        with pytest.raises(ValueError, match=r"has no input_ids, but (text|labels): tokenize"):
            paradyse.sequences_of(given)


IDS = torch.ones(2, 4, dtype=torch.int64)
ROW = IDS[:1]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pictures": ({"input_ids": IDS, "pixel_values": IDS}, "a batch with pixel_values"),
    "one sample": ({"input_ids": IDS[0]}, r"input_ids \[4\]: give \[batch, tokens\]"),
    "other labels": ({"input_ids": IDS, "labels": IDS[:, :3]}, r"labels \[2, 3\]: give \[2, 4\]"),
    "a mask over pairs": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)},
        r"attention_mask \[2, 1, 4, 4\]: give \[2, 4\]",
    ),
    "numbered documents": (
        {"input_ids": ROW, "attention_mask": torch.tensor([[1, 1, 2, 2]])},
        "row 0: attention_mask has other values",
    ),
    "padding inside": (
        {"input_ids": ROW, "attention_mask": torch.tensor([[1, 0, 1, 1]])},
        "row 0 has padding inside",
    ),
    "padding to learn from": (
        {"input_ids": ROW, "labels": ROW, "attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "row 0 has labels at padding",
    ),
    "positions from one": (
        {"input_ids": ROW, "position_ids": torch.tensor([[1, 2, 3, 4]])},
        "row 0: position_ids do not count from 0",
    ),
    "a gap in positions": (
        {"input_ids": ROW, "position_ids": torch.tensor([[0, 1, 3, 4]])},
        "row 0: position_ids do not count from 0",
    ),
    "bounds of two rows": (
        {"input_ids": IDS, "cu_seq_lens_q": [0, 4]},
        r"cu_seq_lens \[0, 4\] of input_ids \[2, 4\]",
    ),
    "bounds that end early": (
        {"input_ids": ROW, "cu_seq_lens_q": [0, 2, 3]},
        r"cu_seq_lens \[0, 2, 3\]",
    ),
    "bounds and padding": (
        {"input_ids": ROW, "cu_seq_lens": [0, 4], "attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "cu_seq_lens and padding",
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_refused(what: str) -> None:
    batch, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        paradyse.sequences_of(batch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16])
def test_numbers_of_few_bits_and_no_labels(dtype: torch.dtype) -> None:
    """As memory maps and datasets have them."""
    sample = {"input_ids": torch.arange(5).to(dtype), "labels": None}
    batch = {name: x if x is None else x[None] for name, x in sample.items()}
    for found in (checked(sample, 3), paradyse.sequences_of(batch)[0]):
        assert {x.dtype for x in found.values()} == {torch.int64}
        assert found["labels"].tolist() == [0, 1, 2, 3, 4]


def test_numbers_that_are_not_whole_are_refused() -> None:
    sample = {"input_ids": torch.arange(5), "labels": torch.ones(5)}
    with pytest.raises(ValueError, match=r"sequence 3 has labels of torch.float32: give whole"):
        checked(sample, 3)
