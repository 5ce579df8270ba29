"""Lower: compile a function of tensors once for all lengths, by the inner compiler through
AOTAutograd.

Sizes that vary between calls are named ("B", "S", "s"); they become symbols of a shape environment
of our own, so nothing here adds a guard to Dynamo's. What the compiler assumed about the symbols
is kept and checked against each new combination of sizes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.session import Recent
from paradyse.torch_private import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    TracingContext,
    compiling_backward_at_once,
    lookup_backend,
    make_fx,
    no_saved_tensors_hooks,
    tracing,
)

log = logging.getLogger(__name__)

LONG = 2048
"""Tokens to have the inner compiler tune for at least, where the graph allows: long sequences cost
most. Not more: inductor writes sums of over 4,096 values in another way, and would compile twice.
"""


Size = str | int | tuple[str, int]
"""One factor of a dim: a number, the name of a varying size, or (name, k) for k more than that
size.
"""

Dims = tuple[tuple[Size, ...], ...]
"""Per dim of a tensor its factors."""


def dim_size(dim: tuple[Size, ...], sizes: Mapping[str, Any]) -> Any:
    """Product of the factors of ``dim``, those with names as in ``sizes``."""
    return math.prod(
        f if isinstance(f, int) else sizes[f] if isinstance(f, str) else sizes[f[0]] + f[1]
        for f in dim
    )


@dataclass(frozen=True)
class Spec:
    """One tensor argument of a compiled function."""

    dims: Dims
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    alike: bool = False
    """Its elements are one in memory, as those of a tensor that only shows sizes are."""


@dataclass
class Compiled:
    """A compiled function and the sizes it holds for."""

    fn: Callable[..., Any]
    guards: list[Any]
    symbols: dict[str, Any]
    static: dict[str, int]
    shape_env: Any
    _known: Recent[tuple[int, ...], bool] = field(default_factory=Recent)

    @property
    def has_constants(self) -> bool:
        """Whether the compiler took a size that varies for a constant."""
        found = self.shape_env.replacements
        return any(found.get(symbol, symbol).is_number for symbol in self.symbols.values())

    def holds_for(self, sizes: Mapping[str, int]) -> bool:
        """Whether what the compiler assumed holds at ``sizes``: in backward it may have taken some
        for constants."""
        constants = self.shape_env.replacements
        key = (len(constants), *sizes.values())
        if key not in self._known:
            fixed = all(sizes.get(name, n) == n for name, n in self.static.items())
            at = {sym: sizes[name] for name, sym in self.symbols.items()}
            large = all(n > 1 for n in at.values())
            kept = all(constants.get(sym, sym).xreplace(at) == n for sym, n in at.items())
            guarded = all(bool(g.xreplace(at)) for g in self.guards)
            self._known[key] = fixed and large and kept and guarded
        return self._known[key]


def compile_function(
    fn: Callable[..., tuple[Any, ...]],
    specs: Sequence[Spec],
    inner: str,
    hints: Mapping[str, int],
    differentiates: bool = False,
) -> Compiled:
    """Trace ``fn`` on fake tensors shaped like ``specs`` and compile the graph with ``inner``.

    Args:
        fn: takes one tensor per spec, returns a tuple; may call operators of ours.
        inner: "inductor", "aot_eager", "eager" or another registered backend.
        hints: sizes to trace at; the function holds for these and for all that its guards allow. A
            size of 1 is fixed: it is special to broadcasting.
        differentiates: ``fn`` asks autograd for gradients, so the graph holds what autograd calls.
    """
    start = time.perf_counter()
    static = {name: n for name, n in hints.items() if n == 1}
    shape_env = ShapeEnv(duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    factors = {f for s in specs for d in s.dims for f in d if not isinstance(f, int)}
    names = {f if isinstance(f, str) else f[0] for f in factors}
    sizes: dict[str, Any] = {name: static[name] for name in names if name in static}
    symbols = {}
    for name in sorted(names - set(static)):
        hint = hints[name]
        source = ConstantSource(f"__paradyse_{name}")
        symbols[name] = shape_env.create_symbol(
            hint, source, DimDynamic.DYNAMIC, constraint_dim=None
        )
        sizes[name] = shape_env.create_symintnode(symbols[name], hint=hint, source=source)

    def example(spec: Spec) -> Tensor:
        shape = [dim_size(d, sizes) for d in spec.dims]
        out = torch.empty(() if spec.alike else shape, dtype=spec.dtype, device=spec.device)
        out = out.expand(shape) if spec.alike else out
        return out.requires_grad_(spec.requires_grad)

    # The fake mode also while tracing: operators without tensor inputs (arange) find it no other
    # way. And what tracing saves is no business of hooks, such as those of a checkpointed region.
    with no_saved_tensors_hooks():
        with fake_mode:
            fakes = [example(s) for s in specs]
            graph = make_fx(fn, _BY_PARTS, pre_dispatch=not differentiates)(*fakes)
        graph.graph.eliminate_dead_code()
        if inner == "inductor" and not _count_elements_alone(graph):
            log.warning(
                "a piece with an avg_pool of ceil_mode and padding is compiled by aot_eager"
            )
            inner = "aot_eager"
        shown: list[tuple[int, int]] = []
        if inner != "eager" and specs:
            shown = _take_sizes(graph)
        graph.recompile()
        examples = [*fakes, *(fakes[i].shape[d] for i, d in shown)]
        with tracing(TracingContext(fake_mode)), compiling_backward_at_once():
            compiled = graph if inner == "eager" else lookup_backend(inner)(graph, examples)
    run = _with_sizes(compiled, shown) if shown else compiled
    guards = [g.expr for g in shape_env.guards]
    took = time.perf_counter() - start
    log.debug("compiled with %s in %.2f s, guards %s: %s", inner, took, guards, graph.graph)
    return Compiled(run, guards, symbols, static, shape_env)


_aten = torch.ops.aten


def _lerp(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):  # it is rounded once
        x, y, weight = x.float(), y.float(), weight.float()
    step = y - x
    return torch.where(weight.abs() < 0.5, x + weight * step, y - step * (1 - weight)).to(dtype)


_BY_PARTS = {_aten.lerp.Tensor: _lerp}
"""Operators that PyTorch 2.11 to 2.14 cannot trace at sizes that vary."""

_PADDING_OF_MEANS = {getattr(_aten, f"avg_pool{n}d").default: 3 for n in (1, 2, 3)} | {
    getattr(_aten, f"avg_pool{n}d_backward").default: 4 for n in (2, 3)
}
"""Means over windows and their gradients -> where their arguments say the padding; behind it
``ceil_mode`` and ``count_include_pad``."""


def _count_elements_alone(gm: fx.GraphModule) -> bool:
    """Whether no mean over windows in ``gm`` that reach beyond the edge (``ceil_mode``) counts
    padding, of which inductor of PyTorch 2.11 and 2.13 computes wrong gradients. Those without
    padding, which may say that they count it, no longer do: that is the same."""
    for node in gm.graph.nodes:
        at = _PADDING_OF_MEANS.get(node.target)
        if at is None or not any(node.args[at + 1 : at + 2]):
            continue
        counts = node.args[at + 2] if len(node.args) > at + 2 else True
        if counts and any(node.args[at]):
            return False
        node.args = (*node.args[: at + 2], False, *node.args[at + 3 :])
    return True


def _take_sizes(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """Have ``gm`` take, as inputs behind the others, the sizes that vary: (input, dim) that each is
    of. So Dynamo gives graphs to compilers: what is compiled for backward is handed those sizes
    alone that are inputs, and inductor finds none in a product; and caches of compilers note what
    was assumed of sizes that are inputs, and hand to all others what was compiled for some.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found = dict[Any, tuple[int, int]]()
    for i, node in enumerate(inputs):
        for d, size in _dims(node).items():
            if size.is_Symbol:
                found.setdefault(size, (i, d))
    at, last = sorted(found, key=str), inputs[-1]
    for symbol in at:
        i, d = found[symbol]
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"size_{symbol}")
        last.meta["val"] = inputs[i].meta["val"].shape[d]
    return [found[symbol] for symbol in at]


def _dims(node: fx.Node) -> dict[int, Any]:
    """The dims of the value of ``node`` that vary, as expressions."""
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()
    return {d: n.node.expr for d, n in enumerate(shape) if isinstance(n, torch.SymInt)}


def _with_sizes(fn: Callable[..., Any], shown: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """``fn``, given besides its arguments the sizes that are ``shown`` by them: (place, dim)s."""
    return lambda *args: fn(*args, *(args[i].shape[d] for i, d in shown))
