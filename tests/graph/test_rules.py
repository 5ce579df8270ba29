"""Every rule of an operator against full tensors, for every way of splitting that it claims.

A factor that an operator does not mix may be split: of the parts of its inputs along that factor
the operator makes the parts of its outputs; what does not have the factor is the same from each.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import paradyse.graph.infer  # noqa: F401  registers the rules
from paradyse.graph import subgraph
from paradyse.graph.factors import RULES, Dim, Factor, Names, size_of

aten = torch.ops.aten


class Arg:
    """A tensor argument: per dim its size, or the sizes of its factors."""

    def __init__(self, *dims: int | tuple[int, ...], dtype: Any = torch.float64, high: int = 3):
        self.factors = [(d,) if isinstance(d, int) else d for d in dims]
        shape = [torch.Size(d).numel() for d in self.factors]
        if dtype.is_floating_point:
            self.value = torch.rand(shape, dtype=dtype) + 0.1
        else:
            self.value = torch.randint(0, 2 if dtype == torch.bool else high, shape).to(dtype)


def t(*dims: int | tuple[int, ...]) -> Arg:
    return Arg(*dims)


def ints(*dims: int | tuple[int, ...], high: int = 3) -> Arg:
    return Arg(*dims, dtype=torch.int64, high=high)


def bools(*dims: int) -> Arg:
    return Arg(*dims, dtype=torch.bool)


def shares(*dims: int | tuple[int, ...]) -> Arg:
    """Numbers below 1."""
    made = t(*dims)
    made.value /= 2
    return made


CPU = torch.device("cpu")
X = ((2, 3), 5, 7)
"""Of most samples: the first dim is made of two factors."""

Q, CAUSAL = t(2, 4, 5, 3), (-1, 0, -1, 0.5, 0.0, 0.0)
"""Queries; and left, right, chunk, scale, softcap, dropout."""

SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "linear": [(t(*X), t(4, 7), t(4)), (t(7), t((2, 3), 7), None), (t(3, (2, 3)), t(5, (3, 2)))],
    "matmul": [(t(*X), t(7, 4)), (t(2, 1, 5, 7), t(3, 7, 4)), (t(5, 7), t(3, 7, 4))],
    "bmm": [(t((2, 3), 5, 7), t(6, 7, 4))],
    "baddbmm": [
        (t((2, 3), 5, 4), t(6, 5, 7), t(6, 7, 4)),
        (t(1, 5, 4), t((2, 3), 5, 7), t(6, 7, 4)),
        (t(6, 1, 1), t(6, 5, 7), t((2, 3), 7, 4)),
    ],
    "mm": [(t((2, 3), 7), t(7, 5))],
    "embedding": [(t(4, (2, 3)), ints(3, 5, high=4))],
    "t": [(t((2, 3), 5),)],
    "numpy_T": [(t((2, 3), 5),)],
    "mT": [(t(*X),)],
    "cross_entropy_loss": [
        (t(15, 7), ints(15, high=7)),
        (t((3, 5), 7), ints((3, 5), high=7), t(7), 0),
        (t(15, 7), ints(15, high=7), t(7), 2),
        (t(15, 7), t(15, 7)),
        (t((3, 5), 7), t((3, 5), 7), None, 0),
    ],
    "nll_loss_nd": [
        (t(15, 7), ints(15, high=7)),
        (t((3, 5), 7), ints((3, 5), high=7), t(7), 0),
    ],
    "kl_div": [(t(*X), t(*X), 0), (t(*X), t(7), 0)],
    "mse_loss": [(t(*X), t(*X), 0), (t(*X), t(5, 1), 0)],
    "l1_loss": [(t(*X), t(*X), 0)],
    "smooth_l1_loss": [(t(*X), t(*X), 0, 0.3)],
    "huber_loss": [(t(*X), t(*X), 0, 0.3)],
    "soft_margin_loss": [(t(*X), t(*X), 0)],
    "poisson_nll_loss": [(t(*X), t(*X), True, False, 1e-8, 0)],
    "binary_cross_entropy": [(shares(*X), shares(*X), t(5, 7), 0)],
    "binary_cross_entropy_with_logits": [(t(*X), shares(*X), t(5, 7), t(7), 0)],
    "broadcast_tensors": [([t(*X), t(5, 1), t(7)],)],
    "type_as": [(t(*X), t(2, 4)), (t(5), t(3, 5, 2))],
    "to.other": [(t(*X), Arg(2, 4, dtype=torch.float32))],
    "to.device": [(t(*X), CPU, torch.float32)],
    "to.dtype": [(t(*X), torch.float32)],
    "masked_fill.Scalar": [(t(*X), bools(5, 1), 2.0), (t(*X), bools(6, 1, 7), 2.0)],
    "masked_fill.Tensor": [(t(*X), bools(5, 7), Arg())],
    "where.self": [(bools(5, 1), t(*X), t(7)), (bools(6, 5, 7), t(), t(5, 7))],
    "where.ScalarSelf": [(bools(5, 7), 1.0, t(*X))],
    "where.ScalarOther": [(bools(5, 7), t(*X), 1.0)],
    "where.Scalar": [(bools(6, 5), 1.0, 2.0)],
    "full_like": [(t(*X), 2.0)],
    "dropout": [(t(*X), 0.3, False)],
    "arange": [(5,)],
    "arange.start": [(2, 7)],
    "arange.start_step": [(2, 9, 3), (2, 9)],
    "zeros": [([3, 5],)],
    "ones": [([3, 5],)],
    "full": [([3, 5], 2.0)],
    "empty.memory_format": [([3, 5],)],
    "new_empty": [(t(3, 7), [3, 5])],
    "new_ones": [(t(3, 7), [3, 5])],
    "new_zeros": [(t(3, 7), [3, 5])],
    "new_full": [(t(3, 7), [3, 5], 2.0)],
    "scalar_tensor": [(2.0,)],
    "layer_norm": [(t(*X), [7], t(7), t(7)), (t(3, 5, 7), [5, 7], t(5, 7), t(5, 7))],
    "rms_norm": [(t(*X), [7], t(7)), (t(*X), [7])],
    "prod.dim_int": [(t(*X), 1), (t(*X), -1, True)],
    "any.dim": [(bools(3, 5, 7), 1)],
    "all.dim": [(bools(3, 5, 7), 1, True)],
    "argmax": [(t(*X), 1), (t(*X), -1, True), (t(*X),)],
    "argmin": [(t(*X), 1), (t(*X), -1, True), (t(*X),)],
    "softmax.int": [(t(*X), -1), (t(*X), 1)],
    "_softmax": [(t(*X), -1, False)],
    "log_softmax.int": [(t(*X), -1)],
    "_log_softmax": [(t(*X), 0, False)],
    "cumsum": [(t(*X), 1)],
    "flip": [(t(*X), [1]), (t(*X), [0, -1])],
    "roll": [(t(*X), [2], [1]), (t(*X), [2])],
    "sort": [(t(*X), 1), (t(*X),)],
    "topk": [(t(*X), 2), (t(*X), 2, 1)],
    "transpose.int": [(t(*X), 0, -1)],
    "movedim.int": [(t(*X), 2, 0), (t(*X), 0, -1)],
    "movedim.intlist": [(t(*X), [0, 1], [1, 2])],
    "moveaxis.int": [(t(*X), 2, 0)],
    "moveaxis.intlist": [(t(*X), [0, 2], [2, 1])],
    "swapaxes": [(t(*X), 0, 2)],
    "swapdims": [(t(*X), -1, 1)],
    "permute": [(t(*X), [2, 0, -2])],
    "unsqueeze": [(t(*X), 1), (t(*X), -1)],
    "squeeze.dim": [(t(3, 1, 5), 1), (t(3, 1, 5), 0)],
    "squeeze.dims": [(t(1, 3, 1), [0, 2])],
    "reshape": [
        (t((2, 3), 5, 7), [2, 15, 7]),
        (t(15, 7), [3, 5, 7]),
        (t(3, 5, 1, 7), [15, 7]),
        (t(5, 6, 4), [5, 4, 6]),
    ],
    "reshape_as": [(t((2, 3), 5, 7), t(2, 15, 7)), (t(5, 6, 4), t(5, 4, 6))],
    "view_as": [(t(15, 7), t(3, 1, 5, 7))],
    "view_as_complex": [(t(*X, 2),)],
    "imag": [(Arg(*X, dtype=torch.complex128),)],
    "view_as_real": [(Arg(*X, dtype=torch.complex128),)],
    "view": [(t(*X), [30, 7]), (t(15, 7), [3, 1, 5, 7])],
    "_unsafe_view": [(t(*X), [6, 35])],
    "flatten.using_ints": [(t(*X), 0, 1), (t(*X), 1)],
    "unflatten.int": [(t(15, 7), 0, [3, 5]), (t(7, (3, 5)), -1, [3, -1])],
    "expand": [(t(3, 1, 7), [3, 5, 7]), (t(3, 7), [4, -1, 7])],
    "expand_as": [(t(3, 1, 7), t(3, 5, 7))],
    "broadcast_to": [(t(3, 1, 7), [4, 3, 5, 7])],
    "slice.Tensor": [
        (t(*X), 1, 1),
        (t(*X), 1, 0, -1),
        (t(*X), 1, 0, 5),
        (t(*X), -1, 2, 5),
        (t(*X), 1, 0, 5, 2),
    ],
    "narrow": [(t(*X), 1, 2, 2), (t(*X), 1, 0, 5)],
    "select.int": [(t(*X), 1, 2), (t(*X), -1, -1)],
    "split.Tensor": [(t(*X), 2, 1), (t(*X), 5, 1)],
    "split.sizes": [(t(*X), [3, 2], 1)],
    "split": [(t(*X), [3, 2], 1)],
    "split_with_sizes": [(t(*X), [3, 4], -1)],
    "chunk": [(t(*X), 2, 1), (t(*X), 2)],
    "tensor_split.sections": [(t(*X), 2, 1)],
    "tensor_split.indices": [(t(*X), [2, 4], 2)],
    "unbind.int": [(t(*X),), (t(*X), -1)],
    "cat": [
        ([t(*X), t(6, 2, 7)], 1),
        ([t(0), t(*X)],),
        ([t(3, (2, 3)), t(5, (3, 2)), t(1, 6)],),
    ],
    "stack": [([t(*X), t(*X)], 1), ([t(3, 1), t(3, 1)], -1)],
    "pad": [(t(*X), [0, 1]), (t(*X), [1, -1, 2, 0])],
    "constant_pad_nd": [(t(*X), [0, 0, 1, 1], 2.0)],
    "diff": [(t(*X),), (t(*X), 1, 1), (t(*X), 1, -1, t(6, 5, 1), None)],
    "index.Tensor": [
        (t(4, 5, 7), [ints(3), None]),
        (t(*X), [None, ints(2, 3), ints(3)]),
        (t(4, 5, 7), [ints(2, 1), ints(3)]),
    ],
    "index_select": [
        (t(*X), 1, ints(3)),
        (t((2, 3), 5), -1, ints(7)),
        (t(5), 0, ints((2, 3))),
        (t(*X), 1, ints()),
    ],
    "gather": [
        (t(*X), -1, ints(6, 1, 4)),
        (t(*X), -1, ints(3, 5, 4)),
        (t(*X), -1, ints(6, 5, 2)),
        (t(*X), 1, ints(6, 2, 4)),
        (t(7, 5), 0, ints(7, 5)),
    ],
    "squeeze": [(t(3, 1, 5),)],
    "scaled_dot_product_attention": [
        (t(2, 4, 5, 3), t(2, 4, 7, 3), t(2, 4, 7, 6)),
        (t(2, 4, 5, 3), t(2, 4, 7, 3), t(2, 4, 7, 6), bools(2, 1, 1, 7)),
        (t((2, 3), 5, 3), t((2, 3), 5, 3), t((2, 3), 5, 6), None, 0.0, True),
        (t(2, 4, 5, 3), t(2, 4, 5, 3), t(2, 4, 5, 6), t(4, 5, 5)),
    ],
    "conv1d": [
        (t((2, 3), 4, 9), t(5, 4, 3), t(5)),
        (t(6, 4, 9), t(4, 1, 3), None, [1], [2], [1], 4),
    ],
    "einsum": [("aij,akj->aik", [t((2, 3), 5, 4), t(6, 2, 4)]), ("ab->ba", [t(3, 5)])],
    "linalg_solve_triangular": [(t(3, (2, 2), 4, 4), t(3, 4, 4, 5))],
    "tril": [(t(3, 4, 4),)],
    "triu": [(t(3, 4, 4), 1)],
    "conv1d.padding": [(t(6, 4, 9), t(5, 4, 3), t(5), [1], "same")],
    "conv2d": [(t((2, 3), 4, 6, 6), t(5, 4, 2, 2), t(5), [2, 2])],
    "conv2d.padding": [(t(6, 4, 5, 5), t(5, 4, 3, 3), t(5), [1], "same")],
    "conv3d": [(t(6, 2, 4, 4, 4), t(5, 2, 2, 2, 2), t(5))],
    "conv3d.padding": [(t(6, 2, 4, 4, 4), t(5, 2, 2, 2, 2), None, [1], "same")],
    "group_norm": [(t((2, 3), 6, 5), 2, t(6), t(6))],
    "slice_scatter": [
        (t(*X), t(6, 4, 7), 1, 1),
        (t(*X), t((2, 3), 4, 7), 1, 0, -1),
        (t(*X), t(6, 5, 3), -1, 2, 5),
        (t(*X), t(6, 3, 7), 1, 0, 5, 2),
        (t(*X), t(*X), 1),
    ],
    "masked_scatter": [(t(*X), bools(6, 5, 1), t(210)), (t(*X), bools(7), t(*X))],
    "repeat": [(t(*X), [1, 2, 1]), (t(5, 7), [2, 1, 3])],
    "repeat_interleave.self_int": [(t(*X), 3, 1), (t(*X), 2, 0), (t(5), 3)],
    "scatter.src": [(t(*X), 1, ints(6, 2, 7, high=5), t(6, 2, 7))],
    "scatter.value": [
        (t(*X), -1, ints(6, 1, 4), 2.0),
        (t(*X), -1, ints(3, 5, 4), 2.0),
        (t(*X), 1, ints((2, 3), 2, 7, high=5), 2.0),
        (t(5), 0, ints(5), 2.0),
    ],
    "scatter_add": [(t(*X), 1, ints(6, 2, 7, high=5), t(6, 2, 7))],
    "scatter_reduce.two": [(t(*X), -1, ints(6, 5, 7), t(*X), "amax")],
    "outer": [(t(5), t((2, 3)))],
    "mv": [(t((2, 3), 5), t(5))],
    "dot": [(t(5), t(5))],
    "var_mean.correction": [(t(*X), [1]), (t(*X), [-1])],
    "std_mean.correction": [(t(*X), [1])],
    "var_mean.dim": [(t(*X), [1], True, True)],
    "std_mean.dim": [(t(*X), [-1])],
    "median.dim": [(t(*X), 1, True)],
    "nanmedian.dim": [(t(*X), -1)],
    "mode": [(t(*X), 1)],
    "kthvalue": [(t(*X), 2, 1)],
    "aminmax": [(t(*X),)],
    "cumprod": [(t(*X), 1)],
    "logcumsumexp": [(t(*X), -1)],
    "argsort": [(t(*X), 1)],
    "argsort.stable": [(t(*X),)],
    "glu": [(t((2, 3), 4, 5), 1), (t(5, (2, 3)), -1)],
    "prelu": [(t(*X), t(5)), (t(*X), t(1)), (t(6, (2, 3), 5), t(6))],
    "bucketize.Tensor": [(t(*X), t(4))],
    "cosine_similarity": [(t(*X), t(5, 7), -1), (t(*X), t(*X), 1)],
    "linalg_cross": [(t((2, 3), 5, 3), t(6, 1, 3))],
    "linalg_vector_norm": [(t(*X), 2, [1], True), (t(*X), 1, [-1])],
    "norm.ScalarOpt_dim": [(t(*X), 2, [1], True)],
    "pairwise_distance": [(t(*X), t(5, 7)), (t(*X), t(6, 1, 7), 2.0, 1e-6, True)],
    "one_hot": [(ints(6, 5, high=4), 4)],
    "tile": [(t(*X), [1, 2, 1]), (t(5, 7), [2, 1, 3]), (t(*X), [2])],
    "meshgrid": [([t(5), t((2, 3))],)],
    "meshgrid.indexing": [([t(5), t((2, 3)), t(7)],)],
    "route_rows": [(ints(7, high=3), 3)],
    "take_rows": [(t(4, (2, 3)), ints(8, high=8), ints(8, high=8), 2)],
    "grouped_mm": [(t(7, 3), t(4, 3, 5), ints(4, high=8))],
    "select_scatter": [(t(*X), t((2, 3), 7), 1, 2), (t(*X), t(6, 5), -1, -1)],
    "attention": [
        (Q, t(2, 2, 5, 3), t(2, 2, 5, 6), None, None, None, None, *CAUSAL),
        (Q, t(2, 4, 5, 3), t(2, 4, 5, 6), None, None, t(1, 4, 5, 5), None, *CAUSAL),
        (Q, t(2, 1, 5, 3), t(2, 1, 5, 3), bools(2, 5), ints(2, 5), t(2, 1, 5, 5), None, *CAUSAL),
    ],
}

KEYWORDS: dict[str, dict[str, Any]] = {
    "linalg_solve_triangular": {"upper": False},
    "sort.stable": {"stable": True, "dim": 1},
    "argsort.stable": {"stable": True, "dim": 1},
    "linalg_cross": {"dim": -1},
    "aminmax": {"dim": 1},
    "meshgrid.indexing": {"indexing": "xy"},
    "clamp": {"min": 0.3},
    "clip": {"min": 0.3},
}
"""Arguments that are given by name."""

MIX_ALL = {"dot", "scalar_tensor", "squeeze", "masked_scatter", "route_rows"} | set(
    "mean sum prod any all var std".split()
)
"""Operators of which nothing can be split."""


def name_of(target: Any) -> str:
    """Without the namespace, and the overload where it has no name."""
    return str(target).split(".", 1)[-1].removesuffix(".default")


def samples(target: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of ``target``: from the table, or from the schema for elementwise and reductions."""
    name = name_of(target)
    if SAMPLES.get(name):
        return [(args, dict(KEYWORDS.get(name, {}))) for args in SAMPLES[name]]
    if RULES[target].__name__ not in ("elementwise", "reduction", "ordering"):
        return []
    whole = name.startswith(("bitwise", "__"))
    dims = iter([X, (5, 1), (7,)])
    args: list[Any] = []
    kwargs: dict[str, Any] = dict(KEYWORDS.get(name, {}))
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            shape = next(dims)
            args.append(ints(*shape) if whole else t(*shape))
        elif argument.name == "dim" and "dim" not in kwargs:
            args.append([1] if "List" in kind else 1)
        elif not argument.has_default_value() and argument.name not in kwargs:
            value = None if "Optional" in kind else 2
            kwargs |= {argument.name: value} if argument.kwarg_only else {}
            args += [] if argument.kwarg_only else [value]
    return [(tuple(args), kwargs)]


