"""The launches that are compiled ahead of time: each kernel as models of width 64 and 128 run it.

    python tests/aot_cases.py [--arch 90] [NAME ...]     one JSON line for each kernel and device

In a process of its own, as kernels that the interpreter has taken over cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from aot import SHARED_LIMIT, Case, compiled

from paradyse.kernels import triton_exchange, triton_merge

BF16, F32 = torch.bfloat16, torch.float32
TOKENS = 16384


def _strides(*names: str, width: int, heads: int) -> dict[str, int]:
    """Of [B, H, S, D] laid out as [B, S, H, D]."""
    by_dim = {"b": TOKENS * heads * width, "h": width, "s": heads * width}
    return {f"{name}_{dim}": n for name in names for dim, n in by_dim.items()}


def merge_cases() -> Iterator[Case]:
    for width in (64, 128):
        rows, columns = triton_merge._tile(width)
        lse = {"b": 32 * TOKENS, "h": TOKENS, "s": 1}
        for out, result in ((F32, F32), (F32, BF16), (BF16, F32)):
            args: dict[str, Any] = {"OUT": out, "LSE": F32, "OUT_I": BF16, "LSE_I": F32}
            args |= {"RESULT": result, "RESULT_LSE": F32}
            args |= {"num_heads": 32, "num_rows": TOKENS, "width": width}
            args |= _strides("out", "out_i", "result", width=width, heads=32)
            args |= {f"{x}_{dim}": n for x in ("lse", "lse_i") for dim, n in lse.items()}
            args |= {"ROWS": rows, "WIDTH": columns}
            names = "/".join(str(d).removeprefix("torch.") for d in (out, result))
            yield Case(f"merge {names} width {width}", triton_merge.merge_kernel, args)


def exchange_cases() -> Iterator[Case]:
    """32 query heads and 8 KV heads on 4 ranks."""
    width, p, s = 128, 4, TOKENS // 4
    tile = triton_exchange._tile(width)
    tensors: dict[str, Any] = {"Q": BF16, "K": BF16, "V": BF16, "MESSAGE": BF16}
    sizes = {"num_sequences": 1, "width": width, "value_width": width}
    strides = _strides("q", width=width, heads=32) | _strides("k", "v", width=width, heads=8)
    slots = {"num_kv_heads": 8, "group": 4, "replicas": 1, "slots_per_rank": 2, "heads_per_slot": 4}
    rank_major = {"rows_per_rank": s, "chunk": s // 2, "num_ranks": p}
    own = {"slots_per_rank": 2, "real_slots": 2, "heads_per_slot": 4}
    yield Case(
        "receive_tokens",
        triton_exchange.receive_tokens_kernel,
        {"MESSAGE": BF16, "TOKENS": BF16, "num_sequences": 1, "columns": 12 * width}
        | rank_major
        | triton_exchange._tile(1024),
    )
    for has_keys in (True, False):
        what = "q, k, v" if has_keys else "q"
        common = tensors | sizes | tile | {"HAS_KEYS": has_keys}
        yield Case(
            f"send_heads {what}",
            triton_exchange.send_heads_kernel,
            common | strides | slots | {"num_rows": s},
        )
        yield Case(
            f"send_tokens {what}",
            triton_exchange.send_tokens_kernel,
            common | strides | rank_major | own,
        )
        yield Case(
            f"receive_heads {what}",
            triton_exchange.receive_heads_kernel,
            common | slots | {"num_rows": s, "num_heads": 32, "SUM": tl.float32},
        )


def all_cases() -> Iterator[Case]:
    yield from merge_cases()
    yield from exchange_cases()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, action="append", help="compute capability, as 90")
    parser.add_argument("names", nargs="*", help="kernels whose name has one of these in it")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels are interpreted, there is nothing to compile")
    for case in all_cases():
        if not args.names or any(name in case.name for name in args.names):
            for arch in args.arch or SHARED_LIMIT:
                print(json.dumps(compiled(case, arch)), flush=True)


if __name__ == "__main__":
    main()
