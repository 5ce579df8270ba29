"""What a call of the Triton attention kernels is launched with: tile sizes, constants, pointers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_pairs import BOOL_BIAS, FLOAT_BIAS, NO_BIAS
from paradyse.kernels.flash_tiles import Visibility

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on the CPU (TRITON_INTERPRET=1 before triton is imported)."""

LOG2_E = 1.4426950408889634
MAX_WIDTH = 256


@dataclass(frozen=True)
class Config:
    """One kernel's tile of queries x keys, warps per program, and depth of its load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    masked_stages: int = 1
    """The depth in loops over partly visible tiles, which need more registers."""

    def constants(self) -> dict[str, int]:
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return {**sizes, "MASKED_STAGES": self.masked_stages}

    def options(self) -> dict[str, Any]:
        """Of the launch. Contraction is set because its default depends on Triton's version."""
        stages = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class Configs:
    """The tiles of the three kernels."""

    forward: Config
    keys: Config
    """dk and dv: a program has block_n keys and steps through block_m queries."""
    queries: Config
    """dq: a program has block_m queries and steps through block_n keys."""


_F = Config
# Per (generation, bytes per element, width rounded up to a power of two). 8: sm_80 (163 KiB of
# shared memory per block), 86: its smaller relatives and sm_120 (99 KiB), 9: sm_90 and sm_100 (227
# KiB). Large tiles that compile without spilling registers (tests/aot_cases.py: bfloat16, widths 64
# and 128, sm_80 and sm_90); not tuned on a device.
_CONFIGS: dict[tuple[int, int, int], Configs] = {
    (9, 2, 64): Configs(_F(128, 64, 4, 3, 3), _F(64, 128, 8, 3, 3), _F(128, 64, 4, 3, 3)),
    (9, 2, 128): Configs(_F(128, 128, 8, 2), _F(32, 128, 8, 3, 3), _F(128, 64, 8, 3, 3)),
    (9, 2, 256): Configs(_F(128, 32, 8, 2, 2), _F(32, 32, 8, 2), _F(128, 32, 8, 2)),
    (8, 2, 64): Configs(_F(128, 64, 8, 3, 3), _F(64, 64, 8, 3, 3), _F(128, 64, 8, 2)),
    (8, 2, 128): Configs(_F(64, 64, 4, 2), _F(64, 64, 8, 2), _F(64, 64, 8, 2)),
    (8, 2, 256): Configs(_F(64, 32, 8, 2), _F(32, 32, 8, 1), _F(64, 32, 8, 1)),
    (8, 4, 64): Configs(_F(32, 16, 8, 1), _F(16, 32, 8, 1), _F(16, 16, 8, 1)),
    (8, 4, 128): Configs(_F(32, 16, 8, 1), _F(32, 32, 8, 1), _F(16, 16, 8, 1)),
    (8, 4, 256): Configs(_F(16, 16, 8, 1), _F(16, 16, 8, 1), _F(16, 16, 8, 1)),
}
for _width in (64, 128, 256):
    _CONFIGS[86, 2, _width] = _CONFIGS[8, 2, _width]
    _CONFIGS[86, 4, _width] = _CONFIGS[9, 4, _width] = _CONFIGS[8, 4, _width]
# Forward with documents, whose comparison takes registers, where the tiles above would spill.
_DOCUMENT_FORWARD = {(8, 2, 128): _F(64, 32, 4, 2), (86, 2, 128): _F(64, 32, 4, 2)}
_INTERPRETED_CONFIGS = Configs(_F(32, 16, 1, 1), _F(16, 32, 1, 1), _F(32, 16, 1, 1))


def padded_width(width: int) -> int:
    """The power of two, at least 16, that a tile of a width has."""
    return max(16, triton.next_power_of_2(width))


