"""Sharded parameters in the hands of clip_grad_norm_ and torch.optim, against whole ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from harness import RankPool
from models import whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import paradyse
from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.weights.layout import even_layout
from paradyse.weights.sharded_tensor import ShardedTensor, relayout

SHAPES = ((7, 3), (2, 5), (4,), (1, 2))
"""Over three ranks some have no rows."""


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in (*SHAPES, (3, 3))]


class Weights(nn.Module):
    """Parameters of ``SHAPES``, and one of no dim, which stays whole on every rank."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weights = nn.ParameterList([*drawn(0, dtype)[:-1], torch.ones((), dtype=dtype)])


def give_gradients(model: nn.Module, seed: int, dtype: torch.dtype = torch.float64) -> None:
    for p, g in zip(model.parameters(), drawn(seed, dtype), strict=True):
        given = g.flatten()[0] if p.ndim == 0 else g
        at_rest = isinstance(p, ShardedTensor)
        p.grad = p.detach().with_rows(p.placement.take_own(given)) if at_rest else given


def both(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    return Weights(dtype), paradyse.shard(Weights(dtype))


def messages() -> int:
    return sum(collectives.traffic(resolve_axis(), collectives.OPTIMIZER).calls.values())


NORMS = (2.0, 1.0, 3.5, math.inf, -math.inf, 0.0)


def clipped(foreach: bool | None) -> list[int]:
    """How many messages each norm takes."""
    found = []
    for ord in NORMS:
        alone, model = both()
        for m in (alone, model):
            give_gradients(m, 1)
        before = messages()
        norm = clip_grad_norm_(model.parameters(), 0.7, ord, foreach=foreach)
        found.append(messages() - before)
        want = clip_grad_norm_(alone.parameters(), 0.7, ord, foreach=foreach)
        if ord > 0:  # else PyTorch's norm of norms is that of no vector
            torch.testing.assert_close(norm, want, rtol=1e-14, atol=0)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-14, atol=0)
    return found


@pytest.mark.parametrize(("foreach", "num"), [(None, 1), (True, 1), (False, len(SHAPES))])
def test_gradients_are_clipped_by_one_message(foreach: Any, num: int, pool3: RankPool) -> None:
    """Unless they are asked for one after the other."""
    for found in pool3.run(clipped, foreach):
        assert found == [num] * len(NORMS)


def not_finite(value: float) -> None:
    for rank in range(resolve_axis().size):
        _, model = both()
        give_gradients(model, 1)
        if resolve_axis().rank == rank and rank < 2:
            next(model.parameters()).grad.local.view(-1)[0] = value
        elif rank == 2:  # the whole one
            model.weights[-1].grad.fill_(value)
        with pytest.raises(RuntimeError, match="total norm of order 2.0 for gradients"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert not math.isfinite(clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_one_rank_has_raises_on_all(value: float, pool3: RankPool) -> None:
    pool3.run(not_finite, value)


def norms_of_sixteen_bits() -> None:
    alone, model = both(torch.bfloat16)
    for m in (alone, model):
        give_gradients(m, 1, torch.bfloat16)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        got, want = (torch.linalg.vector_norm(x.grad) for x in (p, q))
        assert got.dtype == want.dtype == torch.bfloat16
        assert got == want


def test_norms_of_sixteen_bits_are_rounded_once(pool3: RankPool) -> None:
    pool3.run(norms_of_sixteen_bits)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": lambda p, **how: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, momentum=0.9, nesterov=True, **how),
}
HOW: tuple[Mapping[str, Any], ...] = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})


def after_steps(model: nn.Module, make: Any, seeds: Iterable[int], state: Any = None) -> Any:
    """Weights and state after a step with each gradient."""
    optimizer = make(model.parameters(), lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
    for seed in seeds:
        give_gradients(model, seed)
        optimizer.step()
    return optimizer


def stepped(name: str) -> float:
    """The largest difference of weights and states, over all ways to step."""
    most = 0.0
    for how in HOW:

        def make(parameters: Any, lr: float, how: Mapping[str, Any] = how) -> Any:
            return OPTIMIZERS[name](list(parameters), lr=lr, **how)

        alone, model = both()
        want = after_steps(alone, make, range(5))
        first = after_steps(model, make, range(3))
        saved = copy.deepcopy(first.state_dict())
        got = after_steps(model, make, range(3, 5), saved)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            pairs = [(p, q), *((got.state[p][k], v) for k, v in want.state[q].items())]
            for x, y in pairs:
                if isinstance(y, Tensor):
                    most = max(most, (whole(x) - y.detach()).abs().max().item())
    return most


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name: str, pool3: RankPool) -> None:
    """The state is saved and loaded on the way."""
    assert max(pool3.run(stepped, name)) < 1e-14


def gone_on(name: str) -> float:
    """As ``stepped``, from the state of one process after three steps; some weights are split along
    their second dim."""
    most = 0.0
    for how in HOW:

        def make(parameters: Any, lr: float, how: Mapping[str, Any] = how) -> Any:
            return OPTIMIZERS[name](list(parameters), lr=lr, **how)

        alone, model = both()
        for p in list(model.parameters())[1::2]:
            if p.ndim == 2:
                relayout(p, even_layout(p.placement.axis, p.shape[1], 1))
        saved = after_steps(alone, make, range(3)).state_dict()
        model.load_state_dict(alone.state_dict())
        want, got = (
            after_steps(m, make, range(3, 5), copy.deepcopy(saved)) for m in (alone, model)
        )
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            pairs = [(p, q), *((got.state[p][k], v) for k, v in want.state[q].items())]
            most = max(most, *((whole(x) - y.detach()).abs().max().item() for x, y in pairs))
    return most


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_go_on_from_the_state_of_one_process(name: str, pool3: RankPool) -> None:
    assert max(pool3.run(gone_on, name)) < 1e-14


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def operators(how: Mapping[str, Any]) -> tuple[int, int]:
    """How many run in a step on whole weights, and on sharded ones."""
    found = []
    for model in both():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **how)
        for seed in range(2):
            give_gradients(model, seed)
            with _Count() as count:
                optimizer.step()
        found.append(count.num)
    return found[0], found[1]


def test_lists_stay_lists(pool2: RankPool) -> None:
    """What optimizers do to all weights at once is one operator, not one for each."""
    for how in ({"foreach": True}, {"fused": True}):
        for alone, sharded in pool2.run(operators, how):
            assert sharded == alone <= 5
