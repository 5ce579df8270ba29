"""PyTorch's own parallel training of the same HuggingFace model, for ``peers.py``: tensor
parallel of a Llama, the others of any that masks causally or not at all.

README.md says how fair they are. The context manager ``context_parallel`` dispatches only CUDA
kernels to its ring ("Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not
have a sharding strategy registered"), so the ring is called directly, on the CPU's flash kernels.
Ulysses (DeepSpeed's, arXiv 2309.14509) is written on PyTorch's own all-to-all, which DeepSpeed's
layer calls too; grouped heads are dealt as they are, where they divide by the ranks.
With whole weights all deliver whole gradients: DTensor reduces those of the norms; for context
parallel and Ulysses one all-reduce of one bucket, as DDP does it for models of this size. With
sharded weights the two are wrapped by FSDP2 layer by layer, as torchtitan has it, which is ZeRO-3.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import Contender
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AttentionInterface

aten = torch.ops.aten


class TensorParallel(Contender):
    """Tensor + sequence parallel. Lengths divide by the ranks."""

    def __init__(self, model: Any, mesh: DeviceMesh):
        layer, sharded, whole = "model.layers.*", Shard(1), Replicate()
        linear = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(output_layouts=sharded)}
        own = model.config.base_model_tp_plan.items()
        plan: dict[str, Any] = {f"model.{name}": linear[style] for name, style in own} | {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=sharded),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=sharded, output_layouts=whole),
            f"{layer}.*_layernorm": SequenceParallel(),
            f"{layer}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": sharded},
                desired_input_kwarg_layouts={"hidden_states": whole},
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=sharded, desired_input_layouts=whole),
        }
        super().__init__(parallelize_module(model, mesh, plan), self.call)

    def call(self, input_ids: Tensor, **given: Any) -> Any:
        # Positions are given: the model would count the rank's part of the embeddings.
        positions = torch.arange(input_ids.shape[1])[None]
        return self.model(input_ids, position_ids=positions, **given)

    def gradients(self) -> dict[str, Tensor]:
        grads = super().gradients()
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, causal: bool, *qkv: Tensor) -> Tensor:
        given = dist.group.WORLD, 2, aten._scaled_dot_product_flash_attention_for_cpu, *qkv
        out, lse = ring._templated_ring_attention(*given, is_causal=causal)
        ctx.save_for_backward(*qkv, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        flash = partial(aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)
        given = dist.group.WORLD, 2, flash, grad, "grad_out", *ctx.saved_tensors
        return None, *ring._templated_ring_attention_backward(*given, is_causal=ctx.causal)


def _ring_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it; one that it does not know gets no mask.

    The kernels' own scale is that of all families here.
    """
    out = _Ring.apply(is_causal(module), query, key, value)
    return out.transpose(1, 2).contiguous(), None


def is_causal(module: Any) -> bool:
    """Whether queries of ``module`` see no keys later than themselves."""
    return bool(getattr(module, "is_causal", False))


def _exchange(x: Tensor, gather: int, split: int) -> Tensor:
    """``x``, whole along ``gather`` and split along ``split``, whatever it was the other way."""
    p = dist.get_world_size()
    parts = torch.stack(x.chunk(p, split)).contiguous()
    rows = [1] * p
    arrived = all_to_all_single_autograd(parts, rows, rows, dist.group.WORLD)
    return torch.cat(arrived.unbind(0), gather)


def _ulysses_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As ``_ring_attention``: [B, H, s, D] to whole sequences of the rank's heads, and back."""
    q, k, v = (_exchange(x, 2, 1) for x in (query, key, value))
    how = {"is_causal": is_causal(module), "enable_gqa": True}
    out = F.scaled_dot_product_attention(q, k, v, **how)
    return _exchange(out, 1, 2).transpose(1, 2).contiguous(), None


ATTENTION = {"ring": _ring_attention, "ulysses": _ulysses_attention}


class ContextParallel(Contender):
    """Context parallel by a ring, whose lengths divide by twice the ranks, or by Ulysses, whose key
    heads divide by the ranks too."""

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        compiled: bool,
        attention: str = "ring",
        sharded: bool = False,
    ):
        AttentionInterface.register(f"counterpart_{attention}", ATTENTION[attention])
        model.set_attn_implementation(f"counterpart_{attention}")
        self.mesh, self.causal = mesh, any(map(is_causal, model.modules()))
        self.balanced = attention == "ring" and self.causal
        if sharded:
            layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
            for module in (*layers, model):
                fully_shard(module, mesh=mesh)
                module.set_gradient_divide_factor(1.0)  # ranks have parts of one sum
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        super().__init__(model, self.call)
        self.part = torch.compile(model) if compiled else model

    def call(self, input_ids: Tensor, labels: Tensor, **given: Any) -> Any:
        # Labels are shifted before the split, and the count is that of the whole.
        seq_len = input_ids.shape[1]
        if self.causal:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        buffers = [input_ids, labels, torch.arange(seq_len)[None]]
        balancer = None
        if self.balanced:
            balancer = ring._create_default_load_balancer(seq_len, self.mesh.size(), "cpu")
        ids, labels, positions = ring._context_parallel_shard(
            self.mesh, buffers, [1, 1, 1], balancer
        )
        if self.causal:
            given |= {"shift_labels": labels, "num_items_in_batch": torch.tensor(seq_len - 1)}
        out = self.part(input_ids=ids, position_ids=positions, labels=labels, **given)
        if not self.causal:  # a mean over the rank's words, which are as many on each
            out.loss = out.loss / self.mesh.size()
        return out

    def step(self, ids: Tensor) -> Tensor:
        loss = super().step(ids)
        if isinstance(self.model, FSDPModule):
            return loss
        grads = list(self.gradients().values())
        flat = parameters_to_vector(grads)
        dist.all_reduce(flat)
        vector_to_parameters(flat, grads)
        return loss

    def loss(self, seq_len: int) -> float:
        part = self.step(self.tokens(seq_len)).clone()  # each rank has its part of the sum
        dist.all_reduce(part)
        return float(part)
