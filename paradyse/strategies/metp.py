"""``metp``: memory-efficient tensor parallel (Frontiers of IT & EE 26(5), 2025).

A block is a sum over p groups of heads (or intermediate columns). Each rank keeps its own tokens
and computes the groups one after the other, attention by a ring within the group, so that only one
group's queries, keys and values exist at a time:

    Y = 0;  for g in 0..p-1:  q, k, v = x W_qkv^g;  O_g, lse_g = ring(q, k, v);  Y += O_g W_o^g

Saved for backward are x, O_g and lse_g; q, k, v (for an MLP: the columns) are computed again there.
Groups of experts are in ``experts.streamed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.dropouts import has_dropout
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Piece, cast_of
from paradyse.strategies.attention.operators import attend_across_ranks, backward_across_ranks
from paradyse.strategies.base import (
    EAGER_NODES,
    SPLIT,
    WHOLE,
    LoweredPiece,
    Scope,
    StepContext,
    Strategy,
    Uses,
    attended_by,
    bind_factors,
    gradients,
    piece_key,
)
from paradyse.strategies.dropout import dropout_overrides
from paradyse.strategies.experts.streamed import StreamedExpertsVariant, count_streamed_experts
from paradyse.strategies.groups.analyse import analyse, closure, may_be_split
from paradyse.strategies.groups.evaluate import (
    Segments,
    evaluate,
    evaluate_ups,
    local_shape,
    part,
)
from paradyse.strategies.groups.model import Unsplittable, Weight, up_weights
from paradyse.strategies.local import KEYS_GO_ROUND, LocalPiece
from paradyse.strategies.streaming import GroupContext, Streaming
from paradyse.strategies.weight_stream import sum_dtype
from paradyse.strategies.work import PIECE_OPS, Work
from paradyse.types import EXPERTS


def masks_inside(block: Any) -> str:
    """Why the ring cannot have the mask of ``block`` whole; "" where it can."""
    if block.attention is None:
        return ""
    inside = set(block.nodes)
    for mask in AttentionCall.of(block.attention).mask_nodes:
        if mask in inside or may_be_split(mask):
            return f"its mask {mask} is computed from hidden states"
    return ""


def _refusal(block: Any) -> str:
    """Why no group of ``block`` can be computed on local tokens with a ring; "" where it can."""
    if block.apart:
        return "its attention is over a dim that is not split, so that nothing goes round the ranks"
    return masks_inside(block)


@dataclass(frozen=True)
class _Call(GroupContext):
    """What a step knows besides the tensors that may have gradients."""

    masks: tuple[Tensor | None, ...]
    """Key padding and document ids, whole."""


class _Stage:
    """A part of a group's work, compiled once for all groups."""

    def __init__(
        self,
        variant: MetpVariant,
        name: str,
        nodes: Piece,
        outputs: Sequence[fx.Node],
        attended: fx.Node | None = None,
    ):
        """
        Args:
            outputs: what the stage gives.
            attended: the value that holds attention's output, which the stage reads.
        """
        scope, groups = variant.scope, variant.groups
        read = {*nodes.inputs, *outputs}
        ups = [u for u in groups.ups if any(leaf.node in read for leaf in u.leaves)]
        read.update(part.x for up in ups for part in up.parts)
        local = [n for n in variant.local if n in read]
        region = [Weight(n, form) for n, form in groups.region_weights.items() if n in read]
        used = [*up_weights(ups), *region]
        self.at = [variant.local.index(n) for n in local]
        self.at += [len(variant.local) + variant.weights.index(w) for w in used]
        num_up = len(used) - len(region)
        self.reads_heads = has_dropout(nodes)
        dims: list[Dims] = [((groups.slots.queries_per_rank,),)] * self.reads_heads
        if attended is not None:
            b, h, s, d = local_shape(scope, attended, groups.sizes, SPLIT)
            dims.append((b, s, h, d))
        dims += [local_shape(scope, n, groups.sizes, SPLIT) for n in local]
        dims += [tuple((n,) for n in w.shape()) for w in used]

        def fn(sizes: dict[str, Any], common: Sequence[Tensor], rest: Iterator[Tensor]) -> Any:
            overrides = {}
            if self.reads_heads:
                every, heads = variant.piece.nodes, next(rest)
                overrides = dropout_overrides(scope, every, SPLIT, sizes, common, groups, heads)
            factors = {**bind_factors(scope, SPLIT, sizes), **groups.sizes}
            env: dict[fx.Node, Any] = {}
            if attended is not None:
                env[attended] = next(rest).transpose(1, 2)
            env.update((n, next(rest)) for n in local)
            weights = [next(rest) for _ in range(num_up)]
            env.update(evaluate_ups(scope, ups, env, weights, factors))
            env.update((w.node, next(rest)) for w in region)
            evaluate(scope, nodes, env, factors, overrides)
            return [env[n] for n in outputs]

        key = f"{piece_key(scope, variant.piece, SPLIT, 'metp ' + groups.text())}\n{name}"
        self.lowered = LoweredPiece(scope, key, fn, dims)

    def __call__(
        self, call: _Call, group: Sequence[Tensor], heads: Tensor, attended: Tensor | None = None
    ) -> Any:
        """
        Args:
            group: the group's part of ``MetpVariant.local`` and ``MetpVariant.weights``.
            heads: int64, query heads (or columns) of the group.
        """
        tensors = [heads] * self.reads_heads + ([attended] if attended is not None else [])
        return self.lowered(call.sizes, call.common, tensors + [group[i] for i in self.at])


