"""``megatron_ts``: tensor parallel with sequence parallel (Megatron-LM, arXiv 2205.05198).

Each rank gathers the tokens of the block's normalized input, computes its own heads (or
intermediate columns) over the whole sequence with its part of the weights, and the partial sums are
scattered back to the ranks' tokens. Norm, bias, dropout and residual stay local. Of experts each
rank computes its own (``experts.parallel``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.token_linears import gather_linears, linear_scatter
from paradyse.graph.attention_call import Apply, AttentionCall, apply_operator
from paradyse.graph.dropouts import has_dropout
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Override, Piece
from paradyse.strategies.base import (
    SPLIT,
    WHOLE,
    LoweredPiece,
    PieceVariant,
    Scope,
    StepContext,
    Strategy,
    Uses,
    attended_by,
    bind_factors,
    piece_key,
    spec_dims,
)
from paradyse.strategies.dropout import dropout_overrides
from paradyse.strategies.experts.parallel import ExpertParallelVariant, count_expert_parallel
from paradyse.strategies.groups.analyse import analyse
from paradyse.strategies.groups.evaluate import (
    Operands,
    Segments,
    evaluate,
    evaluate_ups,
    linears,
    local_shape,
    on_tokens,
)
from paradyse.strategies.groups.model import up_weights
from paradyse.strategies.work import CORE_OPS, GATHER_OPS, Work
from paradyse.types import EXPERTS


class TensorParallelVariant(PieceVariant):
    """A block as one compiled piece: local, gather, this rank's group, reduce-scatter, local."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        self.scope = scope
        self.groups = groups = analyse(scope, block)
        self.segments = segments = Segments(scope, groups)
        self.replicated = [*segments.replicated, *groups.slices]
        biases = [d.bias for d in groups.downs if d.bias is not None]
        self.weights = [*groups.weights, *biases, *segments.weights]
        self.uses: Uses = [(w.node, w.form) for w in self.weights]
        self.meanwhile = self._find_meanwhile()
        self.begins_with_message = bool(self.meanwhile)
        self.heads: Tensor | None = None
        self.needs_heads = has_dropout(groups.core)
        dims: list[Dims] = [((groups.slots.queries_per_rank,),)] * self.needs_heads
        dims += [spec_dims(scope, n, SPLIT) for n in segments.inputs]
        dims += [local_shape(scope, n, groups.sizes, WHOLE) for n in self.replicated]
        dims += [tuple((n,) for n in w.shape()) for w in self.weights]
        at = [piece.nodes.index(n) for n in [*block.up, *block.downs]]
        key = piece_key(scope, piece, WHOLE, f"megatron_ts {at} {groups.text()}")
        self.piece = piece
        self.lowered = LoweredPiece(scope, key, self.compute, dims)

    def compute(
        self,
        sizes: dict[str, Any],
        common: Sequence[Tensor],
        own: Iterator[Tensor],
        apply: Apply = apply_operator,
    ) -> Sequence[Any]:
        """See ``PieceVariant``: of ``sizes``, ``common``, ``own`` and ``apply``."""
        scope, groups, segments, block = self.scope, self.groups, self.segments, self.groups.block
        whole, local, beside, info, _ = common
        heads = next(own) if self.needs_heads else None
        env: dict[fx.Node, Any] = {n: next(own) for n in segments.inputs}
        core_env: dict[fx.Node, Any] = {n: next(own) for n in self.replicated}
        ups = [next(own) for _ in up_weights(groups.ups)]
        core_env.update((n, next(own)) for n in groups.region_weights)
        downs = [d.weight.apply(next(own)) for d in groups.downs]
        biases = [d.bias.apply(next(own)) if d.bias is not None else None for d in groups.downs]
        env.update((w.node, next(own)) for w in segments.weights)
        here = bind_factors(scope, SPLIT, sizes)
        everywhere = {**bind_factors(scope, WHOLE, sizes), **groups.sizes}
        overrides = dropout_overrides(scope, self.piece.nodes, SPLIT, sizes, common)
        if heads is not None:
            every = self.piece.nodes
            overrides |= dropout_overrides(scope, every, WHOLE, sizes, common, groups, heads)
        if block.attention is not None:
            overrides[block.attention] = self._attention(common, heads, apply)

        def lengths(of: fx.Node) -> tuple[Tensor, Tensor]:
            if scope.sequence_of(of) is not scope.keys:
                return local, whole
            at = (scope.keys_at[SPLIT], scope.keys_at[WHOLE])
            return tuple(beside.new_empty(sizes[letter]) for letter in at)

        def gather(of: fx.Node, x: Tensor, dim: int) -> Tensor:
            name = scope.axis.name
            return torch.ops.paradyse.gather_tokens(x, *lengths(of), info, dim, name)

        def scatter(x: Tensor, dim: int) -> Tensor:
            return torch.ops.paradyse.reduce_scatter_tokens(
                x, local, whole, info, dim, scope.axis.name
            )

        def multiply(_: Any, operands: Sequence[Operands]) -> list[Tensor]:
            """As ``linears`` does; what they read is gathered meanwhile where it can be."""
            found: dict[fx.Node, Tensor] = {}
            for node in self.meanwhile:
                mine = [(d, w, b) for d, w, b in operands if d.x is node]
                weights = [w for _, w, _ in mine]
                biases = [b for _, _, b in mine if b is not None]
                core_env[node], *ys = gather_linears(
                    env[node], weights, biases, *lengths(node), info, scope.axis.name
                )
                found.update((d.node, y) for (d, _, _), y in zip(mine, ys, strict=True))
            others = [o for o in operands if o[0].node not in found]
            found.update((o[0].node, y) for o, y in zip(others, linears(core_env, others)))
            return [found[d.node] for d, _, _ in operands]

        evaluate(scope, segments.pre, env, here, overrides)
        for nodes in self._messages():
            if nodes[0] in self.meanwhile:
                continue
            parts = [env[n] for n in nodes]
            sent = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            came = on_tokens(scope, nodes[0], sent, here, partial(gather, nodes[0]))
            widths = [x.shape[-1] for x in parts]
            # one alone may have the sequence last, which is longer now
            core_env.update(zip(nodes, came.split(widths, -1) if len(nodes) > 1 else [came]))
        core_env.update(evaluate_ups(scope, groups.ups, core_env, ups, everywhere, multiply))
        evaluate(scope, groups.core, core_env, everywhere, overrides)
        for d, weight, bias in zip(groups.downs, downs, biases, strict=True):
            x = core_env[d.x]
            if self._tokens_come_last(d.x) and self._tokens_come_last(d.node):
                y = linear_scatter(x, weight, local, whole, info, scope.axis.name)
            else:
                summand = torch.ops.aten.linear.default(x, weight)
                y = on_tokens(scope, d.node, summand, everywhere, scatter)
            env[d.node] = y if bias is None else y + bias
        evaluate(scope, segments.post, env, here, overrides)
        return [env[block.output]]

    def _tokens_come_last(self, node: fx.Node) -> bool:
        """Whether tokens are the last dim of ``node`` but one, and nothing else is in it."""
        dims = self.scope.names.of(node)
        tokens = {*self.scope.tokens}
        return len(dims) > 1 and len(dims[-2]) == 1 and dims[-2][0] in tokens

    def _find_meanwhile(self) -> list[fx.Node]:
        """What up projections read that is gathered while they multiply the rank's own tokens."""
        found = []
        for nodes in self._messages():
            read = [d for up in self.groups.ups for d in up.parts if d.x is nodes[0]]
            alike = len({d.bias is None for d in read}) == 1
            if len(nodes) == 1 and alike and self._tokens_come_last(nodes[0]):
                found.append(nodes[0])
        return found

    def _messages(self) -> list[list[fx.Node]]:
        """The values to gather, in messages: the narrow ones that adapters make share one."""
        inputs = self.groups.inputs
        widest = max(inputs, key=lambda n: n.meta["val"].shape[-1])
        together: dict[Any, list[fx.Node]] = {}
        for node in self.segments.gathered:
            val, dims = node.meta["val"], self.scope.names.of(node)
            alone = node is widest or node not in inputs or {*self.scope.tokens} & {*dims[-1]}
            key = node if alone else (val.dtype, *map(tuple, dims[:-1]))
            together.setdefault(key, []).append(node)
        return list(together.values())

    def _attention(self, common: Sequence[Tensor], heads: Tensor | None, apply: Apply) -> Override:
        def whole_sequence(*args: Any) -> Any:
            return replace(AttentionCall(*args).seeded(common[-1]), head_ids=heads).run(apply)

        return whole_sequence

    def output_dims(self) -> list[Dims]:
        """See ``PieceVariant``."""
        return [spec_dims(self.scope, self.groups.block.output, SPLIT)]

    def attended_dims(self) -> Dims | None:
        """See ``PieceVariant``: of the rank's heads, over the whole sequence."""
        attention = self.groups.block.attention
        if attention is None:
            return None
        return local_shape(self.scope, attended_by(attention), self.groups.sizes, WHOLE)

    def tensors(self, step: StepContext) -> list[Tensor]:
        """See ``PieceVariant``, of ``step``."""
        tensors = []
        if self.needs_heads:
            if self.heads is None:
                mine = torch.tensor(self.groups.slots.q[self.scope.axis.rank])
                self.heads = mine.clamp(min=0).to(step.common[0].device)
            tensors.append(self.heads)
        tensors += [step.get(n, SPLIT) for n in self.segments.inputs]
        for node in self.replicated:
            value, rows = step.get(node, WHOLE), self.groups.slices.get(node)
            tensors.append(value if rows is None else rows.take(value, self.scope.axis.rank))
        return tensors + [w.contiguous() for w in step.weights(self.uses)]


