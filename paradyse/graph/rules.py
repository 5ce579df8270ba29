"""How each operator treats the named dims of its inputs, stated as factor maps.

``x[..., i], w[o, i], b[o] -> [..., o]; mixes i``: dims of one letter are the same factors, ``...``
is any number of dims (broadcast from the right), and what an operator mixes cannot be split there.
A map that says all there is to say is a line of ``MAPS``; the others are decorated functions, whose
docstrings state the map, with n for the dims that an argument chooses.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.factors import Dim, Names, Rule, resolve, rule, size_of
from paradyse.graph.subgraph import is_tensor
from paradyse.torch_private import schema_of

aten = torch.ops.aten


def shape_of(node: fx.Node) -> Any:
    """The shape of ``node``'s value."""
    return node.meta["val"].shape


def _tensors(node: fx.Node) -> list[fx.Node]:
    return list(filter(is_tensor, node.all_input_nodes))


def overloads(names: str) -> list[Any]:
    """The overloads of operators, ``names`` with blanks between, that a functional graph has: those
    that write nothing, and those for named tensors neither, which PyTorch up to 2.11 has."""
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        of = getattr(aten, packet)
        for o in [overload] if overload else of.overloads():
            schema = schema_of(getattr(of, o))
            gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
            other = o.startswith("prim_") or "name" in o.lower()
            if gives_tensors and not schema.is_mutable and not other:
                found.append(getattr(of, o))
    return found


def argument(node: fx.Node, name: str) -> Any:
    """The argument called ``name``, its default where it is not given; None where there is none."""
    for i, arg in enumerate(schema_of(node.target).arguments):
        if arg.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, arg.default_value)
    return None


def dims_along(node: fx.Node, ndim: int) -> list[int]:
    """The dims that ``node``'s argument ``dim`` or ``dims`` names, all ``ndim`` where it names
    none."""
    given = argument(node, "dim")
    given = argument(node, "dims") if given is None else given
    if given is None or given == []:
        return list(range(ndim))
    return [d % max(ndim, 1) for d in ([given] if isinstance(given, int) else given)]


def mix_along(names: Names, node: fx.Node) -> tuple[list[Dim], list[int]]:
    """The dims of ``node``'s first input, and which it works along: ``names`` has these mixed."""
    dims = names.of(node.args[0])
    over = dims_along(node, len(dims))
    names.mix(node, *[dims[d] for d in over])
    return dims, over


def _spread(pattern: str, ndim: int) -> list[str] | None:
    """A letter per dim, those of ``...`` numbered from the right; None where they do not fit."""
    letters = pattern.split(", ") if pattern else []
    if "..." in letters:
        at, n = letters.index("..."), ndim - len(letters) + 1
        letters[at : at + 1] = [f"...{i}" for i in range(n, 0, -1)]
    return letters if len(letters) == ndim else None


def factor_map(text: str) -> Rule:
    """The rule that ``text`` states; it has nothing to say of inputs whose dims do not fit.

    Args:
        text: one bracket per tensor argument, in order (an argument may be None); then one per
            result, or several joined by "or" for a result whose number of dims differs; then the
            letters that are mixed.
    """
    left, _, rest = text.partition(" -> ")
    right, _, mixed = rest.partition("; mixes ")
    inputs, outputs = (re.findall(r"\[(.*?)\]", side) for side in (left, right))

    def of_map(names: Names, node: fx.Node) -> Any:
        found: dict[str, Dim] = {}
        for arg, pattern in zip(node.args, inputs):
            if arg is None:
                continue
            dims = names.of(arg)
            letters = _spread(pattern, len(dims))
            if letters is None:
                return None
            for letter, dim in zip(letters, dims):
                names.unify_at(node, found.setdefault(letter, dim), dim)
                found[letter] = found[letter] or dim
        val = node.meta["val"]
        several = isinstance(val, tuple | list)
        vals = val if several else [val] * len(outputs)
        results = [_spread(p, v.ndim) for p, v in zip(outputs, vals)]
        named = [[found[x] for x in letters] for letters in results if letters is not None]
        if not named or several and len(named) < len(vals):
            return None
        names.mix(node, *[found[x] for x in mixed.split(", ") if x])
        return named if several else named[0]

    of_map.__doc__ = text
    return of_map


