"""``metp``: memory-efficient tensor parallel (Frontiers of IT & EE 26(5), 2025).

A block is a sum over p groups of heads (or intermediate columns). Each rank keeps its own tokens
and computes the groups one after the other, attention by a ring within the group, so that only one
group's queries, keys and values exist at a time:

    Y = 0;  for g in 0..p-1:  q, k, v = x W_qkv^g;  O_g, lse_g = ring(q, k, v);  Y += O_g W_o^g

Saved for backward are x, O_g and lse_g; q, k, v (for an MLP: the columns) are computed again there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.subgraph import Piece
from paradyse.strategies.base import (
    NUM_COMMON,
    SPLIT,
    WHOLE,
    LoweredPiece,
    Scope,
    StepContext,
    Strategy,
    Uses,
    bind_factors,
    bind_sizes,
    common_dims,
    contiguous,
    piece_key,
    spec_dims,
)
from paradyse.strategies.dropout import dropout_overrides, has_dropout
from paradyse.strategies.groups.analyse import analyse, closure, may_be_split
from paradyse.strategies.groups.evaluate import (
    Segments,
    attention_extras,
    evaluate,
    evaluate_ups,
    local_shape,
    part,
    up_weights,
)
from paradyse.strategies.groups.model import Projection, Unsplittable, Weight
from paradyse.strategies.weight_stream import WeightStream, padded_rows
from paradyse.strategies.work import PIECE_OPS, Work
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Rows
from paradyse.weights.unshard import fits

EAGER_NODES = 4
"""What surrounds the groups is compiled from more operators than this."""


def masks_inside(block: Any) -> str:
    """Why the ring cannot have the block's mask whole; "" where it can."""
    if block.attention is None:
        return ""
    extras, _ = attention_extras(block.attention.args[3:])
    inside = set(block.nodes)
    for mask in (m for m in extras if isinstance(m, fx.Node)):
        if mask in inside or may_be_split(mask):
            return f"its mask {mask} is computed from hidden states"
    return ""


@dataclass(frozen=True)
class _Call:
    """What a step knows besides the tensors that may have gradients."""

    sizes: Mapping[str, int]
    common: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]
    """Key padding, document ids and bias, whole."""


class _Local:
    """What comes before or after the groups, on local tokens."""

    def __init__(self, variant: MetpVariant, name: str, nodes: Piece, first: Sequence[fx.Node]):
        """``first``: nodes that the piece reads, or passes on, besides what its operators read."""
        scope = variant.scope
        biases = [d for d in variant.groups.downs if d.bias is not None and d.node in first]
        read = [n for n in nodes.inputs if n not in first]
        weights = {w.node for w in variant.segments.weights}
        self.inputs = [*first, *(n for n in read if n not in weights)]
        self.weights = [n for n in read if n in weights]
        given = [d.bias.node for d in biases if d.bias is not None]
        self.weights += [n for n in dict.fromkeys(given) if n not in self.weights]
        order = [*self.inputs, *self.weights]
        dims = [*common_dims(scope), *(spec_dims(scope, n, SPLIT) for n in order)]
        outputs = nodes.outputs or tuple(first)

        def fn(*tensors: Tensor) -> tuple[Any, ...]:
            sizes = bind_sizes(dims, tensors)
            common = tensors[:NUM_COMMON]
            env = dict(zip(order, tensors[NUM_COMMON:], strict=True))
            for d in biases:
                assert d.bias is not None
                env[d.node] = env[d.node] + d.bias.apply(env[d.bias.node])
            overrides = dropout_overrides(scope, variant.piece.nodes, SPLIT, sizes, common)
            evaluate(scope, nodes, env, bind_factors(scope, SPLIT, sizes), overrides)
            return contiguous([env[n] for n in outputs])

        key = f"{piece_key(scope, variant.piece, SPLIT, 'metp')}\n{name}"
        small = len(nodes.nodes) <= EAGER_NODES
        lowered = LoweredPiece(scope, key, fn, dims)
        self.run = (lambda sizes, tensors: fn(*tensors)) if small else lowered
        self.outputs = outputs

    def __call__(self, values: StepContext, env: dict[fx.Node, Tensor]) -> None:
        tensors = [env[n] for n in [*self.inputs, *self.weights]]
        results = self.run(values.sizes, [*values.common, *tensors])
        env.update(zip(self.outputs, results, strict=True))


