"""Tensors whose rows lie spread over the ranks of an axis, each row on one rank.

``ShardedTensor`` is a parameter (or its gradient, or optimizer state) at rest: it has the shape of
the whole tensor and the memory of the rank's rows. Elementwise operators, reductions
(``reductions.py``) and the optimizers run on the rows; any other operator takes whole tensors
(``whole_operators.py``), and raises where a gradient would be lost. While a model is traced, a
sharded parameter stands for the whole tensor, so the forward and the parameter names stay as they
are; at run time the backend takes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.agreement import compare
from paradyse.distributed.collectives import OPTIMIZER
from paradyse.distributed.replicas import average
from paradyse.torch_private import (
    backend_traced_for,
    disabled_torch_function,
    join_foreach_types,
    make_wrapper_subclass,
    tree_map_only,
)
from paradyse.weights import dcp
from paradyse.weights.coming_gradient import ComingGradient
from paradyse.weights.copies_for_use import CopiesUnderWay, wait_for_copies
from paradyse.weights.layout import GradientSum, ShardLayout, to_host
from paradyse.weights.norms import joined_norms, local_norms
from paradyse.weights.operator_kinds import ALIASES, SIZED, kind_of
from paradyse.weights.partial_gradient import PartialGradient
from paradyse.weights.reductions import REDUCTIONS, every_rank
from paradyse.weights.shard_comm import gather_shards
from paradyse.weights.versions import count_write
from paradyse.weights.whole_operators import ShardedView, on_whole, written_by

aten = torch.ops.aten


class ShardedTensor(Tensor):
    """A tensor of which this rank holds some rows; ``paradyse.shard`` makes parameters of it."""

    local: Tensor
    """The rank's rows."""
    placement: ShardLayout
    sums: GradientSum
    on_host: bool
    """Whether the rows lie on the host, and are copied to the device for use."""
    is_alias: bool = False
    """Whether the memory is another one's, as of ``.data``: its rows stay where they lie."""
    _token: Tensor
    """An empty tensor on the device that computes with the rows. Tracers see it in place of them,
    so no guard depends on the layout."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        local: Tensor | None,
        layout: ShardLayout | None,
        size: Sequence[int],
        token: Any = None,
        sums: GradientSum | None = None,
        used_on: torch.device | None = None,
    ) -> ShardedTensor:
        if token is None:
            assert local is not None
            token = local.new_empty(0, device=used_on)
        device = token.device if local is None else local.device
        kind = {"dtype": token.dtype, "device": device}
        # in inference mode too: of one that was made there nothing could be detached or trained
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            out: ShardedTensor = make_wrapper_subclass(cls, tuple(size), **kind)
        out._token, out.sums, out.on_host = token, sums or GradientSum(), used_on is not None
        if local is not None and layout is not None:
            out.local, out.placement = local, layout
        return out

    def with_rows(self, rows: Tensor) -> ShardedTensor:
        """A tensor of this one's shape and layout, of which this rank holds ``rows``: on the host,
        where this one's lie there."""
        kind = self.placement, self.shape
        if not self.on_host:
            return ShardedTensor(rows, *kind, sums=self.sums)
        rows = to_host(rows, self.placement.axis)
        return ShardedTensor(rows, *kind, sums=self.sums, used_on=self.used_on)

    @property
    def used_on(self) -> torch.device:
        """The device that computes with it."""
        return self._token.device

    @property
    def for_use(self) -> Tensor:
        """The rank's rows on the device that computes with them."""
        rows = self.local.to(self.used_on, non_blocking=True)
        if self.on_host:
            self.placement.axis.session.of(CopiesUnderWay).note(self.used_on)
        return rows

    @property
    def trained_dtype(self) -> torch.dtype:
        """Its own dtype."""
        return self.local.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """As ``paradyse.shard`` was told; its own dtype where it was not."""
        return self.sums.dtype or self.local.dtype

    def new_whole(self) -> Tensor:
        """A plain tensor of the whole shape, of unspecified values."""
        return self._token.new_empty(self.shape)

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank; call it on every rank.

        It is differentiable: every rank is taken to compute the same with it, so each keeps its
        rows of the gradient, averaged over replicas.

        Raises:
            ValueError: the tensor is on the meta device.
        """
        self._need_values()
        compare(self.placement.axis, f"gathers a sharded tensor of shape {list(self.shape)}")
        whole: Tensor = _Whole.apply(self)
        return whole.to(self.device)  # the host, where rows lie there

    def _need_values(self) -> None:
        if not is_traced(self) and self.local.is_meta:
            raise ValueError(
                f"a sharded tensor of shape {list(self.shape)} is on the meta device and has no "
                "values: call paradyse.load_safetensors(model, folder) before you use the model"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if is_traced(self):
            return f"ShardedTensor({list(self.shape)})"
        rows = repr(self.local.detach())
        return (
            f"ShardedTensor({list(self.shape)}, {self.dtype}, rank {self.placement.axis.rank} of "
            f"{self.placement.axis.size} holds {list(self.local.shape)}: {rows})"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array, on every rank; call it on every rank.

        Args:
            force: as of ``torch.Tensor.numpy``: of a tensor with gradients, or on a device, too.
        Raises:
            RuntimeError: the tensor requires gradients, and ``force`` is not set.
        """
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use .detach().numpy()")
        return self.detach().full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """The whole tensor as lists, on every rank; call it on every rank."""
        return self.detach().full_tensor().tolist()

    @property
    def data(self) -> Any:
        """As of any tensor: the same rows, without gradients, and writes to it are not noticed."""
        out: Any = Tensor.data.__get__(self)  # counts of writes of its own
        if not is_traced(self):
            out.local = self.local.data
        return out

    @data.setter
    def data(self, value: Tensor) -> None:
        """Have the rows of ``value``, whole or sharded, of this one's shape.

        Raises:
            ValueError: it has another shape.
        """
        if value.shape != self.shape:
            raise ValueError(
                f".data of a sharded tensor of shape {list(self.shape)} cannot become a tensor of "
                f"shape {list(value.shape)}: give one of its shape, whole or sharded; a model is "
                "resized (resize_token_embeddings) before paradyse.shard"
            )
        if not isinstance(value, ShardedTensor):
            value = self.with_rows(self.placement.take_own(value.detach()))
        Tensor.data.__set__(self, value)
        self.local, self.placement, self._token = value.local, value.placement, value._token
        self.on_host = value.on_host

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        out: Any = self.with_rows(self.local.clone())
        if isinstance(self, torch.nn.Parameter):
            out = torch.nn.Parameter(out, requires_grad=self.requires_grad)
        memo[id(self)] = out
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a sharded tensor of shape {list(self.shape)} cannot be pickled: this rank holds "
            f"{list(self.local.shape)} of it. Call paradyse.save_checkpoint on every rank, or save "
            "paradyse.full_state_dict(model), which is whole on every rank"
        )

    def storage(self) -> Any:
        """Writers of files (safetensors) ask for the storage: it is not the whole tensor's.

        Raises:
            ValueError: always; the message says how to save the model.
        """
        raise ValueError(
            f"a sharded tensor of shape {list(self.shape)} has no storage that could be written: "
            "this rank holds some of its rows. Give whole tensors, on every rank: "
            "model.save_pretrained(folder, state_dict=paradyse.full_state_dict(model, cpu=True, "
            "rank0_only=True), is_main_process=rank == 0)"
        )

    def __create_write_items__(self, name: str, x: Any) -> list[Any]:
        return dcp.write_items(self, name)

    def __create_chunk_list__(self) -> list[Any]:
        return dcp.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        wait_for_copies([self])  # it may be read into
        return dcp.chunk_of(self, index)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        self._need_values()  # tracers call this first; what fails later misleads
        name = None if is_traced(self) else backend_traced_for()
        if name is not None:
            _check_backend(name)
        return ["_token"], ()

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> ShardedTensor:
        return ShardedTensor(None, None, size, inner["_token"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if PartialGradient in types or ComingGradient in types:
            return NotImplemented  # they take shards
        sharded = [x for x in _flat(args, kwargs) if isinstance(x, ShardedTensor)]
        if any(map(is_traced, sharded)):
            return _traced(func, args, kwargs)
        if func in _OF_ANY_SHAPE and isinstance(args[0], cls) and [*args[1]] == [*args[0].shape]:
            func, args = aten.alias.default, args[:1]
        reduced = _REDUCTIONS.get(func)
        if reduced is not None and ShardedView not in types:
            return reduced(*args, **kwargs)
        kind = kind_of(func)
        if func == aten.new_empty.default and "device" not in kwargs:  # who copies states names one
            return func(args[0].local, *args[1:], **kwargs)  # initializers transpose it in place
        if not kind.on_rows or ShardedView in types:
            return on_whole(func, args, kwargs)
        if func in SIZED:
            return _sized(func, args, kwargs)
        if kind.on_lists:
            return _on_lists(func, kind.writes, args, kwargs)
        into = written_by(func, args, kwargs) if kind.writes else []
        # What is written to stays where it lies; a result of all is likeliest to have the most.
        like = max([x for x in into if isinstance(x, ShardedTensor)] or sharded, key=Tensor.numel)
        into_others = any(not _lies_as(x, like) for x in into)
        if into_others or not _meets_rows(like, args, kwargs, into):
            return on_whole(func, args, kwargs)
        return _on_rows(func, into, like, args, kwargs)


join_foreach_types(ShardedTensor)


class _Whole(torch.autograd.Function):
    """The whole tensor; backward takes the rank's rows of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> Tensor:
        ctx.of = x
        return gather_shards([x], OPTIMIZER)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        x: ShardedTensor = ctx.of
        rows = x.placement.take_own(grad)
        return x.with_rows(average(rows, x.sums.replicas, x.reduce_dtype))


def is_traced(x: ShardedTensor) -> bool:
    """Whether ``x`` stands for a whole tensor inside a tracer."""
    return not hasattr(x, "local")


TAKES_SHARDS = ("paradyse", "eager", "eager_noexcept", "eager_debug")
"""Backends that compile them, or compile nothing. A function of the user's may call one of them."""


def _check_backend(name: str) -> None:
    """Raise if the backend ``name`` would compile shards as whole tensors, which have no values."""
    if name in torch.compiler.list_backends(()) and name not in TAKES_SHARDS:
        raise ValueError(
            f'backend="{name}" cannot compile sharded weights: torch.compile(model, '
            'backend="paradyse") does; for transformers\' generate give disable_compile=True'
        )


def rows_here(x: Tensor) -> Tensor:
    """What this rank holds of ``x``: its rows of a sharded tensor, all of any other."""
    return x.local if isinstance(x, ShardedTensor) else x


def rows_for_use(x: Tensor) -> Tensor:
    """What this rank holds of ``x``, on the device that computes with it."""
    return x.for_use if isinstance(x, ShardedTensor) else x


def reduce_dtype_of(weight: Tensor) -> torch.dtype:
    """In which gradients of ``weight`` are added up over ranks and averaged over replicas."""
    return weight.reduce_dtype if isinstance(weight, ShardedTensor) else weight.dtype


def used_on(x: Tensor) -> torch.device:
    """The device that computes with ``x``."""
    return x.used_on if isinstance(x, ShardedTensor) else x.device


def lies_on_host(x: Tensor) -> bool:
    """Whether ``x`` is sharded, and its rows are copied to another device for use."""
    return isinstance(x, ShardedTensor) and x.on_host


def _traced(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` with whole (fake) tensors in place of sharded ones."""
    if func in ALIASES:
        return ShardedTensor(None, None, args[0].shape, func(args[0]._token))
    args, kwargs = tree_map_only(
        ShardedTensor, lambda x: x._token.new_empty(x.shape), (args, kwargs)
    )
    return func(*args, **kwargs)


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """All arguments of an operator, those in lists one by one."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, list | tuple):
            yield from x
        else:
            yield x


def _sized(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A new tensor like a sharded one."""
    like, size = args[0], tuple(args[1])
    if size != tuple(like.shape):
        return func(like.local, *args[1:], **kwargs)
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
    return like.with_rows(SIZED[func](like.local, **options))


def _lies_as(x: Any, like: ShardedTensor) -> bool:
    """Whether ``x`` has the rows of ``like``."""
    return x is like or (
        isinstance(x, ShardedTensor) and x.shape == like.shape and x.placement == like.placement
    )


def _meets_rows(like: ShardedTensor, args: Any, kwargs: Any, into: Sequence[Any]) -> bool:
    """Whether what is computed with all tensors given has the shape of ``like``; those of ``into``
    that come by name (``out=``) are given to be written to alone."""
    written = set(map(id, into))
    named = {k: x for k, x in kwargs.items() if id(x) not in written}
    shapes = (x.shape for x in _flat(args, named) if isinstance(x, Tensor))
    return torch.broadcast_shapes(*shapes) == like.shape


def _on_rows(func: Any, into: Any, like: ShardedTensor, args: Any, kwargs: Any) -> Any:
    """Run an elementwise ``func`` on the rows, where ``like`` has them and those of ``into``, which
    it writes to."""
    wait_for_copies(into)
    own = {k: _rows_of(v, like) for k, v in kwargs.items()} if kwargs else kwargs
    out = func(*[_rows_of(x, like) for x in args], **own)
    if into:
        count_write(into)
        return into[0] if len(into) == 1 else tuple(into)
    if isinstance(out, list | tuple):
        return [like.with_rows(x) for x in out]
    if func not in ALIASES:
        return like.with_rows(out)
    alias = like.with_rows(like.local)  # one count of writes to both
    alias.is_alias = True
    return alias


def _on_lists(func: Any, writes: bool, args: Any, kwargs: Any) -> Any:
    """Run ``func``, which treats each place of its lists by itself, on the rows."""
    lists = [x for x in args if isinstance(x, list | tuple)]
    num = len(lists[0])
    together = zip(*(x for x in lists if len(x) == num), strict=True)
    likes = [next((x for x in at if isinstance(x, ShardedTensor)), None) for at in together]
    if writes:  # into whole tensors: whole ones
        likes = [like if isinstance(x, ShardedTensor) else None for x, like in zip(args[0], likes)]

    into = written_by(func, args, kwargs)
    wait_for_copies(into)
    written = set(map(id, into))
    back: list[tuple[Tensor, ShardedTensor]] = []

    def rows_of(x: Any, like: ShardedTensor) -> Any:
        rows = _rows_of(x, like)
        if id(x) not in written or rows is x or isinstance(x, ShardedTensor):
            return rows
        back.append((x, like.with_rows(like.placement.take_own(x))))  # state from one process
        return back[-1][1].local

    def rows(x: Any) -> Any:
        if isinstance(x, list | tuple) and len(x) == num:
            return [_whole(v) if like is None else rows_of(v, like) for v, like in zip(x, likes)]
        return x

    out = func(*map(rows, args), **{k: rows(v) for k, v in kwargs.items()})
    for whole, shard in back:
        whole.copy_(_whole(shard))
    if func.name().startswith("aten::_amp_foreach_"):  # found_inf: of any rank
        first = next(x for x in likes if x is not None)
        compare(first.placement.axis, "looks for infinite gradients")
        args[1].copy_(every_rank(args[1], first).amax(0))
    if writes:
        count_write(into)
        return out
    return [x if like is None else like.with_rows(x) for x, like in zip(out, likes, strict=True)]


def _rows_of(x: Any, like: ShardedTensor) -> Any:
    """The part of ``x`` that meets the rows of ``like``; values without rows as they are."""
    if isinstance(x, ShardedTensor) and x.shape != like.shape:
        x = _whole(x)
    if isinstance(x, ShardedTensor):
        if x.placement is like.placement:
            return x.local
        if x.placement != like.placement and (x.is_alias or isinstance(x, torch.nn.Parameter)):
            # a model's weight stays where its blocks want it, whatever it is averaged with
            return like.placement.take(x.detach().full_tensor(), like.placement.axis.rank)
        relayout(x, like.placement)
        return x.local
    if not isinstance(x, Tensor):
        return x
    dim = x.ndim - (like.ndim - like.placement.dim)
    if dim < 0 or x.shape[dim] != like.shape[like.placement.dim]:
        return x  # the same for all rows
    return replace(like.placement, dim=dim).take(x, like.placement.axis.rank)


def _whole(x: Any) -> Any:
    """``x``, of a sharded tensor all of it."""
    return x.detach().full_tensor() if isinstance(x, ShardedTensor) else x


# Reductions


def _foreach_norm(tensors: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    """Norms of whole tensors, one message for all that are sharded."""
    ord = float(ord)
    shards = [i for i, x in enumerate(tensors) if isinstance(x, ShardedTensor)]
    like, dtypes = tensors[shards[0]], [dtype or x.dtype for x in tensors]
    exact = torch.promote_types(dtypes[0], torch.float32)  # rounded once, as of one tensor
    norms = local_norms([rows_here(x) for x in tensors], ord, exact)
    compare(like.placement.axis, "computes norms of sharded tensors")
    every = every_rank(torch.stack([norms[i] for i in shards]), like)
    for i, norm in zip(shards, joined_norms(every, ord).unbind(0), strict=True):
        norms[i] = norm
    return [norm.to(dtype) for norm, dtype in zip(norms, dtypes, strict=True)]


_OF_ANY_SHAPE = {aten.view.default, aten.expand.default}
"""What is an alias where the shape stays: hooks find by it the node that a gradient arrives at."""

_REDUCTIONS = REDUCTIONS | {aten._foreach_norm.Scalar: _foreach_norm}


def relayout(x: ShardedTensor, layout: ShardLayout) -> None:
    """Move the rows of ``x`` to where ``layout`` has them, in place; call it on every rank."""
    if x.placement != layout:
        rows = layout.take_own(x.detach().full_tensor())
        x.local, x.placement = to_host(rows, layout.axis) if x.on_host else rows, layout
