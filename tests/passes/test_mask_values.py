"""The formula of a node is its element: every operator against the tensor, at every index."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from mask_graphs import evaluate, formula_of
from torch import Tensor

aten = torch.ops.aten
S = 6
TABLE = torch.tensor([[3, 0, 2, 5, 1, 4], [0, 0, 1, 1, 7, 7]])
SEEN = TABLE > 1


def i() -> Tensor:
    return torch.arange(S)[:, None]


def j() -> Tensor:
    return torch.arange(S)


def in_two() -> Tensor:
    return torch.where(j() < 2, 0.0, -torch.inf)


Fn = Callable[[Tensor, Tensor], Tensor]

KNOWN: dict[str, Fn] = {
    "arithmetic": lambda t, s: (i() - 2 * j() + 3).abs() // 2,
    "reversed": lambda t, s: torch.rsub(j(), 5) + torch.sub(i(), j(), alpha=2) - (-i()),
    "division": lambda t, s: torch.div(i() + j(), 4, rounding_mode="floor"),
    "comparisons": lambda t, s: (i() <= j()) | (i() > j() + 2) & (i() != 4) ^ (j() == 1),
    "more comparisons": lambda t, s: torch.logical_and(i() < 3, ~(j() >= i())),
    "truth as numbers": lambda t, s: (i() < 3).long() * 2 + (j() > 1),
    "truth as factors": lambda t, s: (i() < 3) * (j() > 1),
    "choice": lambda t, s: torch.where(i() < j(), i(), 7),
    "filling": lambda t, s: (i() + j()).masked_fill(i() == j(), -1),
    "triangles": lambda t, s: torch.ones(S, S).tril(1).triu(-1),
    "minus infinity": lambda t, s: torch.full((S, S), -torch.inf).triu(1),
    "floats of choices": lambda t, s: in_two() + in_two()[:, None],
    "floats compared": lambda t, s: in_two() == 0,
    "floats that are hidden": lambda t, s: torch.full((S, S), -torch.inf).triu(1) == -torch.inf,
    "floats that are seen": lambda t, s: torch.full((S, S), -torch.inf).triu(1).ne(-torch.inf),
    "floats in order": lambda t, s: in_two() < -1.0,
    "fills": lambda t, s: torch.zeros(S, 1).new_ones(S, S) + torch.full_like(torch.ones(S), 2.0),
    "lookup": lambda t, s: t[:, j()] + t[torch.arange(2)[:, None], j()],
    "lookup of truth": lambda t, s: s[:, None, :] & s[:, :, None],
    "steps": lambda t, s: torch.diff(j()) + torch.diff(j(), prepend=j()[:1])[1:],
    "counting": lambda t, s: torch.ones(2, S, dtype=torch.int64).cumsum(-1),
    "sizes of one": lambda t, s: t[:1, :, None].squeeze(0).unsqueeze(0).view(S, 1).reshape(1, S),
    "expanded": lambda t, s: t[:, None].expand(2, 3, S).expand_as(torch.ones(2, 3, S)),
    "repeated": lambda t, s: t[:, None].repeat(1, 3, 1),
    "moved": lambda t, s: t.t().permute(1, 0).transpose(0, -1).t(),
    "sliced": lambda t, s: t[:, 1::2] + t[:, -9:][:, :3],
    "chosen": lambda t, s: t[1] + t.select(0, 0),
    "padded by nothing": lambda t, s: torch.nn.functional.pad(t, (0, 0)),
    "copies": lambda t, s: t.clone().contiguous().detach().to(torch.int64),
}


@pytest.mark.parametrize("name", KNOWN)
def test_formula(name: str) -> None:
    fn = KNOWN[name]
    formula, known = formula_of(fn, TABLE, SEEN)
    want = fn(TABLE, SEEN)
    for at in itertools.product(*map(range, want.shape)):
        assert evaluate(formula, dict(enumerate(at)), known) == want[at].item(), at


UNKNOWN: dict[str, Fn] = {
    "product": lambda t, s: t * t,
    "floats": lambda t, s: t.float() + 1.5,
    "counted from the end": lambda t, s: t[:, -2:],
    "a negative index": lambda t, s: t[-1],
    "of negative places": lambda t, s: t[:, j() - 3],
    "sorted": lambda t, s: t.sort().values,
    "padded": lambda t, s: torch.nn.functional.pad(t, (1, 0)),
    "regrouped": lambda t, s: t.view(3, 4),
    "cut to 32 bits": lambda t, s: t.to(torch.int32),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_stays_a_lookup_of_itself(name: str) -> None:
    formula, known = formula_of(UNKNOWN[name], TABLE, SEEN)
    want = UNKNOWN[name](TABLE, SEEN)
    last = list(known)[-1]
    known[last] = want
    for at in itertools.product(*map(range, want.shape)):
        assert evaluate(formula, dict(enumerate(at)), known) == want[at].item()
    assert last in repr(formula)
