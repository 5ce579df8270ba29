"""Attention of one rank against PyTorch's, on the CPU: seconds of forward and backward, medians of
interleaved runs.

    python benchmarks/attention_cpu.py --tokens 4096 --heads 8 --kv-heads 4 --head-dim 64 --runs 7

A row is one mask. ``sdpa`` is ``F.scaled_dot_product_attention``: its causal flag where that says
it all, else the dense mask that a HuggingFace model would build. Below 1.0, ``ratio`` says how much
faster ours is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import paradyse.kernels.attention_op  # noqa: F401  registers the operator


def time_s(step: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    start = time.perf_counter()
    out = step()
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, grad)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    s, dtype = args.tokens, getattr(torch, args.dtype)

    def heads(n: int) -> Tensor:
        x = torch.randn(args.batch, s, n, args.head_dim, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = heads(args.heads), heads(args.kv_heads), heads(args.kv_heads)
    inputs, grad = [q, k, v], torch.randn_like(q)
    i, j = torch.arange(s)[:, None], torch.arange(s)
    window = min(512, s // 4)
    document = (torch.arange(s) * 5 // s).expand(args.batch, s)
    padded = (torch.arange(s) >= s // 8).expand(args.batch, s)
    causal = i >= j
    cases: dict[str, tuple[tuple[Tensor | None, Tensor | None], tuple[int, int], Tensor | None]] = {
        "causal": ((None, None), (-1, 0), None),
        "full": ((None, None), (-1, -1), torch.empty(0)),
        f"window {window}": ((None, None), (window - 1, 0), causal & (j > i - window)),
        "5 documents": ((None, document), (-1, 0), causal & (document[0][:, None] == document[0])),
        "left padding": ((padded, None), (-1, 0), causal & padded[0]),
    }
    out = sys.stdout.write
    out(f"{'mask':14}{'ours fwd':>10}{'bwd':>8}{'sdpa fwd':>10}{'bwd':>8}{'ratio':>8}  (ms)\n")
    for name, (data, (left, right), dense) in cases.items():

        def ours(data: tuple = data, left: int = left, right: int = right) -> Tensor:
            scale = args.head_dim**-0.5
            op = torch.ops.paradyse.attention
            return op(q, k, v, *data, None, None, left, right, -1, scale, 0.0, 0.0)[0]

        def sdpa(dense: Tensor | None = dense) -> Tensor:
            mask = None if dense is None or dense.numel() == 0 else dense
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=dense is None, enable_gqa=True
            )

        seconds: list[list[tuple[float, float]]] = [[], []]
        for run in range(args.runs + 1):
            for times, step in zip(seconds, (ours, sdpa), strict=True):
                taken = time_s(step, inputs, grad)
                if run:  # the first warms up
                    times.append(taken)
        (fwd, bwd), (fwd0, bwd0) = (
            [1e3 * statistics.median(part) for part in zip(*times, strict=True)]
            for times in seconds
        )
        ratio = (fwd + bwd) / (fwd0 + bwd0)
        out(f"{name:14}{fwd:10.1f}{bwd:8.1f}{fwd0:10.1f}{bwd0:8.1f}{ratio:8.2f}\n")


if __name__ == "__main__":
    main()
