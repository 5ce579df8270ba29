"""Writing operators into a graph whose nodes carry fake values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx


def value_of(node: fx.Node) -> Any:
    """The fake value of the operator ``node``, from those of its inputs, in ``meta["val"]``."""
    return compute(node.target, node.args, node.kwargs)


def compute(
    target: Any, args: Any, kwargs: Any, values: Mapping[fx.Node, Any] | None = None
) -> Any:
    """What the operator ``target`` gives, of fake values.

    Args:
        target: an operator.
        args, kwargs: its arguments, nodes for the values that they have.
        values: what to take for some nodes instead.
    """
    given = values or {}
    args, kwargs = fx.map_arg((args, kwargs), lambda a: given.get(a, a.meta["val"]))
    with torch.no_grad():
        return target(*args, **kwargs)


def call_like(
    like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A call of ``target`` where the graph of ``like`` inserts, with what else is known of it.

    Args:
        like: the node that it is in place of, or behind.
        target: an operator.
        args, kwargs: its arguments.
    """
    node = like.graph.call_function(target, args, kwargs or {})
    node.meta = {**like.meta, "val": value_of(node)}
    return node
