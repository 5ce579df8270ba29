"""What the attention benchmarks compare: masks, contenders, and attention in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import paradyse.kernels.attention_op  # noqa: F401  registers the operator
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.library_attention import WINDOW_KERNELS
from paradyse.kernels.selection import (
    ATEN_FLASH,
    BACKWARD,
    CAUSAL,
    FORWARD,
    FULL,
    WINDOW,
    capability_of,
    supported,
)

LIBRARIES = {"aten_flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels of ``paradyse.kernels.selection`` that SDPA can be held to."""
ANY = [*LIBRARIES.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MASKS = {
    CAUSAL: "causal",
    FULL: "full",
    WINDOW: "causal, a window",
    "documents": "causal, packed documents",
    "padding": "causal, padding in front",
}
PLAIN = (CAUSAL, FULL)

# Relative norm of the difference from float64. 16 bits: a rounding of probabilities, of each
# gradient of a score and of the results (2^-9 each in bfloat16, eight times less in float16).
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of out, [B, H, S, D], laid out as [B, S, H, D]."""


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
    padded: float = 1 / 8
    """Share of the tokens."""

    @property
    def num_padded(self) -> int:
        return int(self.tokens * self.padded)

    @cached_property
    def positions(self) -> Tensor:
        """[S] int64."""
        return torch.arange(self.tokens, device=self.device)

    def inputs(self) -> Inputs:
        generator = torch.Generator(self.device).manual_seed(self.tokens)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.batch, self.tokens, n, self.width) for n in heads]
        where: Any = {"generator": generator, "device": self.device, "dtype": self.dtype}
        q, k, v, grad = (torch.randn(shape, **where).transpose(1, 2) for shape in shapes)
        if self.mask == "padding":  # what rows that see nothing give is nobody's business
            grad[:, :, : self.num_padded] = 0
        return q, k, v, grad

    @cached_property
    def documents(self) -> Tensor:
        """[S] int64: documents of unlike lengths, the same in every sequence."""
        generator = torch.Generator().manual_seed(self.tokens)
        cuts = torch.randperm(self.tokens - 1, generator=generator)[: self.num_documents - 1] + 1
        return torch.bucketize(self.positions, cuts.sort().values.to(self.device), right=True)

    def visibility(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Whether query i sees key j, of indices that broadcast.

        Closed over numbers and tensors alone, so that it compiles.
        """
        window, num_padded, documents = self.window, self.num_padded, self.documents
        return {
            CAUSAL: lambda i, j: j <= i,
            FULL: lambda i, j: (i >= 0) & (j >= 0),
            "window": lambda i, j: (j <= i) & (i - j < window),
            "documents": lambda i, j: (j <= i) & (documents[i] == documents[j]),
            "padding": lambda i, j: (j <= i) & (j >= num_padded),
        }[self.mask]

    @cached_property
    def num_pairs(self) -> int:
        """Visible ones of a head of a sequence."""
        at, visible = self.positions, self.visibility()
        return sum(int(visible(rows[:, None], at).sum()) for rows in at.split(1024))

    def operations(self, direction: str) -> float:
        """Of the visible pairs, forward or backward."""
        each = 4.0 * self.batch * self.heads * self.width * self.num_pairs
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

    def steps(self, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward, each to be called again and again."""
        out, leaves = self.forward(inputs)
        backward = partial(torch.autograd.grad, out, leaves, inputs[3], retain_graph=True)
        return partial(self.forward, inputs), backward

    def results(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """out, and dq, dk, dv where there is a backward."""
        out, leaves = self.forward(inputs)
        grads = torch.autograd.grad(out, leaves, inputs[3]) if self.differentiable else ()
        return (out.detach(), *grads)


def ours(case: Case) -> Contender:
    """The operator that models call: our Triton kernels, or the CPU's."""
    of_mask = {"padding": case.positions >= case.num_padded, "documents": case.documents}
    padding, documents = (
        x.expand(case.batch, -1) if case.mask == mask else None for mask, x in of_mask.items()
    )
    left = case.window - 1 if case.mask == "window" else -1
    right = -1 if case.mask == FULL else 0
    given = padding, documents, None, None, left, right, -1, case.width**-0.5, 0.0, 0.0
    name = "triton" if case.device == "cuda" else "ours"
    return Contender(name, lambda q, k, v: torch.ops.paradyse.attention(q, k, v, *given)[0])


def sdpa(case: Case, name: str, backend: SDPBackend | None, dense: bool) -> Contender:
    """SDPA of one backend or of PyTorch's choice: plain masks by its flag, the others, or all, by
    the boolean mask [1, 1, S, S] that HuggingFace models build."""
    dense |= case.mask not in PLAIN
    causal, group = case.mask == CAUSAL and not dense, case.heads // case.kv_heads
    shared = 1 if dense else group  # query heads a KV head, as the kernel sees them

    @cache
    def mask() -> Tensor:
        visible = case.visibility()(case.positions[:, None], case.positions)
        if case.mask == "padding":  # as HuggingFace does: a row that sees nothing is no number
            visible[: case.num_padded] = True
        return visible[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > shared:  # as HuggingFace does: not every kernel with a mask takes groups
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel([backend] if backend else ANY):
            return F.scaled_dot_product_attention(
                q, k, v, mask() if dense else None, is_causal=causal, enable_gqa=shared > 1
            )

    return Contender(name, attend)


def windowed(case: Case) -> Contender:
    """ATen's flash attention, which SDPA calls without a window."""
    forward, backward = WINDOW_KERNELS[ATEN_FLASH]
    given = case.window - 1, 0, case.width**-0.5

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = forward(q, k, v, *given)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(Backward(grad, *ctx.saved_tensors).readable(), *given)

    return Contender(ATEN_FLASH, Attend.apply)


def flex(case: Case) -> Contender:
    """flex_attention, compiled; on a CPU eager and forward alone."""
    cuda, attend, visible = case.device == "cuda", flex_attention, case.visibility()
    if cuda:
        torch._dynamo.reset()  # a case is a compilation of its own
        # as it is timed, backward runs again and again on what forward kept
        torch._functorch.config.donated_buffer = False
        attend = torch.compile(flex_attention, dynamic=False)

    @cache
    def blocks() -> Any:
        # Eager, it makes the mask of all pairs first: 16 GiB of 128K tokens.
        make = torch.compile(create_block_mask, dynamic=False) if cuda else create_block_mask
        sizes = None, None, case.tokens, case.tokens
        return make(lambda b, h, i, j: visible(i, j), *sizes, device=case.device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, block_mask=blocks(), enable_gqa=case.heads != case.kv_heads)

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
        if case.mask == WINDOW and supported(ATEN_FLASH, *where, BACKWARD):
            yield windowed(case)
    yield sdpa(case, "efficient, dense mask", dense, dense=True)
    yield flex(case)


EXACT_BYTES = 2**29
"""Of one block of scores in float64, of which there are four or so at a time."""


@lru_cache(maxsize=1)
def exact(case: Case) -> Inputs:
    """out, dq, dk, dv [H, S, D] of the last sequence's last KV head and the query heads that share
    it, in float64, by blocks of rows. Kept for the next contender."""
    group = case.heads // case.kv_heads
    *leaves, grad = (x[-1, -n:].double() for x, n in zip(case.inputs(), (group, 1, 1, group)))
    q, k, v = (x.requires_grad_() for x in leaves)
    outs, visible = [], case.visibility()
    for rows in case.positions.split(max(1, min(1024, EXACT_BYTES // (8 * group * case.tokens)))):
        seen = visible(rows[:, None], case.positions)
        seen |= ~seen.any(-1, keepdim=True)  # a row that sees nothing has no gradient
        out = (q[:, rows] @ k.mT * case.width**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        out.backward(grad[:, rows])
        outs.append(out.detach())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return torch.cat(outs, 1), q.grad, k.grad, v.grad


def check(case: Case, contender: Contender, inputs: Inputs) -> None:
    """Asserts that the last KV head of the last sequence is attention as in float64."""
    limit, results = TOLERANCE.get(case.dtype, 1e-5), contender.results(inputs)
    for what, x, y in zip(("out", "dq", "dk", "dv"), results, exact(case)):
        x = x[-1, -len(y) :]
        if case.mask == "padding" and what == "out":
            x, y = x[:, case.num_padded :], y[:, case.num_padded :]
        error = float((x - y).norm() / y.norm())
        assert error <= limit, (
            f"{contender.name}, {MASKS[case.mask]}, {case.tokens} tokens, width {case.width}: "
            f"{what} is off by {error:.1e} in relative norm, more than {limit:.0e}"
        )
