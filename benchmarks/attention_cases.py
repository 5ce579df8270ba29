"""What ``attention_gpu`` compares: masks, contenders, and attention in float64 to hold them to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.kernels.attention import attention_backward, attention_forward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.library_attention import BACKWARD_KERNELS, FORWARD_KERNELS
from paradyse.kernels.selection import (
    BACKWARD,
    CAUSAL,
    FORWARD,
    FULL,
    capability_of,
    supported,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

WINDOW = 4096
MASKS = {
    CAUSAL: "causal",
    FULL: "full",
    "window": f"causal, window of {WINDOW:,}",
    "documents": "causal, packed documents",
    "padding": "causal, an eighth of padding in front",
}
PLAIN = (CAUSAL, FULL)

TOKENS_PER_BATCH = 16384
HIDDEN = 2048

# Relative norm of the difference from float64. 16 bits: a rounding of probabilities, of each
# gradient of a score and of the results (2^-9 each in bfloat16, eight times less in float16).
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of out, [B, H, S, D], laid out as [B, S, H, D]."""
Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, dq, dk, dv."""
Visible = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One operator: mask, sizes, dtype."""

    mask: str
    tokens: int
    width: int
    dtype: torch.dtype
    device: str
    batch: int = 0
    """0: as many sequences as make ``TOKENS_PER_BATCH``, at least one."""
    heads: int = 0
    """0: ``HIDDEN`` / width."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, S, H, D."""
        batch = self.batch or max(1, TOKENS_PER_BATCH // self.tokens)
        return batch, self.tokens, self.heads or HIDDEN // self.width, self.width

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def inputs(self) -> Inputs:
        generator = torch.Generator(self.device).manual_seed(self.tokens)
        made = (
            torch.randn(self.shape, generator=generator, device=self.device, dtype=self.dtype)
            for _ in range(4)
        )
        q, k, v, grad = (x.transpose(1, 2) for x in made)
        if self.mask == "padding":  # what rows that see nothing give is nobody's business
            grad[:, :, : self.num_padded] = 0
        return q, k, v, grad

    @property
    def window(self) -> int:
        return min(WINDOW, max(1, self.tokens // 4))

    @property
    def num_padded(self) -> int:
        return self.tokens // 8

    @cached_property
    def documents(self) -> Tensor:
        """[B, S] int64: documents of unlike lengths, 2,048 tokens on average, at least 3."""
        count = max(3, self.tokens // 2048)
        generator = torch.Generator().manual_seed(self.tokens)
        cuts = torch.randperm(self.tokens - 1, generator=generator)[: count - 1] + 1
        starts = torch.zeros(self.tokens, dtype=torch.int64)
        starts[cuts] = 1
        return starts.cumsum(0).to(self.device).expand(self.shape[0], -1)

    @cached_property
    def real(self) -> Tensor:
        """[B, S] bool: what is no padding."""
        at = torch.arange(self.tokens, device=self.device)
        return (at >= self.num_padded).expand(self.shape[0], -1)

    @cached_property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.tokens,
            self.scale,
            left=self.window - 1 if self.mask == "window" else None,
            right=None if self.mask == FULL else 0,
            key_padding=self.real if self.mask == "padding" else None,
            document_ids=self.documents if self.mask == "documents" else None,
        )

    def visibility(self) -> Visible:
        """Whether sequence b's query i sees key j, of indices that broadcast.

        Closed over numbers and tensors alone, so that it compiles.
        """
        window, num_padded = self.window, self.num_padded
        if self.mask == FULL:
            return lambda b, i, j: (i >= 0) & (j >= 0)
        if self.mask == "window":
            return lambda b, i, j: (j <= i) & (i - j < window)
        if self.mask == "padding":
            return lambda b, i, j: (j <= i) & (j >= num_padded)
        if self.mask == "documents":
            documents = self.documents[0].contiguous()  # the same in every sequence
            return lambda b, i, j: (j <= i) & (documents[i] == documents[j])
        return lambda b, i, j: j <= i

    def pairs(self) -> int:
        """Visible pairs of one sequence."""
        s, w = self.tokens, self.window
        if self.mask == FULL:
            return s * s
        if self.mask == "window":
            return w * (w + 1) // 2 + (s - w) * w
        if self.mask == "documents":
            lengths = torch.unique_consecutive(self.documents[0], return_counts=True)[1].tolist()
        else:
            lengths = [s - self.num_padded if self.mask == "padding" else s]
        return sum(n * (n + 1) // 2 for n in lengths)

    def operations(self, direction: str) -> float:
        b, _, h, d = self.shape
        return 4.0 * b * h * d * self.pairs() * (1 if direction == FORWARD else 2.5)


@dataclass(frozen=True)
class Contender:
    """One implementation of a case."""

    name: str
    forward: Callable[..., tuple[Any, ...]]
    """(q, k, v) -> out and whatever backward needs."""
    backward: Callable[..., tuple[Tensor, ...]] | None
    """(grad, q, k, v, *forward's) -> dq, dk, dv; None where it has none on this device."""

    def results(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """out, and dq, dk, dv where there is a backward."""
        q, k, v, grad = inputs
        kept = self.forward(q, k, v)
        grads = () if self.backward is None else self.backward(grad, q, k, v, *kept)
        return (kept[0].detach(), *grads)

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward, each to be called again and again."""
        kept, backward = self.forward(q, k, v), self.backward
        assert backward is not None
        return lambda: self.forward(q, k, v), lambda: backward(grad, q, k, v, *kept)


def _ours(case: Case) -> Contender:
    runs, spec = ((0, case.tokens),), case.spec

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return attention_forward(q, k, v, runs, runs, spec)

    def backward(grad: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        return attention_backward(grad, *args, runs, runs, spec)

    return Contender("triton" if case.device == "cuda" else "ours on the CPU", forward, backward)


def _interpreted(case: Case) -> Contender:
    """Our kernels on a CPU, under Triton's interpreter."""
    from paradyse.kernels.flash_attention import flash_attention

    at = torch.arange(case.tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = {"q_positions": at, "kv_positions": at}
        return flash_attention(q, k, v, **places, mask_spec=case.spec, scale=case.scale)[0]

    return _by_autograd("triton, interpreted", attend)


def _library(case: Case, name: str) -> Contender:
    causal = case.mask == CAUSAL

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return FORWARD_KERNELS[name](q, k, v, causal, case.scale)

    def backward(*args: Tensor) -> tuple[Tensor, ...]:
        return BACKWARD_KERNELS[name](*args, causal, case.scale)

    return Contender(name, forward, backward)


def _by_autograd(name: str, function: Callable[..., Tensor]) -> Contender:
    """A contender whose backward is autograd's. It makes leaves of its own, so that no step adds
    to a gradient.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return function(*leaves), leaves

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Any) -> tuple[Tensor, ...]:
        out, leaves = kept
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return Contender(name, forward, backward)


def _dense(case: Case) -> Contender:
    """SDPA with the boolean mask [B|1, 1, S, S] that HuggingFace models build."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    masks: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not masks:
            at = torch.arange(case.tokens, device=case.device)
            mask = case.visibility()(0, at[:, None], at)
            if case.mask == "padding":  # as HuggingFace does: a row that sees nothing is no number
                mask[: case.num_padded] = True
            masks.append(mask[None, None])
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, masks[0], scale=case.scale)

    return _by_autograd("efficient, dense mask", attend)


def _flex(case: Case) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Any = flex_attention
    if case.device == "cuda":
        torch._dynamo.reset()  # a case is a compilation of its own
        attend = torch.compile(flex_attention, dynamic=False)
    blocks: list[Any] = []
    visible = case.visibility()

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return visible(b, i, j)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not blocks:
            s = case.tokens
            blocks.append(create_block_mask(mask_mod, None, None, s, s, device=case.device))
        return attend(q, k, v, block_mask=blocks[0], scale=case.scale)

    if case.device == "cpu":
        return Contender("flex_attention, forward", lambda q, k, v: (run(q, k, v),), None)
    return _by_autograd("flex_attention", run)


def contenders(case: Case) -> Iterator[Contender]:
    """Those that can compute the case."""
    yield _ours(case)
    if case.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        yield _interpreted(case)
    if case.device == "cuda" and case.mask in PLAIN:
        where = (capability_of(torch.device("cuda")), case.dtype, case.width)
        for name in FORWARD_KERNELS:
            if all(supported(name, *where, d) for d in (FORWARD, BACKWARD)):
                yield _library(case, name)
    yield _dense(case)
    yield _flex(case)


def exact(case: Case, inputs: Inputs) -> Results:
    """out, dq, dk, dv [S, D] of the last sequence's last head, in float64, by blocks of rows."""
    q, k, v, grad = (x[-1, -1].double() for x in inputs)
    s = case.tokens
    keys, visible = torch.arange(s, device=q.device), case.visibility()
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, s, 1024):
        rows = keys[begin : begin + 1024]
        seen = visible(case.shape[0] - 1, rows[:, None], keys)
        scores = (q[rows] @ k.T * case.scale).masked_fill(~seen, -torch.inf)
        p = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
        out = p @ v
        ds = p * (grad[rows] @ v.T - (grad[rows] * out).sum(-1, keepdim=True)) * case.scale
        dv += p.T @ grad[rows]
        dk += ds.T @ q[rows]
        outs.append(out)
        dqs.append(ds @ k)
    return torch.cat(outs), torch.cat(dqs), dk, dv


def check(case: Case, contender: Contender, inputs: Inputs) -> None:
    """
    Raises:
        AssertionError: a result differs from attention in float64; names it and says by how much.
    """
    got = [x[-1, -1].double() for x in contender.results(inputs)]
    want = exact(case, inputs)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want):
        if case.mask == "padding" and name == "out":
            x, y = x[case.num_padded :], y[case.num_padded :]
        error = float((x - y).norm() / y.norm())
        limit = TOLERANCE[case.dtype]
        assert error <= limit, (
            f"{contender.name}, {MASKS[case.mask]}, {case.tokens} tokens, width {case.width}: "
            f"{name} differs from float64 by {error:.1e} in relative norm, more than {limit:.0e}"
        )
