"""Which kernel computes a plain causal or full tile, or a window over a whole sequence, on a GPU: a
table, measured, that can be overridden.

``benchmarks/attention_gpu.py --write-table`` measures it. FlashAttention 3 or 4, where it is
installed, takes the place of PyTorch's own build once it is activated
(``torch.nn.attention.activate_flash_attention_impl``); what was measured of one says nothing of
another, so that rows of a table have its name. Windows are Triton's unless the table
says otherwise, and all other masks always.

A ``kernel`` is one of ``KERNELS``, a ``mask`` one of ``MASKS``, a ``direction`` one of
``DIRECTIONS``; ``capability`` is a device's compute capability ("9.0"), ``dtype`` that of q, k and
v, ``width`` that of the heads, of keys and of values alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn.attention import current_flash_attention_impl

TRITON, ATEN_FLASH, CUDNN = KERNELS = ("triton", "aten_flash", "cudnn")
"""Ours; PyTorch's flash attention, its own build of version 2 or what was activated; cuDNN's
attention as PyTorch calls it."""

OWN_FLASH = "FA2"
"""Rows of a table are of this flash attention that name no other."""

CAUSAL, FULL, WINDOW = MASKS = ("causal", "full", "window")
"""The last one: keys so far behind and ahead of a query, of all tokens of a sequence."""
FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")

VARIABLE = "PARADYSE_KERNELS"
"""Environment variable: a kernel's name, for all plain tiles, or the path of a table."""

MEASURED = Path(__file__).parent / "selection.json"
"""The table that comes with the package: of an H100."""

LIBRARY_DTYPES = (torch.bfloat16, torch.float16)
"""What the library's kernels compute in."""

Key = tuple[str, str, int, str, str]
"""Compute capability ("9.0"), dtype ("bfloat16"), head width, mask, direction."""


@dataclass(frozen=True)
class Measured:
    """A row of a table."""

    kernel: str
    """The fastest."""
    tokens: int = 0
    """Of the length that it was measured at; 0: not said."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By kernel."""
    pairs: float = 0.0
    """Queries times keys, of all heads and sequences, that took so long; 0: not said."""
    setup_s: float = 0.0
    """What the first call of a shape costs beyond others: cuDNN makes a plan for each."""


@dataclass(frozen=True)
class Choice:
    """A kernel, and where the choice comes from."""

    kernel: str
    why: str
    measured: Measured | None = None
    """The row that says so."""


MOST_OF_GRID = 65535
"""Of CUDA, along the second and third dim of a grid."""

_LOST: dict[Hashable, float] = {}
"""Of a shape, the seconds that were lost so far to its fastest kernel, which was not set up."""
_MOST_SHAPES = 4096
"""That are remembered."""


def settled(choice: Choice, shape: Hashable, pairs: float) -> str:
    """The kernel for one more call, of a ``shape`` with so many ``pairs``: that of ``choice`` once
    the next best has lost as much time to it as its setup costs (Karlin et al., Competitive snoopy
    caching, 1988: to rent skis until the rent has reached their price). Lengths that come once are
    not set up for. What is lost is that of the row, by the number of pairs. Under deterministic
    algorithms it is always the next best: what ran before must not change a result, and ranks that
    compute the same have to have the same bits.
    """
    row = choice.measured
    others = [k for k in row.seconds if k != row.kernel] if row else []
    if row is None or not (row.setup_s and row.pairs and others):
        return choice.kernel
    next_best = min(others, key=row.seconds.__getitem__)
    if torch.are_deterministic_algorithms_enabled():
        return next_best
    lost = _LOST.pop(shape, 0.0)
    settle = lost >= row.setup_s
    if not settle:
        lost += (row.seconds[next_best] - row.seconds[row.kernel]) * pairs / row.pairs
    _LOST[shape] = lost  # the latest at the end
    if len(_LOST) > _MOST_SHAPES:
        del _LOST[next(iter(_LOST))]
    return row.kernel if settle else next_best


def flash_in_use() -> str:
    """The implementation behind PyTorch's flash attention: ``OWN_FLASH``, "FA3", "FA4", .."""
    return current_flash_attention_impl() or OWN_FLASH


Table = Mapping[Key, Sequence[Measured]]
"""By ascending length."""


def load_table(path: Path, flash: str | None = None) -> Table:
    """The table in the file ``path``; where ``flash`` is given, those of its rows alone that were
    measured with this implementation of flash attention.

    Raises:
        ValueError: the file is not such a table, or names a kernel that does not exist.
    """
    try:
        table: dict[Key, list[Measured]] = {}
        for r in json.loads(path.read_text())["rows"]:
            if flash not in (None, r.get("flash", OWN_FLASH)):
                continue
            key = r["capability"], r["dtype"], int(r["width"]), r["mask"], r["direction"]
            costs = (float(r.get(name, 0)) for name in ("pairs", "setup_s"))
            found = r["kernel"], int(r.get("tokens", 0)), dict(r.get("seconds", {}))
            table.setdefault(key, []).append(Measured(*found, *costs))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path}: cannot read this as a table of kernels ({type(e).__name__}: {e}); "
            "`python benchmarks/attention_gpu.py --write-table PATH` writes one"
        ) from e
    for key, kernel in ((key, row.kernel) for key, rows in table.items() for row in rows):
        if kernel not in KERNELS or key[3] not in MASKS or key[4] not in DIRECTIONS:
            raise ValueError(
                f"{path}: {kernel!r} for {key}; legal kernels: {', '.join(KERNELS)}; masks: "
                f"{', '.join(MASKS)}; directions: {', '.join(DIRECTIONS)}"
            )
    return {key: sorted(rows, key=lambda row: row.tokens) for key, rows in table.items()}


