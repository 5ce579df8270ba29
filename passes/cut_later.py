"""Cut later: tokens are cut off from what is computed of wide values, not from these themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION
from paradyse.graph.edit import call_like, compute
from paradyse.graph.factors import RULES, Dim, Factor, Names, size_of
from paradyse.graph.infer import infer_names
from paradyse.graph.rules import argument, cuts_ends
from paradyse.graph.subgraph import draws, is_tensor, is_weight, with_sizes
from paradyse.passes.finite import rows_are_finite, steep_inputs

aten = torch.ops.aten

_TO_END = 2**63 - 1


def cut_later(gm: fx.GraphModule, ctx: Any) -> int:
    """Compute what each token has by itself of all tokens, and cut some off where it is narrow.

    before: y = log_softmax(slice(x, 1, 0, -1), -1); p = gather(y, -1, slice(labels, 1, 1))
    after:  y = log_softmax(x, -1); q = gather(y, -1, pad(slice(labels, 1, 1), [.., 0, 1]))
            p = slice(q, 1, 0, -1)
    A cut mixes tokens, so that ranks would compute ``y`` [.., words] whole. Rows that are cut off
    have no gradient; of other inputs they are 0, and where an operator could make infinity of them,
    whose product with a gradient of 0 is NaN, it reads 0.5 or 1 in their place.
    Refuses what attention reads later, what stays as wide as it was where its tokens are mixed, and
            what is set to infinity where it was cut off; no random numbers are among what is
            computed so.
    """
    count = 0
    while found := _cut_once_later(gm, ctx):
        count += found
        gm.graph.eliminate_dead_code()
    return count


def _cut_once_later(gm: fx.GraphModule, ctx: Any) -> int:
    nodes = list(gm.graph.nodes)
    seen = _seen_by_attention(nodes)
    cuts = [n for n in nodes if n not in seen and _is_cut(n) and _is_finite_whole(n)]
    if not cuts:
        return 0
    names, done = infer_names(gm.graph), set[fx.Node]()
    for cut in cuts:
        if cut in done or not (kind := _kind_of(cut, names)):
            continue
        alike = [n for n in cuts if n not in done and _kind_of(n, names) == kind]
        done.update(alike)
        wide = max(n.meta["val"].numel() for n in alike)
        roots = [n for n in alike if 2 * n.meta["val"].numel() > wide]
        region = _Region(names, ctx.lengths, kind, {n: n.args[0] for n in roots})
        region.grow(nodes)
        if region.is_worth_it():
            region.rewrite()
            return len(roots)
    return 0


def _seen_by_attention(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Attention, and what it is computed from."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.target is ATTENTION or node in found:
            found.update((node, *node.all_input_nodes))
    return found


def _is_cut(node: fx.Node) -> bool:
    if node.target is not aten.slice.Tensor or not is_tensor(node):
        return False
    value, source = node.meta["val"], node.args[0].meta["val"]
    return value.is_floating_point() and value.shape != source.shape and cuts_ends(node)


def _is_finite_whole(cut: fx.Node) -> bool:
    """Whether the rows that ``cut`` cuts off are not set to infinity."""
    source = cut.args[0]
    return rows_are_finite(source, source.meta["val"].shape[argument(cut, "dim")])


@dataclass(frozen=True)
class _Kind:
    """How tokens are cut off: ``before`` at the start and ``after`` at the end of ``total``."""

    factor: Factor
    """The dim of what is left."""
    total: int
    before: int

    @property
    def after(self) -> int:
        return self.total - self.before - self.factor.size


def _kind_of(node: fx.Node, names: Names) -> _Kind | None:
    """How the slice ``node`` cuts a dim that is no part of another one; None for another node."""
    if node.target is not aten.slice.Tensor or not cuts_ends(node):
        return None
    d = argument(node, "dim")
    whole, left = names.of(node.args[0])[d], names.of(node)[d]
    if len(whole) != 1 or len(left) != 1 or whole == left:
        return None
    return _Kind(left[0], whole[0].size, argument(node, "start") or 0)


@dataclass
class _Region:
    """What is computed of cuts of one kind, token by token, and how it is with all tokens."""

    names: Names
    lengths: Mapping[fx.Node, Any]
    kind: _Kind
    roots: Mapping[fx.Node, fx.Node]
    """The cuts, and what they are cut from."""
    whole: dict[fx.Node, Any] = field(default_factory=dict)
    """Operators of the region -> the fake value that they have with all tokens."""
    wide: set[fx.Node] = field(default_factory=set)
    """The roots, and what in the region is no narrower than what it was made of."""

    def grow(self, nodes: Sequence[fx.Node]) -> None:
        """Take what reads wide values of the region, and may be computed for all tokens.

        Args:
            nodes: of the graph, in order.
        """
        self.wide.update(self.roots)
        for node in nodes:
            read = [a for a in node.all_input_nodes if a in self.wide]
            if read and node not in self.roots and self._takes(node):
                values = {a: self._value(a) for a in node.all_input_nodes}
                try:
                    found = compute(node.target, self._args(node), node.kwargs, values)
                except (RuntimeError, ValueError):  # sizes that no rule has written anew
                    continue
                if _shapes(found) == self._shapes(node):
                    self.whole[node] = found
                    sizes = [a.meta["val"].numel() for a in read if is_tensor(a)]
                    several = not sizes or not is_tensor(node)  # parts, or one of them
                    if several or node.meta["val"].numel() >= min(sizes):
                        self.wide.add(node)

    def is_worth_it(self) -> bool:
        """Whether what leaves the region is less than what comes in."""
        still = [n for n in self.roots if any(u not in self.whole for u in n.users)]
        ends = [n for n in (*self._ends(), *still) if is_tensor(n)]
        left, given = (sum(n.meta["val"].numel() for n in side) for side in (ends, self.roots))
        return bool(self.whole) and left < given

    def rewrite(self) -> None:
        """Write the region anew, and a cut behind each of its ends."""
        made: dict[fx.Node, fx.Node] = dict(self.roots)
        ends = self._ends()
        for node, value in self.whole.items():
            graph = node.graph
            with graph.inserting_before(node):
                for a in node.all_input_nodes:
                    if a not in made and is_tensor(a) and self._times(a):
                        made[a] = self._padded(a)
                args = [fx.map_arg(arg, lambda a: made.get(a, a)) for arg in self._args(node)]
                for i in steep_inputs(node):
                    if node.args[i] in made:
                        args[i] = self._without_ends(node.args[i], args[i])
                kwargs = fx.map_arg(node.kwargs, lambda a: made.get(a, a))
                made[node] = graph.call_function(node.target, tuple(args), kwargs)
                made[node].meta = {**node.meta, "val": value}
                cut = self._cut(node, made[node]) if node in ends else None
            if cut is not None:
                outside = [u for u in node.users if u not in self.whole]
                for user in outside:
                    user.replace_input_with(node, cut)
        for node in reversed(self.whole):
            node.graph.erase_node(node)

    def _ends(self) -> dict[fx.Node, None]:
        """What else reads of the region."""
        inside = self.whole
        return {n: None for n in inside if any(u not in inside for u in n.users)}

    def _takes(self, node: fx.Node) -> bool:
        """Whether ``node`` is computed token by token, and other inputs of it can be padded."""
        known = node.op == "call_function" and node.target in RULES
        if draws(node) or not known or node in self.lengths or node in self.names.unnamed:
            return False
        if node.target is aten.acosh.default:  # NaN of such a number as well
            return False
        if self.kind.factor in self.names.mixed(node) or self._is_cut_before(node):
            return False
        if any(self._count(dims) != 1 for dims in self.names.of_each(node)):
            return False
        return all(self._may_read(a) for a in node.all_input_nodes)

    def _is_cut_before(self, node: fx.Node) -> bool:
        """Whether ``node`` is a cut along a dim in front of the tokens'. Such cuts come last: of
        two, each could be put behind the other for ever."""
        dims = self.names.of(node) if _is_cut(node) else []
        at = next((d for d, dim in enumerate(dims) if self._count([dim])), 0)
        return bool(dims) and argument(node, "dim") % len(dims) < at

    def _may_read(self, a: fx.Node) -> bool:
        if a in self.roots or a in self.whole or not is_tensor(a) or not self._times(a):
            return True
        return not is_weight(a) and self._times(a) == 1

    def _count(self, dims: Sequence[Dim]) -> int:
        return sum(f is self.kind.factor for dim in dims for g in dim for f in g.resolve())

    def _times(self, node: fx.Node) -> int:
        return self._count(self.names.of(node))

    def _size(self, dim: Dim) -> int:
        return int(size_of(dim, {self.kind.factor: self.kind.total}))

    def _args(self, node: fx.Node) -> tuple[Any, ...]:
        """``node``'s arguments with sizes of all tokens."""
        return with_sizes(node, self.names, self._size, lambda dim: self._count([dim]) > 0)

    def _shapes(self, node: fx.Node) -> list[list[int]]:
        return [[self._size(d) for d in dims] for dims in self.names.of_each(node)]

    def _value(self, a: fx.Node) -> Any:
        """The fake value of an input with all tokens."""
        if a in self.whole:
            return self.whole[a]
        value = a.meta["val"]
        if a in self.roots:
            return self.roots[a].meta["val"]
        if not is_tensor(a) or not self._times(a):
            return value
        return value.new_empty([self._size(d) for d in self.names.of(a)])

    def _parts(self, node: fx.Node) -> tuple[int, list[int], list[int]]:
        """Where the dim of tokens is in ``node`` if it stands by itself; the shape of ``node``
        then, with the tokens that are left and with all."""
        dims, factor = self.names.of(node), self.kind.factor
        d = next(i for i, dim in enumerate(dims) if factor in dim)
        at = dims[d].index(factor)
        sizes = [[size_of(dim, {}) for dim in side] for side in (dims[:d], dims[d + 1 :])]
        outer, inner = (prod(f.size for f in side) for side in (dims[d][:at], dims[d][at + 1 :]))
        lead = [*sizes[0], *([outer] if at else [])]
        rest = [*([inner] if at + 1 < len(dims[d]) else []), *sizes[1]]
        left, total = factor.size, self.kind.total
        return len(lead), [*lead, left, *rest], [*lead, total, *rest]

    def _padded(self, a: fx.Node) -> fx.Node:
        """``a``, of the tokens that are left, with zeros for those cut off: where it was cut from
        there may be what is no number, or no index."""
        return self._pad(a, a)

    def _pad(self, a: fx.Node, x: fx.Node) -> fx.Node:
        """``x``, which has the dims of ``a``, with zeros for the tokens that are cut off."""
        dim, left, whole = self._parts(a)
        pad = [0, 0] * (len(left) - 1 - dim) + [self.kind.before, self.kind.after]
        x = x if left == [*x.meta["val"].shape] else call_like(x, aten.reshape.default, (x, left))
        x = call_like(x, aten.constant_pad_nd.default, (x, pad, 0))
        shape = [self._size(d) for d in self.names.of(a)]
        return x if shape == whole else call_like(x, aten.reshape.default, (x, shape))

    def _without_ends(self, a: fx.Node, x: fx.Node) -> fx.Node:
        """``x``, which is ``a`` with all tokens, with a number for those that are cut off, at which
        gradients are finite."""
        yes = call_like(x, aten.full_like.default, (x, True), {"dtype": torch.bool})
        there = self._pad(a, self._cut(a, yes))
        other = 0.5 if x.meta["val"].is_floating_point() else 1
        return call_like(x, aten.where.ScalarOther, (there, x, other))

    def _cut(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """The tokens that are left of ``x``, which has the dims of ``node`` with all tokens."""
        dim, left, whole = self._parts(node)
        shape = [*node.meta["val"].shape]
        x = x if whole == [*x.meta["val"].shape] else call_like(x, aten.reshape.default, (x, whole))
        end = -self.kind.after if self.kind.after else _TO_END
        x = call_like(x, aten.slice.Tensor, (x, dim, self.kind.before, end))
        return x if left == shape else call_like(x, aten.reshape.default, (x, shape))


def _shapes(value: Any) -> list[list[int]]:
    several = value if isinstance(value, tuple | list) else [value]
    return [[*v.shape] for v in several]
