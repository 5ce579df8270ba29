"""A small model as people write them, whose parts tests replace, and how it is compared with itself
without the backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from harness import RankPool
from models import relative
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS = 11, 16, 4
AUTO = "auto"
WHOLE = ("megatron_cz", "ulysses_z", "colossal_z", "megatron_cz+recompute")


class Decoder(nn.Module):
    """Two layers over token ids [B, S], and a loss; parts of it are replaced below."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                    "out": nn.Linear(WIDTH, WIDTH),
                    "score": nn.Linear(WIDTH, 1),
                    "gate": nn.Linear(WIDTH, HEADS),
                    "up": nn.Linear(WIDTH, 4 * WIDTH),
                    "down": nn.Linear(4 * WIDTH, WIDTH),
                }
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.layers_of(self.embed(ids))

    def layers_of(self, x: Tensor, layers: Iterable[Any] | None = None) -> Tensor:
        for layer in layers or self.layers:
            y = layer["norm"](x)
            q, k, v = (
                z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in layer["qkv"](y).chunk(3, -1)
            )
            x = x + layer["out"](self.attend(layer, y, q, k, v).transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def forward(self, ids: Tensor) -> Any:
        return self.loss(self.hidden(ids), ids)


def ids_of(seq_len: int) -> Tensor:
    g = torch.Generator().manual_seed(seq_len)
    return torch.randint(VOCAB, (2, seq_len), generator=g)


def compared(
    make: Callable[[], Decoder], lengths: Sequence[int], strategies: Sequence[Any]
) -> list[str]:
    """What is off of the model that ``make`` gives, under each of ``strategies`` at each of
    ``lengths``. One program serves all that are named, and another "auto"."""
    torch.manual_seed(0)
    model, off, named = make().double(), [], [s for s in strategies if s != AUTO]
    present: list[Any] = []
    for strategy in strategies:
        present[:] = [strategy]
        if strategy in (AUTO, *named[:1]):
            torch._dynamo.reset()
            plan = AUTO if strategy == AUTO else (lambda workload: present[0])
            options = {"inner": "eager", "plan": plan}
            compiled: Any = torch.compile(model, backend="paradyse", options=options)
        for seq_len in lengths:
            found = []
            for run in (model, compiled):
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seq_len)
                out = run(ids_of(seq_len))
                loss, more = out if isinstance(out, tuple) else (out, torch.zeros(()))
                loss = loss + more.square().sum()
                loss.backward()
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                found.append((loss.detach(), grads))
            (want, of), (got, mine) = found
            each = [relative(mine[n], g) for n, g in of.items() if n in mine]
            is_exact = relative(got, want) < 1e-9 and all(off_by < 1e-8 for off_by in each)
            if not (of.keys() == mine.keys() and is_exact):  # nor with NaN
                off.append(f"{strategy}, {seq_len} tokens: loss {got} for {want}, {each} off")
    return off


def in_tiers(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """``names`` as parameters of a test, which but for the ``quick`` ones are broad."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.broad) for n in names]


def check_on_ranks(
    compare: Callable[..., list[str]], name: str, pool1: RankPool, pool2: RankPool
) -> None:
    """Of the model ``name``, ``compare`` finds nothing off, on one rank and on two."""
    assert pool1.run(compare, name, ["auto"], timeout_s=100) == [[]]
    for off in pool2.run(compare, name, [*WHOLE, "auto"], timeout_s=200):
        assert off == []
