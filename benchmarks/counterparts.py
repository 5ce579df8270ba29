"""PyTorch's own parallel training of the same HuggingFace Llama, for ``two_ranks.py``.

README.md says how fair they are. The context manager ``context_parallel`` dispatches only CUDA
kernels to its ring ("Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not
have a sharding strategy registered"), so the ring is called directly, on the CPU's flash kernels.
Both deliver whole gradients for replicated weights: DTensor reduces those of the norms; for context
parallel one all-reduce of one bucket, as DDP does it for models of this size.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import Contender
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters

aten = torch.ops.aten


class TensorParallel(Contender):
    """Tensor + sequence parallel. Lengths divide by the ranks."""

    def __init__(self, model: Any, mesh: DeviceMesh):
        layer, sharded, whole = "model.layers.*", Shard(1), Replicate()
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=sharded),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=sharded, output_layouts=whole),
            f"{layer}.*_layernorm": SequenceParallel(),
            f"{layer}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": sharded},
                desired_input_kwarg_layouts={"hidden_states": whole},
            ),
            f"{layer}.self_attn.[qkv]_proj": ColwiseParallel(),
            f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=sharded),
            f"{layer}.mlp": PrepareModuleInput(
                input_layouts=(sharded,), desired_input_layouts=(whole,)
            ),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=sharded),
        }
        super().__init__(parallelize_module(model, mesh, plan))

    def step(self, ids: Tensor) -> Tensor:
        self.model.zero_grad()
        # Positions are given: the model would count the rank's part of the embeddings.
        positions = torch.arange(ids.shape[1])[None]
        loss = self.run(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        grads = super().gradients()
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _forward_op(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **kwargs: Any) -> Any:
    # The kernel's log-sum-exp lies transposed in memory; the merge wants it as its shape says.
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=kwargs["scale"]
    )
    return out, lse


def _backward_op(**kwargs: Any) -> Any:
    names = "grad_out", "query", "key", "value", "out", "logsumexp"
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(kwargs[n] for n in names), 0.0, kwargs["is_causal"], scale=kwargs["scale"]
    )


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.options = {"is_causal": True, "scale": scale}
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, 2, _forward_op, q, k, v, **ctx.options
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = dist.group.WORLD, 2, _backward_op, grad, "grad_out"
        grads = ring._templated_ring_attention_backward(*given, *ctx.saved_tensors, **ctx.options)
        return *grads, None


def _ring_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it; one that it does not know gets no mask."""
    return _Ring.apply(query, key, value, kwargs["scaling"]).transpose(1, 2).contiguous(), None


class ContextParallel(Contender):
    """Context parallel. Lengths divide by twice the ranks."""

    def __init__(self, model: Any, mesh: DeviceMesh, compiled: bool):
        from transformers import AttentionInterface

        AttentionInterface.register("context_parallel_ring", _ring_attention)
        model.set_attn_implementation("context_parallel_ring")
        super().__init__(model, torch.compile(model) if compiled else model)
        self.mesh = mesh

    def step(self, ids: Tensor) -> Tensor:
        self.model.zero_grad()
        # Labels are shifted before the split, and the count is that of the whole.
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1])[None]
        count = torch.tensor(ids.shape[1] - 1)
        buffers = [ids.clone(), labels, positions]
        with context_parallel(
            self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            ids, labels, positions = buffers
            given = {"input_ids": ids, "position_ids": positions, "labels": labels}
            given |= {"shift_labels": labels, "num_items_in_batch": count, "use_cache": False}
            loss = self.run(**given).loss
            loss.backward()
        grads = list(self.gradients().values())
        flat = parameters_to_vector(grads)
        dist.all_reduce(flat)
        vector_to_parameters(flat, grads)
        return loss.detach()

    def loss(self, seq_len: int) -> float:
        part = self.step(self.tokens(seq_len)).clone()  # each rank has its part of the sum
        dist.all_reduce(part)
        return float(part)
