"""``paradyse.shard``: a model's parameters at rest, each row on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import swap_tensors

from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import Axis, check_group, device_of, resolve_axis, resolve_replicas
from paradyse.distributed.checksums import checksum
from paradyse.distributed.facts import REDUCE_DTYPE
from paradyse.torch_private import has_gradient_hooks, parameters_of
from paradyse.weights.layout import GradientSum, even_layout, to_host
from paradyse.weights.sharded_tensor import ShardedTensor

M = TypeVar("M", bound=nn.Module)

Model = Callable[..., Any]
"""A module, or what ``torch.compile`` makes of one: a module too, but PyTorch's annotations say no
more than that it can be called."""

OFFLOAD = ("", "optimizer")
"""What may lie on the host."""

REDUCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""In which gradients may be added up."""


def shard(
    model: M,
    mesh: DeviceMesh | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
    offload: str = "",
) -> M:
    """Spread every parameter of ``model`` over the ranks of a sequence group, in place.

    Each parameter becomes a ``ShardedTensor`` of the same name, shape and dtype, of which a rank
    keeps 1/p in memory; tied parameters stay tied. Model class and forward stay as they are, and so
    does each parameter as an object: an optimizer may be made before or after this. Then compile
    and train as usual.

    The rows are even at first. When a graph of the model is captured, the weights of its blocks
    move once to whole heads (or columns) per rank, the rest layout that all strategies share.
    Parameters of no dim stay replicated. Every rank must call it, with equal weights. This is
    ZeRO-3's partition of parameters, gradients and optimizer state (arXiv 1910.02054, section 5).

    Args:
        model: not compiled yet, not wrapped by DDP or FSDP. It may be on the meta device;
            ``paradyse.load_safetensors`` then gives the shards values.
        mesh: as the option of the backend; None: one axis over the world. With one rank nothing
            is done without ``offload``.
        reduce_dtype: in which gradients are added up over ranks and averaged over replicas,
            whatever they are computed in, as of FSDP2's ``MixedPrecisionPolicy``; None: that of
            the parameter.
        offload: "optimizer": the rank's rows lie on the host, and so do their gradients and what an
            optimizer keeps of them, as with FSDP2's ``CPUOffloadPolicy``. Rows are copied to the
            device when a block needs its weights, and gradients back: the optimizer steps on the
            host.
    Returns:
        ``model``.
    Raises:
        ValueError: the model is sharded already, wrapped or parallelized by something else, or has
            run in a way that holds on to a parameter; a parameter has a gradient, or hooks on it,
            which would be lost; ranks are not joined yet; the mesh does not fit; nothing can be
            added up in ``reduce_dtype``; ``offload`` is another word; the ranks' weights or dtypes
            differ, said on all of them. Nothing is changed then.

    Example:

        paradyse.shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model = torch.compile(model, backend="paradyse")
        model(**batch).loss.backward()
        optimizer.step()
    """
    check_group("paradyse.shard")
    axis, sums = resolve_axis(mesh), GradientSum(reduce_dtype, resolve_replicas(mesh))
    _check_dtype(reduce_dtype)
    _check_offload(offload)
    _check(model)
    if axis.size == 1 and not offload:
        return model
    if axis.size > 1:
        _check_equal(model, axis, mesh, reduce_dtype)
    parameters = [p for p in model.parameters() if p.ndim]
    for p in parameters:
        swap_tensors(p, _sharded(p, axis, sums, bool(offload)))
    for module in model.modules():
        if parameters_of(module):
            module.register_load_state_dict_pre_hook(_take_rows)
    return model


def _check_dtype(reduce_dtype: Any) -> None:
    if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
        legal = ", ".join(map(str, REDUCE_DTYPES))
        raise ValueError(
            f"reduce_dtype={reduce_dtype!r}: give one of {legal}, or leave it out to add gradients "
            "up in the dtype of their parameters"
        )


def _check_offload(offload: Any) -> None:
    if offload not in OFFLOAD:
        legal = ", ".join(map(repr, OFFLOAD))
        raise ValueError(f"offload={offload!r}: give one of {legal}; '' keeps all on the device")


def _check_equal(model: nn.Module, axis: Axis, mesh: Any, reduce_dtype: torch.dtype | None) -> None:
    """Ranks with other values would each give the model a part of another model, and with another
    dtype send other messages."""
    agreement = agreement_of(axis, mesh)
    assert agreement is not None, "several ranks"
    facts: dict[str, Any] = {
        f"the weight {name} (checksum)": checksum([p]) if not p.is_meta else list(p.shape)
        for name, p in model.named_parameters()
    }
    facts[REDUCE_DTYPE] = str(reduce_dtype)
    agreement.compare("shards a model", {}, together=True, common=facts)