MAPS = {
    aten.linear.default: "x[..., i], w[o, i], b[o] -> [..., o]; mixes i",
    aten.matmul.default: "a[..., m, i], b[..., i, n] -> [..., m, n]; mixes i",
    aten.bmm.default: "a[b, m, i], b[b, i, n] -> [b, m, n]; mixes i",
    aten.baddbmm.default: "c[b, m, n], x[b, m, i], y[b, i, n] -> [b, m, n]; mixes i",
    aten.mm.default: "a[m, i], b[i, n] -> [m, n]; mixes i",
    aten.embedding.default: "w[v, h], ids[...] -> [..., h]; mixes v",
    aten.t.default: "x[a, b] -> [b, a]",
    aten.numpy_T.default: "x[a, b] -> [b, a]",
    aten.mT.default: "x[..., a, b] -> [..., b, a]",
}
"""Operators that one line says all about."""

for _target, _text in MAPS.items():
    rule(_target)(factor_map(_text))


_CROSS_ENTROPY = {
    (labels, rows): factor_map(
        f"x[n, c], y[{labels}], w[c] -> " + ("[n]; mixes c" if rows else "[]; mixes n, c")
    )
    for labels in ("n", "n, c")
    for rows in (False, True)
}


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
def cross_entropy(names: Names, node: fx.Node) -> Any:
    """``x[n, c], y[n] or y[n, c], w[c] -> []; mixes n, c``; of single rows ``-> [n]; mixes c``."""
    labels = "n, c" if len(shape_of(node.args[1])) == 2 else "n"
    return _CROSS_ENTROPY[labels, len(shape_of(node)) == 1](names, node)


BY_ELEMENT = overloads("""
    kl_div mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss
""")
"""Losses of elements, with an argument that says how they are summed up."""


@rule(*BY_ELEMENT)
def losses(names: Names, node: fx.Node) -> Any:
    """``x[...], y[...] -> [...]`` of losses one by one; of sums nothing is known."""
    return None if argument(node, "reduction") else elementwise(names, node)


_ATTENTION, _ATTENTION_BY_DISTANCE, _ACROSS = (
    factor_map(
        f"q[b, h, s, d], k[b, k, {t}, d], v[b, k, {t}, e], padding[b, {t}], documents[b, {t}], "
        f"bias[{bias}] -> [b, h, s, e], [b, h, s]; mixes s, {t}, d"
    )
    for t, bias in (("s", "b, h, s, s"), ("s", "h, n, s"), ("t", "b, h, s, t"))
)


