"""``megatron_ts``: tensor parallel with sequence parallel (Megatron-LM, arXiv 2205.05198).

Each rank gathers the tokens of the block's normalized input, computes its own heads (or
intermediate columns) over the whole sequence with its part of the weights, and the partial sums are
scattered back to the ranks' tokens. Norm, bias, dropout and residual stay local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.pieces import Override, Piece, is_weight, make_piece, run
from paradyse.sharding import Factor, size_of
from paradyse.strategies.head_groups import (
    Groups,
    Weight,
    analyse,
    closure,
    local_shape,
    may_be_split,
    shape_leaf,
)
from paradyse.strategies.variant import (
    NUM_COMMON,
    SPLIT,
    WHOLE,
    LoweredPiece,
    Scope,
    Values,
    bind_factors,
    bind_sizes,
    common_dims,
    contiguous,
    dropout_overrides,
    piece_key,
    spec_dims,
)

_DEFAULTS = (None, None, None, None, -1, -1, -1, 1.0, 0.0)


def attention_extras(rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Of an attention's arguments after q, k and v.

    Returns:
        (key padding, document ids, bias) and (left, right, chunk, scale, dropout rate).
    """
    full = [*rest, *_DEFAULTS[len(rest) :]]
    return full[:3], full[4:9]


class Segments:
    """The parts of a block around its core, and what each reads."""

    def __init__(self, scope: Scope, groups: Groups):
        block = groups.block
        pre = set(block.pre)
        read_by_core = [n for n in (groups.x, *groups.core.inputs) if n in pre]
        post = closure(scope, [block.output], block.post) if block.post else []
        read_by_post = [a for n in post for a in n.all_input_nodes if a in pre]
        ahead = list(dict.fromkeys([*read_by_core, *read_by_post]))
        self.pre: Piece = make_piece("pre", closure(scope, ahead, pre), ahead)
        self.post: Piece = make_piece("post", post, [block.output])
        """Reads ``block.down``; where nothing follows the projection there are no nodes."""
        taken = {groups.x, *groups.slices, *groups.region_weights}
        taken.update(leaf.node for up in groups.ups for leaf in up.leaves)
        others = [n for n in groups.core.inputs if n not in taken]
        self.gathered = [groups.x, *(n for n in others if n in pre or may_be_split(n))]
        """Values on local tokens that the core reads."""
        self.replicated = [n for n in others if n not in self.gathered]
        """Whole values that the core reads as they are."""
        outside = [*self.pre.inputs, *self.post.inputs, *(n for n in self.gathered if n not in pre)]
        outside = [n for n in dict.fromkeys(outside) if n is not block.down and n not in pre]
        self.inputs = [n for n in outside if not is_weight(n)]
        """Values on local tokens that come from outside the block."""
        self.weights = [Weight(n, None) for n in outside if is_weight(n)]


def on_tokens(scope: Scope, node: fx.Node, x: Tensor, sizes: dict[Factor, Any], fn: Any) -> Tensor:
    """Apply ``fn(x, dim)`` to the sequence dim of ``x``, apart from what is merged into it.

    Args:
        node: whose value ``x`` is. sizes: of the factors in ``x``.
    """
    dims = scope.names.of(node)
    at = next(i for i, d in enumerate(dims) if scope.seq in d)
    if len(dims[at]) == 1:
        out: Tensor = fn(x, at)
        return out
    inner = [size_of([f], sizes) for f in dims[at]]
    apart = x.reshape([*x.shape[:at], *inner, *x.shape[at + 1 :]])
    moved: Tensor = fn(apart, at + dims[at].index(scope.seq))
    return moved.flatten(at, at + len(inner) - 1)


def evaluate_ups(
    scope: Scope, groups: Groups, x: Tensor, weights: Sequence[Tensor], sizes: dict[Factor, Any]
) -> dict[fx.Node, Tensor]:
    """The leaves' values within a group; ``weights`` in the order of ``up_weights``."""
    given = iter(weights)
    env: dict[fx.Node, Tensor] = {}
    for up in groups.ups:
        weight = up.weight.apply(next(given))
        bias = up.bias.apply(next(given)) if up.bias is not None else None
        y = torch.ops.aten.linear.default(x, weight, bias)
        for leaf in up.leaves:
            env[leaf.node] = shape_leaf(scope, groups, up, leaf, y, sizes)
    return env


def up_weights(groups: Groups) -> list[Weight]:
    return [w for up in groups.ups for w in (up.weight, up.bias) if w is not None]


