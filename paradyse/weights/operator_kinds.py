"""Which operators run on the rows of sharded tensors, and how."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from paradyse.torch_private import schema_of

aten = torch.ops.aten

SIZED = {
    aten.new_empty_strided.default: torch.empty_like,
    aten.new_empty.default: torch.empty_like,
    aten.new_zeros.default: torch.zeros_like,
}
"""Operators that make a tensor of a given size, and what makes the rows of one."""

ALIASES = {aten.detach.default, aten.alias.default}
"""Operators whose result has the memory of what they are given."""

_LIKE = {
    *ALIASES,
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    *SIZED,
}
"""Operators that treat elements alike, besides those tagged pointwise."""

_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")
"""How the names of operators begin that take lists of tensors, each for itself."""

_REDUCE_LISTS = ("_foreach_max", "_foreach_powsum")
"""Those of them that give one number for each tensor, and have no reduction of ours."""


class Kind(NamedTuple):
    """How an operator treats sharded tensors."""

    on_rows: bool
    """It runs on the rows; else it takes whole tensors."""
    on_lists: bool
    """It takes lists of tensors, each tensor for itself."""
    writes: bool
    """It returns what it was given."""


@cache
def kind_of(func: Any) -> Kind:
    """How ``func``, an overload of an operator, treats sharded tensors."""
    name = func.name().removeprefix("aten::").partition(".")[0]
    on_lists = name.startswith(_LISTS) and name not in _REDUCE_LISTS
    on_rows = on_lists or func in _LIKE or torch.Tag.pointwise in func.tags
    schema = schema_of(func)
    into_lists = on_lists and any(a.is_out for a in schema.arguments)
    return Kind(on_rows and not into_lists, on_lists, schema.is_mutable)
