"""Blocks as sums over groups of heads or columns: ``post(sum_g f(x, W_g))``.

``analyse`` finds, from names and data movement alone, which rows of each weight belong to which
head (or intermediate column), so any layout of a fused projection is handled alike: the rows of
group g are taken from the weights, and everything between the projections runs at the group's
sizes. A block that mixes heads before its last projection is refused with the reason.

Throughout, ``scope`` is what all variants of the capture share: names of dims, axis.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.factors import Factor
from paradyse.graph.subgraph import is_tensor, is_weight, make_piece, run
from paradyse.strategies.base import Scope
from paradyse.strategies.groups.heads import deal_heads
from paradyse.strategies.groups.model import Groups, Leaf, Projection, Unsplittable, Up, Weight
from paradyse.torch_private import unset_fake_temporarily
from paradyse.types import EXPERTS
from paradyse.weights.slices import Form, Rows

aten = torch.ops.aten


def _operators(names: str) -> set[Any]:
    """ATen's operators by name, the default overload where none is named."""
    split = (name.partition(".") for name in names.split())
    return {getattr(getattr(aten, packet), overload or "default") for packet, _, overload in split}


_CASTS = _operators("to.dtype to.dtype_layout to.device _to_copy alias")
_FLIPS = _operators("t numpy_T mT transpose.int permute")
_MOVES = {operator.getitem} | _operators(
    "reshape permute t squeeze unsqueeze narrow numpy_T clone contiguous alias transpose.int"
    " slice.Tensor select.int split.Tensor split_with_sizes chunk unbind.int squeeze.dim"
    " flatten.using_ints unflatten.int index.Tensor"
)
"""Operators that move elements and change none."""

_JOINS = _operators("add.Tensor mul.Tensor div.Tensor") | _CASTS
"""Operators by which a projection and its adapter are added up, each row by itself."""

_MAKES = _operators("expand broadcast_to zeros ones full scalar_tensor")
"""Operators that may give a dim of heads to what has none."""


def analyse(scope: Scope, block: Any) -> Groups:
    """Find the groups of ``block``, one for each rank of the scope's axis.

    Raises:
        Unsplittable: with the reason.
    """
    with unset_fake_temporarily():
        return _Analysis(scope, block).result()


def weight_only(node: fx.Node, scope: Scope, known: dict[fx.Node, bool]) -> bool:
    """Whether ``node`` is a weight or computed from weights alone; ``known`` keeps answers."""
    if node not in known:
        known[node] = is_weight(node) or (
            node.op == "call_function"
            and bool(node.all_input_nodes)
            and not factors_of(scope, node) & {*scope.tokens}
            and all(weight_only(a, scope, known) for a in node.all_input_nodes)
        )
    return known[node]


def factors_of(scope: Scope, node: fx.Node) -> set[Factor]:
    """All factors in the dims of ``node``, or of its several results."""
    return scope.names.factors(node)


def closure(
    scope: Scope,
    outputs: Iterable[fx.Node],
    members: Iterable[fx.Node],
    stops: Iterable[fx.Node] = (),
) -> list[fx.Node]:
    """What ``outputs`` need of ``members`` and of what weights alone give, in graph order.

    Args:
        stops: values that are there already.
    """
    inside, halt = set(members), set(stops)
    known: dict[fx.Node, bool] = {}
    found: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in halt or node in found or node.op != "call_function":
            continue
        if node in inside or weight_only(node, scope, known):
            found.add(node)
            stack += node.all_input_nodes
    if not found:
        return []
    return [n for n in next(iter(found)).graph.nodes if n in found]


