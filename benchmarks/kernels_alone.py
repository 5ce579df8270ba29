"""What the kernels of a step take that is split over ranks, and nothing else, for ``peers.py``.

A rank's share of the matrix multiplications and of attention, as PyTorch's ring of context parallel
calls them, on tensors that are there already: no messages, no Python between, no normalization, no
activations, no gradients added up. It is no strict bound: small tiles on a diagonal, as
``paradyse.kernels`` has them, spare up to a third of a short causal block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from runner import seconds_of
from torch import Tensor

from paradyse.torch_private import cpu_flash, cpu_flash_backward


class KernelsAlone:
    """The kernels of a Llama's steps, of a rank's share of causally masked tokens.

    ``time_s(seq_len)`` has seconds as a ``Contender``'s; nothing is trained, so there is nothing
    to check. Lengths divide by twice the ranks.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.width = config.hidden_size // config.num_attention_heads
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        self.weights = [m.weight.detach() for m in linears]

    def time_s(self, seq_len: int) -> float:
        """Seconds of the kernels of a step, on the slowest rank."""
        own = seq_len // dist.get_world_size()
        inputs = {n: torch.randn(own, n) for w in self.weights for n in w.shape}
        heads, key_heads = self.heads
        query = torch.randn(1, heads, own, self.width)
        key, value = torch.randn(2, 1, key_heads, own, self.width)
        later = query[:, :, own // 2 :]  # sees all that another rank has, or all see its first half

        def kernels() -> None:
            for weight in self.weights:
                outputs, width = weight.shape
                _ = inputs[width] @ weight.mT
                _ = inputs[outputs] @ weight, inputs[outputs].mT @ inputs[width]
            for _ in range(self.layers):
                _attend(query, key, value, causal=True)
                for _ in range(dist.get_world_size() - 1):
                    _attend(later, key, value, causal=False)

        return seconds_of(kernels)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    """Forward and backward of the CPU's flash kernels, on one block of a ring."""
    masked = 0.0, causal
    out, lse = cpu_flash(query, key, value, *masked)
    saved = query, key, value, out, lse
    cpu_flash_backward(out, *saved, *masked)