def _count(work: Work) -> None:
    """All-gather in, reduce-scatter out; backward the reverse. Experts are apart."""
    if work.block.kind == EXPERTS:
        count_expert_parallel(work)
        return
    p, passes, in_out = work.p, 1 + work.back, 2 * work.block.hidden + work.columns
    work.project(work.projected * p, work.padded_weights / p, in_out / p, 1 + 2 * work.back)
    gathers = 1 if work.workload.key_len is None else 2
    read, written = (p - 1) * work.read_bytes, (p - 1) * work.x_bytes
    # own tokens are multiplied meanwhile, and in backward the gradients of weights computed
    ups = 2 * work.projected * work.padded_weights / p * work.up_share
    downs = 2 * work.projected * work.padded_weights / p - ups
    work.send_behind("all_gather", read, gathers, ups)
    work.send_behind("reduce_scatter", written, 1, downs)
    if work.back:
        work.send_behind("reduce_scatter", read, gathers, (1 + p) * ups)
        work.send_behind("all_gather", written, 1, 2 * downs)
    work.moved_bytes += 8 * p * work.x_bytes * passes
    work.num_ops += 2 * GATHER_OPS * passes
    work.saved_bytes += (p - 1) * work.read_bytes  # the gathered input, for the weights' gradients
    work.saved_bytes += work.between_bytes
    work.workspace_bytes += 2 * p * work.x_bytes + work.between_bytes + work.out_bytes
    if work.is_attention:
        work.attend(work.own_heads, work.pairs)
        work.num_ops += CORE_OPS * passes


def _build(scope: Scope, block: Any, piece: Piece) -> Any:
    kind = ExpertParallelVariant if block.kind == EXPERTS else TensorParallelVariant
    return kind(scope, block, piece)


MEGATRON_TS = Strategy(
    "megatron_ts",
    _build,
    _count,
    weights="split",
    without={"chunked": "megatron_ts gathers all tokens before it projects any"},
)
