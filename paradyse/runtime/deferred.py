"""Outputs that are computed at first use: logits and caches that a training loop rarely reads.

A ``DeferredTensor`` is made by an autograd node when the program ends, and only its data comes
later: C++ (autograd functions, hooks, ``torch.func``, scripted code) takes part in the gradient
without asking Python whether it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.runtime.backward import refuse_second_derivatives
from paradyse.torch_private import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_map_only,
)
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.versions import version_of

aten = torch.ops.aten

_ATTRIBUTES = "shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf"
_METHODS = "size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "detach"
_AUTOGRAD = "requires_grad_", "retain_grad", "register_hook", "backward"

_AS_IT_IS = {
    *(getattr(Tensor, name).__get__ for name in (*_ATTRIBUTES, "grad", "retains_grad")),
    *(getattr(Tensor, name) for name in (*_METHODS, *_AUTOGRAD)),
    *(Tensor.requires_grad.__set__, Tensor.grad.__set__, Tensor.grad.__delete__),
    *(torch.is_floating_point, torch.numel, torch.detach),
    *(torch.autograd.backward, torch.autograd.grad),
}
"""What needs no value: questions of shape and dtype, and what speaks to autograd."""

_SAME_VALUE = {aten.alias.default, aten.detach.default, aten.view.default}
"""Where the shape stays, the result is deferred as well."""


CHANGED = (
    "an output that is computed when it is first read, such as logits or a cache of keys and "
    "values, is read after weights that it is made of were changed in place (by an optimizer's "
    "step, load_state_dict, ...), or inputs of the call, or other outputs, so it would be another "
    "model's: read it before, as by logits = output.logits.clone()"
)
"""What is said of a value that is asked for too late."""


class _Value:
    """A value to come, of one or several tensors; what it is ``made_of`` may not change until
    then."""

    def __init__(self, compute: Callable[[], Tensor], made_of: Sequence[Tensor]):
        self._compute: Callable[[], Tensor] | None = compute
        self._made_of = [(x, _writes_to(x)) for x in made_of]
        self._tensor: Tensor | None = None
        self._version = 0

    def get(self, device: torch.device) -> Tensor:
        if self._tensor is None:
            assert self._compute is not None
            if any(_writes_to(x) != writes for x, writes in self._made_of):
                raise RuntimeError(CHANGED)
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                self._tensor = self._compute()
            self._compute, self._made_of = None, []
            self._version = version_of(self._tensor)
        return self._tensor

    def writes(self) -> int:
        """How often the value has been written to since it was computed."""
        return 0 if self._tensor is None else version_of(self._tensor) - self._version


def _writes_to(x: Tensor) -> int:
    return x._value.writes() if isinstance(x, DeferredTensor) else version_of(x)


class DeferredTensor(torch.Tensor):
    """A tensor whose value is made at first use; shape, dtype and ``grad_fn`` are there before.

    Where the value is split over ranks computing it is collective, so every rank must use it, as
    every line of the program is run by every rank.
    """

    _value: _Value
    _plain: Tensor | None

    @staticmethod
    def __new__(
        cls: type,
        value: _Value,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        out = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        out._value, out._plain = value, None
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``, as for all tensor subclasses."""

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _AS_IT_IS:
            # Much of what Python offers asks for memory (numpy, tolist, pickle): a plain tensor.
            args, kwargs = tree_map_only(DeferredTensor, materialize, (args, kwargs))
            if torch.is_grad_enabled():  # a head behind a graph break, with sharded weights
                args, kwargs = tree_map_only(ShardedTensor, _whole, (args, kwargs))
            return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME_VALUE:
            x = args[0]
            if func != aten.view.default or tuple(args[1]) == tuple(x.shape):
                return DeferredTensor(x._value, x.shape, x.dtype, x.device)
        plain = tree_map_only(
            DeferredTensor, lambda x: x._value.get(x.device), (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


def _whole(x: ShardedTensor) -> Tensor:
    """``x``, of one that is trained all of it."""
    return x.full_tensor() if x.requires_grad else x


def materialize(x: DeferredTensor) -> Tensor:
    """``x`` as a plain tensor, its value computed now if it has not been. Once gradients flow
    through it, it is always the same one, so that what is written into it is read again."""
    with DisableTorchFunctionSubclass():
        if x._plain is not None:
            return x._plain
        plain: Tensor = _Read.apply(x)
        if plain.requires_grad:
            x._plain = plain
        return plain


class _Read(torch.autograd.Function):
    """The value of a ``DeferredTensor``, no view of it: tracers would look into what it is of. Both
    count what is written to either."""

    @staticmethod
    def forward(ctx: Any, x: DeferredTensor) -> Tensor:
        return x._value.get(x.device).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Defer(torch.autograd.Function):
    """Inputs to a ``DeferredTensor``; backward asks ``pull`` or computes again."""

    @staticmethod
    def forward(ctx: Any, compute: Any, pull: Any, like: Any, weights: Any, *inputs: Tensor) -> Any:
        ctx.compute, ctx.pull = compute, pull
        ctx.set_materialize_grads(False)
        if pull is None:
            ctx.save_for_backward(*inputs)
        held = [x.detach() for x in inputs]
        return DeferredTensor(_Value(lambda: compute(*held), [*weights, *held]), *like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_second_derivatives("an output that is computed when it is read")
        if ctx.pull is not None:
            return None, None, None, None, *ctx.pull(grad)
        needs = ctx.needs_input_grad[4:]
        inputs = [
            x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needs, strict=True)
        ]
        asked = [x for x in inputs if x.requires_grad]
        with torch.enable_grad():
            value = ctx.compute(*inputs)
        found = iter(torch.autograd.grad(value, asked, grad, allow_unused=True))
        return None, None, None, None, *(next(found) if n else None for n in needs)


def defer(
    compute: Callable[..., Tensor],
    inputs: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    pull: Callable[[Tensor], Sequence[Tensor | None]] | None = None,
    weights: Sequence[Tensor] = (),
) -> DeferredTensor:
    """``compute(*inputs)``, of ``shape``, ``dtype`` and ``device``, at first use.

    Args:
        compute: may be called again in backward, with gradients enabled, where ``pull`` is None.
        inputs: all tensors that gradients flow to, and numbers.
        pull: gradient of the result -> gradients of the tensors in ``inputs``.
        weights: parameters that the result is made of; once they change it cannot be read.

    Its backward refuses to make a graph of its own (NotImplementedError).
    """
    numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    is_tensor = [isinstance(x, Tensor) for x in inputs]

    def of_tensors(*given: Tensor) -> Tensor:
        left = iter(given)
        return compute(*(next(left) if t else x for t, x in zip(is_tensor, numbers, strict=True)))

    like = (tuple(shape), dtype, device)
    out: DeferredTensor = _Defer.apply(of_tensors, pull, like, weights, *tensors)
    return out
