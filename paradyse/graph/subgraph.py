"""Running a part of a graph at sizes other than those it was traced with.

The passes work on a graph with plain integer sizes. A ``Piece`` is a part of it, a function of its
input values; ``run`` evaluates it with every size argument written anew from the names of dims, so
the same piece serves other lengths (the sequence factor bound to a symbol), a rank's rows (bound
to the local length) or a group of heads (the heads factor bound to fewer).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Reversible, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import Dim, Factor, Length, Names, Product, resolve, size_of

aten = torch.ops.aten

_SHAPED_FIRST = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
_SHAPED_SECOND = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.broadcast_to.default,
    aten.new_empty.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_full.default,
}
_IN_GROUPS = {
    getattr(getattr(aten, f"conv{n}d"), overload)
    for n in (1, 2, 3)
    for overload in ("default", "padding")
}
_END = 2**63 - 1


@dataclass(frozen=True)
class Piece:
    """A part of a graph as a function."""

    name: str
    nodes: tuple[fx.Node, ...]
    """In the order of computation; operators only."""
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def last_reads(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Per node of ``nodes`` the values that nothing reads after it."""
        kept, found = set(self.outputs), []
        for node in reversed(self.nodes):
            values = dict.fromkeys((*node.all_input_nodes, node))
            found.append(tuple(n for n in values if n not in kept))
            kept.update(values)
        return tuple(reversed(found))