@lru_cache(maxsize=512)
def _shared(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """One object for equal tables: a deep model has many blocks alike."""
    return groups


class _Analysis:
    def __init__(self, scope: Scope, block: Any):
        self.scope, self.block = scope, block
        self.names = scope.names
        self.outer, self.inner = self._split_factors()
        self.heads = {f for f in (self.outer, self.inner) if f is not None}
        num_kv = self.outer.size if self.outer is not None else 1
        ratio = self.inner.size if self.inner is not None else 1
        self.slots = deal_heads(num_kv * ratio, num_kv, scope.axis.size)
        self.members = set(block.region)
        self.spoiled_below = self._spoiled_below()

    def _what(self) -> str:
        return "heads" if self.block.kind == "attention" else "intermediate columns"

    def _split_factors(self) -> tuple[Factor | None, Factor | None]:
        """(KV heads, query heads of each); the second is None without GQA, the first with MQA."""
        if self.block.kind == EXPERTS:
            raise Unsplittable("its experts are no heads or columns of one projection")
        if self.block.kind == "mlp":
            columns = self.names.of(self.block.down.args[0])[-1]
            if not columns:
                raise Unsplittable("it has one intermediate column")
            return max(columns, key=lambda f: f.size), None
        call = AttentionCall.of(self.block.attention)
        q, k = self.names.of(call.q)[1], self.names.of(call.k)[1]
        if len(q) > 2:
            raise Unsplittable(f"its query heads are of {len(q)} factors {[f.size for f in q]}")
        if not q:
            raise Unsplittable("it has one head")
        if len(q) == 2:
            if k not in (q, q[:1]):
                sizes = [[f.size for f in dim] for dim in (k, q)]
                raise Unsplittable(f"KV heads {sizes[0]} do not divide query heads {sizes[1]}")
            return q
        if not k and call.k.meta["val"].shape[1] == 1:
            return None, q[0]
        if k != q:
            raise Unsplittable("query and KV heads are named differently")
        return q[0], None

    def _spoiled_below(self) -> dict[fx.Node, str]:
        """Node of the block's core -> why one of the region that depends on it cannot run on a
        group's part; "" where all can.
        """
        found: dict[fx.Node, str] = {}
        for node in reversed([*self.block.up, *self.block.region]):
            users = (u for u in node.users if u in self.members)
            found[node] = next((why for u in users if (why := self._spoils(u) or found[u])), "")
        return found

    def _spoils(self, node: fx.Node) -> str:
        """Why ``node`` cannot run on a group's part; "" where it can."""
        if node is self.block.attention or (
            node.target is operator.getitem and node.args[0] is self.block.attention
        ):
            return ""
        where = node.meta.get("module", "").removeprefix("L['self'].")
        at = f"{node.target}" + (f" in {where}" if where else "")
        if self.heads & self.names.mixed(node):
            return f"{at} mixes all {self._what()}"
        read = {f for a in node.all_input_nodes for f in factors_of(self.scope, a)}
        made = (self.heads & factors_of(self.scope, node)) - read
        if made and node.target not in _MAKES:
            return f"{at} makes {self._what()} of something else"
        return ""

    def result(self) -> Groups:
        block = self.block
        sources = self._sources()
        ups = tuple(self._up(node, parts, sources) for node, parts in self._joined().items())
        leaves = [leaf.node for up in ups for leaf in up.leaves]
        read = list(dict.fromkeys(d.args[0] for d in block.downs))
        inside = closure(self.scope, read, self.members, leaves)
        core = make_piece("core", inside, [h for h in read if h in inside])
        for node in core.nodes:
            if reason := self._spoils(node):
                raise Unsplittable(reason)
        region_weights: dict[fx.Node, Form] = {}
        slices: dict[fx.Node, Rows] = {}
        for node in core.inputs:
            if node in leaves or not self.heads & factors_of(self.scope, node):
                if is_weight(node):
                    region_weights[node] = None
                continue
            rows = self._head_rows(node)
            if is_weight(node):
                region_weights[node] = rows
            elif node in block.pre or may_be_split(node):
                raise Unsplittable(f"{node} carries {self._what()} from outside its projections")
            else:
                slices[node] = rows
        return Groups(
            block,
            self.slots,
            self.outer,
            self.inner,
            tuple(dict.fromkeys(sources.values())),
            ups,
            core,
            region_weights,
            slices,
            tuple(map(self._down, block.downs)),
        )

    def _sources(self) -> dict[fx.Node, fx.Node]:
        """Up projection -> what it reads; one node for what is spelled twice, such as a cast."""
        spelled: dict[Any, fx.Node] = {}
        out: dict[fx.Node, fx.Node] = {}
        for up in self.block.up:
            x = up.args[0]
            alike = x.op == "call_function" and x.target in _CASTS
            key = (x.target, str(x.args), str(x.kwargs)) if alike else x
            out[up] = x = spelled.setdefault(key, x)
            if not factors_of(self.scope, x) & {*self.scope.tokens}:
                raise Unsplittable(f"{x} has no sequence dim")
            if self.heads & factors_of(self.scope, x):
                raise Unsplittable(f"{x} carries {self._what()} ahead of the projections")
        return out

    def _down(self, node: fx.Node) -> Projection:
        h = node.args[0]
        columns = self.names.of(h)[-1]
        if not self.heads <= set(columns):
            raise Unsplittable(f"the input of {node} is not made of {self._what()}")
        index = torch.arange(h.meta["val"].shape[-1])
        rows = self._rows(index, columns, pad=True)
        return Projection(node, h, self._weight(node.args[1], 1, rows), self._bias(node, None))

    # ---- up projections

    def _joined(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that are taken apart into leaves -> the linears that they are made of."""
        out: dict[fx.Node, list[fx.Node]] = {}
        for linear in self.block.up:
            node = linear
            try:
                self._leaves(linear)
            except Unsplittable:
                node = self._join_of(linear)
            out.setdefault(node, []).append(linear)
        return out

    def _join_of(self, linear: fx.Node) -> fx.Node:
        """The last value on the way from ``linear`` that has a row for each of its rows."""
        node = linear
        while True:
            users = [u for u in node.users if u in self.members]
            if len(users) != 1 or users[0].target not in _JOINS:
                return node
            node = users[0]

    def _up(self, node: fx.Node, linears: Sequence[fx.Node], sources: dict[fx.Node, fx.Node]) -> Up:
        leaves = self._leaves(node)
        join = make_piece("join", closure(self.scope, [node], self.members, linears), [node])
        shape = node.meta["val"].shape
        alike = all(n.meta["val"].shape == shape for n in [*join.nodes, *join.inputs])
        if not alike or not set(join.inputs) <= set(linears):
            raise Unsplittable(f"{node} is made of more than projections and their adapters")
        moved = closure(self.scope, leaves, self.members, [node])
        index = torch.arange(shape[-1]).view([1] * (len(shape) - 1) + [-1])
        tokens = {f: 1 for dim in self.names.of(node)[:-1] for f in dim}
        piece = make_piece("movement", [n for n in moved if n is not node], leaves)
        values = [index if n is node else self._constant(n) for n in piece.inputs]
        found = run(piece, values, self.names, tokens) if leaves != [node] else (index,)
        groups: list[tuple[int, ...]] = [()] * self.scope.axis.size
        out = []
        for leaf, rows in zip(leaves, found, strict=True):
            factors = [f for d in self.names.of(leaf) for f in d if f not in tokens]
            self._check_order(leaf, tokens)
            part = self._rows(rows, factors, pad=False)
            out.append(Leaf(leaf, len(groups[0]), len(part[0])))
            groups = [a + b for a, b in zip(groups, part, strict=True)]
        table = _shared(tuple(groups))
        parts = []
        for linear in linears:
            weight, bias = self._weight(linear.args[1], 0, table), self._bias(linear, table)
            parts.append(Projection(linear, sources[linear], weight, bias))
        return Up(node, tuple(parts), join, tuple(out))

    def _leaves(self, node: fx.Node) -> list[fx.Node]:
        """The first values on each way from ``node`` that stay whole heads from there on."""
        out: dict[fx.Node, None] = {}

        def visit(at: fx.Node) -> None:
            spoiled = self.spoiled_below[at]
            if is_tensor(at) and not spoiled:
                out[at] = None
                return
            for user in at.users:
                if user not in self.members:
                    continue
                if user.target not in _MOVES:
                    raise Unsplittable(spoiled)
                visit(user)

        visit(node)
        return list(out)

    def _check_order(self, leaf: fx.Node, tokens: dict[Factor, int]) -> None:
        for dim in self.names.of(leaf):
            kinds = [f in tokens for f in dim]
            if kinds != sorted(kinds, reverse=True):
                raise Unsplittable(f"{leaf} merges {self._what()} and tokens into one dim")

    def _constant(self, node: fx.Node) -> Any:
        """The value of an index that the graph holds."""
        piece = make_piece("constant", closure(self.scope, [node], ()), [node])
        roots = piece.inputs if piece.nodes else (node,)
        module: Any = node.graph.owning_module
        if module is None or any(n.op != "get_attr" for n in roots):
            raise Unsplittable(f"its projections are taken apart by the computed index {node}")
        values = [getattr(module, str(n.target)).cpu() for n in roots]
        return run(piece, values, self.names, {})[0] if piece.nodes else values[0]

    # ---- rows

    def _rows(
        self, index: Tensor, factors: Sequence[Factor], pad: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Per group the elements of ``index`` that are its heads', in the order of ``factors``.

        Args:
            pad: -1 for what belongs to a missing head; else a head that exists stands in for it,
                so that all that is computed from it is finite.
        """
        grid = index.reshape([f.size for f in factors])
        along = [factors.index(f) for f in (self.outer, self.inner) if f in factors]
        rest = [d for d in range(grid.ndim) if d not in along]
        has_outer, has_inner = self.outer in factors, self.inner in factors
        if has_inner and not has_outer and self.slots.num_kv_heads > 1:
            raise Unsplittable("query heads stand apart from their KV heads")
        if len(set(factors)) < len(factors):
            raise Unsplittable("a factor occurs twice in one value")
        flat = grid.permute(*along, *rest).flatten(0, len(along) - 1) if along else grid[None]
        groups = []
        for kv, q in zip(self.slots.kv, self.slots.q, strict=True):
            heads = torch.tensor(q if has_inner else kv if has_outer else [0])
            rows = flat[heads.clamp(min=0)]
            if pad:
                rows = torch.where((heads >= 0).view([-1] + [1] * (rows.ndim - 1)), rows, -1)
            if len(along) == 2:
                rows = rows.unflatten(0, (len(kv), self.slots.heads_per_slot))
            if along:
                rows = rows.permute([[*along, *rest].index(d) for d in range(grid.ndim)])
            groups.append(tuple(rows.flatten().tolist()))
        return _shared(tuple(groups))

    def _head_rows(self, node: fx.Node) -> Rows:
        """The slice of ``node`` along its dim of heads."""
        dims = self.names.of(node)
        at = [i for i, d in enumerate(dims) if self.heads & set(d)]
        if len(at) != 1:
            raise Unsplittable(f"{node} has several dims of {self._what()}")
        dim = dims[at[0]]
        if any(f in (*self.scope.tokens, self.scope.batch) for f in dim):
            raise Unsplittable(f"{node} merges {self._what()} and tokens into one dim")
        return Rows(at[0], self._rows(torch.arange(node.meta["val"].shape[at[0]]), dim, pad=False))

    def _bias(self, linear: fx.Node, rows: tuple[tuple[int, ...], ...] | None) -> Weight | None:
        bias = linear.args[2] if len(linear.args) > 2 else None
        return self._weight(bias, 0, rows) if bias is not None else None

    def _weight(self, arg: fx.Node, dim: int, rows: tuple[tuple[int, ...], ...] | None) -> Weight:
        """Follow a linear's weight or bias back to the parameter; rows along ``dim`` of ``arg``."""
        chain: list[fx.Node] = []
        node = arg
        while not is_weight(node):
            kept = node.op == "call_function" and node.target in _CASTS | _FLIPS
            if not kept or len(node.all_input_nodes) != 1:
                raise Unsplittable(
                    f"a projection's weight is computed ({node.target}), not a parameter"
                )
            if node.target in _FLIPS:
                ndim = node.meta["val"].ndim
                if ndim != 2:
                    raise Unsplittable(f"a projection's weight is taken from one of {ndim} dims")
                dim = 1 - dim
            chain.append(node)
            node = node.args[0]
        return Weight(node, Rows(dim, rows) if rows is not None else None, tuple(reversed(chain)))


def may_be_split(node: fx.Node) -> bool:
    """Whether ``node`` may lie split: what no hidden state has gone into is replicated."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        val = at.meta.get("val")
        given = at.op == "placeholder" and not is_weight(at) and isinstance(val, Tensor)
        if given and val.is_floating_point() and val.ndim >= 3:
            return True
        if at.target == aten.embedding.default:
            return True
        stack += at.all_input_nodes
    return False
