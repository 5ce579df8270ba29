"""The Triton attention kernels as they are launched most, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paradyse.kernels.flash_backward import delta_kernel
from paradyse.kernels.flash_forward import forward_kernel
from paradyse.kernels.flash_keys import keys_kernel
from paradyse.kernels.flash_plan import configs_for, padded_width
from paradyse.kernels.flash_queries import queries_kernel
from paradyse.kernels.flash_tiles import describe_keys, describe_queries, find_segments

_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_POINTERS = {
    "*i32": "rows row_documents key_positions key_documents table row_bounds bounds "
    "document_bounds query_bounds key_bounds query_documents",
    "*i64": "seed head_ids positions documents",
    "*u8": "padding",
    "*fp32": "lse shift delta grad_lse",
    "fp32": "pre post inv_keep scale",
}
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
_VALUES = frozenset("q k v out grad dq dk dv bias".split())


@dataclass(frozen=True)
class Build:
    """One kernel as ``triton.compiler.ASTSource`` takes it."""

    name: str
    kernel: Any
    signature: dict[str, str]
    """Type of each argument; constexpr for those in ``constants``."""
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    """Arguments that are multiples of 16, as pointers and strides usually are."""
    options: dict[str, Any]


def _build(
    name: str, kernel: Any, dtype: str, constants: dict[str, Any], options: dict[str, Any]
) -> Build:
    names = kernel.arg_names
    constants = {x: value for x, value in constants.items() if x in names}
    signature = {
        x: "constexpr" if x in constants else f"*{dtype}" if x in _VALUES else _TYPES.get(x, "i32")
        for x in names
    }
    divisible = tuple(
        x
        for x in names
        if signature[x].startswith("*") or x.startswith("stride_") and "bias" not in x
    )
    return Build(name, kernel, signature, constants, divisible, options)


def main_builds(
    capability: tuple[int, int],
    widths: tuple[int, ...] = (64, 128, 256),
    dtypes: tuple[str, ...] = ("bf16", "fp32"),
    **flags: Any,
) -> Iterator[Build]:
    """The kernels on a device of compute ``capability``: causal, 32 heads, 8 of them of keys.

    Args:
        flags: other constants than these, e.g. ``HAS_LO=True`` for a window.
    """
    for dtype in dtypes:
        for width in widths:
            configs = configs_for(capability, _ITEMSIZE[dtype], width)
            padded = padded_width(width)
            common = {"D": width, "DV": width, "BLOCK_D": padded, "BLOCK_DV": padded}
            common |= {"HAS_LO": False, "HAS_DOCUMENTS": False, "SOFTCAP": False, "BIAS": 0}
            common |= {"DROPOUT": False, "HAS_HEAD_IDS": False, "WIDEN": False}
            common |= {"STRIDE_Q": 32 * width, "STRIDE_G": 32 * width}
            common |= {"STRIDE_K": 8 * width, "STRIDE_V": 8 * width, **flags}
            for name, kernel, config in (
                ("forward", forward_kernel, configs.forward),
                ("keys", keys_kernel, configs.keys),
                ("queries", queries_kernel, configs.queries),
            ):
                constants = {**common, **config.constants()}
                label = f"{name} {dtype} {width}"
                yield _build(label, kernel, dtype, constants, config.options())
            constants = {**common, "BLOCK": 64, "HAS_GRAD_LSE": False}
            yield _build(f"delta {dtype} {width}", delta_kernel, dtype, constants, {})
    for masked in (False, True):
        constants = {"HAS_DOCUMENTS": masked, "HAS_PADDING": masked, "GROUPS": 32}
        for kernel in (describe_queries, describe_keys):
            yield _build(f"{kernel.__name__}, masked={masked}", kernel, "i32", constants, {})
        for rows_are_queries in (False, True):
            constants = {"HAS_DOCUMENTS": masked, "ALLOW_FULL": True, "QR": 8, "KR": 4, "STEP": 64}
            constants["ROWS_ARE_QUERIES"] = rows_are_queries
            label = f"find_segments, masked={masked}, rows_are_queries={rows_are_queries}"
            yield _build(label, find_segments, "i32", constants, {})
