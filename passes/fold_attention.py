"""Fold attention: scores, softmax and their product with the values become one operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.rules import argument
from paradyse.passes.mask_emit import Emitter
from paradyse.passes.mask_values import shape_of
from paradyse.passes.recover_masks import HIDDEN, Recovery, label
from paradyse.passes.score_terms import (
    CASTS,
    Scores,
    Term,
    alone,
    below_casts,
    below_moves,
    match_scores,
)

aten = torch.ops.aten
_PRODUCTS = (aten.matmul.default, aten.bmm.default)


def fold_attention(gm: fx.GraphModule, ctx: Any) -> int:
    """Replace attention that is written out by ``paradyse::attention``, the mask as a dense bias.

    before: s = mul(matmul(q, transpose(k, 2, 3)), scale)
            s = mul(tanh(div(s, cap)), cap)
            s = masked_fill(add(s, m), hidden, -inf)
            o = matmul(dropout(softmax(s, -1), p), v)
    after:  n = add(m, where(hidden, -inf, 0))
            o = attention(q, k, v, bias=n, scale, softcap=cap, dropout_p=p)[0]
    All but products and softmax may be missing, and ``score_terms`` says what else may be there;
    batch and heads may be one dim; einsums are spelled as products first. Casts in between are left
    out, as the operator sums in float32. A factor that is no constant, but one number for a row of
    scores at most, multiplies q. Refuses (all stays): scores or probabilities that something else
    reads, other numbers that are not constant, more or fewer queries than keys; with a note, a mask
    that is not understood. One that hides with a finite number is among them unless
    every query is sure to see a key, or a sink: where it sees none all keys count alike, which no
    log-sum-exp can hold.
    """
    spell_out_einsums(gm)
    _name_dtypes(gm)
    count = 0
    masks, reasons = Recovery(gm, {}), defaultdict[str, list[str]](list)
    for node in list(gm.graph.nodes):
        found = _match(node) if node.target in _PRODUCTS else None
        if found is None:
            continue
        scores, dropout_p, dead = found
        emit = Emitter(gm.graph, node)
        call = _call(node, scores, dropout_p, emit)
        if call is None:
            continue
        if call.bias is not None:
            why = masks.refusal(call.bias, call.sinks is not None)
            if why:
                reasons[why].append(label(node))
                continue
        merged = len(shape_of(node)) == 3
        out = emit.replace_by(call)
        if merged:
            with gm.graph.inserting_after(out):
                flat = gm.graph.call_function(aten.reshape.default, (out, list(shape_of(node))))
            flat.meta = {**out.meta, "val": node.meta["val"]}
            out.replace_all_uses_with(flat, delete_user_cb=lambda u, flat=flat: u is not flat)
        for random in dead:  # dropout is random, so not taken for dead
            if not random.users:
                gm.graph.erase_node(random)
        count += 1
    for why, places in reasons.items():
        ctx.note(f"{', '.join(places)}: attention stays written out, its mask {why}")
    gm.graph.eliminate_dead_code()
    return count


def _name_dtypes(gm: fx.GraphModule) -> None:
    """Casts to another tensor's dtype name it instead, so that they do not read that tensor."""
    for target in (aten.type_as.default, aten.to.other):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            x, val = node.args[0], node.meta["val"]
            if len(node.args) > 2 or node.kwargs or x.meta["val"].device != val.device:
                continue
            node.target, node.args = aten.to.dtype, (x, val.dtype)
            if x.meta["val"].dtype == val.dtype:
                node.replace_all_uses_with(x)
                gm.graph.erase_node(node)


def _match(product: fx.Node) -> tuple[Scores, float, list[fx.Node]] | None:
    """What the softmax reads, dropout of probabilities, and what lies between product and softmax,
    the last one first.
    """
    p, rate, between, cut = product.args[0], 0.0, list[fx.Node](), False
    while isinstance(p, fx.Node) and p.target is not aten.softmax.int:
        inner = below_moves(p)
        at = p
        while at is not inner:
            between.append(at)
            at = at.args[0]
        p = inner
        if not isinstance(p, fx.Node) or not alone(p):
            return None
        if p.target is aten.dropout.default and not rate:
            x, rate, training = p.args
            if not isinstance(rate, int | float) or not isinstance(training, bool):
                return None
            rate = float(rate) if training else 0.0
        elif p.target is aten.slice.Tensor and not cut and _drops_last(p):
            cut = True
        elif p.target is not aten.softmax.int:
            return None
        if p.target is not aten.softmax.int:
            between.append(p)
            p = p.args[0]
    if not isinstance(p, fx.Node) or not alone(p):
        return None
    if p.args[1] not in (-1, len(shape_of(p)) - 1):
        return None
    scores = match_scores(p.args[0])
    if scores is None or (scores.sinks is not None) != cut:
        return None
    return scores, rate, between