@lru_cache(maxsize=8)
def _override(value: str, flash: str) -> str | Table:
    """What ``VARIABLE`` says: one kernel, or a table, of which the rows of ``flash``."""
    if value in KERNELS:
        return value
    path = Path(value)
    if not path.is_file():
        raise ValueError(
            f"{VARIABLE}={value!r} is neither a kernel ({', '.join(KERNELS)}) nor the path of a "
            "table; unset it to use the measured one"
        )
    return load_table(path, flash)


@lru_cache(maxsize=8)
def _measured(flash: str) -> Table:
    return load_table(MEASURED, flash) if MEASURED.is_file() else {}


def supported(kernel: str, capability: str, dtype: torch.dtype, width: int, direction: str) -> bool:
    """Whether a kernel can compute a plain tile."""
    if kernel == TRITON:
        return True
    if dtype not in LIBRARY_DTYPES or width % 8 or float(capability) < 8:
        return False
    if kernel == ATEN_FLASH:  # beyond 192 its backward needs the shared memory of the large chips
        return width <= (256 if capability in ("8.0", "9.0", "10.0") else 192)
    # cuDNN's backward adds in no fixed order.
    unordered = direction == BACKWARD and torch.are_deterministic_algorithms_enabled()
    return width <= 128 and not unordered


def choose(
    capability: str, dtype: torch.dtype, width: int, mask: str, direction: str, tokens: int = 0
) -> Choice:
    """The kernel for a plain tile, or a window, of so many ``tokens``, by the row whose length is
    the nearest ratio away; 0: by that of the longest.

    Raises:
        ValueError: ``VARIABLE`` names neither a kernel nor a table.
    """
    key = (capability, str(dtype).removeprefix("torch."), width, mask, direction)
    value, flash = os.environ.get(VARIABLE, ""), flash_in_use()
    asked = _override(value, flash) if value else {}
    row = None
    if isinstance(asked, str):
        kernel, why = asked, f"{VARIABLE}={asked}"
    elif rows := asked.get(key) or _measured(flash).get(key):
        row = rows[-1]
        if tokens:
            row = min(rows, key=lambda row: abs(math.log(max(row.tokens, 1) / tokens)))
        kernel, why = row.kernel, f"measured, {Path(value) if key in asked else 'own table'}"
        why += ", for shapes that come back" if row.setup_s else ""
    else:
        kernel = TRITON if mask == WINDOW else ATEN_FLASH
        why = "not measured for this device, dtype and width"
    no_window = mask == WINDOW and kernel == CUDNN
    if no_window or not supported(kernel, capability, dtype, width, direction):
        can_not = f"{key[1]} of width {width} on compute capability {capability}"
        can_not = "windows" if no_window else can_not
        return Choice(TRITON, f"{kernel} ({why}) cannot do {can_not}")
    return Choice(kernel, f"{why}; {flash} is active" if flash != OWN_FLASH else why, row)


def flash_holds(batch: int, heads: int, rows: int, width: int) -> bool:
    """Whether PyTorch's flash attention can compute a tile: sequences and heads are dims of its
    grid, and its backward counts the float32 sums of dq with 32 bits (rows in tiles of 128, widths
    of 32 at least).

    Args:
        batch, heads, rows, width: of the tile's queries.
    """
    sums = batch * heads * (-(-rows // 128) * 128) * max(width, 32)
    return max(batch, heads) <= MOST_OF_GRID and sums <= 2**31


def flash_of_short(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether plain attention of sequences so short that the host's time counts is to be PyTorch's
    flash attention, whatever is faster on long ones: compiled code calls it by itself. Not where
    ``VARIABLE`` names another kernel.

    Args:
        device: a CUDA device.
        dtype, width: of q, k and v.
    """
    where = capability_of(device), dtype, width
    able = all(supported(ATEN_FLASH, *where, d) for d in DIRECTIONS)
    asked = os.environ.get(VARIABLE, "")
    return able and (asked == ATEN_FLASH or asked not in KERNELS)


def capability_of(device: torch.device) -> str:
    """The compute capability of a CUDA ``device``, "9.0"."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def describe_choices(capability: str, dtype: torch.dtype, width: int) -> list[str]:
    """Lines for people: which kernel computes what."""
    lines = []
    for mask in MASKS:
        for direction in DIRECTIONS:
            c = choose(capability, dtype, width, mask, direction)
            lines.append(f"{mask} {direction}: {c.kernel} ({c.why})")
    return [*lines, "any other mask: triton"]