@rule(ATTENTION)
def attention(names: Names, node: fx.Node) -> Any:
    """Attention, the anchor that says which factor is batch, heads, sequence, head width.

    ``q[b, k g, s, d], k[b, k, s, d], v[b, k, s, e], padding[b, s], documents[b, s],
    bias[b, k g, s, s] or [k g, n, s], sinks[k g] -> [b, k g, s, e], [b, k g, s]; mixes s, d``,
    where g query heads read the same KV head. Keys of another sequence have another s.
    """
    call = AttentionCall.of(node)
    heads, kv_heads = shape_of(call.q)[1], shape_of(call.k)[1]
    names.unify(names.of(call.q)[1], (*names.of(call.k)[1], *names.fresh([heads // kv_heads])[0]))
    by_distance = isinstance(call.bias, fx.Node) and len(shape_of(call.bias)) == 3
    for x in [call.bias] * by_distance + [call.sinks] * isinstance(call.sinks, fx.Node):
        names.unify_at(node, names.of(call.q)[1], names.of(x)[0])
    if call.is_cross:
        return _ACROSS(names, node)
    return (_ATTENTION_BY_DISTANCE if by_distance else _ATTENTION)(names, node)


_ELEMENTWISE = """
    add sub mul div multiply subtract divide pow neg exp exp2 log log1p expm1 tanh sigmoid gelu
    silu relu relu6 leaky_relu elu selu softplus hardtanh hardswish mish log_sigmoid erf sqrt
    rsqrt abs cos sin reciprocal square clamp clamp_min clamp_max maximum minimum max.other
    min.other where.self where.ScalarSelf where.ScalarOther where.Scalar rsub floor_divide
    remainder fmod floor ceil round sign addcmul addcdiv lerp isnan isinf eq ne lt le gt ge
    logical_and logical_or logical_not polar complex bitwise_and bitwise_or bitwise_not __and__
    __or__ masked_fill zeros_like ones_like full_like empty_like to.device to.dtype
    to.dtype_layout _to_copy clone contiguous alias detach dropout lift_fresh lift_fresh_copy
    expand broadcast_to expand_as clip not_equal less less_equal greater greater_equal negative
    absolute true_divide trunc frac sgn sinc tan sinh cosh asin acos atan atan2 arctan2 asinh acosh
    atanh erfc logit logaddexp logaddexp2 xlogy hypot copysign isfinite nan_to_num threshold celu
    softshrink hardshrink hardsigmoid logical_xor bitwise_xor bitwise_left_shift
    bitwise_right_shift __xor__ __lshift__ __rshift__ float_power
"""


@rule(*overloads(_ELEMENTWISE))
def elementwise(names: Names, node: fx.Node) -> Any:
    """``x[...], y[...] -> [...]``"""
    return names.broadcast(node, _tensors(node), shape_of(node))


@rule(aten.broadcast_tensors.default)
def broadcast_tensors(names: Names, node: fx.Node) -> Any:
    """``x[...], y[...] -> [...], [...]``"""
    return [names.broadcast(node, node.args[0], v.shape) for v in node.meta["val"]]


@rule(aten.type_as.default, aten.to.other)
def cast_like(names: Names, node: fx.Node) -> Any:
    """``x[...], any -> [...]``"""
    return names.of(node.args[0])


@rule(*overloads("arange scalar_tensor zeros ones full empty"))
@rule(*overloads("new_zeros new_ones new_full new_empty"))
def creation(names: Names, node: fx.Node) -> Any:
    """``-> [new, ...]``: names that nothing else has yet."""
    return names.fresh(shape_of(node))


@rule(aten.layer_norm.default, aten.rms_norm.default)
def normalization(names: Names, node: fx.Node) -> Any:
    """``x[..., n], w[n], b[n] -> [..., n]; mixes n``, where n stands for one or more last dims."""
    dims = names.of(node.args[0])
    k = len(node.args[1])
    for arg in _tensors(node)[1:]:
        for mine, theirs in zip(dims[-k:], names.of(arg), strict=True):
            names.unify_at(node, mine, theirs)
    names.mix(node, *dims[-k:])
    return dims


@rule(*overloads("mean sum amax amin prod any all var std argmax argmin logsumexp"))
def reduction(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., ...]`` or, with keepdim, ``[..., 1, ...]; mixes n``."""
    dims, over = mix_along(names, node)
    if argument(node, "keepdim"):
        return [() if d in over else dim for d, dim in enumerate(dims)]
    return [dim for d, dim in enumerate(dims) if d not in over]


@rule(*overloads("softmax _softmax log_softmax _log_softmax cumsum flip roll"))
def along_dim(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., n, ...]; mixes n``"""
    return mix_along(names, node)[0]


@rule(*overloads("sort"))
def ordering(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., n, ...], [..., n, ...]; mixes n``"""
    dims, _ = mix_along(names, node)
    return [dims, list(dims)]


@rule(aten.topk.default)
def topk(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., new, ...], [..., new, ...]; mixes n``"""
    dims, (d,) = mix_along(names, node)
    dims[d] = names.fresh([node.args[1]])[0]
    return [dims, list(dims)]


@rule(*overloads("permute transpose.int movedim moveaxis swapaxes swapdims"))
def permutation(names: Names, node: fx.Node) -> Any:
    """``x[a, b, c] -> [c, a, b]``, in the order that is given."""
    dims = names.of(node.args[0])
    numbered = torch.empty([*range(len(dims))], device="meta")
    order = node.target(numbered, *node.args[1:], **node.kwargs).shape
    return [dims[d] for d in order]


@rule(*overloads("unsqueeze reshape view.default flatten unflatten _unsafe_view"))
def reshape(names: Names, node: fx.Node) -> Any:
    """``x[a b, c] -> [a, b c]``; mixes all where sizes do not nest."""
    return names.reshape(node, names.of(node.args[0]), shape_of(node))


@rule(*overloads("reshape_as view_as"))
def reshape_like(names: Names, node: fx.Node) -> Any:
    """``x[a b, c], y[a, b c] -> [a, b c]``; mixes all where sizes do not nest."""
    dims = reshape(names, node)
    for mine, theirs in zip(dims, names.of(node.args[1]), strict=True):
        names.unify_at(node, mine, theirs)
    known = {f for dim in names.of(node.args[0]) for f in dim}
    for dim in names.of(node.args[1]):
        names.mix(node, [f for f in dim if f not in known])
    return dims


@rule(aten.view_as_complex.default)
def view_as_complex(names: Names, node: fx.Node) -> Any:
    """``x[..., n] -> [...]; mixes n``, which has two elements."""
    dims = names.of(node.args[0])
    names.mix(node, dims[-1])
    return dims[:-1]


@rule(aten.view_as_real.default)
def view_as_real(names: Names, node: fx.Node) -> Any:
    """``x[...] -> [..., new]``"""
    return [*names.of(node.args[0]), *names.fresh([2])]


@rule(*overloads("squeeze"))
def squeeze(names: Names, node: fx.Node) -> Any:
    """``x[..., 1, ...] -> [..., ...]``; mixes a dim that is asked for and stays: a part of one
    row would lose it.
    """
    dims, over = mix_along(names, node)
    return [dim for d, dim in enumerate(dims) if dim or d not in over]


@rule(aten.slice.Tensor, aten.narrow.default)
def slice_(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., n - k, ...]; mixes n`` where the ends are cut off; a new dim where
    anything else stays.
    """
    dims = names.of(node.args[0])
    d = dims_along(node, len(dims))[0]
    before, after = shape_of(node.args[0])[d], shape_of(node)[d]
    if before != after:
        names.mix(node, dims[d])
        dims[d] = shifted(names, dims[d], after) if cuts_ends(node) else names.fresh([after])[0]
    return dims


def cuts_ends(node: fx.Node) -> bool:
    """Whether the slice ``node``, or what it writes into a slice, leaves out a fixed number of
    elements at the start or the end."""
    if argument(node, "step") != 1:
        return False
    start, end = argument(node, "start") or 0, argument(node, "end")
    to_end = end is None or end > 2**62
    return start >= 0 and (to_end or end < 0)


def shifted(names: Names, dim: Dim, size: int) -> Dim:
    """``dim`` after elements are added or cut at an end, ``size`` of them then."""
    if size == 1 or len(dim) != 1:
        return names.fresh([size])[0]
    return dim[0].shifted(size - dim[0].size).resolve()


@rule(aten.select.int)
def select(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., ...]; mixes n``"""
    dims, (d,) = mix_along(names, node)
    return dims[:d] + dims[d + 1 :]


@rule(*overloads("split split_with_sizes chunk tensor_split.sections tensor_split.indices"))
def split(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., new, ...], [..., new, ...], ..; mixes n``"""
    dims = names.of(node.args[0])
    parts = node.meta["val"]
    if len(parts) == 1:
        return [dims]
    dims, (d,) = mix_along(names, node)
    return [[*dims[:d], *names.fresh([p.shape[d]]), *dims[d + 1 :]] for p in parts]


@rule(aten.unbind.int)
def unbind(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., ...], [..., ...], ..; mixes n``"""
    dims, (d,) = mix_along(names, node)
    return [dims[:d] + dims[d + 1 :] for _ in node.meta["val"]]


@rule(operator.getitem)
def getitem(names: Names, node: fx.Node) -> Any:
    """The dims of the result that is taken."""
    return [resolve(d) for d in names.dims[node.args[0]][node.args[1]]]


@rule(aten.cat.default)
def cat(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], y[..., m, ...] -> [..., new, ...]; mixes n, m``"""
    ndim = len(shape_of(node))
    d = dims_along(node, ndim)[0]
    out: list[Dim] = [()] * ndim
    for part in node.args[0]:
        if part.meta["val"].ndim == ndim:  # an empty 1-D tensor goes with any
            dims = names.of(part)
            names.mix(node, dims[d])
            for mine, theirs in zip(out[:d] + out[d + 1 :], dims[:d] + dims[d + 1 :]):
                names.unify_at(node, mine, theirs)
            out = dims
    out[d] = names.fresh([shape_of(node)[d]])[0]
    return out


@rule(aten.stack.default)
def stack(names: Names, node: fx.Node) -> Any:
    """``x[...], y[...] -> [..., new, ...]``"""
    shape = list(shape_of(node))
    d = dims_along(node, len(shape))[0]
    n = shape.pop(d)
    dims = names.broadcast(node, node.args[0], shape)
    return [*dims[:d], *names.fresh([n]), *dims[d:]]


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...] -> [..., n + k, ...]; mixes n``"""
    dims, given = names.of(node.args[0]), node.args[1]
    for d, before, after in zip(range(-1, -len(dims) - 1, -1), given[::2], given[1::2]):
        if before or after:
            names.mix(node, dims[d])
            dims[d] = shifted(names, dims[d], shape_of(node)[d])
    return dims


@rule(aten.diff.default)
def diff(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], y[..., m, ...], z[..., k, ...] -> [..., new, ...]; mixes n, m, k``"""
    dims, (d,) = mix_along(names, node)
    for other in _tensors(node)[1:]:
        for i, dim in enumerate(names.of(other)):
            names.unify_at(node, dims[i], dim) if i != d else names.mix(node, dim)
    if shape_of(node) != shape_of(node.args[0]):
        dims[d] = names.fresh([shape_of(node)[d]])[0]
    return dims


@rule(aten.index.Tensor)
def index(names: Names, node: fx.Node) -> Any:
    """``x[..., n, m, ...], i[k, l], j[k, l] -> [..., k, l, ...]; mixes n, m``

    Nothing is known of masks as indices, nor of indices with whole dims between them.
    """
    dims = names.of(node.args[0])
    given = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    where, indices = [d for d, _ in given], [i for _, i in given]
    contiguous = where == list(range(where[0], where[-1] + 1))
    if not contiguous or any(i.meta["val"].dtype == torch.bool for i in indices):
        return None
    names.mix(node, *[dims[d] for d in where])
    shape = torch.broadcast_shapes(*[shape_of(i) for i in indices])
    return [*dims[: where[0]], *names.broadcast(node, indices, shape), *dims[where[-1] + 1 :]]


@rule(aten.index_select.default)
def index_select(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], i[k] -> [..., k, ...]; mixes n``; an index without dims is as ``i[1]``."""
    if not shape_of(node):
        return []
    dims, (d,) = mix_along(names, node)
    dims[d : d + 1] = names.of(argument(node, "index")) or [()]
    return dims


@rule(aten.gather.default)
def gather(names: Names, node: fx.Node) -> Any:
    """``x[..., n, ...], i[..., k, ...] -> [..., k, ...]; mixes n``, and where ``i`` is shorter."""
    dims, (over,) = mix_along(names, node)
    chosen = names.of(node.args[2])
    for d, (mine, theirs) in enumerate(zip(dims, chosen, strict=True)):
        if d != over:
            same_or_shorter(names, node, mine, theirs)
    return chosen


def same_or_shorter(names: Names, node: fx.Node, mine: Dim, theirs: Dim) -> None:
    """``mine`` and ``theirs`` are the same dim of what ``node`` reads, unless its index is shorter
    there: then it is of the first rows alone, and both are mixed."""
    if size_of(mine, {}) == size_of(theirs, {}):
        names.unify_at(node, mine, theirs)
    else:
        names.mix(node, mine, theirs)