class _Stage:
    """A part of a group's work, compiled once for all groups."""

    def __init__(
        self,
        variant: MetpVariant,
        name: str,
        nodes: Piece,
        outputs: Sequence[fx.Node],
        attended: fx.Node | None = None,
        downs: Sequence[Projection] = (),
    ):
        """
        Args:
            outputs: what the stage gives where there are no ``downs``; else what those read.
            attended: the value that holds attention's output, which the stage reads.
        """
        scope, groups = variant.scope, variant.groups
        read = {*nodes.inputs, *outputs}
        self.ups = [u for u in groups.ups if any(leaf.node in read for leaf in u.leaves)]
        read.update(part.x for up in self.ups for part in up.parts)
        self.inputs = [i for i, n in enumerate(variant.local) if n in read]
        region = [Weight(n, form) for n, form in groups.region_weights.items() if n in read]
        used = [*up_weights(self.ups), *region, *(d.weight for d in downs)]
        self.weights = [variant.weights.index(w) for w in used]
        num_up = len(used) - len(region) - len(downs)
        self.reads_heads = has_dropout(nodes)
        dims = [*common_dims(scope)]
        dims += [((groups.slots.queries_per_rank,),)] * self.reads_heads
        if attended is not None:
            b, h, s, d = local_shape(scope, attended, groups.sizes, SPLIT)
            dims.append((b, s, h, d))
        local = [variant.local[i] for i in self.inputs]
        dims += [local_shape(scope, n, groups.sizes, SPLIT) for n in local]
        dims += [tuple((n,) for n in w.shape()) for w in used]

        def fn(*tensors: Tensor) -> tuple[Any, ...]:
            sizes = bind_sizes(dims, tensors)
            common, rest = tensors[:NUM_COMMON], iter(tensors[NUM_COMMON:])
            overrides = {}
            if self.reads_heads:
                every, heads = variant.piece.nodes, next(rest)
                overrides = dropout_overrides(scope, every, SPLIT, sizes, common, groups, heads)
            factors = {**bind_factors(scope, SPLIT, sizes), **groups.sizes}
            env: dict[fx.Node, Any] = {}
            if attended is not None:
                env[attended] = next(rest).transpose(1, 2)
            env.update((n, next(rest)) for n in local)
            ups = [next(rest) for _ in range(num_up)]
            if self.ups:
                env.update(evaluate_ups(scope, self.ups, env, ups, factors))
            env.update((w.node, next(rest)) for w in region)
            evaluate(scope, nodes, env, factors, overrides)
            if not downs:
                return tuple(env[n] for n in outputs)
            linear = torch.ops.aten.linear.default
            return tuple(linear(env[d.x], d.weight.apply(next(rest))) for d in downs)

        key = f"{piece_key(scope, variant.piece, SPLIT, 'metp ' + groups.text())}\n{name}"
        self.lowered = LoweredPiece(scope, key, fn, dims)

    def __call__(self, call: _Call, group: _Group, attended: Tensor | None = None) -> Any:
        tensors = [*call.common, *([group.heads] if self.reads_heads else [])]
        tensors += [attended] if attended is not None else []
        tensors += [group.local[i] for i in self.inputs] + [group.weights[i] for i in self.weights]
        return self.lowered(call.sizes, tensors)


@dataclass(frozen=True)
class _Group:
    """The tensors of one group, leaves of a graph of their own."""

    index: int
    heads: Tensor
    """Query heads (or columns), int64; one that exists in place of one that is missing."""
    local: list[Tensor]
    weights: list[Tensor]

    def all(self) -> list[Tensor]:
        return [*self.local, *self.weights]


