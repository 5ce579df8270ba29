"""Fold attention: scores, softmax and their product with the values become one operator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.passes.mask_emit import Emitter
from paradyse.passes.mask_values import shape_of
from paradyse.passes.recover_masks import Recovery, label

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default)


def fold_attention(gm: fx.GraphModule, ctx: Any) -> int:
    """Replace attention that is written out by ``paradyse::attention``, the mask as a dense bias.

    before: s = mul(matmul(q, transpose(k, 2, 3)), scale)
            s = mul(tanh(div(s, cap)), cap)
            o = matmul(dropout(softmax(add(s, m), -1), p), v)
    after:  o = attention(q, k, v, bias=m, scale, softcap=cap, dropout_p=p)[0]
    Softcap, mask and dropout may be missing; casts in between are left out, as the operator sums in
    float32. Refuses (all stays): scores or probabilities that something else reads, numbers that
    are not constant, more or fewer queries than keys, other than 4 dims; with a note, a mask that
    is not understood. One that hides with a finite number is among them unless every query is sure
    to see a key: where it sees none all keys count alike, which no log-sum-exp can hold.
    """
    count = 0
    masks, reasons = Recovery(gm, {}), defaultdict[str, list[str]](list)
    for node in list(gm.graph.nodes):
        found = _match(node) if node.target is aten.matmul.default else None
        if found is None:
            continue
        if found.bias is not None and isinstance(why := masks.recover(found.bias), str):
            reasons[why].append(label(node))
            continue
        emit = Emitter(gm.graph, node)
        if found.bias is not None:
            found = replace(found, bias=emit.four_dims(found.bias))
        used = node.args[0]
        emit.replace_by(found)
        while used.target is not aten.softmax.int:  # dropout is random, so not taken for dead
            dead, used = used, used.args[0]
            gm.graph.erase_node(dead)
        count += 1
    for why, places in reasons.items():
        ctx.note(f"{', '.join(places)}: attention stays written out, its mask {why}")
    gm.graph.eliminate_dead_code()
    return count


def _match(product: fx.Node) -> AttentionCall | None:
    cast, v = product.args
    p = dropped = _below_casts(cast)
    if dropped.target is aten.dropout.default and _alone(dropped):
        p = _below_casts(dropped.args[0])
    if p.target is not aten.softmax.int or not _alone(p) or p.args[1] not in (-1, 3):
        return None
    found = _match_sum(_below_casts(p.args[0]))
    if found is None:
        return None
    found = replace(found, v=v)
    if p is not dropped:
        _, rate, training = dropped.args
        if not isinstance(rate, int | float) or not isinstance(training, bool):
            return None
        found = replace(found, dropout_p=float(rate) if training else 0.0)
    return found if _fits(found) else None


def _match_sum(node: fx.Node) -> AttentionCall | None:
    """Scores, and a mask added to them."""
    if node.target is not aten.add.Tensor or not _alone(node) or node.kwargs:
        return _match_scores(node)
    for scores, mask in (node.args, node.args[::-1]):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node):
            found = _match_scores(_below_casts(scores))
            if found is not None:
                return replace(found, bias=mask)
    return None


def _match_scores(node: fx.Node) -> AttentionCall | None:
    """The product of queries and keys, times a number, and capped."""
    if not _alone(node):
        return None
    if node.target is aten.matmul.default:
        q, k = node.args
        if k.target is not aten.transpose.int or {d % 4 for d in k.args[1:]} != {2, 3}:
            return None
        return AttentionCall(q, k.args[0], k)
    x, factor = _times_number(node)
    if x is None:
        return None
    x = _below_casts(x)
    if x.target is aten.tanh.default and _alone(x):
        inside, inverse = _times_number(x.args[0])
        found = _match_scores(_below_casts(inside)) if inside is not None else None
        if found is None or found.softcap or not factor > 0 or abs(factor * inverse - 1) > 1e-6:
            return None
        return replace(found, softcap=factor)
    found = _match_scores(x)
    if found is None or found.softcap:  # times a number after the cap: no operator of ours
        return None
    return replace(found, scale=found.scale * factor)


def _times_number(node: fx.Node) -> tuple[fx.Node | None, float]:
    """x and c where ``node`` is c x, of which nothing else reads; None where it is not."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or not _alone(node) or node.kwargs:
        return None, 1.0
    x, c = node.args
    if not isinstance(x, fx.Node) or not isinstance(c, int | float) or c == 0:
        return None, 1.0
    return x, float(c) if node.target is aten.mul.Tensor else 1 / float(c)


def _below_casts(x: Any) -> Any:
    """Without casts between floating-point types of which nothing else reads."""
    while isinstance(x, fx.Node) and x.target in _CASTS and _alone(x):
        if not x.args[0].meta["val"].dtype.is_floating_point:
            break
        x = x.args[0]
    return x


def _alone(x: fx.Node) -> bool:
    return len(x.users) == 1


def _fits(found: AttentionCall) -> bool:
    """Whether the operator computes it: the batch, heads and tokens of all parts go together."""
    q, k, v = (shape_of(x) for x in found.qkv)
    dtypes = {x.meta["val"].dtype for x in found.qkv}
    if not len(q) == len(k) == len(v) == 4 or len(dtypes) > 1:
        return False
    if q != k or k[:3] != v[:3]:
        return False
    if found.bias is None:
        return True
    mask, scores = shape_of(found.bias), (*q[:3], k[2])
    fits = all(n in (1, scores[i - len(mask)]) for i, n in enumerate(mask))
    return len(mask) <= 4 and fits and found.bias.meta["val"].dtype.is_floating_point