def split(value: Tensor, dims: list[Dim], factor: Factor, parts: Sequence[int]) -> list[Tensor]:
    """``value`` in parts along ``factor``; whole for each where it does not have it."""
    for d, dim in enumerate(dims):
        if factor in dim:
            i = dim.index(factor)
            inner = [size_of(dim[:i], {}), factor.size, size_of(dim[i + 1 :], {})]
            pieces = value.unflatten(d, inner).split(list(parts), d + 1)
            return [p.flatten(d, d + 2).contiguous() for p in pieces]
    return [value] * len(parts)


def infer(target: Any, args: Any, kwargs: Any) -> tuple[list[fx.Node], list[fx.Node], Names]:
    """The inputs and outputs of a graph of one call, and the names of their dims by its rule."""
    graph, names = fx.Graph(), Names()
    inputs: list[fx.Node] = []

    def placeholder(arg: Any) -> Any:
        if not isinstance(arg, Arg):
            return arg
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = arg.value
        names.dims[node] = [tuple(Factor(n) for n in dim if n != 1) for dim in arg.factors]
        inputs.append(node)
        return node

    def value(arg: Any) -> Any:
        return arg.value if isinstance(arg, Arg) else arg

    node = graph.call_function(target, fx.node.map_aggregate(args, placeholder), kwargs)
    full = node.meta["val"] = target(*fx.node.map_aggregate(args, value), **kwargs)
    names.dims[node] = RULES[target](names, node)
    assert names.dims[node] is not None, "the rule knows nothing of its own sample"
    if isinstance(full, Tensor):
        return inputs, [node], names
    outputs = [graph.call_function(operator.getitem, (node, i)) for i in range(len(full))]
    for i, output in enumerate(outputs):
        output.meta["val"] = full[i]
        names.dims[output] = RULES[operator.getitem](names, output)
    return inputs, outputs, names