def _drops_last(node: fx.Node) -> bool:
    last = len(shape_of(node)) - 1
    whole = argument(node, "dim") in (-1, last) and not argument(node, "start")
    return whole and shape_of(node)[-1] == shape_of(node.args[0])[-1] - 1


def _call(
    product: fx.Node, scores: Scores, dropout_p: float, emit: Emitter
) -> AttentionCall | None:
    """The operator's arguments, the mask as one dense bias; None where it does not compute this."""
    keys = below_casts(scores.keys)
    if not isinstance(keys, fx.Node) or not (
        _swaps_last(keys) or keys.target is aten.permute.default
    ):
        return None
    given = scores.q, keys, product.args[1]
    ranks = {len(shape_of(x)) for x in given}
    if ranks not in ({3}, {4}):
        return None
    heads = _batch_and_heads(given)
    if heads is None:
        return None
    if any(t.fill is not None and t.fill > HIDDEN for t in scores.terms):
        return None
    if not scores.scale > 0:  # kernels take the largest product of a row for its largest score
        return None
    q, k, v = (_four_dims(x, heads, emit) for x in given)
    k = _swapped(k, emit)
    if len({x.meta["val"].dtype for x in (q, k, v)}) > 1:
        q, k, v = (_below_widening(x) for x in (q, k, v))
    dtypes = {x.meta["val"].dtype for x in (q, k, v)}
    sizes = [shape_of(x) for x in (q, k, v)]
    if len(dtypes) > 1 or sizes[0] != sizes[1] or sizes[1][:3] != sizes[2][:3]:
        return None
    bias = _mask(scores.terms, sizes[0], heads, emit)
    if bias is NotImplemented:
        return None
    # What was cast to a wider type on the way has that in the end.
    q, k, v = (emit.cast(x, product.meta["val"].dtype) for x in (q, k, v))
    q = _multiplied(q, scores.factors, emit)
    found = AttentionCall(q, k, v, bias=bias, dropout_p=dropout_p, sinks=scores.sinks)
    return replace(found, scale=scores.scale, softcap=scores.softcap)


def _multiplied(q: fx.Node, factors: Sequence[tuple[Any, fx.Node]], emit: Emitter) -> fx.Node:
    """``q`` times what the scores of each query are times."""
    dtype = q.meta["val"].dtype
    for target, factor in factors:
        q = emit.call(target, (q, factor))
    return emit.cast(q, dtype)


def _below_widening(x: fx.Node) -> fx.Node:
    """``x`` before it was cast to a wider type."""
    while (
        x.target in CASTS and x.args[0].meta["val"].dtype.itemsize <= x.meta["val"].dtype.itemsize
    ):
        x = x.args[0]
    return x


def _swaps_last(x: fx.Node) -> bool:
    """Whether ``x`` is another value with its last two dims swapped, and nothing else."""
    n = len(shape_of(x))
    if x.target is aten.permute.default:
        return [d % n for d in x.args[1]] == [*range(n - 2), n - 1, n - 2]
    if x.target is aten.transpose.int:
        return {d % n for d in x.args[1:]} == {n - 2, n - 1}
    return x.target is aten.mT.default


def _batch_and_heads(given: Sequence[fx.Node]) -> tuple[int, int] | None:
    """B and H of q, k transposed, and v, which may have them in one dim."""
    if len(shape_of(given[0])) == 4:
        b, h, *_ = shape_of(given[0])
        return b, h
    for x in given:
        source = _taken_together(x.args[0] if _swaps_last(x) else x)
        if source is not None:
            b, h, *_ = shape_of(source)
            return b, h
    return None


def _taken_together(x: Any) -> fx.Node | None:
    """[B, H, ..] where ``x`` is it as [B H, ..]."""
    x = below_casts(x)
    if x.target is not aten.reshape.default:
        return None
    source: fx.Node = x.args[0]
    shape, here = shape_of(source), shape_of(x)
    whole = len(shape) == 4 and len(here) == 3 and shape[2:] == here[1:]
    return source if whole and shape[0] * shape[1] == here[0] else None