class TensorParallelVariant:
    """A block as one compiled piece: local, gather, this rank's group, reduce-scatter, local."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        self.scope = scope
        self.groups = groups = analyse(scope, block)
        self.segments = segments = Segments(scope, groups)
        self.replicated = [*segments.replicated, *groups.slices]
        region = [Weight(n, form) for n, form in groups.region_weights.items()]
        last = [groups.down, *([groups.down_bias] if groups.down_bias is not None else [])]
        self.weights = [*up_weights(groups), *region, *last, *segments.weights]
        self.nodes = [w.node for w in self.weights]
        self.forms = [w.form for w in self.weights]
        self.heads: Tensor | None = None
        self.needs_heads = (
            block.attention is not None and attention_extras(block.attention.args[3:])[1][-1] > 0
        )
        whole = scope.labels(WHOLE).of
        dims = [*common_dims(scope)]
        dims += [((len(groups.slots.q[0]),),)] * self.needs_heads
        dims += [spec_dims(scope, n, SPLIT) for n in segments.inputs]
        dims += [local_shape(scope, n, groups.sizes, dict(whole)) for n in self.replicated]
        dims += [tuple((n,) for n in w.shape()) for w in self.weights]
        self.dims = dims
        at = [piece.nodes.index(n) for n in [*block.up, block.down]]
        key = piece_key(scope, piece, WHOLE, f"megatron_ts {at} {groups.text()}")
        self.piece = piece
        self.lowered = LoweredPiece(scope, key, self._compute, dims)

    def _compute(self, *tensors: Tensor) -> tuple[Any, ...]:
        scope, groups, segments, block = self.scope, self.groups, self.segments, self.groups.block
        sizes = bind_sizes(self.dims, tensors)
        common, rest = tensors[:NUM_COMMON], iter(tensors[NUM_COMMON:])
        whole, local, _, info, _ = common
        heads = next(rest) if self.needs_heads else None
        env: dict[fx.Node, Any] = {n: next(rest) for n in segments.inputs}
        core_env: dict[fx.Node, Any] = {n: next(rest) for n in self.replicated}
        ups = [next(rest) for _ in up_weights(groups)]
        core_env.update((n, next(rest)) for n in groups.region_weights)
        down = groups.down.apply(next(rest))
        bias = groups.down_bias.apply(next(rest)) if groups.down_bias is not None else None
        env.update((w.node, next(rest)) for w in segments.weights)
        here = bind_factors(scope, SPLIT, sizes)
        everywhere = {**bind_factors(scope, WHOLE, sizes), **groups.sizes}
        overrides = dropout_overrides(scope, self.piece.nodes, SPLIT, sizes, common)
        if block.attention is not None:
            overrides[block.attention] = self._attention(common, heads)

        def evaluate(part: Piece, values: dict[fx.Node, Any], factors: dict[Factor, Any]) -> None:
            results = run(part, [values[n] for n in part.inputs], scope.names, factors, overrides)
            values.update(zip(part.outputs, results, strict=True))

        def gather(x: Tensor, dim: int) -> Tensor:
            return torch.ops.paradyse.gather_tokens(x, local, whole, info, dim, scope.axis.name)

        def scatter(x: Tensor, dim: int) -> Tensor:
            return torch.ops.paradyse.reduce_scatter_tokens(
                x, local, whole, info, dim, scope.axis.name
            )

        evaluate(segments.pre, env, here)
        for node in segments.gathered:
            core_env[node] = on_tokens(scope, node, env[node], here, gather)
        core_env.update(evaluate_ups(scope, groups, core_env[groups.x], ups, everywhere))
        evaluate(groups.core, core_env, everywhere)
        partial = torch.ops.aten.linear.default(core_env[groups.core.outputs[0]], down)
        y = on_tokens(scope, block.down, partial, everywhere, scatter)
        env[block.down] = y if bias is None else y + bias
        if segments.post.nodes:
            evaluate(segments.post, env, here)
        return contiguous([env[block.output]])

    def _attention(self, common: Sequence[Tensor], heads: Tensor | None) -> Override:
        def whole_sequence(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            extras, numbers = attention_extras(rest)
            seed = common[-1] if numbers[-1] > 0 else None
            return torch.ops.paradyse.attention(q, k, v, *extras, seed, *numbers, heads)

        return whole_sequence

    def __call__(self, values: Values) -> Any:
        tensors = [*values.common]
        if self.needs_heads:
            if self.heads is None:
                mine = torch.tensor(self.groups.slots.q[self.scope.axis.rank])
                self.heads = mine.clamp(min=0).to(values.common[0].device)
            tensors.append(self.heads)
        tensors += [values.get(n, SPLIT) for n in self.segments.inputs]
        for node in self.replicated:
            value, rows = values.get(node, WHOLE), self.groups.slices.get(node)
            tensors.append(value if rows is None else rows.take(value, self.scope.axis.rank))
        taken = values.weights(self.nodes, self.forms)
        tensors += [w.contiguous() for w in taken]
        return self.lowered(values.sizes, tensors)