def _sharded(p: nn.Parameter, axis: Axis, sums: GradientSum, on_host: bool) -> nn.Parameter:
    layout = even_layout(axis, p.shape[0])
    rows = layout.take_own(p.detach())
    used_on = None
    if on_host:
        used_on = device_of(axis.group) if p.device.type in ("cpu", "meta") else p.device
    if used_on is not None:
        rows = to_host(rows)
        rows = rows.pin_memory() if used_on.type == "cuda" and not rows.is_meta else rows
    x = ShardedTensor(rows, layout, p.shape, sums=sums, used_on=used_on)
    out = nn.Parameter(x, requires_grad=p.requires_grad)
    for name, value in vars(p).items():  # marks of the model's own
        setattr(out, name, value)
    return out


def check_module(model: Any) -> nn.Module:
    """``model``, which is one.

    Raises:
        ValueError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"give a torch.nn.Module, not {type(model).__name__}")
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether some parameter of ``model`` is."""
    return any(isinstance(p, ShardedTensor) for p in model.parameters())


def _check(model: nn.Module) -> None:
    check_module(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(
                f"{name or 'the model'} is wrapped by {kind}, which moves gradients of its own; "
                "give the model inside it"
            )
    for name, p in model.named_parameters():
        if isinstance(p, ShardedTensor):
            raise ValueError(
                f"{name} is sharded already: call paradyse.shard once, before torch.compile"
            )
        if type(p) is not nn.Parameter:
            raise ValueError(
                f"{name} is a {type(p).__name__}, parallelized by something else (fully_shard, "
                "parallelize_module, ...); give a model with plain parameters"
            )
        if why := _lost(p):
            raise ValueError(f"{name} {why}, after paradyse.shard, which cannot take it along")
        other = nn.Parameter(p.detach().new_empty(0), p.requires_grad)
        try:
            swap_tensors(p, other)
        except RuntimeError as e:
            raise ValueError(
                f"{name} cannot be sharded in place: something holds on to its memory, such as a "
                "loss whose backward is still to come, a compiled model that has run, or nn.GRU "
                "and the like, whose weights stay whole. Call paradyse.shard before the model runs "
                "for the first time, and leave it out where there is a recurrent network"
            ) from e
        swap_tensors(p, other)


def _lost(p: nn.Parameter) -> str:
    """What ``p`` would lose, and what to do about it."""
    if p.grad is not None:
        return "has a gradient: call model.zero_grad() before, and backward"
    if has_gradient_hooks(p):
        return "has hooks on its gradient: remove them before, and register them"
    return ""


def _take_rows(module: nn.Module, state: dict[str, Any], prefix: str, told: Any, *_: Any) -> None:
    """A hook before ``load_state_dict``: with ``assign=True`` each rank takes its rows of the
    whole tensors that are given, which would replace the sharded ones."""
    if not told.get("assign_to_params_buffers"):
        return
    for name, p in parameters_of(module).items():
        value: Any = state.get(key := prefix + name)
        if isinstance(p, ShardedTensor) and type(value) in (Tensor, nn.Parameter):
            if value.shape == p.shape:  # else it is refused behind this
                state[key] = p.with_rows(p.placement.take_own(value.detach()))


def full_state_dict(
    model: Model, *, cpu: bool = False, rank0_only: bool = False
) -> dict[str, Tensor]:
    """``model.state_dict()`` with whole tensors; call it on every rank.

    Tensors are gathered one after the other. They are detached, and copies where the parameter is
    sharded. Tied parameters give one tensor under each of their names. Names are those of the
    model before ``torch.compile``.

    Args:
        model: sharded or not, compiled or not.
        cpu: move each whole tensor to the CPU before the next one is gathered.
        rank0_only: rank 0 of the world keeps them, the other ranks get ``{}``.
    Returns:
        Name -> the whole tensor, on the device of its parameter or on the CPU.
    Raises:
        ValueError: ``model`` is no module.

    Example:

        weights = paradyse.full_state_dict(model, cpu=True, rank0_only=True)
        if dist.get_rank() == 0:
            torch.save(weights, "weights.pt")
    """
    module = check_module(model)
    everywhere = not (rank0_only and dist.is_available() and dist.is_initialized())
    kept = everywhere or dist.get_rank() == 0
    made: dict[int, Any] = {}
    out: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if id(x) not in made:
            whole = x.full_tensor() if isinstance(x, ShardedTensor) else x
            if isinstance(whole, Tensor):
                whole = whole.detach().cpu() if cpu and kept else whole.detach()
            made[id(x)] = whole if kept else None
        if kept:
            out[name_before_compile(name)] = made[id(x)]
    return out


def name_before_compile(name: str) -> str:
    """``name`` of a parameter, without the prefix that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")
