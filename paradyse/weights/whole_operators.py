"""Operators on sharded tensors that need more than the rows of a rank: views, products, sorts.

They take whole tensors, which are gathered on every rank for the operator and freed after it, so
all ranks must call them. Results are plain tensors, but a view is a ``ShardedView``: what is
written through it is written to the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import (
    disabled_torch_function,
    make_wrapper_subclass,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from paradyse.weights.copies_for_use import wait_for_copies
from paradyse.weights.versions import count_write

log = logging.getLogger(__name__)

aten = torch.ops.aten


class ShardedView(Tensor):
    """A view of a sharded tensor: rows, a transpose, another shape. It has no values of its own.

    Args:
        base: the sharded tensor.
        steps: one after the other they make the view of the whole tensor.
        like: a meta tensor of the view's shape and strides.
    """

    __torch_function__ = disabled_torch_function

    base: Any
    _steps: tuple[Callable[[Tensor], Tensor], ...]
    _like: Tensor

    @staticmethod
    def __new__(
        cls, base: Any, steps: tuple[Callable[[Tensor], Tensor], ...], like: Tensor
    ) -> ShardedView:
        out: ShardedView = make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=base.dtype,
            device=base.device,
        )
        out.base, out._steps, out._like = base, steps, like
        return out

    def of(self, whole: Tensor) -> Tensor:
        """The view of ``whole``, the tensor's values."""
        for step in self._steps:
            whole = step(whole)
        return whole

    def full_tensor(self) -> Tensor:
        """The view's values, on every rank; call it on every rank."""
        return self.of(self.base.detach().full_tensor())

    def numpy(self, *, force: bool = False) -> Any:
        """The view's values as an array, on every rank; call it on every rank.

        Args:
            force: as of ``torch.Tensor.numpy``.
        """
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """The view's values as lists, on every rank; call it on every rank."""
        return self.full_tensor().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedView({list(self.shape)}, {self.dtype}, of {self.base!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_whole(func, args, kwargs or {})


def is_spread(x: Any) -> bool:
    """Whether ``x`` is a sharded tensor or a view of one."""
    return isinstance(x, ShardedView) or (isinstance(x, Tensor) and hasattr(x, "placement"))


def _base(x: Any) -> Any:
    return x.base if isinstance(x, ShardedView) else x


def _refuse(func: Any, x: Any, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{func} is not defined for a sharded tensor of shape {list(x.shape)}: {why}"
    )


OUTSIDE = (
    "each rank holds some of its rows. Compute with .full_tensor() of it, on every rank, which "
    "takes gradients back to the rows; under torch.no_grad(), or of its .detach(), whole tensors "
    "are gathered for the operator. Or run the model through torch.compile(model, "
    'backend="paradyse"): where that was done, Dynamo runs this part of it eagerly, and '
    "TORCH_LOGS=graph_breaks says why (of an input that another compiled model gave, pass the "
    ".clone(); once the model has raised an exception, as for wrong arguments, Dynamo runs it "
    "eagerly until torch._dynamo.reset()); before trainers of transformers and TRL put "
    "paradyse.TrainerMixin"
)
"""What is said where gradients would be lost."""

MESSAGES = (
    "it is a message of another library (DistributedDataParallel, FullyShardedDataParallel, "
    "broadcast, ...), and the ranks hold different rows. ParaDySe sums gradients by itself: give "
    "the model as it is, to trainers of transformers and TRL behind paradyse.TrainerMixin, to "
    "accelerate's Accelerator behind paradyse.AcceleratorMixin; and load whole states on every "
    "rank (StateDictOptions without broadcast_from_rank0)"
)
"""What is said where a process group would be given rows for whole tensors."""


_WITHOUT_GRADIENT = {aten.allclose.default, aten.argmax.default, aten.argmin.default}


@torch.compiler.disable  # Dynamo would compile what runs here, where a graph has broken outside
def on_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` with whole tensors in place of the sharded ones of ``args`` and ``kwargs``.

    Raises:
        NotImplementedError: a gradient would be needed of it, or it sends messages itself.
        ValueError: a sharded tensor is on the meta device, or is given as ``out=`` of a result of
            another shape.
    """
    given = [x for x in tree_leaves((args, kwargs)) if is_spread(x)]
    if func.namespace != "aten":
        raise _refuse(func, given[0], MESSAGES if "c10d" in func.namespace else OUTSIDE)
    if torch.Tag.inplace_view in func.tags:
        raise _refuse(func, given[0], "its shape stays; call what gives a new tensor, such as .t()")
    has_gradient = func not in _WITHOUT_GRADIENT and torch.is_grad_enabled()
    if has_gradient and any(x.requires_grad for x in given):
        raise _refuse(func, given[0], OUTSIDE)
    if _is_view(func) and is_spread(args[0]):
        return _view(func, args, kwargs)
    _tell_once(str(func), tuple(given[0].shape))
    bases = {id(_base(x)): _base(x) for x in given}
    wholes = {i: base.detach().full_tensor() for i, base in bases.items()}

    def whole(x: Any) -> Any:
        if not is_spread(x):
            return x
        return x.of(wholes[id(x.base)]) if isinstance(x, ShardedView) else wholes[id(x)]

    written = [x for x in written_by(func, args, kwargs) if is_spread(x)]
    named = set(map(id, tree_leaves(dict(kwargs))))
    outs = {id(x): x for x in written if id(x) in named}
    rooms = {i: wholes[id(_base(x))].new_empty(0) for i, x in outs.items()}  # of any shape
    positional = tree_map_only(Tensor, whole, list(args))
    by_name = tree_map_only(Tensor, lambda x: rooms.get(id(x), whole(x)), dict(kwargs))
    out = func(*positional, **by_name)
    for i, x in outs.items():
        if rooms[i].shape != x.shape:
            raise ValueError(
                f"out= is a sharded tensor of shape {list(x.shape)}, and {func} gives one of shape "
                f"{list(rooms[i].shape)}: give one of that shape, or leave out= out"
            )
    for i, x in outs.items():
        whole(x).copy_(rooms[i])
    for base in {id(_base(x)): _base(x) for x in written}.values():
        wait_for_copies([base])
        base.local.copy_(base.placement.take_own(wholes[id(base)]))
        count_write([base])
    back = {id(whole(x)): x for x in written if not isinstance(x, ShardedView)}
    back |= {id(rooms[i]): x for i, x in outs.items()}
    views = [x for x in written if isinstance(x, ShardedView)]
    if views and isinstance(out, Tensor):  # an operator in place gives what it was given
        return views[0]
    return tree_map_only(Tensor, lambda x: back.get(id(x), x), out)


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Views of the first argument."""
    x, rest = args[0], args[1:]
    base = _base(x)
    steps = x._steps if isinstance(x, ShardedView) else ()
    like = x._like if isinstance(x, ShardedView) else _meta(base)
    found = func(like, *rest, **kwargs)

    def step(whole: Tensor) -> Any:
        return func(whole, *rest, **kwargs)

    def part(i: int) -> Callable[[Tensor], Tensor]:
        return lambda whole: step(whole)[i]

    if isinstance(found, Tensor):
        return ShardedView(base, (*steps, step), found)
    return [ShardedView(base, (*steps, part(i)), like) for i, like in enumerate(found)]


def _is_view(func: Any) -> bool:
    """Whether what ``func`` returns shares the memory of what it is given, and it writes none."""
    alias = [r.alias_info for r in schema_of(func).returns]
    return bool(alias) and all(a is not None and not a.is_write for a in alias)


def _meta(base: Any) -> Tensor:
    return torch.empty(base.shape, dtype=base.dtype, device="meta")


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of ``args`` and ``kwargs`` that ``func`` writes to, those in lists one by one."""
    found: list[Any] = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            found += value if isinstance(value, list | tuple) else [value]
    return found


@cache
def _tell_once(func: str, shape: tuple[int, ...]) -> None:
    if _tell_once.cache_info().currsize:
        log.debug("%s on a sharded tensor of shape %s takes whole ones", func, list(shape))
        return
    log.warning(
        "%s on a sharded tensor of shape %s takes whole tensors, gathered on every rank: this is "
        'exact, slow, and needs their memory for a moment. Said once; TORCH_LOGS="+paradyse" logs '
        "every such operator",
        func,
        list(shape),
    )
