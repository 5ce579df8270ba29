"""What the attention benchmarks compare: masks, contenders, and attention in float64."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import paradyse.kernels.attention_op  # noqa: F401  registers the operator
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.selection import BACKWARD, CAUSAL, FORWARD, FULL, capability_of, supported

LIBRARIES = {"aten_flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels of ``paradyse.kernels.selection`` that SDPA can be held to."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

MASKS = {
    CAUSAL: "causal",
    FULL: "full",
    "window": "causal, a window",
    "documents": "causal, packed documents",
    "padding": "causal, an eighth of padding in front",
}
PLAIN = (CAUSAL, FULL)

# Relative norm of the difference from float64. 16 bits: a rounding of probabilities, of each
# gradient of a score and of the results (2^-9 each in bfloat16, eight times less in float16).
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of out, [B, H, S, D], laid out as [B, S, H, D]."""
Visible = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One operator: mask, sizes, dtype."""

    mask: str
    tokens: int
    width: int
    dtype: torch.dtype
    device: str
    batch: int
    heads: int
    kv_heads: int
    window: int = 1
    num_documents: int = 3

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def inputs(self) -> Inputs:
        generator = torch.Generator(self.device).manual_seed(self.tokens)

        def heads(n: int) -> Tensor:
            shape = self.batch, self.tokens, n, self.width
            x = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            return x.transpose(1, 2)

        q, k, v, grad = map(heads, (self.heads, self.kv_heads, self.kv_heads, self.heads))
        if self.mask == "padding":  # what rows that see nothing give is nobody's business
            grad[:, :, : self.num_padded] = 0
        return q, k, v, grad

    @property
    def num_padded(self) -> int:
        return self.tokens // 8

    @cached_property
    def documents(self) -> Tensor:
        """[B, S] int64: documents of unlike lengths."""
        generator = torch.Generator().manual_seed(self.tokens)
        cuts = torch.randperm(self.tokens - 1, generator=generator)[: self.num_documents - 1] + 1
        starts = torch.zeros(self.tokens, dtype=torch.int64)
        starts[cuts] = 1
        return starts.cumsum(0).to(self.device).expand(self.batch, -1)

    @cached_property
    def real(self) -> Tensor:
        """[B, S] bool: what is no padding."""
        at = torch.arange(self.tokens, device=self.device)
        return (at >= self.num_padded).expand(self.batch, -1)

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
        keys, visible = torch.arange(self.tokens, device=self.device), self.visibility()
        return sum(int(visible(0, rows[:, None], keys).sum()) for rows in keys.split(1024))

    def operations(self, direction: str) -> float:
        each = 4.0 * self.batch * self.heads * self.width * self.pairs()
        return each * (1 if direction == FORWARD else 2.5)


@dataclass(frozen=True)
class Contender:
    """One implementation of a case; its backward is autograd's."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(q, k, v) -> out."""
    differentiable: bool = True

    def forward(self, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        """out, and leaves of its own, so that no step adds to a gradient."""
        leaves = [x.detach().requires_grad_(self.differentiable) for x in inputs[:3]]
        return self.attend(*leaves), leaves

    def results(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """out, and dq, dk, dv where there is a backward."""
        out, leaves = self.forward(inputs)
        grads = torch.autograd.grad(out, leaves, inputs[3]) if self.differentiable else ()
        return (out.detach(), *grads)

    def steps(self, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward, each to be called again and again."""
        out, leaves = self.forward(inputs)
        backward = partial(torch.autograd.grad, out, leaves, inputs[3], retain_graph=True)
        return partial(self.forward, inputs), backward


def ours(case: Case) -> Contender:
    """The operator that models call: our Triton kernels, or the CPU's."""
    spec, op = case.spec, torch.ops.paradyse.attention
    left, right = (-1 if reach is None else reach for reach in (spec.left, spec.right))
    data = spec.key_padding, spec.document_ids, None, None, left, right, -1, case.scale, 0.0, 0.0
    name = "triton" if case.device == "cuda" else "ours"
    return Contender(name, lambda q, k, v: op(q, k, v, *data)[0])


def interpreted(case: Case) -> Contender:
    """Our kernels on a CPU, under Triton's interpreter."""
    from paradyse.kernels import flash_runs

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = flash_runs.forward(q, k, v, *where)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return flash_runs.backward(Backward(grad, *ctx.saved_tensors), *where)

    runs = ((0, case.tokens),)
    where = (runs, runs, case.spec)
    return Contender("triton, interpreted", lambda *qkv: Attention.apply(*qkv))


def sdpa(case: Case, name: str, backend: SDPBackend | None, dense: bool) -> Contender:
    """SDPA of one backend or of PyTorch's choice: plain masks by its flag, the others, or all, by
    the boolean mask [1, 1, S, S] that HuggingFace models build."""
    masks: list[Tensor | None] = []
    causal = case.mask == CAUSAL and not dense

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not masks:
            masks.append(dense_mask(case) if dense or case.mask not in PLAIN else None)
        chosen = sdpa_kernel(backend) if backend else contextlib.nullcontext()
        options = {"is_causal": causal, "scale": case.scale, "enable_gqa": q.shape != k.shape}
        with chosen:
            return F.scaled_dot_product_attention(q, k, v, masks[0], **options)

    return Contender(name, attend)


def dense_mask(case: Case) -> Tensor:
    at = torch.arange(case.tokens, device=case.device)
    mask = case.visibility()(0, at[:, None], at)
    if case.mask == "padding":  # as HuggingFace does: a row that sees nothing is no number
        mask[: case.num_padded] = True
    return mask[None, None]


def flex(case: Case) -> Contender:
    """flex_attention, compiled; on a CPU eager and forward alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cuda, attend = case.device == "cuda", flex_attention
    if cuda:
        torch._dynamo.reset()  # a case is a compilation of its own
        attend = torch.compile(flex_attention, dynamic=False)
    blocks: list[Any] = []
    visible = case.visibility()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not blocks:
            sizes = None, None, case.tokens, case.tokens
            mask_mod = lambda b, h, i, j: visible(b, i, j)  # noqa: E731
            blocks.append(create_block_mask(mask_mod, *sizes, device=case.device))
        return attend(q, k, v, block_mask=blocks[0], scale=case.scale)

    return Contender("flex_attention" if cuda else "flex_attention, forward", run, cuda)


def contenders(case: Case) -> Iterator[Contender]:
    """Those that can compute the case."""
    yield ours(case)
    dense = SDPBackend.MATH
    if case.device == "cuda":
        dense = SDPBackend.EFFICIENT_ATTENTION
        where = (capability_of(torch.device("cuda")), case.dtype, case.width)
        for name, backend in LIBRARIES.items() if case.mask in PLAIN else ():
            if all(supported(name, *where, d) for d in (FORWARD, BACKWARD)):
                yield sdpa(case, name, backend, dense=False)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        yield interpreted(case)
    yield sdpa(case, "efficient, dense mask", dense, dense=True)
    yield flex(case)


def exact(case: Case, inputs: Inputs) -> Inputs:
    """out, dq, dk, dv [S, D] of the last sequence's last head, in float64, by blocks of rows."""
    q, k, v, grad = (x[-1, -1].double() for x in inputs)
    s = case.tokens
    keys, visible = torch.arange(s, device=q.device), case.visibility()
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in keys.split(1024):
        seen = visible(case.batch - 1, rows[:, None], keys)
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
    """Compares the last head of the last sequence with attention in float64.

    Raises:
        AssertionError: a result differs.
    """
    got = [x[-1, -1] for x in contender.results(inputs)]
    compare(case, contender.name, got, exact(case, inputs))


def compare(case: Case, name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """
    Raises:
        AssertionError: a result differs from ``want``; names it and says by how much.
    """
    limit = TOLERANCE.get(case.dtype, 1e-5)
    for what, x, y in zip(("out", "dq", "dk", "dv"), got, want):
        if case.mask == "padding" and what == "out":
            x, y = x[..., case.num_padded :, :], y[..., case.num_padded :, :]
        error = float((x.double() - y.double()).norm() / y.double().norm())
        assert error <= limit, (
            f"{name}, {MASKS[case.mask]}, {case.tokens} tokens, width {case.width}: {what} is off "
            f"by {error:.1e} in relative norm, more than {limit:.0e}"
        )
