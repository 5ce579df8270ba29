"""Losses of logits of which ranks have some columns: how much of 16 bits they keep."""

from __future__ import annotations

import pytest
import torch

from paradyse.strategies.split_losses import Columns, Stretch, split_log_softmax

WORDS = 200
ALONE = Columns(Stretch(0, WORDS, WORDS), to_all=lambda x: x, to_owners=lambda x: x[..., None])
"""Of one rank, which has all."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_are_rounded_once(dtype: torch.dtype) -> None:
    """As PyTorch's: of a likely word the logit and the log-sum-exp are large, their difference is
    not."""
    logits = (torch.randn(16, WORDS) * 2 + 12).to(dtype)
    logits[:, 0] = 24
    exact = logits.double().log_softmax(-1)
    got = split_log_softmax(ALONE, logits, -1)
    assert got.dtype == dtype
    torch.testing.assert_close(got, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert split_log_softmax(ALONE, logits, -1, torch.float32).dtype == torch.float32
