"""Attention in a run of blocks: PyTorch's kernel where it is one call of it, else our operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paradyse.strategies  # noqa: F401  registers the operators
from paradyse.graph.attention_call import ATTENTION
from paradyse.kernels import selection
from paradyse.strategies import fused
from paradyse.strategies.fused import attend
from paradyse.torch_private import FakeTensorMode, make_fx

CAUSAL = (-1, 0, -1)
PLAIN = 0.3, 0.0, 0.0
"""Scale, softcap, dropout."""


def qkv(
    kv_heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """[2, H, 13, D] with four query heads, as projections give them."""
    torch.manual_seed(0)
    sizes = (4, 8), (kv_heads, 8), (kv_heads, width)
    made = [torch.randn(2, 13, n, d, dtype=dtype).transpose(1, 2) for n, d in sizes]
    return [x.requires_grad_() for x in made]


def operators(*args: Any) -> set[Any]:
    """What ``attend`` calls for ``args`` of ``paradyse::attention``."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        left = iter(given)
        return attend(ATTENTION, *(next(left) if isinstance(a, torch.Tensor) else a for a in args))

    return {n.target for n in make_fx(run)(*tensors).graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [CAUSAL, (-1, -1, -1)], ids=["causal", "full"])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_values_and_gradients_are_those_of_the_operator(
    kv_heads: int, mask: tuple[int, ...], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    found = []
    for call in (lambda op, *args: op(*args), attend):
        given = qkv(kv_heads)
        out = call(ATTENTION, *given, None, None, None, None, *mask, *PLAIN)[0]
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        found.append([out.detach(), *(x.grad for x in given)])
        assert out.transpose(1, 2).is_contiguous()
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert ATTENTION not in operators(*qkv(kv_heads), None, None, None, None, *mask, *PLAIN)


def test_what_is_more_than_a_call_of_the_kernel_stays_our_operator() -> None:
    padding = torch.ones(2, 13, dtype=torch.bool)
    seed = torch.zeros((), dtype=torch.int64)
    none = (None, None, None, None)
    for args in (
        [*qkv(), padding, None, None, None, *CAUSAL, *PLAIN],
        [*qkv(), None, padding.long(), None, None, *CAUSAL, *PLAIN],
        [*qkv(), None, None, torch.zeros(2, 1, 13, 13), None, *CAUSAL, *PLAIN],
        [*qkv(), *none, 4, 0, -1, *PLAIN],
        [*qkv(), *none, -1, 0, 5, *PLAIN],
        [*qkv(), *none, -1, 2, -1, *PLAIN],
        [*qkv(), *none, *CAUSAL, 0.3, 5.0, 0.0],
        [*qkv(), None, None, None, seed, *CAUSAL, 0.3, 0.0, 0.1],
        [*qkv(width=4), *none, *CAUSAL, *PLAIN],
        [*qkv(), *none, *CAUSAL, *PLAIN, None, None, torch.zeros(4, dtype=torch.float64)],
    ):
        assert ATTENTION in operators(*args), args[3:]


def test_without_the_kernel_in_the_build_it_stays_our_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "cpu_flash", None)
    assert ATTENTION in operators(*qkv(), None, None, None, None, *CAUSAL, *PLAIN)


def targets_on_cuda(dtype: torch.dtype, width: int = 8) -> set[Any]:
    """What ``attend`` calls for plain attention on a CUDA device that need not be there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    none = (None, None, None, None)
    with mode:
        given = [torch.empty(2, n, 13, width, dtype=dtype, device="cuda") for n in (4, 2, 2)]
        graph = make_fx(lambda q, k, v: attend(ATTENTION, q, k, v, *none, *CAUSAL, *PLAIN))(*given)
    return {n.target for n in graph.graph.nodes if n.op == "call_function"}


def test_on_a_gpu_it_is_its_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    monkeypatch.setattr(selection, "capability_of", lambda device: "9.0")
    for dtype in (torch.bfloat16, torch.float16):
        assert flash in targets_on_cuda(dtype) and ATTENTION not in targets_on_cuda(dtype)
    for refused in (targets_on_cuda(torch.float32), targets_on_cuda(torch.bfloat16, width=12)):
        assert flash not in refused and ATTENTION in refused
    monkeypatch.setenv(selection.VARIABLE, selection.ATEN_FLASH)
    assert flash in targets_on_cuda(torch.bfloat16)
    for asked, takes_it in ((selection.TRITON, False), (selection.CUDNN, False), ("a.json", True)):
        monkeypatch.setenv(selection.VARIABLE, asked)
        assert (ATTENTION not in targets_on_cuda(torch.bfloat16)) == takes_it
