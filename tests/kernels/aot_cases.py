"""What is compiled ahead of time: every kernel as models of width 64 and 128 launch it.

    python tests/kernels/aot_cases.py [--arch 90] [NAME ...]   one JSON line a kernel and device
    python tests/kernels/aot_cases.py --every                  of more widths and masks

In a process of its own, as kernels that the interpreter has taken over cannot be compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from aot import SHARED_LIMIT, Launch, compiled, launches
from torch import Tensor

from paradyse.kernels import flash_plan, triton_exchange, triton_merge
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_pairs import Constants
from paradyse.kernels.flash_tiles import describe_mask
from paradyse.strategies.groups.heads import deal_heads

BF16, F32 = torch.bfloat16, torch.float32
TOKENS, HEADS, KV_HEADS = 4096, 32, 8

Case = tuple[str, Callable[[], Any]]
"""A name, and the call whose launches are compiled. Tensors are on the meta device."""


def heads(n: int, width: int, tokens: int = TOKENS, dtype: torch.dtype = BF16) -> Tensor:
    """[1, n, tokens, width], laid out as models have it."""
    return torch.empty(1, tokens, n, width, dtype=dtype, device="meta").transpose(1, 2)


def merge(width: int, running: torch.dtype, result: torch.dtype) -> None:
    lse = torch.empty(1, HEADS, TOKENS, device="meta")
    out = heads(HEADS, width, dtype=running)
    triton_merge.launch_merge(out, lse, heads(HEADS, width), lse, result)


def exchange(width: int) -> None:
    """Both ways with q, k, v, and with q alone."""
    slots = deal_heads(HEADS, KV_HEADS, 4)
    for count in (3, 1):
        widths = [width] * count
        counts = [HEADS, KV_HEADS, KV_HEADS][:count]
        local = [heads(n, width, TOKENS // 4) for n in counts]
        message = triton_exchange.launch_send_heads(slots, local)
        triton_exchange.launch_receive_tokens(message)
        own = [heads(n // 4, width) for n in counts]
        message = triton_exchange.launch_send_tokens(slots, own)
        triton_exchange.launch_receive_heads(slots, message, widths)


def flash(width: int, value_width: int | None = None, **mask: Any) -> None:
    """Forward and backward, with GQA."""
    q, k, v = heads(HEADS, width), heads(KV_HEADS, width), heads(KV_HEADS, value_width or width)
    spec = AttentionSpec(TOKENS, width**-0.5, right=0, **mask)
    positions = torch.empty(TOKENS, dtype=torch.int32, device="meta")
    visibility = describe_mask(positions, positions, spec)
    out, lse = launch_forward(q, k, v, visibility, spec)
    launch_backward(Backward(torch.empty_like(out), q, k, v, out, lse), visibility, spec)


def more_cases() -> Iterator[Case]:
    """Attention at every width that has tiles of its own, with what each mask and score needs."""
    documents = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    masks: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"left": 4095},
        "documents": {"document_ids": documents},
        "bias": {"bias": torch.empty(1, HEADS, TOKENS, TOKENS, dtype=BF16, device="meta")},
        "dropout": {"dropout_p": 0.1, "seed": seed},
    }
    for width, (name, mask) in itertools.product((64, 128, 256), masks.items()):
        yield f"{name}, width {width}", lambda w=width, m=mask: flash(w, **m)


def cases() -> Iterator[Case]:
    for width, (running, result) in itertools.product(
        (64, 128), ((F32, F32), (F32, BF16), (BF16, F32))
    ):
        name = f"merge {running} {result}".replace("torch.", "")
        yield name, lambda w=width, r=running, t=result: merge(w, r, t)
    yield "exchange", lambda: exchange(128)
    for width in (64, 128):
        yield "flash causal", lambda w=width: flash(w)
    yield "flash unlike widths", lambda: flash(64, 32)
    by_distance = torch.empty(HEADS, 2, TOKENS, device="meta")
    yield "flash bias by distance", lambda: flash(64, bias=by_distance)
    documents = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    padding = torch.empty(1, TOKENS, dtype=torch.bool, device="meta")
    yield (
        "flash window, documents, padding",
        lambda: flash(128, left=4095, document_ids=documents, key_padding=padding),
    )


def alone(launch: Launch) -> str:
    """Which of dk and dv it computes alone, for people."""
    given = [c for c in launch.constants.values() if isinstance(c, Constants)]
    sums = [(c.SUM_DK, c.SUM_DV) for c in given if not (c.SUM_DK and c.SUM_DV)]
    return "".join(f", {'dk' if dk else 'dv'} alone" for dk, _ in sums)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, action="append", help="compute capability, as 90")
    parser.add_argument("--every", action="store_true", help="attention of all widths and masks")
    parser.add_argument("names", nargs="*", help="kernels whose name has one of these in it")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels are interpreted, there is nothing to compile")
    for arch in args.arch or SHARED_LIMIT:
        seen: set[str] = set()
        for name, run in more_cases() if args.every else cases():
            # Tile sizes depend on the device, of which there need not be one.
            with mock.patch.object(flash_plan, "_capability", lambda index, a=arch: divmod(a, 10)):
                found = launches(run)
            for launch in found:
                kernel = f"{name}{alone(launch)}: {launch.kernel.__name__}"
                wanted = not args.names or any(n in kernel for n in args.names)
                if wanted and launch.key not in seen:
                    seen.add(launch.key)
                    row = {"kernel": kernel, "tile": launch.tile, "arch": arch}
                    print(json.dumps(row | compiled(launch, arch)), flush=True)


if __name__ == "__main__":
    main()
