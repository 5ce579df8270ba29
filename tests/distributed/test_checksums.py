"""Numbers that stand for tensors."""

from __future__ import annotations

import torch

from paradyse.distributed.checksums import checksum


def test_checksum_tells_numbers_apart() -> None:
    """Numbers come as tensors of no dim, such as a count of tokens."""
    assert checksum([torch.tensor(2.5)]) == checksum([torch.tensor(2.5)])
    assert checksum([torch.tensor(2.5)]) != checksum([torch.tensor(2.0)])
    assert checksum([torch.tensor([1, 2])]) != checksum([torch.tensor([2, 1])])
