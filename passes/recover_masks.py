"""Recover masks: attention under a dense mask becomes attention that knows what it means."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.rules import argument
from paradyse.graph.subgraph import is_tensor, live_nodes
from paradyse.passes.distance_bias import by_distance, is_ordinary
from paradyse.passes.mask_domain import (
    TRUE,
    Bool,
    Eq0,
    Expr,
    Lin,
    Load,
    Not,
    as_bool,
    conj,
    negate,
    substitute,
    var,
)
from paradyse.passes.mask_emit import Emitter
from paradyse.passes.mask_spec import HIDDEN, Recovered, Unrecoverable, classify, visible
from paradyse.passes.mask_values import MaskValues, shape_of
from paradyse.types import MaskSpec

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default
_CHOICES = (aten.where.self, aten.where.ScalarOther)
_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)
_MERGES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def recover_masks(gm: fx.GraphModule, ctx: Any) -> int:
    """Replace SDPA, and what ``fold_attention`` made, by a ``paradyse::attention`` that knows its
    mask by position, not by element.

    before: m = and(le(arange[kv], arange[q]), index(attention_mask, [b, kv]))
            o = sdpa(q, repeat_kv(k), repeat_kv(v), m)
    after:  p = ne(attention_mask, 0)
            o = attention(q, k, v, key_padding=p, right=0)[0]
    A mask may be the sum of one that is understood and of biases, such as slopes times distances:
    then these alone are the bias, by distance where they depend on that alone (``distance_bias``).
    Refuses, with a note: more or fewer queries than keys, unless each query sees the same keys of
    another sequence and there are several of both; other than 4 dims; a learned mask that is not
    understood (all stays); another goes along whole, as a dense bias.
    """
    nodes = [n for n in gm.graph.nodes if _is_dense(n)]
    if not nodes:
        return 0
    reasons: dict[str, list[str]] = defaultdict(list)
    recovery = Recovery(gm, reasons)
    count = sum(recovery.rewrite(n) for n in nodes)
    for reason, places in reasons.items():
        ctx.note(f"{', '.join(places)}: {reason}")
    gm.graph.eliminate_dead_code()
    return count


def _is_dense(node: fx.Node) -> bool:
    """Whether an attention knows its mask by element, or as causal, only."""
    if node.target is not ATTENTION:
        return node.target is _SDPA
    spec = replace(AttentionCall.of(node), bias=None).mask_spec
    return spec == MaskSpec()


def _call_of(node: fx.Node) -> AttentionCall:
    """SDPA, or what ``fold_attention`` made, as a call whose bias is the dense mask."""
    if node.target is ATTENTION:
        return AttentionCall.of(node)
    q, k, v = node.args[:3]
    scale = argument(node, "scale")
    return AttentionCall(
        q,
        k,
        v,
        bias=argument(node, "attn_mask"),
        right=0 if argument(node, "is_causal") else -1,
        scale=1 / math.sqrt(shape_of(q)[-1]) if scale is None else float(scale),
        dropout_p=float(argument(node, "dropout_p")),
    )


@dataclass(frozen=True)
class Understood:
    """A mask as conditions on pairs, and what is added to those that meet them."""

    spec: Recovered
    biases: tuple[fx.Node, ...] = ()
    """Each broadcasts to [B, H, S, S]."""


@dataclass(frozen=True)
class _Addends:
    """A mask before its conditions are understood."""

    seen: Bool
    """Over (batch, head, query, key)."""
    infinite: bool
    """What hides is minus infinity."""
    biases: tuple[fx.Node, ...] = ()


class Recovery:
    """State over the attentions of one graph: they share masks, so each is understood once."""

    def __init__(self, gm: fx.GraphModule, reasons: dict[str, list[str]]) -> None:
        self.graph, self.reasons = gm.graph, reasons
        self.values = MaskValues()
        self.found: dict[tuple[fx.Node, bool], Understood | str] = {}
        self.emitted: dict[tuple[tuple[Any, ...], tuple[int, int]], fx.Node] = {}
        self.biases: dict[tuple[fx.Node, ...], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> bool:
        call = _call_of(node)
        folded = node.target is ATTENTION
        if folded:  # the result of interest is the first of two
            (node,) = node.users
        q, mask = call.q, call.bias
        if refusal := self._refusal(call):
            left = "dense mask kept" if folded else "left to PyTorch"
            self.reasons[f"{left}, {refusal}"].append(label(node))
            return False
        k, v = _without_repeat(call.k), _without_repeat(call.v)
        if shape_of(k)[1] != shape_of(v)[1]:
            k, v = call.k, call.v
        emit = Emitter(self.graph, node, (shape_of(q)[0], shape_of(k)[2]))
        spec = Recovered(right=call.right)
        padding = documents = bias = None
        if mask is not None:
            found = self._found(call)
            if isinstance(found, str):
                self.reasons[f"dense mask kept, it {found}"].append(label(node))
                bias = self._bias((mask,), emit, call.is_cross)
            else:
                spec = found.spec if call.right < 0 else replace(found.spec, right=call.right)
                if spec.padding != TRUE:
                    padding = self._emit((spec.padding,), emit)
                if spec.documents:
                    documents = self._emit(spec.documents, emit)
                if found.biases:
                    bias = self._bias(found.biases, emit, call.is_cross)
                    if 1 not in shape_of(bias)[2:] and len(shape_of(bias)) == 4:
                        why = "a bias with a number for each pair is kept"
                        self.reasons[why].append(label(node))
        out = node.meta["val"].dtype
        # Under autocast SDPA itself casts its inputs; other operators do not.
        q, k, v = (emit.cast(x, out) for x in (q, k, v))
        if bias is not None and bias.meta["val"].dtype.is_floating_point:
            bias = emit.cast(bias, out)
        masks: dict[str, Any] = {"key_padding": padding, "document_ids": documents, "bias": bias}
        masks |= {"left": spec.left, "right": spec.right, "chunk": spec.chunk}
        emit.replace_by(replace(call, q=q, k=k, v=v, **masks))
        return True

    def _bias(self, parts: tuple[fx.Node, ...], emit: Emitter, across: bool) -> fx.Node:
        """The sum of ``parts``: by distance if all of it is, else for every pair, as all pairs
        ``across`` two sequences."""
        if parts not in self.biases:
            found = None if across else by_distance(parts, emit, self.values)
            if found is None:
                parts_4d = [emit.four_dims(x) for x in parts]
                found = reduce(lambda a, b: emit.call(aten.add.Tensor, (a, b)), parts_4d)
            self.biases[parts] = found
        return self.biases[parts]

    def _refusal(self, call: AttentionCall) -> str | None:
        q, k, v = (shape_of(x) for x in call.qkv)
        if not len(q) == len(k) == len(v) == 4:
            return f"queries have {len(q)} dims and keys {len(k)}, not 4"
        if call.is_cross and (min(q[2], k[2]) == 1 or not self._is_of_keys(call)):
            return f"{q[2]} queries see {k[2]} keys"
        if not q[0] == k[0] == v[0]:
            return "batches differ"
        if k[1] != v[1] or q[1] % k[1]:
            return "heads of queries, keys and values differ"
        if call.bias is not None and _is_learned(call.bias):
            if isinstance(self._found(call), str):
                return f"the mask `{call.bias.name}` is learned"
        return None

    def _found(self, call: AttentionCall) -> Understood | str:
        """What the bias of ``call`` means, or why that is not known: words to follow its name."""
        return self.recover(call.bias, call.sinks is not None)

    def _is_of_keys(self, call: AttentionCall) -> bool:
        """Whether the mask of ``call`` is understood, and the same for each query."""
        if call.right >= 0 or call.bias is None:
            return call.right < 0
        found = self._found(call)
        if isinstance(found, str) or replace(found.spec, padding=TRUE) != Recovered():
            return False
        return all(len(s := shape_of(x)) < 2 or s[-2] == 1 for x in found.biases)

    def refusal(self, mask: fx.Node, has_sinks: bool) -> str:
        """Why attention under ``mask`` is not computed by the operator, in words to follow its
        name; "" where it is. A mask that hides with minus infinity may be any.

        Args:
            has_sinks: every query sees a sink.
        """
        found = self.recover(mask, has_sinks)
        if not isinstance(found, str):
            return ""
        try:
            return "" if self._split(mask).infinite else found
        except Unrecoverable:
            return found

    def recover(self, mask: fx.Node, has_sinks: bool) -> Understood | str:
        """What ``mask`` means, or why that is not known: words to follow its name.

        Args:
            has_sinks: every query sees a sink, so that finite numbers hide as well as infinite.
        """
        key = mask, has_sinks
        if key not in self.found:
            try:
                self.found[key] = self._understand(mask, has_sinks)
            except Unrecoverable as reason:
                self.found[key] = str(reason)
        return self.found[key]

    def _understand(self, mask: fx.Node, has_sinks: bool) -> Understood:
        found = self._split(mask)
        spec = classify(found.seen, self.values)
        if not found.infinite and not has_sinks and not spec.sees_itself:
            source = _given_padding(spec)
            if source is None or not (_is_learned(mask) or len({*shape_of(mask)[-2:], 1}) == 3):
                raise Unrecoverable("hides with a finite number, and a query might see no key")
            source.meta["shows_keys"] = True
        return Understood(spec, found.biases)

    def _split(self, mask: fx.Node) -> _Addends:
        """``mask`` as what is seen, and what else is added.

        Raises:
            Unrecoverable: it holds numbers of which nothing is known.
        """
        for n in live_nodes(self.graph.nodes, [mask]):  # in order: no formula needs deep recursion
            if is_tensor(n):
                self.values.value(n)
        return self._addends(mask)

    def _addends(self, mask: fx.Node) -> _Addends:
        seen = visible(self._formula(mask), mask.meta["val"].dtype)
        if seen is not None:
            return _Addends(seen[0], not seen[1])
        args = mask.args
        if mask.target is aten.add.Tensor and not mask.kwargs:
            if all(isinstance(x, fx.Node) for x in args):
                a, b = (self._addends(x) for x in args)
                biases = (*a.biases, *b.biases)
                return _Addends(conj(a.seen, b.seen), a.infinite and b.infinite, biases)
        if mask.target is aten.masked_fill.Scalar and isinstance(args[2], int | float):
            if args[2] <= HIDDEN:
                inner, hidden = self._addends(args[0]), as_bool(self._formula(args[1]))
                infinite = inner.infinite and args[2] == float("-inf")
                return replace(inner, seen=conj(inner.seen, negate(hidden)), infinite=infinite)
        if mask.target in _CHOICES:
            condition, inner, fill = mask.args
            if isinstance(inner, fx.Node) and (number := _number(fill)) is not None:
                if number <= HIDDEN:
                    rest, shown = self._addends(inner), as_bool(self._formula(condition))
                    infinite = rest.infinite and number == float("-inf")
                    return replace(rest, seen=conj(rest.seen, shown), infinite=infinite)
        if mask.target is aten.unsqueeze.default and not is_ordinary(mask):
            if args[1] % len(shape_of(mask)):  # below it dims are others, counted from the last
                raise Unrecoverable("has a dim put between its own, behind numbers of a bias")
            return self._addends(args[0])
        if not is_ordinary(mask):
            raise Unrecoverable("holds numbers that are not known to be 0 or minus infinity")
        return _Addends(TRUE, True, (mask,))

    def _formula(self, node: fx.Node) -> Expr:
        """At (batch, head, query, key)."""
        rank = len(shape_of(node))
        at = {d: var(d + 4 - rank) for d in range(rank)}
        return substitute(self.values.value(node), at)

    def _emit(self, parts: tuple[Any, ...], emit: Emitter) -> fx.Node:
        """The bool key padding, or the document ids made of one or more numbers; [B, S]."""
        key = parts, emit.sizes  # a formula of the keys' places alone does for any number of keys
        if key not in self.emitted:
            documents = isinstance(parts[0], Lin)
            self.emitted[key] = emit.documents(parts) if documents else emit.table(parts[0])
        return self.emitted[key]


def _without_repeat(x: fx.Node) -> fx.Node:
    """Keys or values [B, Hk, S, D] before heads were repeated for their query heads, else ``x``.

    Only repeats that put query head h on KV head h // group: [B, Hk, group, S, D] read as
    [B, H, S, D]. A cast after the repeat is left out, the caller casts anyway.
    """
    merged = _below_copies(x)
    b, h, s, d = shape_of(x)
    if merged.target is aten.repeat_interleave.self_int:
        return merged.args[0] if argument(merged, "dim") in (1, -3) else x
    if merged.target is aten.expand.default:  # one KV head for all
        source = merged.args[0]
        return source if shape_of(source) == (b, 1, s, d) else x
    if merged.target not in _MERGES:
        return x
    grouped = _below_copies(merged.args[0])
    if grouped.target is not aten.expand.default or len(shape_of(grouped)) != 5:
        return x
    one = grouped.args[0]
    if one.target is not aten.unsqueeze.default or one.args[1] not in (2, -3):
        return x
    source = one.args[0]
    kv_heads = shape_of(source)[1]
    whole = shape_of(source) == (b, kv_heads, s, d)
    return source if whole and shape_of(grouped) == (b, kv_heads, h // kv_heads, s, d) else x


def _number(x: Any) -> float | None:
    """The number that ``x`` is, in a graph or as it stands; None where it is none."""
    if isinstance(x, fx.Node):
        made = x.target in (aten.full.default, aten.scalar_tensor.default) and not shape_of(x)
        x = x.args[-1 if x.target is aten.full.default else 0] if made else None
    return float(x) if isinstance(x, int | float) else None


def _below_copies(x: fx.Node) -> fx.Node:
    def real(n: fx.Node) -> bool:
        return bool(n.meta["val"].dtype.is_floating_point)

    while x.target in _COPIES or (x.target is aten.to.dtype and real(x) and real(x.args[0])):
        x = x.args[0]
    return x


def _given_padding(spec: Recovered) -> fx.Node | None:
    """The input [B, S] of the graph that says by itself which keys every query of ``spec`` sees;
    None where there is no such one. It can be looked at before each call (``shown_keys``)."""
    load: Any = spec.padding
    if isinstance(load, Not) and isinstance(load.value, Eq0):
        load = load.value.value.single()
    plain = isinstance(load, Load) and load.index == (var(0), var(1))
    alone = plain and replace(spec, padding=TRUE) == Recovered()
    return load.node if alone and load.node.op == "placeholder" else None


def _is_learned(mask: fx.Node) -> bool:
    # Fake values in a graph are detached; what tracing noted beside them still knows.
    return any(getattr(mask.meta.get(m), "requires_grad", False) for m in ("tensor_meta", "val"))


def label(node: fx.Node) -> str:
    """Where in the model it is, for people."""
    return str(node.meta.get("module") or node.name)