def configs_for(
    capability: tuple[int, int], itemsize: int, width: int, has_documents: bool
) -> Configs:
    """Tile sizes of a device.

    Args:
        capability: its compute capability, as (9, 0). itemsize: bytes of an element of q.
        width: the wider of D and Dv. has_documents: whether pairs of documents are compared.
    """
    major, minor = capability
    generation = 9 if major in (9, 10) else 8 if capability in ((8, 0), (8, 7)) else 86
    key = generation, itemsize, max(64, padded_width(width))
    configs = _CONFIGS[key]
    if has_documents and key in _DOCUMENT_FORWARD:
        return replace(configs, forward=_DOCUMENT_FORWARD[key])
    return configs


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def refusal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    """Why the kernels cannot compute this call; None if they can.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv]. scale: of the scores.
    """
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype}: give bfloat16, float16 or float32"
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"head widths {q.shape[-1]}, {v.shape[-1]}: at most {MAX_WIDTH}"
    if not scale > 0:
        return f"scale {scale}: must be positive"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"device {q.device}: must be CUDA"
    if q.device.type == "cuda" and _capability(q.device.index) < (8, 0):
        return f"compute capability {_capability(q.device.index)}: at least 8.0"
    return None


@dataclass(frozen=True)
class Plan:
    """The arguments that the kernels of one call share."""

    visibility: Visibility
    spec: AttentionSpec
    configs: Configs
    num_heads: int
    width: int
    value_width: int
    widen: bool

    def bias(self) -> Tensor | None:
        """[B|1, H|1, S|1, S|1], bool as uint8."""
        bias = self.spec.head_bias(self.num_heads)
        if bias is None:
            return None
        bias = bias.to(self.visibility.rows.device)
        return bias.view(torch.uint8) if bias.dtype == torch.bool else bias

    def mask_tensors(self) -> tuple[Tensor, ...]:
        x = self.visibility
        return x.rows, x.row_documents, x.key_positions, x.key_documents

    def pair_tensors(self) -> tuple[Tensor, ...]:
        """Bias, seed, indices of heads; something in place of what is not there."""
        absent = self.visibility.rows
        given = (self.bias(), self.spec.seed, self.spec.head_ids)
        return tuple(absent if x is None else x.to(absent.device) for x in given)

    def bias_strides(self) -> tuple[int, ...]:
        """Of sequences, heads, queries and keys; 0 along a dim of size 1."""
        bias = self.bias()
        if bias is None:
            return 0, 0, 0, 0
        return tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True))

    def scalars(self) -> tuple[float, float, float, int]:
        """Before and after the softcap, by what scores are multiplied, to base 2; 1 / (1 - p) of
        dropout; the hash from which on a pair is kept, as int32 of the same bits.
        """
        p = self.spec.dropout_p
        threshold = min(int(p * 2**32), 2**32 - 1)
        threshold -= 2**32 if threshold >= 2**31 else 0
        inv_keep = 1 / (1 - p) if p < 1 else 0.0
        if self.spec.softcap is None:
            return 1.0, self.spec.scale * LOG2_E, inv_keep, threshold
        return self.spec.scale / self.spec.softcap, self.spec.softcap * LOG2_E, inv_keep, threshold

    def constants(self) -> dict[str, Any]:
        bias = self.spec.bias
        kind = NO_BIAS if bias is None else BOOL_BIAS if bias.dtype == torch.bool else FLOAT_BIAS
        return {
            "D": self.width,
            "DV": self.value_width,
            "BLOCK_D": padded_width(self.width),
            "BLOCK_DV": padded_width(self.value_width),
            "HAS_LO": self.visibility.has_lo,
            "HAS_DOCUMENTS": self.visibility.has_documents,
            "SOFTCAP": self.spec.softcap is not None,
            "BIAS": kind,
            "DROPOUT": self.spec.dropout_p > 0,
            "HAS_HEAD_IDS": self.spec.head_ids is not None,
            "WIDEN": self.widen,
        }

    def segments(self, block_m: int, block_n: int, transposed: bool) -> Tensor:
        return self.visibility.segments(block_m, block_n, transposed, self.spec.bias is None)


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    spec: AttentionSpec,
) -> Plan:
    """The plan of a call that ``refusal`` has nothing against."""
    width, value_width = q.shape[-1], v.shape[-1]
    if INTERPRETED:
        configs = _INTERPRETED_CONFIGS
    else:
        capability = _capability(q.device.index)
        widest, documents = max(width, value_width), visibility.has_documents
        configs = configs_for(capability, q.element_size(), widest, documents)
    widen = INTERPRETED and q.dtype == torch.bfloat16
    sizes = (q.shape[1], width, value_width)
    return Plan(visibility, spec, configs, *sizes, widen)