def live_nodes(nodes: Reversible[fx.Node], outputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes``, in graph order, that ``outputs`` need; these among them."""
    needed = set(outputs)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [n for n in nodes if n in needed]


def make_piece(name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Piece:
    """The piece ``name`` that computes ``outputs`` by ``nodes``, which are in graph order; its
    inputs are what they read from outside.
    """
    inside = set(nodes)
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    return Piece(name, tuple(nodes), tuple(inputs), tuple(outputs))


def cast_of(piece: Piece, node: fx.Node) -> torch.dtype | None:
    """The smaller dtype that ``piece`` casts its input ``node`` to wherever it reads it, as under
    autocast; None where there is no such one."""
    readers = [n for n in piece.nodes if node in n.all_input_nodes]
    dtypes = {n.meta["val"].dtype if n.target == aten.to.dtype else None for n in readers}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    smaller = dtype is not None and dtype.itemsize < node.meta["val"].dtype.itemsize
    return dtype if smaller else None


def with_sizes(
    node: fx.Node, names: Names, size: Callable[[Dim], Any], varies: Callable[[Dim], bool]
) -> tuple[Any, ...]:
    """``node``'s arguments with sizes written from its dims in ``names``.

    Args:
        size: of a dim, as a number or as text.
        varies: whether the size of a dim is another one than was traced.
    """
    args: Any = node.args
    if node.target in _SHAPED_SECOND:
        return (args[0], [size(d) for d in names.of(node)], *args[2:])
    if node.target in _SHAPED_FIRST:
        return ([size(d) for d in names.of(node)], *args[1:])
    if node.target == aten.unflatten.int:
        at = args[1] % args[0].meta["val"].ndim
        return (args[0], at, [size(d) for d in names.of(node)[at : at + len(args[2])]])
    if node.target in _IN_GROUPS and len(args) > 6 and args[6] == args[0].meta["val"].shape[1]:
        return (*args[:6], size(names.of(args[0])[1]))  # each channel by itself
    if node.target == aten.arange.default:
        return (size(names.of(node)[0]),)
    if node.target == aten.arange.start:
        return (args[0], _plus(args[0], size(names.of(node)[0])))
    if node.target == aten.arange.start_step and all(isinstance(a, int) for a in args):
        step = args[2] if len(args) > 2 else 1
        return (args[0], _plus(args[0], size(names.of(node)[0]), step), step)
    if node.target == aten.narrow.default:
        return (*args[:3], size(names.of(node)[args[1]]))
    if node.target == aten.slice.Tensor and len(args) > 3 and isinstance(args[3], int):
        start, end = args[2] or 0, args[3]
        dim = names.of(node)[args[1]]
        if isinstance(start, int) and start >= 0 and 0 < end < _END and varies(dim):
            return (*args[:3], _plus(start, size(dim), *args[4:]), *args[4:])
    if node.target == aten.slice_scatter.default and len(args) > 4:
        start, end = args[3] or 0, args[4]
        dim = names.of(args[1])[args[2]]
        if start >= 0 and 0 < end < _END and varies(dim):
            return (*args[:4], _plus(start, size(dim), *args[5:]), *args[5:])
    made = names.lengths.get(node, {})
    if not made:
        return args
    found = {i: _number(x, names, size, varies) for i, x in made.items()}
    return tuple(a if found.get(i) is None else found[i] for i, a in enumerate(args))


def _number(
    made: Length | Product,
    names: Names,
    size: Callable[[Dim], Any],
    varies: Callable[[Dim], bool],
) -> Any:
    """The number ``made``; None: as it was traced."""
    if isinstance(made, Length):
        return _length(made, names, size, varies)
    found = [(x, _length(x, names, size, varies)) for x in made.lengths]
    if all(n is None for _, n in found):
        return None
    numbers = [_traced(x) if n is None else n for x, n in found]
    if any(isinstance(n, str) for n in numbers):
        return "*".join(f"({n})" for n in (made.times, *numbers))
    return prod(numbers, start=made.times)


def _traced(made: Length) -> int:
    """The number ``made`` at the sizes that the graph was traced with."""
    return made.start + made.sign * int(made.of.meta["val"].shape[made.dim])


def _length(
    made: Length, names: Names, size: Callable[[Dim], Any], varies: Callable[[Dim], bool]
) -> Any:
    """The number ``made``, of all of a dim also where a rank has a part; None: as it was traced."""
    dim = names.of(made.of)[made.dim]
    if len(dim) != 1 or not varies(dim):
        return None
    base, k = dim[0].origin()
    n = size((base.entire,))
    assert n != -1, f"the size of {made.of} is not known here"
    return _plus(made.start + made.sign * k, n, made.sign)


def _plus(start: int, n: Any, step: int = 1) -> Any:
    return f"{start}+{step}*{n}" if isinstance(n, str) else start + step * n


Override = Callable[..., Any]


def run(
    piece: Piece,
    values: Sequence[Any],
    names: Names,
    sizes: Mapping[Factor, Any],
    overrides: Mapping[fx.Node, Override] | None = None,
) -> tuple[Any, ...]:
    """Evaluate ``piece`` on ``values`` (one per input), each let go of when it was last read.

    Args:
        sizes: factor -> size to use instead of the traced one.
        overrides: node -> function called with the node's evaluated arguments in place of its
            operator.
    """

    def size(dim: Dim) -> Any:
        return size_of(dim, sizes)

    def varies(dim: Dim) -> bool:
        return any(f in sizes or f.origin()[0] in sizes for f in dim)

    env: dict[fx.Node, Any] = dict(zip(piece.inputs, values, strict=True))
    for node, read in zip(piece.nodes, piece.last_reads, strict=True):
        override = overrides.get(node) if overrides else None
        args = node.args if override else with_sizes(node, names, size, varies)
        args, kwargs = fx.map_arg((args, node.kwargs), lambda n: env[n])
        env[node] = (override or node.target)(*args, **kwargs)
        del args, kwargs
        for n in read:
            del env[n]
    return tuple(env[n] for n in piece.outputs)


ONE = "1"
"""The letter of a factor that is taken to be of size 1."""


@dataclass(frozen=True)
class Labels:
    """Letters for the factors whose size varies between calls."""

    of: Mapping[Factor, str] = field(default_factory=dict)

    def dim(self, dim: Dim) -> str:
        """The size of ``dim`` as text: ``2*S``."""
        parts: list[str] = []
        const = 1
        for f in resolve(dim):
            base, k = f.origin()
            if self.of.get(base) == ONE:
                const *= 1 + k
            elif base in self.of:
                parts += [str(const)] * (const > 1) + [
                    f"({self.of[base]}{k:+d})" if k else self.of[base]
                ]
                const = 1
            else:
                const *= f.size
        return "*".join(parts + [str(const)] * (const > 1)) or "1"

    def varies(self, dim: Dim) -> bool:
        """Whether the size of ``dim`` has a letter in it."""
        return any(f.origin()[0] in self.of for f in resolve(dim))

    def dims(self, dims: Sequence[Dim]) -> str:
        """The shape of ``dims`` as text: ``[B, S, 64]``."""
        return "[" + ", ".join(self.dim(d) for d in dims) + "]"


def structure(piece: Piece, names: Names, labels: Labels, numbers: bool = False) -> str:
    """Text that ``piece`` and another share exactly when one compiled function serves both, with
    sizes as ``labels`` writes them.

    Args:
        numbers: whether inputs that stand for a number are written as that of the captured call, as
            where Dynamo takes numbers for constants: two such texts may be of one function.
    """
    known = {n: n.meta.get("number") for n in piece.inputs} if numbers else {}
    index = {node: repr(number) for node, number in known.items() if number is not None}
    lines = []
    for i, node in enumerate(n for n in piece.inputs if n not in index):
        index[node] = f"i{i}"
        val = node.meta["val"]
        if is_tensor(node):
            shape = labels.dims(names.of(node))
            lines.append(f"i{i}: {shape} {val.dtype} {val.device} {'w' if is_weight(node) else ''}")
        else:
            lines.append(f"i{i}: {val}")
    for i, node in enumerate(piece.nodes):
        index[node] = f"n{i}"
        args = node.args
        if is_tensor(node):
            args = with_sizes(node, names, labels.dim, labels.varies)
        text = fx.map_arg((args, node.kwargs), lambda n: _Ref(index[n]))
        lines.append(f"n{i} = {node.target}{text!r}")
    lines.append("return " + ", ".join(index[n] for n in piece.outputs))
    return "\n".join(lines)


class _Ref(str):
    def __repr__(self) -> str:
        return str(self)


def is_tensor(node: fx.Node) -> bool:
    """Whether ``node`` has one tensor as its value."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def draws(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_gradient(node: fx.Node) -> bool:
    """Whether ``node`` had a gradient as the model was traced; its fake value has none."""
    return bool(getattr(node.meta.get("tensor_meta"), "requires_grad", False))


def device_of(inputs: Sequence[fx.Node]) -> torch.device:
    """Where a graph of ``inputs`` computes; numbers that are inputs stay on the host."""
    found = [n.meta["val"].device for n in inputs if is_tensor(n)]
    return next((d for d in found if d.type != "cpu"), found[0])


def is_weight(node: fx.Node) -> bool:
    """Whether ``node`` is a parameter or a buffer of the model."""
    return node.op == "get_attr" or (node.op == "placeholder" and bool(node.meta.get("weight")))


def read_by_none_but(
    inside: Iterable[fx.Node], nodes: Reversible[fx.Node], free: Container[fx.Node]
) -> list[fx.Node]:
    """Operators among ``nodes``, which are in graph order, that are ``free`` and that only those
    ``inside`` read, or others such. One of several results stays with what gives them."""
    within = set(inside)
    found: list[fx.Node] = []
    for node in reversed(nodes):
        usable = node.op == "call_function" and node in free and node.users
        if usable and within.issuperset(node.users):
            within.add(node)
            found.append(node)
    return [n for n in reversed(found) if n.target is not operator.getitem or n.args[0] in within]
