"""How each operator treats the named dims of its inputs. One decorated function per kind of
operator.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import Dim, Names, resolve, rule

aten = torch.ops.aten


def _shape(node: fx.Node) -> Any:
    return node.meta["val"].shape


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]


def _overloads(*names: str) -> list[Any]:
    found = []
    for name in names:
        packet = getattr(aten, name, None)
        if packet is not None:
            found += [getattr(packet, o) for o in packet.overloads()]
    return found


_ELEMENTWISE = """
    add sub mul div pow neg exp exp2 log log1p expm1 tanh sigmoid gelu silu relu relu6 leaky_relu
    elu selu softplus hardtanh hardswish mish log_sigmoid erf sqrt rsqrt abs cos sin reciprocal
    square clamp clamp_min clamp_max maximum minimum where type_as rsub floor_divide remainder fmod
    floor ceil round sign addcmul addcdiv lerp isnan isinf eq ne lt le gt ge logical_and logical_or
    logical_not bitwise_and bitwise_or bitwise_not __and__ __or__ masked_fill zeros_like ones_like
    full_like empty_like to _to_copy clone contiguous alias detach dropout lift_fresh
    lift_fresh_copy
""".split()


@rule(*_overloads(*_ELEMENTWISE))
def elementwise(names: Names, node: fx.Node) -> Any:
    return names.broadcast(node, _tensors(node), _shape(node))


@rule(
    *_overloads(
        "arange",
        "zeros",
        "ones",
        "full",
        "empty",
        "new_ones",
        "new_zeros",
        "new_full",
        "scalar_tensor",
    )
)
def creation(names: Names, node: fx.Node) -> Any:
    return names.fresh(_shape(node))


@rule(aten.linear.default)
def linear(names: Names, node: fx.Node) -> Any:
    x, w = names.of(node.args[0]), names.of(node.args[1])
    names.unify(x[-1], w[1])
    names.mix(node, w[1])
    if len(node.args) > 2 and node.args[2] is not None:
        names.unify(w[0], names.of(node.args[2])[0])
    return [*x[:-1], w[0]]


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(names: Names, node: fx.Node) -> Any:
    a, b = names.of(node.args[0]), names.of(node.args[1])
    if len(a) < 2 or len(b) < 2:
        return None
    names.unify(a[-1], b[-2])
    names.mix(node, a[-1])
    batch: list[Dim] = []
    shape = _shape(node)[:-2]
    for i in range(len(shape)):
        left = a[i - len(shape) - 2] if i - len(shape) - 2 >= -len(a) else ()
        right = b[i - len(shape) - 2] if i - len(shape) - 2 >= -len(b) else ()
        if left and right:
            names.unify(left, right)
        batch.append(left or right)
    return [*batch, a[-2], b[-1]]


@rule(aten.embedding.default)
def embedding(names: Names, node: fx.Node) -> Any:
    w, ids = names.of(node.args[0]), names.of(node.args[1])
    names.mix(node, w[0])
    return [*ids, w[1]]


@rule(aten.layer_norm.default, aten.rms_norm.default)
def normalization(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    k = len(node.args[1])
    for arg in _tensors(node)[1:]:
        for mine, theirs in zip(dims[-k:], names.of(arg), strict=True):
            names.unify(mine, theirs)
    names.mix(node, *dims[-k:])
    return dims


def _dim_list(dim: Any, ndim: int) -> list[int]:
    dims = (
        list(range(ndim))
        if dim is None or dim == []
        else [dim]
        if isinstance(dim, int)
        else list(dim)
    )
    return [d % max(ndim, 1) for d in dims]


def _argument(node: fx.Node, name: str, default: Any = None) -> Any:
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, arg.default_value)
    return default


@rule(
    *_overloads(
        "mean",
        "sum",
        "amax",
        "amin",
        "prod",
        "any",
        "all",
        "var",
        "std",
        "argmax",
        "argmin",
        "logsumexp",
    )
)
def reduction(names: Names, node: fx.Node) -> Any:
    if not isinstance(node.meta["val"], torch.Tensor):
        return None
    dims = names.of(node.args[0])
    over = _dim_list(_argument(node, "dim"), len(dims))
    names.mix(node, *[dims[d] for d in over])
    if _argument(node, "keepdim", False):
        return [() if d in over else dim for d, dim in enumerate(dims)]
    return [dim for d, dim in enumerate(dims) if d not in over]


@rule(*_overloads("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "flip", "roll"))
def along_dim(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    over = _dim_list(_argument(node, "dim", _argument(node, "dims")), len(dims))
    names.mix(node, *[dims[d] for d in over])
    return dims


@rule(aten.topk.default, *_overloads("sort"))
def ordering(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = _argument(node, "dim") % len(dims)
    names.mix(node, dims[d])
    n = node.meta["val"][0].shape[d]
    out = [
        *dims[:d],
        names.fresh([n])[0] if node.target == aten.topk.default else dims[d],
        *dims[d + 1 :],
    ]
    return [out, list(out)]


@rule(aten.transpose.int)
def transpose(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    a, b = (d % len(dims) for d in node.args[1:3])
    dims[a], dims[b] = dims[b], dims[a]
    return dims


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def reverse(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    return [*dims[:-2], *dims[-2:][::-1]] if node.target == aten.mT.default else dims[::-1]


@rule(aten.permute.default)
def permute(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    return [dims[d] for d in node.args[1]]


@rule(
    *_overloads("unsqueeze", "squeeze", "reshape", "view", "flatten", "unflatten", "_unsafe_view")
)
def reshape(names: Names, node: fx.Node) -> Any:
    return names.reshape(node, names.of(node.args[0]), _shape(node))


@rule(aten.expand.default, aten.broadcast_to.default)
def expand(names: Names, node: fx.Node) -> Any:
    return names.broadcast(node, [node.args[0]], _shape(node))


@rule(aten.slice.Tensor, aten.narrow.default)
def slice_(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    before, after = _shape(node.args[0])[d], _shape(node)[d]
    if before != after:
        names.mix(node, dims[d])
        dims[d] = _shifted(names, dims[d], after) if _cuts_ends(node) else names.fresh([after])[0]
    return dims


def _cuts_ends(node: fx.Node) -> bool:
    """Whether a slice leaves out a fixed number of elements at the start or the end."""
    if node.target != aten.slice.Tensor or len(node.args) > 4:
        return False
    start, end = _argument(node, "start") or 0, _argument(node, "end")
    to_end = end is None or end > 2**62
    return start >= 0 and (to_end or end < 0)


def _shifted(names: Names, dim: Dim, size: int) -> Dim:
    """The dim after elements are added or cut at an end."""
    if size == 1 or len(dim) != 1:
        return names.fresh([size])[0]
    return dim[0].shifted(size - dim[0].size).resolve()


@rule(aten.select.int)
def select(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = node.args[1] % len(dims)
    names.mix(node, dims[d])
    return dims[:d] + dims[d + 1 :]


@rule(*_overloads("split", "split_with_sizes", "chunk", "tensor_split"))
def split(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = (_argument(node, "dim", 0) or 0) % len(dims)
    parts = node.meta["val"]
    if len(parts) == 1:
        return [dims]
    names.mix(node, dims[d])
    return [[*dims[:d], names.fresh([p.shape[d]])[0], *dims[d + 1 :]] for p in parts]


@rule(aten.unbind.int)
def unbind(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    names.mix(node, dims[d])
    return [dims[:d] + dims[d + 1 :] for _ in node.meta["val"]]


@rule(operator.getitem)
def getitem(names: Names, node: fx.Node) -> Any:
    dims = names.dims[node.args[0]]
    return [resolve(d) for d in dims[node.args[1]]]


@rule(aten.cat.default)
def cat(names: Names, node: fx.Node) -> Any:
    parts = [a for a in node.args[0] if a.meta["val"].ndim == len(_shape(node))]
    d = (node.args[1] if len(node.args) > 1 else 0) % len(_shape(node))
    out = names.of(parts[0])
    for part in parts[1:]:
        for i, dim in enumerate(names.of(part)):
            if i != d:
                names.unify(out[i], dim)
    for part in parts:
        names.mix(node, names.of(part)[d])
    out[d] = names.fresh([_shape(node)[d]])[0]
    return out


@rule(aten.stack.default)
def stack(names: Names, node: fx.Node) -> Any:
    d = (node.args[1] if len(node.args) > 1 else 0) % len(_shape(node))
    shape = list(_shape(node))
    n = shape.pop(d)
    dims = names.broadcast(node, node.args[0], shape)
    return [*dims[:d], names.fresh([n])[0], *dims[d:]]


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    for d, (n, m) in enumerate(zip(_shape(node), _shape(node.args[0]), strict=True)):
        if n != m:
            names.mix(node, dims[d])
            dims[d] = _shifted(names, dims[d], n)
    return dims


@rule(aten.diff.default)
def diff(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    d = (node.args[2] if len(node.args) > 2 else -1) % len(dims)
    names.mix(node, dims[d])
    if _shape(node) != _shape(node.args[0]):
        dims[d] = names.fresh([_shape(node)[d]])[0]
    return dims


@rule(aten.index.Tensor)
def index(names: Names, node: fx.Node) -> Any:
    dims = names.of(node.args[0])
    given = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    where = [d for d, _ in given]
    if where != list(range(where[0], where[-1] + 1)) or any(
        i.meta["val"].dtype == torch.bool for _, i in given
    ):
        return None
    names.mix(node, *[dims[d] for d in where])
    shape = torch.broadcast_shapes(*[_shape(i) for _, i in given])
    return [
        *dims[: where[0]],
        *names.broadcast(node, [i for _, i in given], shape),
        *dims[where[-1] + 1 :],
    ]


@rule(aten.gather.default)
def gather(names: Names, node: fx.Node) -> Any:
    names.mix(node, *names.of(node.args[0]))
    return names.of(node.args[2])


def attention_dims(names: Names, node: fx.Node) -> Any:
    """Attention [B, H, S, D]: the anchor that says which factor is batch, heads, sequence, head
    width.
    """
    q, k, v = (names.of(a) for a in node.args[:3])
    for a, b in (
        (q[0], k[0]),
        (q[0], v[0]),
        (q[2], k[2]),
        (q[2], v[2]),
        (k[1], v[1]),
        (q[3], k[3]),
    ):
        if a and b:
            names.unify(a, b)
    heads, kv_heads = _shape(node.args[0])[1], _shape(node.args[1])[1]
    if heads == kv_heads:
        names.unify(q[1], k[1])
    elif kv_heads > 1:  # query head h reads KV head h // (heads // kv_heads)
        names.unify(q[1], (*k[1], *names.fresh([heads // kv_heads])[0]))
    names.mix(node, q[2], q[3])
    bias = node.args[5] if len(node.args) > 5 else None
    if bias is not None:
        for mine, theirs in zip(names.of(bias), (q[0], q[1], q[2], q[2]), strict=True):
            if mine:
                names.unify(mine, theirs)
    for extra in node.args[3:5]:
        if extra is not None:
            b, s = names.of(extra)
            if b:
                names.unify(b, q[0])
            names.unify(s, q[2])
    return [[q[0], q[1], q[2], v[3]], [q[0], q[1], q[2]]]


@rule(aten.scaled_dot_product_attention.default)
def sdpa(names: Names, node: fx.Node) -> Any:
    return None


@rule(aten.cross_entropy_loss.default)
def cross_entropy(names: Names, node: fx.Node) -> Any:
    logits, labels = names.of(node.args[0]), names.of(node.args[1])
    if len(logits) != 2 or len(labels) != 1:
        return None
    names.unify(logits[0], labels[0])
    names.mix(node, *logits)
    return names.fresh(_shape(node))
