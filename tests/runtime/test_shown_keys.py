"""A mask of keys among the inputs that shows a sequence none is an error that names both."""

from __future__ import annotations

import encoder_decoder
import pytest
import torch
from torch import fx

from paradyse.runtime.shown_keys import ShownKeys


def test_a_sequence_without_keys_is_named() -> None:
    graph = fx.Graph()
    arguments = [graph.placeholder(name) for name in ("ids", "mask")]
    arguments[1].meta["shows_keys"] = True
    keys = ShownKeys(arguments)
    ids, mask = torch.zeros(3, 4, dtype=torch.int64), torch.eye(3, 4, dtype=torch.int64)
    keys.check([ids, mask], ["ids", "attention_mask"])
    mask[1] = 0
    with pytest.raises(ValueError, match="sequence 1 of .* this call .*input attention_mask"):
        keys.check([ids, mask], ["ids", "attention_mask"])


@pytest.mark.slow
def test_a_model_that_hides_with_a_finite_number() -> None:
    model = encoder_decoder.make("T5")
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = encoder_decoder.batch_of("T5", 7, 5, "padded")
    compiled(**batch).loss.backward()
    batch["attention_mask"][0] = 0
    with pytest.raises(ValueError, match="sequence 0 of the batch .* no visible key"):
        compiled(**batch)