class MetpVariant(Streaming):
    """A block computed group by group on local tokens."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        if reason := _refusal(block):
            raise Unsplittable(reason)
        self.scope, self.piece = scope, piece
        self.groups = groups = analyse(scope, block)
        self.segments = segments = Segments(scope, groups)
        self.call = AttentionCall.of(block.attention) if block.attention is not None else None
        self.masks = self.call.masks if self.call is not None else ()
        read = [*segments.gathered, *segments.replicated, *groups.slices]
        self.local = [n for n in read if n not in self.masks]
        """Values on local tokens that the groups read; then the bias, which is whole."""
        bias = self.call.bias if self.call is not None else None
        self.bias_at = None if bias is None else len(self.local)
        """Which of a group's tensors is the bias of its heads."""
        self.local += [] if bias is None else [bias]
        self.weights = groups.weights
        """Weights of the groups, each in the form in which a group takes it."""
        sinks = self.call.sinks if self.call is not None else None
        of = [w.node for w in self.weights]
        self.sinks_at = None if sinks is None else len(self.local) + of.index(sinks)
        """Which of a group's tensors are the sinks of its heads."""
        self.used = [g for g, q in enumerate(groups.slots.q) if max(q) >= 0]
        self._heads: dict[int, Tensor] = {}
        self._make_stages(block)
        self.forms = [*map(groups.slices.get, self.local), *(w.form for w in self.weights)]
        self.casts = [None] * len(self.local) + [cast_of(piece, w.node) for w in self.weights]
        self.pre = self._around("pre", segments.pre)
        self.post = self._around("post", segments.post)
        around = [w.node for w in segments.weights]
        bias = [d.bias.node for d in groups.downs if d.bias is not None]
        nodes = dict.fromkeys([*(w.node for w in self.weights), *around, *bias])
        forms = {w.node: w.form for w in self.weights if w.node not in {*around, *bias}}
        self.uses: Uses = [(n, forms.get(n)) for n in nodes]
        self.streamed = [(w.node, forms.get(w.node)) for w in self.weights]

    def _make_stages(self, block: Any) -> None:
        scope, groups, region = self.scope, self.groups, block.region
        leaves = [leaf.node for up in groups.ups for leaf in up.leaves]
        self.read = read = list(dict.fromkeys(d.x for d in groups.downs))
        """What the down projections read."""
        first = len(self.local)
        self.downs = [(d, first + self.weights.index(d.weight)) for d in groups.downs]
        """The down projections, and which of a group's tensors is the weight of each."""
        self.before: _Stage | None = None
        attended = None
        nodes = groups.core
        if self.call is not None:
            qkv = self.call.qkv
            inside = closure(scope, qkv, region, leaves)
            self.before = _Stage(self, "before", part("before", inside, qkv), qkv)
            attended = attended_by(block.attention)
            inside = closure(scope, read, region, [*leaves, attended])
            nodes = part("after", inside, read)
        self.after = _Stage(self, "after", nodes, read, attended)

    def __call__(self, values: StepContext) -> Any:
        env = self.whole_or_shards(values, self.uses)
        for node in [*self.segments.inputs, *self.local]:
            if node not in self.groups.block.pre and node not in env:
                env[node] = values.get(node, WHOLE if node in self.masks else SPLIT)
        self.pre(values, env)
        whole = self.masks[:2]
        masks = tuple(values.get(m, WHOLE) if isinstance(m, fx.Node) else None for m in whole)
        own = values.block_id, values.sync, values.streams
        call = _Call(values.sizes, values.common, *own, masks)
        sources = [*self.local, *(w.node for w in self.weights)]
        tensors = [env[n] for n in sources]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            sums = _Stream.apply(self, call, *tensors)
        else:
            sums = self.forward_groups(call, tensors, [False] * len(tensors))[0]
        for d, y in zip(self.groups.downs, sums, strict=True):
            env[d.node] = y if d.bias is None else y + d.bias.apply(env[d.bias.node])
        self.post(values, env)
        return (env[self.groups.block.output],)

    def _around(
        self, name: str, nodes: Piece
    ) -> Callable[[StepContext, dict[fx.Node, Tensor]], None]:
        """What comes before or after the groups, on local tokens; its outputs join the values."""
        eager = len(nodes.nodes) <= EAGER_NODES
        body = LocalPiece(self.scope, nodes, SPLIT, f"metp {name}", within=self.piece, eager=eager)

        def compute(values: StepContext, env: dict[fx.Node, Tensor]) -> None:
            own = [env[n] for n in body.order]
            results = body.lowered(values.sizes, values.common, own)
            env.update(zip(nodes.outputs, results, strict=True))

        return compute

    def heads(self, index: int, device: torch.device) -> Tensor:
        """Query heads (or columns) of group ``index`` on ``device``, int64 [h]."""
        if index not in self._heads:
            ids = torch.tensor(self.groups.slots.q[index]).clamp(min=0)
            self._heads[index] = ids.to(device)
        return self._heads[index]

    def _attention(
        self, call: _Call, index: int, group: Sequence[Tensor], qkv: Sequence[Tensor]
    ) -> AttentionCall:
        """The attention of group ``index``, whose part of the step's tensors is ``group``."""
        assert self.call is not None
        seeded = self.call.seeded(call.common[-1])
        heads = self.heads(index, seeded.seed.device) if seeded.seed is not None else None
        q, k, v = qkv
        padding, documents = call.masks
        tensors = {"q": q, "k": k, "v": v, "key_padding": padding, "document_ids": documents}
        for name, at in (("bias", self.bias_at), ("sinks", self.sinks_at)):
            if at is not None:
                tensors[name] = group[at].detach()
        return replace(seeded, **tensors, head_ids=heads, info=call.common[3])

    def forward_groups(
        self, call: _Call, tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Per down projection the sum over groups, before bias; and per group attention's output
        and log-sum-exp.

        Args:
            call: what the step knows besides ``tensors``.
            tensors: the local values, the weights (whole, or sharded by groups).
            needs: which need gradients; the stages then run as they will in backward, so that
                nothing is compiled twice.
        """
        totals: list[Tensor] = []
        ys: list[Tensor] = []
        saved: list[Tensor] = []
        taken = self.taken(call, tensors, any(needs), call.streams.begin_following)
        for index in self.used:
            group, heads = taken.take(index, needs), self.heads(index, tensors[0].device)
            attended = None
            if self.before is not None:
                with torch.set_grad_enabled(any(needs)):
                    qkv = [t.detach() for t in self.before(call, group, heads)]
                with torch.no_grad():
                    attention = self._attention(call, index, group, qkv)
                    out, (lse,) = attend_across_ranks(attention, "ring", self.scope.axis)
                del qkv, attention
                saved += [out, lse]
                attended = out.transpose(1, 2).detach().requires_grad_(any(needs))
            with torch.set_grad_enabled(any(needs)):
                xs = [x.detach() for x in self.after(call, group, heads, attended)]
            ys = self._project(group, xs)
            del xs
            exact = [y.to(sum_dtype(y)) for y in ys]
            totals = [t.add_(y) for t, y in zip(totals, exact, strict=True)] if totals else exact
        return tuple(t.to(y.dtype) for t, y in zip(totals, ys, strict=True)), saved

    @torch.no_grad()
    def _project(self, group: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
        """A group's part of each down projection, of ``xs``, what these read."""
        of = dict(zip(self.read, xs, strict=True))
        linear = torch.ops.aten.linear.default
        return [linear(of[d.x], d.weight.apply(group[at])) for d, at in self.downs]

    def _behind(
        self, group: Sequence[Tensor], xs: Sequence[Any], grads_of_sums: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the down projections read of ``xs`` and of the group's weights, with its gradient:
        the projections themselves are not computed again."""
        of = dict(zip(self.read, xs, strict=True))
        ends, cotangents = list[Tensor](), list[Tensor]()
        for (d, at), grad in zip(self.downs, grads_of_sums, strict=True):
            x, weight = of[d.x], d.weight.apply(group[at])
            with torch.no_grad():
                if x.requires_grad:
                    ends.append(x)
                    cotangents.append(grad @ weight)
                if weight.requires_grad:
                    ends.append(weight)
                    cotangents.append(grad.flatten(0, -2).T @ x.flatten(0, -2))
        return ends, cotangents

    def backward_groups(
        self,
        call: _Call,
        tensors: Sequence[Tensor],
        saved: Sequence[Tensor],
        grads_of_sums: Sequence[Tensor],
        needs: Sequence[bool],
        nodes: Sequence[Any],
    ) -> list[Tensor | None]:
        """Gradients of ``tensors``. Each group's graph is built for its group alone, in two parts:
        the columns behind attention are gone before queries, keys and values are made again.

        Args:
            call, tensors, needs: as ``forward_groups`` had them.
            saved: attention's output and log-sum-exp of each group in turn.
            grads_of_sums: per down projection, of its sum over groups.
            nodes: as of ``GroupTensors.gradients``.
        """
        before = partial(call.streams.begin_before, call.block_id)
        taken = self.taken(call, tensors, True, before)
        for place, index in enumerate(self.used):
            group, heads = taken.take(index, needs), self.heads(index, tensors[0].device)
            where = [i for i, t in enumerate(group) if t.requires_grad]
            leaves, attended = [group[i] for i in where], []
            if self.before is not None:
                out, lse = saved[2 * place : 2 * place + 2]
                attended = [out.transpose(1, 2).detach().requires_grad_()]
            with torch.enable_grad():
                xs = self.after(call, group, heads, *attended)
                ends, cotangents = self._behind(group, xs, grads_of_sums)
            grads = gradients(ends, cotangents, [*leaves, *attended])
            del xs, ends, cotangents
            taken.add(index, where, grads[: len(leaves)])
            if self.before is not None:
                with torch.enable_grad():
                    qkv = self.before(call, group, heads)
                d_qkv = backward_across_ranks(
                    grads[-1].transpose(1, 2),
                    out,
                    [lse],
                    self._attention(call, index, group, [t.detach() for t in qkv]),
                    "ring",
                    self.scope.axis,
                    self.bias_at in where,
                )
                taken.add(index, where, gradients(qkv, d_qkv[:3], leaves))
                for at, grad in zip((self.bias_at, self.sinks_at), d_qkv[3:], strict=True):
                    if at is not None and at in where:
                        taken.add(index, [at], [grad])
            taken.send(index)
        return taken.gradients(nodes)


class _Stream(torch.autograd.Function):
    """The sum over groups, with what backward does written out.

    ``torch.utils.checkpoint`` would send K and V round once more, hold a group's part of the sum
    while its queries are made again, and add up gradients of 16-bit values in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, variant: MetpVariant, call: _Call, *tensors: Tensor) -> Any:
        needs = ctx.needs_input_grad[2:]
        sums, saved = variant.forward_groups(call, tensors, needs)
        ctx.of = (variant, call, len(tensors))
        ctx.save_for_backward(*tensors, *saved)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        variant, call, n = ctx.of
        kept = ctx.saved_tensors  # once: where the block is checkpointed each access runs it again
        tensors, saved = kept[:n], kept[n:]
        needs, nodes = ctx.needs_input_grad[2:], [node for node, _ in ctx.next_functions]
        return None, None, *variant.backward_groups(call, tensors, saved, grads, needs, nodes)


def _count(work: Work) -> None:
    """One piece for each group; in backward q, k, v (an MLP's columns) are computed again. Experts
    are apart."""
    if work.block.kind == EXPERTS:
        count_streamed_experts(work)
        return
    p, b = work.p, work.block
    work.num_ops += (p - 1) * PIECE_OPS * (1 + 2 * work.back)
    again = 1 + work.back * (2 + work.up_share)
    if not work.is_attention:
        work.project(work.tokens, b.num_weight_elements, 2 * b.hidden * p + work.columns, again)
        work.workspace_bytes += work.x_bytes + work.between_bytes / p * (1 + work.back)
        return
    num_kv = b.num_kv_heads
    work.project(work.projected, work.padded_weights, 2 * b.hidden + work.columns, again)
    each_once = work.own_kv * p == num_kv
    kv_bytes = work.keys_bytes(2 * num_kv / p if each_once else 2 * work.own_kv)
    for _ in range(p):
        work.ring(kv_bytes, work.own_heads)
    # one group at a time
    work.workspace_bytes = (work.workspace_bytes + work.between_bytes) / p + work.out_bytes
    work.attend(work.own_heads, work.pairs)


def _build(scope: Scope, block: Any, piece: Piece) -> Any:
    kind = StreamedExpertsVariant if block.kind == EXPERTS else MetpVariant
    return kind(scope, block, piece)


METP = Strategy(
    "metp",
    _build,
    _count,
    weights="streamed",
    refuses=_refusal,
    without={
        "selective": "metp keeps no more than the block's input and what attention gave",
        "tiled": "metp computes an MLP by groups of columns; its weights would go round once more "
        "for every tile",
        "chunked": KEYS_GO_ROUND,
    },
)