class MetpVariant:
    """A block computed group by group on local tokens."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        if reason := masks_inside(block):
            raise Unsplittable(reason)
        self.scope, self.piece = scope, piece
        self.groups = groups = analyse(scope, block)
        self.segments = segments = Segments(scope, groups)
        self.masks: list[Any] = []
        self.numbers: list[Any] = []
        if block.attention is not None:
            self.masks, self.numbers = attention_extras(block.attention.args[3:])
        read = [*segments.gathered, *segments.replicated, *groups.slices]
        self.local = [n for n in read if n not in self.masks]
        """Values on local tokens that the groups read."""
        region = [Weight(n, form) for n, form in groups.region_weights.items()]
        self.weights = [*up_weights(groups.ups), *region, *(d.weight for d in groups.downs)]
        """Weights of the groups, each in the form in which a group takes it."""
        self.used = [g for g, q in enumerate(groups.slots.q) if max(q) >= 0]
        self._heads: dict[int, Tensor] = {}
        self._make_stages(block)
        pre = segments.pre
        self.pre = _Local(self, "pre", pre, ()) if pre.nodes else None
        self.post = _Local(self, "post", segments.post, block.downs)
        around = [w.node for w in segments.weights]
        bias = [d.bias.node for d in groups.downs if d.bias is not None]
        self.nodes = list(dict.fromkeys([*(w.node for w in self.weights), *around, *bias]))
        forms = {w.node: w.form for w in self.weights if w.node not in {*around, *bias}}
        self.uses: Uses = [(n, forms.get(n)) for n in self.nodes]

    def _make_stages(self, block: Any) -> None:
        scope, groups, region = self.scope, self.groups, block.region
        leaves = [leaf.node for up in groups.ups for leaf in up.leaves]
        read = list(dict.fromkeys(d.x for d in groups.downs))
        self.before: _Stage | None = None
        attended = None
        nodes = groups.core
        if block.attention is not None:
            qkv = block.attention.args[:3]
            inside = closure(scope, qkv, region, leaves)
            self.before = _Stage(self, "before", part("before", inside, qkv), qkv)
            attended = next(u for u in block.attention.users if u.args[1] == 0)
            inside = closure(scope, read, region, [*leaves, attended])
            nodes = part("after", inside, read)
        self.after = _Stage(self, "after", nodes, read, attended, groups.downs)

    def __call__(self, values: StepContext) -> Any:
        env = self._weights(values)
        for node in self.segments.inputs:
            env[node] = values.get(node, SPLIT)
        for node in self.local:
            if node not in self.groups.block.pre and node not in env:
                env[node] = values.get(node, SPLIT)
        if self.pre is not None:
            self.pre(values, env)
        masks = tuple(values.get(m, WHOLE) if isinstance(m, fx.Node) else None for m in self.masks)
        call = _Call(values.sizes, values.common, masks)
        sources = [*self.local, *(w.node for w in self.weights)]
        tensors = [env[n] for n in sources]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            sums = _Stream.apply(self, call, *tensors)
        else:
            sums = self.forward_groups(call, tensors, [False] * len(tensors))[0]
        env.update(zip(self.groups.block.downs, sums, strict=True))
        self.post(values, env)
        return (env[self.groups.block.output],)

    def _weights(self, values: StepContext) -> dict[fx.Node, Tensor]:
        """Whole weights, and shards where each rank holds the rows of its group: they stream."""
        env: dict[fx.Node, Tensor] = {}
        for node, form in self.uses:
            x = values.raw(node)
            if isinstance(x, ShardedTensor) and fits(x, form):
                env[node] = x
        whole = [n for n in self.nodes if n not in env]
        env.update(zip(whole, values.weights(whole, [None] * len(whole)), strict=True))
        return env

    # ---- groups

    def stream(self, call: _Call, tensors: Sequence[Tensor]) -> WeightStream:
        """The sharded ones of ``tensors``' weights, group by group."""
        return WeightStream(tensors[len(self.local) :], self.used, int(call.common[3][1]))

    def group(
        self, index: int, tensors: Sequence[Tensor], needs: Sequence[bool], stream: WeightStream
    ) -> _Group:
        """The tensors of group ``index``, detached; those asked for require gradients."""
        n = len(self.local)
        local = []
        for node, t in zip(self.local, tensors[:n], strict=True):
            rows = self.groups.slices.get(node)
            local.append(t.detach() if rows is None else rows.take(t.detach(), index).contiguous())
        weights = self.group_weights(index, tensors[n:], stream)
        out = _Group(index, self.heads(index, tensors[0].device), local, weights)
        for t, need in zip(out.all(), needs, strict=True):
            if need:
                t.requires_grad_()
        return out

    def heads(self, index: int, device: torch.device) -> Tensor:
        """Query heads (or columns) of group ``index``, int64."""
        if index not in self._heads:
            ids = torch.tensor(self.groups.slots.q[index]).clamp(min=0)
            self._heads[index] = ids.to(device)
        return self._heads[index]

    def group_weights(
        self, index: int, given: Sequence[Tensor], stream: WeightStream
    ) -> list[Tensor]:
        """W_g of group ``index``, in the order of ``weights``, from whole weights or the stream."""
        streamed = stream.rows(index)
        out = []
        for i, (use, w) in enumerate(zip(self.weights, given, strict=True)):
            if i in streamed:
                assert use.form is not None
                out.append(padded_rows(streamed[i], use.form, index))
            else:
                w = w.detach()
                out.append((w if use.form is None else use.form.take(w, index)).contiguous())
        return out

    def _ring(self, call: _Call, index: int) -> list[Any]:
        """Arguments of the ring operator after q, k and v."""
        masks = [
            self.groups.slices[n].take(m, index).contiguous() if n in self.groups.slices else m
            for n, m in zip(self.masks, call.masks, strict=True)
        ]
        seed = call.common[-1] if self.numbers[-1] > 0 else None
        heads = self.heads(index, seed.device) if seed is not None else None
        return [call.common[3], *masks, seed, *self.numbers, self.scope.axis.name, heads]

    def forward_groups(
        self, call: _Call, tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Per down projection the sum over groups, before bias; and per group attention's output
        and log-sum-exp.

        Args:
            tensors: the local values, the whole weights. needs: which need gradients; the
                stages then run as they will in backward, so that nothing is compiled twice.
        """
        totals: list[Tensor] = []
        ys: list[Tensor] = []
        saved: list[Tensor] = []
        stream = self.stream(call, tensors)
        for index in self.used:
            group = self.group(index, tensors, needs, stream)
            attended = None
            if self.before is not None:
                with torch.set_grad_enabled(any(needs)):
                    qkv = [t.detach() for t in self.before(call, group)]
                with torch.no_grad():
                    out, lse = torch.ops.paradyse.attention_ring(*qkv, *self._ring(call, index))
                del qkv
                saved += [out, lse]
                attended = out.transpose(1, 2).detach().requires_grad_(any(needs))
            with torch.set_grad_enabled(any(needs)):
                ys = [y.detach() for y in self.after(call, group, attended)]
            exact = [y.to(_sum_dtype(y)) for y in ys]
            totals = [t.add_(y) for t, y in zip(totals, exact, strict=True)] if totals else exact
        return tuple(t.to(y.dtype) for t, y in zip(totals, ys, strict=True)), saved

    def backward_groups(
        self,
        call: _Call,
        tensors: Sequence[Tensor],
        saved: Sequence[Tensor],
        grads_of_sums: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of ``tensors``."""
        forms: list[Rows | None] = []
        forms += [self.groups.slices.get(n) for n in self.local]
        forms += [w.form for w in self.weights]
        totals: list[Tensor | None] = [None] * len(tensors)
        stream = self.stream(call, tensors)
        first = len(self.local)
        for place, index in enumerate(self.used):
            group = self.group(index, tensors, needs, stream)
            of_group: dict[int, Tensor] = {}
            leaves = [t for t in group.all() if t.requires_grad]
            where = [i for i, t in enumerate(group.all()) if t.requires_grad]
            attended = None
            if self.before is not None:
                out, lse = saved[2 * place : 2 * place + 2]
                attended = out.transpose(1, 2).detach().requires_grad_()
            inputs = leaves if attended is None else [*leaves, attended]
            with torch.enable_grad():
                ys = self.after(call, group, attended)
            given = [(y, g) for y, g in zip(ys, grads_of_sums, strict=True) if y.requires_grad]
            results, cotangents = zip(*given, strict=True)
            grads = list(torch.autograd.grad(results, inputs, cotangents, allow_unused=True))
            del ys, given, results
            stream.set_apart(where, grads, first, of_group)
            _add(totals, where, grads[: len(leaves)], forms, index, tensors)
            if self.before is None:
                stream.send_gradients(index, of_group, self.weights)
                continue
            with torch.enable_grad():
                qkv = self.before(call, group)
            d_qkv = torch.ops.paradyse.attention_ring_backward(
                grads[-1].transpose(1, 2),
                *(t.detach() for t in qkv),
                out,
                lse,
                *self._ring(call, index),
                False,
            )
            pairs = [(t, d) for t, d in zip(qkv, d_qkv[:3], strict=True) if t.requires_grad]
            if pairs:
                results, cotangents = zip(*pairs, strict=True)
                grads = list(torch.autograd.grad(results, leaves, cotangents, allow_unused=True))
                stream.set_apart(where, grads, first, of_group)
                _add(totals, where, grads, forms, index, tensors)
            stream.send_gradients(index, of_group, self.weights)
        for i, grad in stream.gradients().items():
            totals[first + i] = grad
        return [
            None if total is None else total.to(t.dtype)
            for total, t in zip(totals, tensors, strict=True)
        ]


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Sums over groups of 16-bit values are kept in 32 bits."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _add(
    totals: list[Tensor | None],
    where: Sequence[int],
    grads: Sequence[Tensor | None],
    forms: Sequence[Rows | None],
    group: int,
    like: Sequence[Tensor],
) -> None:
    """Add a group's gradients to those of the whole tensors."""
    for i, grad in zip(where, grads, strict=True):
        if grad is None:
            continue
        form, total = forms[i], totals[i]
        if form is not None:
            if total is None:
                total = totals[i] = torch.zeros_like(like[i], memory_format=torch.contiguous_format)
            form.add(total, group, grad)
        elif total is None:
            totals[i] = grad.to(_sum_dtype(grad), copy=True)
        else:
            total.add_(grad)


