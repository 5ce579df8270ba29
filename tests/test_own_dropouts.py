"""Dropout in places where no family of HuggingFace's has it, and other noise: what is drawn depends
neither on the number of ranks nor on the strategy, nor on what came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from own_models import HEADS, WIDTH, Decoder, ids_of
from torch import Tensor, nn
from torch.nn import functional as F

from paradyse.runtime.frame import Frame


class Dropping(Decoder):
    """Drops of the embeddings, and of cut tokens ahead of the loss; blocks add nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.fill_(float(name == "embed.weight"))

    def forward(self, ids: Tensor) -> Any:
        x = F.dropout(self.embed(ids), 0.25, training=True)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))
        q = layer["qkv"](x).chunk(3, -1)
        heads = [z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in q]
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = F.dropout((x + layer["out"](y))[:, :-1], 0.25, training=True)
        return x.mean(), x


def kept() -> list[Tensor]:
    """Which elements both drops keep, at several lengths."""
    torch._dynamo.reset()
    model, found = Dropping(), []
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for seq_len in (13, 22, 31, 40):
        torch.manual_seed(7)
        loss, x = compiled(ids_of(seq_len))
        loss.backward()
        found.append(x.detach() > 0)
    return found


def test_two_drops_are_independent_at_any_length(pool1: RankPool, pool2: RankPool) -> None:
    (one,) = pool1.run(kept, timeout_s=100)
    for two in pool2.run(kept, timeout_s=100):
        assert all(map(torch.equal, one, two))
    for mask in one:
        share, n = mask.double().mean().item(), mask.numel()
        assert abs(share - 0.5625) < 5 * (0.5625 * 0.4375 / n) ** 0.5


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, training=True)


class Apart(Decoder):
    """Attention of what no linear of its own made, so that it is in no block."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mine = super().attend(layer, x, q, k, v)
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return mine + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


class TwoAttentions(Decoder):
    """Local and global attention of the same heads, added."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        near = (at[:, None] - at).abs() < 4
        narrow = F.scaled_dot_product_attention(q, k, v, near, dropout_p=0.3)
        return narrow + F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)


class Convolved(Decoder):
    """Behind a convolution along tokens, and ahead of another."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) for _ in range(2)
        )

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        first, second = self.convs
        return x + dropped(second(dropped(first(x.transpose(1, 2)))).transpose(1, 2))


class Shifted(Decoder):
    """Of tokens that are cut, padded and repeated: some ranks compute some of it whole."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        first, moved, last = dropped(x), dropped(x[:, 1:]), dropped(2 * x)
        x = first + F.pad(moved, (0, 0, 1, 0)) + last + dropped(F.pad(x, (0, 0, 0, 3)))[:, 3:]
        return x + dropped(x[:, ::2]).repeat_interleave(2, 1)[:, : x.shape[1]]


MODELS: dict[str, Callable[[], Decoder]] = {
    "attention in no block": Apart,
    "two attentions": TwoAttentions,
    "between convolutions": Convolved,
    "of shifted tokens": Shifted,
}


def trained(name: str, plan: str) -> list[Tensor]:
    """Loss and gradients at several lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found = MODELS[name]().double(), list[Tensor]()
    options = {"inner": "eager", "plan": plan}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for seq_len in (13, 22, 17):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        loss = compiled(ids_of(seq_len))
        loss.backward()
        grads = (p.grad for p in model.parameters() if p.grad is not None)
        found += [loss.detach(), *(g.clone() for g in grads)]
    return found


@pytest.mark.broad
@pytest.mark.parametrize("name", MODELS)
def test_masks_are_the_same_on_any_ranks(
    name: str, pool1: RankPool, pool2: RankPool, pool3: RankPool
) -> None:
    (want,) = pool1.run(trained, name, "auto", timeout_s=100)
    for pool in (pool2, pool3):
        for plan in ("megatron_cz", "ulysses_z"):
            for got in pool.run(trained, name, plan, timeout_s=100):
                for x, y in zip(got, want, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


class Noisy(Decoder):
    """Noise that is no dropout."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().loss(x * torch.rand(WIDTH, dtype=x.dtype), ids)


def run_again() -> tuple[bool, Tensor, Tensor]:
    """Whether a forward failed for lack of memory on one rank, and its loss and the next random
    number, less those of the model itself."""
    torch.manual_seed(0)
    model, ids, found = Noisy().double(), ids_of(12), []
    options = {"inner": "eager", "strategies": ["megatron_cz", "metp"], "splits": []}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    compiled(ids)
    run_step, left = Frame.run_step, [torch.OutOfMemoryError("Tried to allocate 20 GiB")]

    def fail_once(self: Frame, step: Any, strategy: str) -> None:
        run_step(self, step, strategy)
        if left and torch.distributed.get_rank() == 1:
            raise left.pop()

    for run in (model, compiled):
        torch.manual_seed(7)
        with patch.object(Frame, "run_step", fail_once):
            found.append((run(ids).detach(), torch.rand(())))
    (loss, number), (mine, my_number) = found
    return not left, mine - loss, my_number - number


def test_a_forward_that_is_run_again_draws_the_same(pool2: RankPool) -> None:
    results = pool2.run(run_again, timeout_s=100)
    assert [failed for failed, _, _ in results] == [False, True]
    for _, loss, number in results:
        assert abs(loss) < 1e-12 and number == 0