def check(target: Any, args: Any, kwargs: Any) -> int:
    """Hold one call against its parts; the number of factors that the rule claims."""
    inputs, outputs, names = infer(target, args, kwargs)
    values = [n.meta["val"] for n in outputs]
    for node in [*inputs, *outputs]:
        assert [size_of(d, {}) for d in names.of(node)] == list(node.meta["val"].shape)
    call = outputs[0].args[0] if outputs[0].target is operator.getitem else outputs[0]
    everywhere = [[f for d in names.of(n) for f in d] for n in [*inputs, *outputs]]
    factors = dict.fromkeys(f for n in everywhere[: len(inputs)] for f in n)
    claimed = [
        f for f in factors if f not in names.mixed(call) and max(n.count(f) for n in everywhere) < 2
    ]
    nodes = [call] if call is outputs[0] else [call, *outputs]
    piece = subgraph.make_piece("call", nodes, outputs)
    for f in claimed:
        for parts in ([1, f.size - 1], [f.size - 2, 1, 1]):
            if min(parts) < 1:
                continue
            shares = [split(n.meta["val"], names.of(n), f, parts) for n in piece.inputs]
            wanted = [split(v, names.of(n), f, parts) for v, n in zip(values, outputs)]
            for i, n in enumerate(parts):
                got = subgraph.run(piece, [share[i] for share in shares], names, {f: n})
                for ours, want in zip(got, wanted):
                    assert ours.shape == want[i].shape
                    if "empty" not in name_of(target):
                        torch.testing.assert_close(
                            ours, want[i], rtol=1e-12, atol=1e-12, equal_nan=True
                        )
    return len(claimed)


