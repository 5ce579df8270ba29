"""A gradient of which this rank holds what it has computed alone: the sum over ranks is to come.

It stands in ``.grad`` of a weight where ``paradyse.no_sync`` keeps gradients back. More may be
added to it, and it may be cleared; whatever would read its values raises, since they are a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import disabled_torch_function, make_wrapper_subclass

aten = torch.ops.aten


class PartialGradient(Tensor):
    """Of a gradient: mean over replicas of (sum over ranks of ``own`` + ``rest``)."""

    own: Tensor | None
    """This rank's summand, whole; None: there is none."""
    rest: Tensor | None
    """What needs no sum over ranks, as the weight lies at rest: whole, or the rank's rows."""
    place: Tensor | None
    """What stood in ``.grad`` before, into which the gradient goes: others may have kept it, such
    as a view of a buffer of all gradients. None: nothing did."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        own: Tensor | None = None,
        rest: Tensor | None = None,
        place: Tensor | None = None,
    ) -> PartialGradient:
        out: PartialGradient = make_wrapper_subclass(
            cls, tuple(like.shape), dtype=like.dtype, device=like.device
        )
        out.own, out.rest, out.place = own, rest, place
        return out

    @property
    def num_parts(self) -> int:
        """Of ``own`` and ``rest``, how many are there."""
        return (self.own is not None) + (self.rest is not None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PartialGradient({list(self.shape)}, {self.dtype}, not summed over ranks)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(f"{func} is not defined here: {NOT_SUMMED}")
        return handler(*args, **(kwargs or {}))


NOT_SUMMED = (
    "gradients that paradyse.no_sync keeps back are this rank's part until they are summed over "
    "ranks. Run the last backward before optimizer.step() outside paradyse.no_sync, and clip or "
    "read gradients after it, or clear them with zero_grad(). A hook on a weight that computes "
    "with its gradient needs every backward outside (Trainer's accumulation: sync_each_batch)"
)
"""What errors say, and the way out."""


def own_part(weight: Tensor, grad: Tensor) -> PartialGradient:
    """This rank's summand ``grad`` of the whole gradient of ``weight``."""
    return PartialGradient(weight, own=_cast(grad, kept_dtype(weight)))


def rest_part(weight: Tensor, grad: Tensor, place: Tensor | None = None) -> PartialGradient:
    """What needs no sum over ranks of the gradient of ``weight``: ``grad``, as it lies at rest;
    ``place`` stood in ``.grad`` before."""
    return PartialGradient(weight, rest=_cast(grad, kept_dtype(weight)), place=place)


def kept_dtype(weight: Tensor) -> torch.dtype:
    """In which gradients of ``weight``, whole or sharded, are added up over calls: in 32 bits at
    least, and in the ``reduce_dtype`` of ``paradyse.shard`` where that is wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.promote_types(dtype, getattr(weight, "reduce_dtype", dtype))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, also of a sharded tensor while an operator is dispatched."""
    return x if x.dtype == dtype else aten._to_copy(x, dtype=dtype)


# What autograd and zero_grad() do with gradients. Sums are new tensors: autograd may have lent what
# it gave to others.


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else a if b is None else b


def _add(a: Tensor, b: Tensor) -> PartialGradient:
    partial = a if isinstance(a, PartialGradient) else b
    x, y = (g if isinstance(g, PartialGradient) else rest_part(g, g) for g in (a, b))
    return PartialGradient(partial, _plus(x.own, y.own), _plus(x.rest, y.rest), x.place)


def _add_into(a: Tensor, b: Tensor) -> Tensor:
    if not isinstance(a, PartialGradient):
        raise NotImplementedError(
            "a gradient that was put into .grad between two backwards inside paradyse.no_sync "
            "cannot take one that is kept back: put it there before the first of them"
        )
    return _copy(a, _add(a, b))


def _copy(a: PartialGradient, b: PartialGradient) -> PartialGradient:
    a.own, a.rest = b.own, b.rest
    return a


def _same(a: PartialGradient, *args: Any, **options: Any) -> PartialGradient:
    return PartialGradient(a, a.own, a.rest, a.place)


def _empty(a: PartialGradient, *args: Any, **options: Any) -> PartialGradient:
    return PartialGradient(a)


def _isnan(a: PartialGradient) -> Tensor:
    """Whether any element of the rank's part is no number, [1]: what autograd asks of each gradient
    under ``detect_anomaly``, and all that may be asked."""
    parts = (getattr(x, "local", x) for x in (a.own, a.rest) if x is not None)  # shards' rows
    found = [x.isnan().any() for x in parts]
    return torch.stack(found or [torch.tensor(False, device=a.device)]).any()[None]


def _zero(a: PartialGradient) -> PartialGradient:
    return _copy(a, PartialGradient(a))


def _zero_each(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        x.zero_()


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.new_empty_strided.default: _empty,
    aten.copy_.default: _copy,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_into,
    aten.isnan.default: _isnan,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _zero_each,
}
