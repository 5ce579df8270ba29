"""Compiling once for all sizes. Tried on torch 2.13."""

from __future__ import annotations

import pytest
import torch

from paradyse.graph.lower import Spec, compile_function
from paradyse.strategies.base import VariantCache

CPU = torch.device("cpu")
SIZES = {"B": 3, "s": 11}


def specs():
    return [
        Spec((("B",), ("s",), (8,)), torch.float64, CPU, True),
        Spec(((4,), (8,)), torch.float64, CPU, True),
        Spec((("s",),), torch.int64, CPU, False),
    ]


def fn(x, w, positions):
    b, s, _ = x.shape
    y = torch.nn.functional.linear(x, w).reshape(b * s, 4).reshape(b, s, 4)
    return (y * torch.arange(s, device=x.device)[:, None] + positions[:, None],)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_one_compilation_serves_all_sizes_with_gradients(inner):
    compiled = compile_function(fn, specs(), inner, SIZES)
    for b, s in ((2, 3), (5, 17), (3, 2)):
        assert compiled.holds_for({"B": b, "s": s})
        x = torch.randn(b, s, 8, dtype=torch.float64, requires_grad=True)
        w = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        args = (x, w, torch.arange(s))
        (got,), (want,) = compiled.fn(*args), fn(*args)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        g = torch.randn_like(want)
        for a, e in zip(*(torch.autograd.grad(y, (x, w), g) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_graph_may_be_kept_for_another_backward(inner, cached):
    """Also of what comes from the compiler's cache."""
    w, positions = torch.randn(4, 8, dtype=torch.float64), torch.arange(11)

    def gated(x, w, positions):
        return (torch.nn.functional.gelu(fn(x, w, positions)[0]).exp(),)

    for _ in range(1 + cached):
        torch._dynamo.reset()
        compiled = compile_function(gated, specs(), inner, SIZES)
    x = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True)
    (y,) = compiled.fn(x, w.requires_grad_(), positions)
    first, again = (torch.autograd.grad(y.sum(), (x, w), retain_graph=k) for k in (True, False))
    want = torch.autograd.grad(gated(x, w, positions)[0].sum(), (x, w))
    torch.testing.assert_close((*first, *again), (*want, *want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("differentiates", [False, True])
def test_lerp_at_sizes_that_vary(dtype, differentiates):
    def mixed(x, w, positions):
        return (torch.lerp(x, x * x, w[0]),)

    given = [Spec(s.dims, dtype if i < 2 else s.dtype, CPU, False) for i, s in enumerate(specs())]
    compiled = compile_function(mixed, given, "aot_eager", SIZES, differentiates)
    for s in (3, 17):
        x, w = torch.randn(2, s, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
        args = (x, w, torch.arange(s))
        (got,), (want,) = compiled.fn(*args), mixed(*args)
        torch.testing.assert_close(got, want)


def test_what_the_compiler_assumed_is_checked():
    def branchy(x, w, positions):
        return (x * 2 if x.shape[1] < 2000 else x,)

    compiled = compile_function(branchy, specs(), "eager", SIZES)
    assert compiled.guards
    assert compiled.holds_for({"B": 2, "s": 1999})
    assert not compiled.holds_for({"B": 2, "s": 2000})


def test_sizes_of_one_and_fixed_sizes_hold_for_themselves_only():
    assert not compile_function(fn, specs(), "eager", SIZES).holds_for({"B": 1, "s": 7})
    fixed = compile_function(fn, specs(), "eager", {"B": 1, "s": 9})
    assert fixed.holds_for({"B": 1, "s": 7})
    assert not fixed.holds_for({"B": 2, "s": 7})


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_sizes_that_gradients_show_as_a_product_alone(inner):
    """What is compiled for backward has no value with a dim of B or of s alone."""
    rows = Spec((("B", "s"), (8,)), torch.float64, CPU, True)
    beside = [Spec(((name,),), torch.int64, CPU, False) for name in SIZES]

    def flat(x, w, sequences, positions):
        return (torch.nn.functional.gelu(x) * w,)

    given = [rows, Spec(((8,),), torch.float64, CPU, True), *beside]
    compiled = compile_function(flat, given, inner, SIZES)
    for b, s in ((2, 3), (5, 17)):
        x = torch.randn(b * s, 8, dtype=torch.float64, requires_grad=True)
        w = torch.randn(8, dtype=torch.float64, requires_grad=True)
        args = (x, w, torch.arange(b), torch.arange(s))
        (got,), (want,) = compiled.fn(*args), flat(*args)
        g = torch.randn_like(want)
        for a, e in zip(*(torch.autograd.grad(y, (x, w), g) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def convolved(x, w, sequences, positions):
    """[B, s, 32] of [B, 32, s] and [32, 16, 16]; inductor's backward knows no sizes in it."""
    y = torch.nn.functional.conv1d(x, w, None, [1], [8], [1], 2)[:, :, :-1]
    return (torch.nn.functional.gelu(y).transpose(1, 2),)


def picked(x, w, sequences, positions):
    """[B, s, 64] of [B, 32, s] and [32, 16, 16]; what backward keeps is every fourth element of
    what lies in memory, of which inductor makes a copy with other strides."""
    rows = (x.transpose(1, 2) @ w.flatten(1)).unflatten(2, (64, 4)).permute(3, 0, 1, 2) + 1
    one = rows[0] * torch.rsqrt(rows[0].pow(2).mean(-1, keepdim=True) + 1)
    return (one + rows[1],)


@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("num_dims", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_means_over_windows_that_reach_beyond_the_edge(num_dims, padding, differentiates):
    """Inductor's own gradient of them is wrong (PyTorch 2.11 and 2.13): as AOTAutograd asks for it,
    and as pieces do that compute a block again."""
    pool = getattr(torch.nn.functional, f"avg_pool{num_dims}d")
    beside = (4, 5)[: num_dims - 1]

    def pooled(x, positions):
        y = pool(x, 3, 2, padding, True)
        return (y, *torch.autograd.grad(y, x, y.cos())) if differentiates else (y,)

    dims = (("B",), (2,), ("s",), *((n,) for n in beside))
    specs = [Spec(dims, torch.float64, CPU, True), Spec((("s",),), torch.int64, CPU, False)]
    how = specs, "inductor", {"B": 3, "s": 12}, differentiates
    compiled = compile_function(pooled, *how)
    x = torch.randn(3, 2, 12, *beside, dtype=torch.float64, requires_grad=True)
    want = pool(x, 3, 2, padding, True)
    with torch.set_grad_enabled(not differentiates):
        got, *grads = compiled.fn(x, torch.arange(12))
    g = want.detach().cos()
    grads = grads or torch.autograd.grad(got, x, g)
    for a, e in zip((got, *grads), (want, *torch.autograd.grad(want, x, g)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


GIVEN = [
    Spec((("B",), (32,), ("s",)), torch.float64, CPU, True),
    Spec(((32,), (16,), (16,)), torch.float64, CPU, True),
    *(Spec(((name,),), torch.int64, CPU, False) for name in SIZES),
]
"""Of ``convolved`` and ``picked``."""


@pytest.mark.parametrize("function", [convolved, picked])
def test_sizes_that_backward_takes_for_constants_hold_for_themselves_only(function):
    """What caches have of them must not be given to others."""
    for s in (13, 22, 13):
        compiled = compile_function(function, GIVEN, "inductor", {"B": 3, "s": s})
        assert compiled.holds_for({"B": 3, "s": s})
        for n in filter(lambda n: compiled.holds_for({"B": 3, "s": n}), (s, 17)):
            x = torch.randn(3, 32, n, dtype=torch.float64, requires_grad=True)
            w = torch.randn(32, 16, 16, dtype=torch.float64, requires_grad=True)
            args = (x, w, torch.arange(3), torch.arange(n))
            (got,), (want,) = compiled.fn(*args), function(*args)
            g = torch.randn_like(want)
            for a, e in zip(*(torch.autograd.grad(y, (x, w), g) for y in (got, want)), strict=True):
                torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_a_piece_that_is_compiled_for_each_length_is_spoken_of_once(caplog):
    """Whether inductor takes a length for a constant is up to its version."""
    cache, found = VariantCache(), []
    for s in (13, 22, 31, 17, 13):
        found.append(cache.get("picked", picked, GIVEN, "inductor", {"B": 3, "s": s}))
    spoken = caplog.text.count("takes lengths for constants")
    assert (cache.num_compiled, spoken) in ((1, 0), (4, 1))
    assert found[0] is found[-1]