def check_new(target: Any, args: Any, kwargs: Any) -> int:
    """Hold a call that makes dims of its own against the start of it, dim by dim."""
    _, (node,), names = infer(target, args, kwargs)
    piece = subgraph.make_piece("call", [node], [node])
    full = node.meta["val"]
    new = [(d, dim[0]) for d, dim in enumerate(names.of(node)) if dim]
    for d, f in new:
        values = [n.meta["val"] for n in piece.inputs]
        (got,) = subgraph.run(piece, values, names, {f: f.size - 1})
        want = full.narrow(d, 0, f.size - 1)
        assert got.shape == want.shape
        if "empty" not in name_of(target):
            torch.testing.assert_close(got, want)
    return len(new)


@pytest.mark.parametrize("target", [x for x in RULES if x is not operator.getitem], ids=name_of)
def test_what_a_rule_claims_to_be_splittable_is(target: Any) -> None:
    torch.manual_seed(0)
    calls = samples(target)
    assert calls, f"{target} has a rule, but no sample in the table of this file"
    creates = RULES[target].__name__ == "creation"
    claims = [(check_new if creates else check)(target, *call) for call in calls]
    assert sum(claims) or name_of(target) in MIX_ALL, "the samples show nothing"


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.cumsum.default, RULES[aten.relu.default])
    with pytest.raises(AssertionError):
        check(aten.cumsum.default, (t(3, 5), 1), {})
