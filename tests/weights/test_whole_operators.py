"""What people do with parameters, done with sharded ones: each as with whole ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import RankPool
from torch import Tensor, nn

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.whole_operators import ShardedView, _tell_once

SHAPES = ((7, 4), (6, 9), (5,), (1, 3))
"""Over three ranks some have no rows."""


def drawn(seed: int) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        yield torch.randn(shape, generator=g, dtype=torch.float64)


def both() -> tuple[Any, Any]:
    """The same parameters, whole and sharded."""
    plain, sharded = (nn.ParameterList(list(drawn(0))) for _ in range(2))
    return plain, paradyse.shard(sharded)


def whole(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().full_tensor() if isinstance(x, ShardedTensor | ShardedView) else x
    return [whole(v) for v in x] if isinstance(x, list | tuple) else x


def same(got: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(
        whole(got), want, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


READ: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w[0] * 1,
    "a column": lambda w: w[:, 1],
    "an element": lambda w: w[0, 1].item(),
    "transposed": lambda w: w.T,
    "flat": lambda w: w.flatten(),
    "rows, one by one": lambda w: [row.sum() for row in w],
    "in two": lambda w: list(w.chunk(2)),
    "a product": lambda w: w @ torch.ones(w.shape[1], dtype=w.dtype),
    "a product of two": lambda w: w.T @ w,
    "linear": lambda w: nn.functional.linear(torch.ones(3, w.shape[1], dtype=w.dtype), w),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([0, 2, 2]), w),
    "singular values": lambda w: torch.linalg.svdvals(w),
    "median": lambda w: w.median(),
    "quantile": lambda w: torch.quantile(w, 0.25),
    "the largest": lambda w: list(w.flatten().topk(3)),
    "where": lambda w: w[w > 0],
    "a norm's weight": lambda w: nn.functional.rms_norm(torch.ones_like(whole(w)), w.shape, w),
    "largest of each": lambda w: torch._foreach_max([w, w * 2]),
    "place of the largest": lambda w: w.argmax(),
    "cat": lambda w: torch.cat([w, w * 2]),
    "by a row": lambda w: w * torch.arange(w.shape[1]),
    "by a column": lambda w: w * torch.arange(w.shape[0])[:, None],
    "by its own mean": lambda w: w - w.mean(1, keepdim=True),
    "grown": lambda w: w + torch.ones(2, *w.shape),
    "noise": torch.randn_like,
    "smaller": lambda w: w.new_zeros(w.shape[0]),
    "an array": lambda w: torch.from_numpy(w.numpy()),
    "lists": lambda w: w.tolist(),
    "a view's array": lambda w: torch.from_numpy(w[1:].numpy().copy()),
}


def read() -> None:
    plain, sharded = both()
    for i in (0, 1):
        for name, ask in READ.items():
            found = []
            for w in (sharded[i], plain[i]):
                torch.manual_seed(3)
                found.append(ask(w.detach()))
            same(*found, f"{name} of {SHAPES[i]}")


def test_what_is_read_has_the_values_of_the_whole(pool3: RankPool) -> None:
    pool3.run(read)


def row_set(w: Any) -> None:
    w[0] = 5.0
    w[-1, 1:3] = torch.arange(2.0, dtype=w.dtype)


INTO: dict[str, Callable[[Any], Any]] = {
    "rows": row_set,
    "a column": lambda w: w[:, 1].mul_(3),
    "the transpose": lambda w: w.T[2].copy_(torch.arange(w.shape[0])),
    "a view of a view": lambda w: w.view(-1)[2:7].view(-1).add_(1),
    "where": lambda w: w.__setitem__(w > 0.5, 0.25),
    "by index": lambda w: w.index_fill_(0, torch.tensor([0, 3]), 7.0),
    "whole": lambda w: w.copy_(torch.arange(w.numel()).view(w.shape)),
    "a row for all": lambda w: w.copy_(torch.arange(w.shape[1])),
    "a column to all": lambda w: w.add_(torch.arange(w.shape[0])[:, None]),
    "clamp": lambda w: w.clamp_(-0.5, 0.5),
    "by its norm": lambda w: w.div_(w.norm(dim=1, keepdim=True)),
    "product": lambda w: w.addmm_(
        torch.ones(w.shape[0], 2).double(), torch.ones(2, w.shape[1]).double()
    ),
    ".data": lambda w: setattr(w, "data", torch.full(w.shape, 2.0, dtype=w.dtype)),
    ".data, sharded": lambda w: setattr(w, "data", w.data * 3),
    **{
        name: getattr(nn.init, name)
        for name in ("normal_", "uniform_", "xavier_uniform_", "xavier_normal_", "kaiming_normal_")
    },
    **{name: getattr(nn.init, name) for name in ("orthogonal_", "trunc_normal_", "eye_", "ones_")},
    "sparse_": lambda w: nn.init.sparse_(w, 0.3),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
}


def written() -> None:
    for i in (0, 1):
        for name, write in INTO.items():
            plain, sharded = both()
            for w in (sharded[i], plain[i]):
                torch.manual_seed(3)
                with torch.no_grad():
                    write(w)
            assert type(sharded[i]) is ShardedTensor, name
            assert sharded[i].local.shape[0] < SHAPES[i][0], name
            same(sharded[i], plain[i].detach(), f"{name} of {SHAPES[i]}")


def test_what_is_written_is_written_to_the_rows(pool3: RankPool) -> None:
    pool3.run(written)


def into_plain() -> None:
    plain, sharded = both()
    w, v = sharded[0].detach(), plain[0].detach()
    for name, write in {
        "copy_": lambda x, w: x.copy_(w),
        "add_": lambda x, w: x.add_(w),
        "mul_": lambda x, w: x.mul_(w),
        "out=": lambda x, w: torch.mul(w, w, out=x),
        "lists": lambda x, w: torch._foreach_add_([x], [w]),
    }.items():
        got, want = torch.ones(v.shape).double(), torch.ones(v.shape).double()
        write(got, w), write(want, v)
        same(got, want, name)


def test_a_whole_tensor_that_is_written_to_is_written_whole(pool3: RankPool) -> None:
    pool3.run(into_plain)


def two_lists(p: Any) -> dict[str, Any]:
    return {"matrices": [x for x in p if x.ndim == 2], "vectors": [x for x in p if x.ndim == 1]}


class Together(torch.optim.Optimizer):
    """Muon for matrices, AdamW for what is left, as people use it."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
        kinds = two_lists(parameters)
        self.parts = [torch.optim.Muon(kinds["matrices"], lr=0.1)]
        self.parts.append(torch.optim.AdamW(kinds["vectors"], lr=0.1))

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class Shampoo(torch.optim.Optimizer):
    """Gupta, Koren, Singer 2018, algorithm 1, for matrices; other gradients as they are."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                g = p.grad
                for side in range(g.ndim if g.ndim == 2 else 0):
                    m = g if side == 0 else g.T
                    sums = self.state[p].setdefault(side, torch.eye(m.shape[0], dtype=g.dtype))
                    sums += p.grad @ p.grad.T if side == 0 else p.grad.T @ p.grad
                    values, vectors = torch.linalg.eigh(sums)
                    root = vectors @ torch.diag(values**-0.25) @ vectors.T
                    g = root @ g if side == 0 else g @ root
                p.add_(g, alpha=-0.1)


def schedule_free(p: Any) -> Any:
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    optimizer = schedulefree.AdamWScheduleFree(p, lr=0.1)
    optimizer.train()
    return optimizer


def hf_adafactor(p: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(p, lr=None)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor of transformers": hf_adafactor,
    "Muon": Together,
    "Shampoo": lambda p: Shampoo(p, {}),
    "schedule-free": schedule_free,
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.1)
        for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    },
}


def stepped(name: str) -> float:
    found = []
    for model in both():
        optimizer = OPTIMIZERS[name](list(model))
        for seed in (1, 2, 3):
            for p, g in zip(model, drawn(seed), strict=True):
                at_rest = isinstance(p, ShardedTensor)
                p.grad = p.detach().with_rows(p.placement.take_own(g)) if at_rest else g
            optimizer.step()
        found.append([whole(p) for p in model])
    assert any(not torch.equal(x, y) for x, y in zip(found[0], drawn(0), strict=True))
    return max((x - y).abs().max().item() for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_are_those_of_whole_weights(name: str, pool3: RankPool) -> None:
    if name == "schedule-free":
        pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    bound = 1e-2 if name == "Muon" else 1e-12  # torch's Muon computes in bfloat16
    assert max(pool3.run(stepped, name)) <= bound


def messages() -> tuple[str, ...]:
    _, sharded = both()
    w, found = sharded[0], []
    for ask in (
        lambda: w @ torch.ones(4).double(),
        lambda: w[0],
        lambda: torch.distributed.broadcast(w.detach(), 0),
        lambda: setattr(w, "data", torch.ones(3)),
        lambda: w.numpy(),
    ):
        with pytest.raises((NotImplementedError, ValueError, RuntimeError)) as error:
            ask()
        found.append(str(error.value))
    return tuple(found)


def test_messages_give_the_way_out_of_the_case(pool3: RankPool) -> None:
    for product, row, sent, data, array in pool3.run(messages):
        for text in (product, row):
            assert ".detach()" in text and ".full_tensor()" in text and "no_grad" in text
        assert "paradyse.TrainerMixin" in sent and "paradyse.AcceleratorMixin" in sent
        assert "[3]" in data and "[7, 4]" in data
        assert ".detach().numpy()" in array


def told() -> list[str]:
    _tell_once.cache_clear()
    _, sharded = both()
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("paradyse.weights.whole_operators")
    log.addHandler(handler)
    try:
        for _ in range(3):
            for w in sharded:
                w.detach().median(), w.detach().sort()
    finally:
        log.removeHandler(handler)
    return seen


def test_it_is_said_once(pool3: RankPool) -> None:
    for seen in pool3.run(told):
        assert len(seen) == 1 and "takes whole tensors" in seen[0], seen


def printed() -> str:
    _, sharded = both()
    return repr(sharded[0].detach()) if resolve_axis().rank == 0 else ""


def test_printing_asks_no_other_rank(pool3: RankPool) -> None:
    text = pool3.run(printed)[0]
    assert "ShardedTensor([7, 4]" in text and "rank 0 of 3 holds [2, 4]: tensor(" in text
