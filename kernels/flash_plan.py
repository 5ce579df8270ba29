"""What a call of the Triton attention kernels is launched with: tile sizes, constants, pointers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from paradyse.kernels.additive_mask import join_sides
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_pairs import BOOL_BIAS, FLOAT_BIAS, NO_BIAS, Constants, Mask, Pairs
from paradyse.kernels.flash_tiles import Visibility
from paradyse.kernels.triton_heads import Heads

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on the CPU (TRITON_INTERPRET=1 before triton is imported)."""

TILES_VARIABLE = "PARADYSE_TILES"
"""Environment variable: the path of a table of tile sizes, which goes before the package's own."""

MEASURED_TILES = Path(__file__).parent / "tiles.json"
"""The table that comes with the package."""

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
# KiB). Large tiles that compile with few registers spilled, none for plain masks but on sm_100
# (benchmarks/compiled_kernels.py); not tuned on a device. What benchmarks/tile_sweep.py measures on
# one goes first.
_CONFIGS: dict[tuple[int, int, int], Configs] = {
    (9, 2, 64): Configs(_F(128, 64, 4, 3, 3), _F(64, 128, 8, 3, 3), _F(128, 64, 4, 3, 3)),
    (9, 2, 128): Configs(_F(128, 128, 8, 2), _F(32, 128, 8, 3, 3), _F(128, 64, 8, 3, 3)),
    (9, 2, 256): Configs(_F(128, 32, 8, 2, 2), _F(32, 128, 8, 2), _F(128, 32, 8, 2)),
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
# Forward with documents, whose comparison takes registers, or a bias, where the tiles above would
# spill.
_BIAS_FORWARD = {(9, 2, 64): _F(128, 64, 8, 3, 3)}
_DOCUMENT_FORWARD = {(9, 2, 128): _F(128, 64, 8, 3, 2)}
_DOCUMENT_FORWARD |= {(g, 2, 128): _F(64, 32, 4, 2) for g in (8, 86)}
_INTERPRETED_CONFIGS = Configs(_F(32, 16, 1, 1), _F(16, 32, 1, 1), _F(32, 16, 1, 1))


def padded_width(width: int) -> int:
    """The power of two, at least 16, that a tile of ``width`` has."""
    return max(16, triton.next_power_of_2(width))


ALIGNED = 16
"""Elements: Triton copies tiles asynchronously where sequences, heads and rows begin at multiples
of so many."""


def aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What one launch reads, in memory that all of its tiles are copied from asynchronously where
    it has to be: tensors of 16 bits and of unlike widths are copied if they lie otherwise.

    Else two products have constant addresses in shared memory of unlike forms, and the ptxas of
    Triton 3.6 computes those of one from a register that nothing wrote (seen on an H100;
    ``tests/kernels/unwritten.py`` finds it in the code).

    Args:
        tensors: [B, H, S, D], of one dtype, with adjacent elements along the last dim.
    """
    if len({padded_width(x.shape[3]) for x in tensors}) == 1 or tensors[0].itemsize != 2:
        return list(tensors)
    return [x if _is_aligned(x) else _aligned_copy(x) for x in tensors]


def _is_aligned(x: Tensor) -> bool:
    return all(n % ALIGNED == 0 for n in (*x.stride()[:3], x.data_ptr()))


def _aligned_copy(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    whole = x.new_empty((b, s, h, triton.cdiv(d, ALIGNED) * ALIGNED)).transpose(1, 2)
    return whole[..., :d].copy_(x)


SUM_REGISTERS = 128
"""Of a thread, for sums over queries or keys; with more it would spill."""


Sums = tuple[bool, bool]
"""Whether a program with a tile of keys computes dk, and dv."""


def sums_of_keys(config: Config, widths: Sequence[int]) -> list[Sums]:
    """What each launch of the kernel of keys computes: both dk and dv, or, where a thread has no
    registers for both, one after the other. Scores are computed for each then, but tiles may have
    the 64 keys and more that wgmma needs.

    Args:
        config: of the kernel.
        widths: of dk and of dv.
    """
    width = sum(map(padded_width, widths))
    if config.block_n * width <= SUM_REGISTERS * 32 * config.num_warps:
        return [(True, True)]
    return [(False, True), (True, False)]


@dataclass(frozen=True)
class TileKey:
    """What tiles were measured for."""

    capability: tuple[int, int]
    """Of the device."""
    itemsize: int
    """Bytes per element."""
    width: int
    """Rounded up to a power of two, at least 64."""
    documents: bool = False
    """Whether documents are compared."""


def tile_row(key: TileKey, configs: Configs) -> dict[str, Any]:
    """The ``configs`` of a ``key`` as ``load_tiles`` reads them."""
    return vars(key) | {name: astuple(config) for name, config in vars(configs).items()}


@lru_cache(maxsize=8)
def load_tiles(path: Path) -> Mapping[TileKey, Configs]:
    """The table in the file ``path``, of JSON with "rows" of ``tile_row``.

    Raises:
        ValueError: the file is no such table.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
        found = {}
        for r in rows:
            major, minor = map(int, r["capability"])
            key = TileKey((major, minor), r["itemsize"], r["width"], r.get("documents", False))
            found[key] = Configs(*(Config(*map(int, r[f.name])) for f in fields(Configs)))
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise ValueError(
            f"{path}: cannot read this as a table of tiles ({type(e).__name__}: {e}); "
            f"`python benchmarks/tile_sweep.py --write-table PATH` writes one, and without "
            f"{TILES_VARIABLE} the package's own are used"
        ) from e


@cache
def _own_tiles() -> Mapping[TileKey, Configs]:
    return load_tiles(MEASURED_TILES) if MEASURED_TILES.is_file() else {}


def _measured_tiles() -> Mapping[TileKey, Configs]:
    asked = os.environ.get(TILES_VARIABLE)
    return {**_own_tiles(), **load_tiles(Path(asked))} if asked else _own_tiles()


def configs_for(
    capability: tuple[int, int],
    itemsize: int,
    width: int,
    has_documents: bool,
    has_bias: bool = False,
) -> Configs:
    """Tile sizes of a device.

    Args:
        capability: its compute capability, as (9, 0).
        itemsize: bytes of an element of q.
        width: the wider of D and Dv.
        has_documents: whether pairs of documents are compared.
        has_bias: whether something is added to scores, or says which are seen.
    Raises:
        ValueError: ``TILES_VARIABLE`` names no table.
    """
    major, _ = capability
    generation = 9 if major in (9, 10) else 8 if capability in ((8, 0), (8, 7)) else 86
    key = generation, itemsize, max(64, padded_width(width))
    measured = _measured_tiles().get(TileKey(capability, *key[1:], has_documents))
    if measured and not has_bias:  # of which no table is measured
        return measured
    configs = _CONFIGS[key]
    if has_documents and key in _DOCUMENT_FORWARD:
        return replace(configs, forward=_DOCUMENT_FORWARD[key])
    if has_bias and key in _BIAS_FORWARD:
        return replace(configs, forward=_BIAS_FORWARD[key])
    return configs


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def refusal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    """Why the kernels cannot compute this call; None if they can.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv].
        scale: of the scores.
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


def device_configs(q: Tensor, v: Tensor, visibility: Visibility, has_bias: bool = False) -> Configs:
    """Tile sizes of a call, of its ``q`` [B, H, Sq, D], ``v`` [B, Hk, Sk, Dv], ``visibility`` and
    whether it ``has_bias``, that ``refusal`` has nothing against.
    """
    if INTERPRETED:
        return _INTERPRETED_CONFIGS
    widest = max(q.shape[-1], v.shape[-1])
    capability, documents = _capability(q.device.index), visibility.has_documents
    return configs_for(capability, q.element_size(), widest, documents, has_bias)


def scalars(spec: AttentionSpec) -> tuple[float, float, float, int]:
    """What kernels take of ``spec``: by what scores are multiplied before and after the softcap, to
    base 2; 1 / (1 - p) of dropout; the hash from which on a pair is kept, as int32 of the same
    bits.
    """
    p = spec.dropout_p
    threshold = min(int(p * 2**32), 2**32 - 1)
    threshold -= 2**32 if threshold >= 2**31 else 0
    inv_keep = 1 / (1 - p) if p < 1 else 0.0
    if spec.softcap is None:
        return 1.0, spec.scale * LOG2_E, inv_keep, threshold
    return spec.scale / spec.softcap, spec.softcap * LOG2_E, inv_keep, threshold


def launch(
    kernel: Any,
    config: Config,
    programs: int,
    inputs: Sequence[Tensor],
    own: Sequence[Any],
    visibility: Visibility,
    spec: AttentionSpec,
    transposed: bool = False,
    sums: Sums = (True, True),
) -> None:
    """Launch one of the attention kernels.

    Args:
        kernel: takes ``inputs``, ``own``, then what is the same for all kernels.
        config: its tile.
        programs: how many a tile has.
        inputs: q, k, v as of ``refusal``, and the gradient of the output where it is needed.
        visibility, spec: of the call.
        transposed: a program has a tile of keys, not of queries.
        sums: which of dk and dv it computes.
    """
    q, k, v = inputs[:3]
    bias, kind = spec.head_bias(q.shape[1]), NO_BIAS
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        kind = FLOAT_BIAS
        if bias.dtype == torch.bool:
            kind, bias = BOOL_BIAS, bias.view(torch.uint8)
        bias_strides = tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride()))
        if bias.dim() == 3:  # of a pair as far from the middle as its tokens are apart
            bias = join_sides(bias)[:, spec.seq_len - 1 :]
            bias_strides = 0, 0 if bias.shape[0] == 1 else bias.stride(0), -1, 1
    rows = visibility.rows  # in place of what is not there
    given = bias, spec.seed, spec.head_ids, spec.sequence_ids
    tensors = (rows if x is None else x.to(q.device) for x in given)
    *factors, threshold = scalars(spec)
    pairs = Pairs._make([*tensors, *bias_strides, *factors])
    mask = Mask(
        rows,
        visibility.row_documents,
        visibility.key_positions,
        visibility.key_documents,
        visibility.segments(config.block_m, config.block_n, transposed, bias is None),
        visibility.num_masks,
    )
    constants = Constants(
        D=q.shape[3],
        DV=v.shape[3],
        BLOCK_D=padded_width(q.shape[3]),
        BLOCK_DV=padded_width(v.shape[3]),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        MASKED_STAGES=config.masked_stages,
        HAS_LO=visibility.has_lo,
        HAS_DOCUMENTS=visibility.has_documents,
        SOFTCAP=spec.softcap is not None,
        BIAS=kind,
        DROPOUT=spec.dropout_p > 0,
        HAS_HEAD_IDS=spec.head_ids is not None,
        HAS_SEQUENCE_IDS=spec.sequence_ids is not None,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        SUM_DK=sums[0],
        SUM_DV=sums[1],
        **{f"STRIDE_{name}": x.stride(2) for name, x in zip("QKVG", inputs)},
    )
    kernel[(mask.table.shape[1] * programs,)](
        *map(Heads.of, inputs),
        *own,
        mask,
        pairs,
        q.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        threshold,
        C=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,  # its default depends on Triton's version
    )
