"""A block as ``post(sum_g f(x, W_g))``: what ``groups.analyse`` finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from paradyse.graph.factors import Factor
from paradyse.graph.subgraph import Piece
from paradyse.kernels.head_slots import HeadSlots
from paradyse.weights.slices import Form, Rows


class Unsplittable(NotImplementedError):
    """A block cannot be computed group by group; the text says why."""


@dataclass(frozen=True)
class Weight:
    """A weight as one linear takes it."""

    node: fx.Node
    """The parameter."""
    form: Form
    chain: tuple[fx.Node, ...] = ()
    """Casts and transposes between the parameter and the linear."""

    def apply(self, value: Tensor) -> Tensor:
        """The linear's argument, from ``value``: the parameter or its rows."""
        for node in self.chain:
            value = node.target(value, *node.args[1:], **node.kwargs)
        return value

    def shape(self) -> list[int]:
        """Shape of the parameter in ``form``."""
        shape = list(self.node.meta["val"].shape)
        if self.form is not None:
            shape[self.form.dim] = len(self.form.groups[0])
        return shape


@dataclass(frozen=True)
class Projection:
    """A linear restricted to a group."""

    node: fx.Node
    x: fx.Node
    """What it reads."""
    weight: Weight
    bias: Weight | None


@dataclass(frozen=True)
class Leaf:
    """A value that is a part of an up projection's output, rearranged."""

    node: fx.Node
    start: int
    num_rows: int


@dataclass(frozen=True)
class Up:
    """An up projection restricted to a group: one linear, or several joined, then its leaves."""

    node: fx.Node
    """The value that the leaves are parts of."""
    parts: tuple[Projection, ...]
    join: Piece
    """From the linears to ``node``: a fused projection and its adapter are added up before they
    are taken apart. Elementwise, so it holds for any rows."""
    leaves: tuple[Leaf, ...]


def up_weights(ups: Sequence[Up]) -> list[Weight]:
    """Weights of the linears of ``ups``, each with its bias."""
    parts = [part for up in ups for part in up.parts]
    return [w for part in parts for w in (part.weight, part.bias) if w is not None]


@dataclass(frozen=True)
class Groups:
    """A block as ``post(sum_g f(x, W_g))``. See ``analyse``."""

    block: Any
    slots: HeadSlots
    outer: Factor | None
    """The factor of KV heads, or of columns; None where there is one KV head."""
    inner: Factor | None
    """The factor of query heads of one KV head; None where there is one."""
    inputs: tuple[fx.Node, ...]
    """What the up projections read: the normalized input, and what adapters make of it."""
    ups: tuple[Up, ...]
    core: Piece
    """From the leaves to what ``downs`` read."""
    region_weights: dict[fx.Node, Form]
    """Weights that ``core`` reads: by rows where they have a dim of heads, else whole."""
    slices: dict[fx.Node, Rows]
    """Other inputs of ``core`` that have a dim of heads."""
    downs: tuple[Projection, ...]
    """Each gives a partial sum; biases are added to the whole."""

    @property
    def weights(self) -> list[Weight]:
        """Weights of up projections, core and down projections, without biases of the last."""
        region = [Weight(n, form) for n, form in self.region_weights.items()]
        return [*up_weights(self.ups), *region, *(d.weight for d in self.downs)]

    @property
    def sizes(self) -> dict[Factor, int]:
        """Sizes of the factors of heads (or columns) within a group."""
        sizes = ((self.outer, self.slots.slots_per_rank), (self.inner, self.slots.heads_per_slot))
        return {f: n for f, n in sizes if f is not None}

    def text(self) -> str:
        """What distinguishes two analyses of pieces of one structure."""
        rows = [[(leaf.start, leaf.num_rows) for leaf in up.leaves] for up in self.ups]
        return f"slots {self.slots.slots_per_rank} x {self.slots.heads_per_slot}, leaves {rows}"
