"""Numbers that stand for tensors."""

from __future__ import annotations

import pytest
import torch

from paradyse.distributed.checksums import bit_sums, checksum


def test_checksum_tells_numbers_apart() -> None:
    """Numbers come as tensors of no dim, such as a count of tokens."""
    assert checksum([torch.tensor(2.5)]) == checksum([torch.tensor(2.5)])
    assert checksum([torch.tensor(2.5)]) != checksum([torch.tensor(2.0)])
    assert checksum([torch.tensor([1, 2])]) != checksum([torch.tensor([2, 1])])


def one_bit_up_one_down(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its first element a bit larger and its last one a bit smaller."""
    bits = x.clone().view(torch.int16 if x.itemsize == 2 else torch.int32)
    bits[0] += 1
    bits[-1] -= 1
    return bits.view(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3, 9, 1001])
def test_bit_sums_tell_rounding_apart(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    whole = torch.cat([x.new_zeros(1), x])
    same = bit_sums([x, x.clone(), whole[1:], x.requires_grad_()])
    assert same.shape == (4, 2) and (same == same[0]).all()
    for other in (one_bit_up_one_down(x.detach()), -x, x.flip(0), x * 2, torch.cat([x, x[:1]])):
        assert (bit_sums([other]) != same[0]).any()