def _four_dims(x: fx.Node, heads: tuple[int, int], emit: Emitter) -> fx.Node:
    if len(shape_of(x)) == 4:
        return x
    if _swaps_last(x):
        return emit.call(aten.transpose.int, (_four_dims(x.args[0], heads, emit), 2, 3))
    source = _taken_together(x)
    if source is not None and shape_of(source)[:2] == heads:
        return source
    return emit.call(aten.reshape.default, (x, [*heads, *shape_of(x)[1:]]))


def _swapped(x: fx.Node, emit: Emitter) -> fx.Node:
    """``x`` with its last two dims swapped."""
    if x.target is aten.permute.default:
        dims = list(x.args[1])
        order = [*dims[:-2], dims[-1], dims[-2]]
        same = [d % len(dims) for d in order] == list(range(len(dims)))
        return x.args[0] if same else emit.call(aten.permute.default, (x.args[0], order))
    return x.args[0] if _swaps_last(x) else emit.call(aten.transpose.int, (x, 2, 3))


def _mask(terms: Sequence[Term], q: tuple[int, ...], heads: tuple[int, int], emit: Emitter) -> Any:
    """One float mask [B|1, H|1, S|1, S|1] of ``terms``; None for none, NotImplemented where they do
    not fit queries of the shape ``q``.
    """
    dtype, parts = emit.place.meta["val"].dtype, []
    for term in terms:
        node, shape = term.node, shape_of(term.node)
        if len(shape) == 3 and shape[0] == heads[0] * heads[1] and shape[0] != 1:
            source = _taken_together(node)
            node = (
                source
                if source is not None
                else emit.call(aten.reshape.default, (node, [*heads, *shape[1:]]))
            )
            shape = shape_of(node)
        full = (*q[:3], q[2])
        fits = all(n in (1, full[i - len(shape)]) for i, n in enumerate(shape))
        if len(shape) > 4 or not fits:
            return NotImplemented
        node = emit.four_dims(node)
        kind = node.meta["val"].dtype
        if term.fill is not None:
            if kind != torch.bool:
                return NotImplemented
            fill, none = (emit.number(x, dtype) for x in (term.fill, 0.0))
            either = (fill, none) if term.where else (none, fill)
            node = emit.call(aten.where.self, (node, *either))
        elif not kind.is_floating_point:
            return NotImplemented
        elif term.factor != 1:
            node = emit.call(aten.mul.Tensor, (node, term.factor))
        parts.append(node)
    return reduce(lambda a, b: emit.call(aten.add.Tensor, (a, b)), parts) if parts else None


def spell_out_einsums(gm: fx.GraphModule) -> None:
    """Replace einsums of two tensors with one summed letter by permute, matmul, permute.

    before: s = einsum("bihd,bjhd->bhij", [q, k])
    after:  s = matmul(permute(q, [0, 2, 1, 3]), permute(k, [0, 2, 3, 1]))
    Refuses ellipses, letters that occur twice in one operand, and any other number of letters.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.einsum.default):
        equation, operands = node.args[:2]
        found = _as_product(equation.replace(" ", ""))
        if found is None or len(operands) != 2:
            continue
        emit = Emitter(gm.graph, node)
        a, b = (_permuted(x, order, emit) for x, order in zip(operands, found[:2], strict=True))
        out = _permuted(emit.call(aten.matmul.default, (a, b)), found[2], emit)
        kept = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
        for new in {a, b, out, *out.all_input_nodes} - set(operands):
            new.meta.update(kept)
        node.replace_all_uses_with(out)
        gm.graph.erase_node(node)


def _permuted(x: fx.Node, order: list[int], emit: Emitter) -> fx.Node:
    same = order == list(range(len(order)))
    return x if same else emit.call(aten.permute.default, (x, order))


def _as_product(equation: str) -> tuple[list[int], list[int], list[int]] | None:
    """The orders in which a product takes its operands and gives its result."""
    left, _, out = equation.partition("->")
    a, _, b = left.partition(",")
    if "." in equation or not out or any(len(set(x)) < len(x) for x in (a, b, out)):
        return None
    both = [x for x in a if x in b]
    batch, summed = [x for x in both if x in out], [x for x in both if x not in out]
    rows, columns = ([x for x in y if x not in both] for y in (a, b))
    if len(batch) not in (1, 2) or {len(x) for x in (summed, rows, columns)} != {1}:
        return None
    if set(out) != {*batch, *rows, *columns}:
        return None
    given = [*batch, *rows, *columns]
    first, second = [*batch, *rows, *summed], [*batch, *summed, *columns]
    return [a.index(x) for x in first], [b.index(x) for x in second], [given.index(x) for x in out]
