"""PyTorch's own parallel training of the same HuggingFace Llama, for ``two_ranks.py``.

- ``TensorParallel``: ``parallelize_module`` with the tensor + sequence parallel plan of PyTorch's
  tutorial.
- ``ContextParallel``: the ring of ``torch.distributed.tensor.experimental.context_parallel``,
  load-balanced, eager or compiled by inductor. The context manager itself dispatches only CUDA
  kernels to the ring ("Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not
  have a sharding strategy registered"), so its ring is called directly, on the CPU's flash
  kernels: the same ring without the DTensor around it.

Both deliver whole gradients for replicated weights: DTensor reduces those of the norms; for
context parallel one all-reduce of one bucket, as DDP does it for models of this size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

aten = torch.ops.aten


class TensorParallel:
    """Tensor + sequence parallel. Lengths divide by the ranks."""

    def __init__(self, model: Any, mesh: DeviceMesh):
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for i in range(model.config.num_hidden_layers):
            layer = f"model.layers.{i}"
            plan |= {
                f"{layer}.input_layernorm": SequenceParallel(),
                f"{layer}.self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                f"{layer}.post_attention_layernorm": SequenceParallel(),
                f"{layer}.mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            }
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                plan[f"{layer}.{name}"] = ColwiseParallel()
            for name in ("mlp.gate_proj", "mlp.up_proj"):
                plan[f"{layer}.{name}"] = ColwiseParallel()
        self.model = parallelize_module(model, mesh, plan)

    def step(self, ids: Tensor) -> Tensor:
        # Positions are given: the model would count the rank's part of the embeddings.
        positions = torch.arange(ids.shape[1])[None]
        loss = self.model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        out = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            out[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        return out


def _forward_op(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **kwargs: Any) -> Any:
    # The kernel's log-sum-exp lies transposed in memory; the merge wants it as its shape says.
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=kwargs["scale"]
    )
    return out, lse


def _backward_op(**kwargs: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        kwargs["grad_out"],
        kwargs["query"],
        kwargs["key"],
        kwargs["value"],
        kwargs["out"],
        kwargs["logsumexp"],
        0.0,
        kwargs["is_causal"],
        scale=kwargs["scale"],
    )


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, 2, _forward_op, q, k, v, is_causal=True, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ring._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _backward_op,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
            scale=ctx.scale,
        )
        return *grads, None


def _ring_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it; one that it does not know gets no mask."""
    return _Ring.apply(query, key, value, kwargs["scaling"]).transpose(1, 2).contiguous(), None


class ContextParallel:
    """Context parallel. Lengths divide by twice the ranks."""

    def __init__(self, model: Any, mesh: DeviceMesh, compiled: bool):
        from transformers import AttentionInterface

        AttentionInterface.register("context_parallel_ring", _ring_attention)
        model.set_attn_implementation("context_parallel_ring")
        self.model, self.mesh = model, mesh
        self.run = torch.compile(model) if compiled else model

    def step(self, ids: Tensor) -> Tensor:
        # Labels are shifted before the split, and the count is that of the whole.
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1])[None]
        count = torch.tensor(ids.shape[1] - 1)
        buffers = [ids.clone(), labels, positions]
        with context_parallel(
            self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            ids, labels, positions = buffers
            loss = self.run(
                input_ids=ids,
                position_ids=positions,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=count,
                use_cache=False,
            ).loss
            loss.backward()
        self._reduce()
        return loss.detach()

    def _reduce(self) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        for grad, whole in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
            grad.copy_(whole)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