class _Stream(torch.autograd.Function):
    """The sum over groups, with what backward does written out."""

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
        needs = ctx.needs_input_grad[2:]
        return None, None, *variant.backward_groups(call, tensors, saved, grads, needs)


def _count(work: Work) -> None:
    """One piece for each group; in backward q, k, v (an MLP's columns) are computed again."""
    p, b = work.p, work.block
    work.num_ops += (p - 1) * PIECE_OPS * (1 + 2 * work.back)
    again = 1 + work.back * (2 + work.up_share)
    if not work.is_attention:
        work.project(work.tokens, b.num_weight_elements, 2 * b.hidden * p + work.columns, again)
        work.workspace_bytes += work.x_bytes + work.between_bytes / p * (1 + work.back)
        return
    num_kv = b.num_kv_heads
    work.project(work.tokens, work.padded_weights, 2 * b.hidden + work.columns, again)
    each_once = work.own_kv * p == num_kv
    kv_bytes = work.heads_bytes(2 * num_kv / p if each_once else 2 * work.own_kv)
    for _ in range(p):
        work.ring(kv_bytes, work.own_heads)
    # one group at a time
    work.workspace_bytes = (work.workspace_bytes + work.between_bytes) / p + work.out_bytes
    work.attend(work.own_heads, work.pairs)


METP = Strategy("metp", MetpVariant, _count, weights="streamed", refuses=masks_inside)
