"""Simplify: fewer spellings of the same thing, so that later passes need fewer rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paradyse.graph.rules import argument
from paradyse.graph.subgraph import draws
from paradyse.passes.retrace import Untraceable
from paradyse.torch_private import OpOverload, schema_of

aten = torch.ops.aten

_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default}
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view_copy.default,
}
_READ_MEMORY = {aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype}
"""Views that only some layouts in memory have, or that show other elements of each."""
_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.transpose.int}


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _same(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """What ``node`` is equal to, where it changes nothing."""
    out, source = _val(node), node.args[0] if node.args else None
    if node.target == aten.cat.default:  # a new cache is an empty 1-D tensor, which cat ignores
        keep = [a for a in node.args[0] if _val(a).numel() or _val(a).ndim != 1]
        whole = len(keep) == 1 < len(node.args[0]) and _same(_val(keep[0]), out)
        return keep[0] if whole else None
    if not isinstance(_val(source), torch.Tensor) or not isinstance(out, torch.Tensor):
        return None
    same = node.target is aten.alias.default
    if node.target in (aten.contiguous.default, aten.clone.default):
        same = not _is_read_as_it_lies(node)
    if node.target in _CASTS | {aten.reshape.default, aten.expand.default}:
        same = _same(_val(source), out)
    if node.target == aten.dropout.default:
        same = node.args[1] == 0 or not node.args[2]
    return source if same else None


def _may_alias(op: Any) -> bool:
    """Whether what ``op`` gives may share memory with what it is given."""
    schema = schema_of(op) if isinstance(op, OpOverload) else None
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _is_read_as_it_lies(node: fx.Node) -> bool:
    """Whether what ``node`` gives is read by an operator that counts on how it lies in memory."""
    return any(
        user.target in _READ_MEMORY or (_may_alias(user.target) and _is_read_as_it_lies(user))
        for user in node.users
    )


def _lay_out(node: fx.Node) -> None:
    """Have ``as_strided`` read a value that lies as in the trace, wherever it comes from.

    Raises:
        Untraceable: it reads what is not laid out without gaps, or memory beyond that.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    x, out = _val(source), _val(node)
    start = out.storage_offset() - x.storage_offset()
    end = start + sum((n - 1) * stride for n, stride in zip(out.shape, out.stride()))
    if not x.is_contiguous() or start < 0 or end >= x.numel():
        raise Untraceable(
            f"{node.target} reads {source}, of shape {list(x.shape)}, as it lies in memory, and "
            "that has gaps or ends before: call contiguous() before it"
        )
    with node.graph.inserting_before(node):
        laid_out = node.graph.call_function(aten.contiguous.default, (source,))
    laid_out.meta = dict(source.meta)
    node.args = (laid_out, list(out.shape), list(out.stride()), start)
    node.kwargs = {}


def _is_copy_for_caller(node: fx.Node) -> bool:
    """Whether ``node`` copies, and the graph returns it or a view of it: whoever called may write
    to it."""
    copies = node.target in {aten.clone.default, aten._to_copy.default}
    if not copies and not (node.target in _CASTS and argument(node, "copy")):
        return False
    left, seen = [node], {node}
    while left:
        for user in left.pop().users:
            if user.op == "output":
                return True
            if user not in seen and _may_alias(user.target):
                seen.add(user)
                left.append(user)
    return False


def drop_no_ops(gm: fx.GraphModule, ctx: Any) -> int:
    """Remove operators that change nothing; spell every view as reshape, name squeezed dims, and
    forget the length that rows repeated a number of times have: it follows.

    before: a = to(x, float32); b = contiguous(a); c = view(b, [2, -1]); d = cat([empty, c])
    after:  c = reshape(x, [2, -1])
    Refuses casts, copies and dropouts that do something, as copies do for operators that read
    memory as it lies. These are given values that lie as in the trace, or else cannot be carried
    (Untraceable).
    """
    count = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.as_strided.default:
            _lay_out(node)
        if node.target in _VIEWS:
            node.target = aten.reshape.default
        if node.target == aten.squeeze.default:  # of a part with one row it would take more
            ones = [d for d, n in enumerate(_val(node.args[0]).shape) if n == 1]
            node.target, node.args = aten.squeeze.dims, (node.args[0], ones)
        if node.target == aten.repeat_interleave.self_int:
            node.kwargs = {k: x for k, x in node.kwargs.items() if k != "output_size"}
        if (source := _unchanged(node)) is not None and not _is_copy_for_caller(node):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            count += 1
    return count


def merge_equals(gm: fx.GraphModule, ctx: Any) -> int:
    """Compute once what is written twice.

    before: a = unsqueeze(cos, 1); ..; b = unsqueeze(cos, 1)
    after:  a = unsqueeze(cos, 1); ..
    Refuses random operators, and what the graph gives twice: the caller may write into one.
    """
    count = 0
    seen: dict[Any, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or draws(node):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # 1, 1.0 and True stay apart
        if key not in seen:
            seen[key] = node
        elif not (_is_given(node) and _is_given(seen[key])):
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
            count += 1
    return count


def _is_given(node: fx.Node) -> bool:
    """Whether the caller is given what ``node`` computes."""
    return any(user.op == "output" for user in node.users)


def unify_linears(gm: fx.GraphModule, ctx: Any) -> int:
    """Spell every product of activations and a weight as linear on unflattened tokens.

    before: y = reshape(addmm(b, reshape(x, [-1, h]), w), [B, S, o]);  z = matmul(x, t(v))
    after:  y = linear(x, t(w), b);                                    z = linear(x, v)
    Refuses products of two activations, and addmm with scaling.
    """
    count = 0
    for node in list(gm.graph.nodes):
        bias = None
        if node.target in {aten.matmul.default, aten.mm.default}:
            x, w = node.args
        elif node.target == aten.addmm.default and not node.kwargs:
            bias, x, w = node.args
        else:
            continue
        if _val(w).ndim != 2 or not _is_weight(w) or (bias is not None and _val(bias).ndim != 1):
            continue
        weight = w.args[0] if w.target in _TRANSPOSES else None
        with gm.graph.inserting_before(node):
            if weight is None:
                weight = gm.graph.call_function(aten.t.default, (w,))
                weight.meta = {**node.meta, "val": _val(w).t()}
            args = (x, weight) if bias is None else (x, weight, bias)
            linear = gm.graph.call_function(aten.linear.default, args)
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        gm.graph.erase_node(node)
        count += 1
    return count + sum(_unflatten(gm, n) for n in gm.graph.nodes if n.target == aten.linear.default)


def _is_weight(node: fx.Node) -> bool:
    while node.op != "placeholder":
        if node.target not in _TRANSPOSES | _CASTS:
            return False
        node = node.args[0]
    return True


def _unflatten(gm: fx.GraphModule, linear: fx.Node) -> bool:
    """Drop reshape([-1, h]) before and reshape([B, S, o]) after a linear."""
    flat = linear.args[0]
    if not isinstance(flat, fx.Node) or flat.target != aten.reshape.default or _val(flat).ndim != 2:
        return False
    x = flat.args[0]
    shape = _val(x).shape
    if shape[-1] != _val(flat).shape[-1] or len(shape) < 3:
        return False
    out = (*shape[:-1], _val(linear).shape[-1])
    users = list(linear.users)
    if any(u.target != aten.reshape.default or tuple(_val(u).shape) != tuple(out) for u in users):
        return False
    linear.args = (x, *linear.args[1:])
    linear.meta = dict(users[0].meta)
    for user in users:
        user.replace_all_uses_with(linear)
        gm.graph.erase_node(user)
    return True
