"""The parts of a block that is computed group by group, and how a group's leaves are evaluated.

Throughout, ``scope`` is what all variants of the capture share, ``sizes`` those of the factors that
differ from the traced ones: tokens, heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.factors import Factor, size_of
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Override, Piece, is_weight, make_piece, run
from paradyse.strategies.base import Scope, spec_dims
from paradyse.strategies.groups.analyse import closure, factors_of, may_be_split
from paradyse.strategies.groups.model import Groups, Leaf, Projection, Up, Weight


class Segments:
    """The parts of a block around its core, and what each reads."""

    def __init__(self, scope: Scope, groups: Groups):
        block = groups.block
        pre = set(block.pre)
        read_by_core = [n for n in (*groups.inputs, *groups.core.inputs) if n in pre]
        post = closure(scope, [block.output], block.post) if block.post else []
        read_by_post = [a for n in post for a in n.all_input_nodes if a in pre]
        ahead = list(dict.fromkeys([*read_by_core, *read_by_post]))
        self.pre = part("pre", closure(scope, ahead, pre), ahead)
        self.post = part("post", post, [block.output])
        """Reads ``block.downs``; where nothing follows the projection there are no nodes."""
        taken = {*groups.inputs, *groups.slices, *groups.region_weights}
        taken.update(leaf.node for up in groups.ups for leaf in up.leaves)
        others = [n for n in groups.core.inputs if n not in taken]
        split = [n for n in others if factors_of(scope, n) & {*scope.tokens}]
        self.gathered = [*groups.inputs, *(n for n in split if n in pre or may_be_split(n))]
        """Values on local tokens that the core reads."""
        self.replicated = [n for n in others if n not in self.gathered]
        """Whole values that the core reads as they are."""
        outside = [*self.pre.inputs, *self.post.inputs, *(n for n in self.gathered if n not in pre)]
        outside = [n for n in dict.fromkeys(outside) if n not in block.downs and n not in pre]
        self.inputs = [n for n in outside if not is_weight(n)]
        """Values on local tokens that come from outside the block."""
        self.weights = [Weight(n, None) for n in outside if is_weight(n)]


def on_tokens(scope: Scope, node: fx.Node, x: Tensor, sizes: dict[Factor, Any], fn: Any) -> Tensor:
    """``fn(x, dim)`` at the dim of tokens of ``x``, apart from what is merged into that dim.

    Args:
        node: whose value ``x`` is.
        sizes: of the factors in ``x``.
        fn: of a tensor and a dim; it may change the size of that dim.
    """
    dims, seq = scope.names.of(node), scope.sequence_of(node)
    at = next(i for i, d in enumerate(dims) if seq in d)
    if len(dims[at]) == 1:
        out: Tensor = fn(x, at)
        return out
    inner = [size_of([f], sizes) for f in dims[at]]
    apart = x.reshape([*x.shape[:at], *inner, *x.shape[at + 1 :]])
    moved: Tensor = fn(apart, at + dims[at].index(seq))
    return moved.flatten(at, at + len(inner) - 1)


Operands = tuple[Projection, Tensor, Tensor | None]
"""A projection with a group's rows of its weight [n, h] and of its bias [n]."""


def linears(inputs: Mapping[fx.Node, Any], operands: Sequence[Operands]) -> list[Tensor]:
    """What each projection of ``operands`` gives, [.., n], of what it reads in ``inputs``,
    [.., h]."""
    linear = torch.ops.aten.linear.default
    return [linear(inputs[of.x], weight, bias) for of, weight, bias in operands]


def evaluate_ups(
    scope: Scope,
    ups: Sequence[Up],
    inputs: Mapping[fx.Node, Any],
    weights: Sequence[Tensor],
    sizes: dict[Factor, Any],
    multiply: Callable[[Mapping[fx.Node, Any], Sequence[Operands]], Sequence[Tensor]] = linears,
) -> dict[fx.Node, Tensor]:
    """The values of the leaves of ``ups`` within a group.

    Args:
        inputs: what the projections read, [.., h].
        weights: a group's rows [n, h] or [n], in the order of ``up_weights``.
        multiply: what computes the projections of all ``ups``.
    """
    given = iter(weights)
    operands: list[Operands] = []
    for part in (part for up in ups for part in up.parts):
        weight = part.weight.apply(next(given))
        bias = part.bias.apply(next(given)) if part.bias is not None else None
        operands.append((part, weight, bias))
    projected = iter(multiply(inputs, operands))
    env: dict[fx.Node, Tensor] = {}
    for up in ups:
        rows = {part.node: next(projected) for part in up.parts}
        if up.join.nodes:
            evaluate(scope, up.join, rows, {})
        for leaf in up.leaves:
            env[leaf.node] = shape_leaf(scope, up, leaf, rows[up.node], sizes)
    return env


def part(name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Piece:
    """A piece called ``name`` of ``nodes``; of ``outputs`` those that it computes (others are there
    before it).
    """
    inside = set(nodes)
    return make_piece(name, nodes, [n for n in outputs if n in inside])


def evaluate(
    scope: Scope,
    piece: Piece,
    values: dict[fx.Node, Any],
    sizes: dict[Factor, Any],
    overrides: Mapping[fx.Node, Override] | None = None,
) -> None:
    """Run ``piece`` on ``values`` and put its outputs there; ``overrides`` replace operators."""
    results = run(piece, [values[n] for n in piece.inputs], scope.names, sizes, overrides)
    values.update(zip(piece.outputs, results, strict=True))


def local_shape(scope: Scope, node: fx.Node, heads: Mapping[Factor, int], layout: str) -> Dims:
    """Dims of ``node`` within a group: ``heads`` are the sizes there, tokens lie in ``layout``."""
    dims = zip(scope.names.of(node), spec_dims(scope, node, layout), strict=True)
    return tuple(
        tuple(heads.get(f, n) for f, n in zip(factors, sizes, strict=True))
        for factors, sizes in dims
    )


def shape_leaf(scope: Scope, up: Up, leaf: Leaf, y: Tensor, sizes: dict[Factor, Any]) -> Tensor:
    """The value of ``leaf`` of ``up`` within a group, from its projection ``y`` [.., rows]."""
    mine = y if len(up.leaves) == 1 else y.narrow(-1, leaf.start, leaf.num_rows)
    dims, source = scope.names.of(leaf.node), scope.names.of(up.node)
    if dims[:-1] == source[:-1]:
        return mine
    tokens = [f for d in source[:-1] for f in d]
    place = {f: i for i, f in enumerate(tokens)}
    rest = [[f for f in d if f not in place] for d in dims]
    apart = mine.reshape([size_of([f], sizes) for f in tokens] + [size_of(d, sizes) for d in rest])
    order = []
    for i, d in enumerate(dims):
        order += [place[f] for f in d if f in place] + [len(tokens) + i]
    return apart.permute(order).reshape([size_of(d, sizes) for d in dims])
