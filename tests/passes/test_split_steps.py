"""Splitting a graph into steps, on a toy graph: what each holds, reads, gives, and when it goes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pass_graphs import context, toy_inputs, trace
from pass_graphs import toy as model
from torch import Tensor, fx
from torch.nn import functional as F

from paradyse.distributed.axis import SINGLE, Axis
from paradyse.graph.factors import Factor, Names
from paradyse.passes.outline_blocks import Block
from paradyse.passes.pipeline import run_passes
from paradyse.passes.split_steps import HeadStep, LookUpStep, Schedule, split_steps
from paradyse.strategies.base import EAGER_NODES

aten = torch.ops.aten
TWO = Axis("of 2", 2, 0)
SEQ = Factor(7)


class Toy:
    """ids -> embedding -> two blocks of one linear each -> norm -> sum over rows -> root.

    A cast of a weight is read before, between and behind the blocks; a table of positions comes of
    nothing; the inside of the first block is returned, as it is and scaled.
    """

    note: Callable[[str], None]

    def __init__(self, axis: Axis = TWO, dropout: bool = False) -> None:
        self.graph = fx.Graph()
        self.axis, self.seq, self.batch, self.seqs = axis, SEQ, None, {SEQ: None}
        self.names, self.partial, self.tails = Names(), set[fx.Node](), set[fx.Node]()
        self.schedule: Schedule | None = None
        self.options = SimpleNamespace(passes_off=())
        self.embed, self.weight = (self._input(n, (4, 4), True) for n in ("embed", "weight"))
        self.ids = self._input("ids", (7,), False)
        self.cast = self._call(aten.to.dtype, self.weight, torch.float64, shape=(4, 4))
        self.table = self._call(aten.arange.default, 7, shape=(7,))
        self.x = self._call(aten.embedding.default, self.embed, self.ids)
        self.start = self._call(aten.mul.Tensor, self.x, self.cast)
        first, self.inside = self._block(self.start)
        drop = aten.dropout.default
        between = self._call(drop, first, 0.1, True) if dropout else first
        second, _ = self._block(between)
        self.normed = self._call(aten.mul.Tensor, second, self.cast)
        self.total = self._call(aten.sum.default, self.normed, shape=())
        self.loss = self._call(aten.sqrt.default, self.total, shape=())
        self.tail = self._call(aten.mul.Tensor, self.inside, 2.0)
        self.graph.output((self.loss, self.inside, self.tail, self.table))
        nodes = list(self.graph.nodes)
        replicated = {self.ids, self.cast, self.table, self.loss}
        split = {n for n in nodes if n.op == "call_function"} - replicated
        self.split = dict.fromkeys(split, SEQ)
        self.partial = {self.total}
        self.tails = {self.tail}
        self.heads: list[Any] = []
        self.mixing: list[Any] = []
        self.blocks = [
            Block("mlp", i, [up], [act], [down], label=f"layers.{i}.mlp", seq=SEQ)
            for i, (up, act, down) in enumerate(self._made)
        ]

    _made: list[tuple[fx.Node, fx.Node, fx.Node]]

    def _input(self, name: str, shape: tuple[int, ...], weight: bool) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(weight=weight, val=torch.empty(shape))
        self._name(node)
        return node

    def _call(self, op: Any, *args: Any, shape: tuple[int, ...] = (7, 4)) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta["val"] = torch.empty(shape)
        self._name(node)
        return node

    def _name(self, node: fx.Node) -> None:
        self.names.dims[node] = [(SEQ,) if n == 7 else (Factor(n),) for n in node.meta["val"].shape]

    def _block(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        up = self._call(aten.linear.default, x, self.weight)
        act = self._call(aten.relu.default, up)
        down = self._call(aten.linear.default, act, self.weight)
        self._made = [*getattr(self, "_made", []), (up, act, down)]
        return down, up

    def run(self) -> Schedule:
        gm = fx.GraphModule(torch.nn.Module(), self.graph)
        assert split_steps(gm, self) == len(self.schedule.steps)
        return self.schedule


def test_blocks_and_what_lies_between_in_an_order_in_which_all_is_there() -> None:
    toy = Toy()
    steps = toy.run().steps
    kinds = [s.index if s.index >= 0 else "split" if s.split else "whole" for s in steps]
    assert kinds == ["whole", "split", 0, 1, "split", "whole"]
    assert [s.position for s in steps] == list(range(6))
    there = {n for n in toy.graph.nodes if n.op == "placeholder"}
    for step in steps:
        assert there.issuperset(step.piece.inputs)
        there.update(step.piece.outputs)
    assert steps[0].piece.outputs == (toy.table,)
    assert steps[4].piece.outputs == (toy.total,)  # a partial sum is added up for the next step
    assert steps[5].piece.outputs == (toy.loss,)


def test_what_comes_of_weights_alone_is_part_of_every_piece_that_reads_it() -> None:
    toy = Toy()
    steps = toy.run().steps
    holders = [s.position for s in steps if toy.cast in s.piece.nodes]
    assert holders == [1, 4]
    assert all(toy.cast not in s.piece.outputs for s in steps)


def test_the_inside_of_a_block_is_computed_again_on_ranks_and_given_on_one() -> None:
    toy = Toy()
    schedule = toy.run()
    assert list(schedule.block_steps[0].sides) == [toy.inside]
    assert schedule.block_steps[0].sides[toy.inside].nodes == (toy.inside,)
    assert list(schedule.tails) == [toy.tail] and schedule.tails[toy.tail].inputs == (toy.inside,)
    one = Toy(SINGLE)
    schedule = one.run()
    assert not schedule.tails and not schedule.block_steps[0].sides
    assert one.inside in schedule.block_steps[0].piece.outputs
    assert any(one.tail in s.piece.nodes for s in schedule.steps)
    assert not any(s.split for s in schedule.steps if s.index < 0)


def test_values_go_after_their_last_reader_and_outputs_stay() -> None:
    toy = Toy()
    schedule = toy.run()
    freed = {n: i for i, nodes in enumerate(schedule.freed) for n in nodes}
    assert freed[toy.start] == 2 and freed[toy.total] == 5
    assert not {toy.loss, toy.inside, toy.table, toy.weight}.intersection(freed)


def test_a_weight_is_booked_to_the_first_that_computes_a_part_with_it() -> None:
    toy = Toy()
    schedule = toy.run()
    owners = {n: step.block_id for n, step in schedule.first_readers.items()}
    assert owners == {toy.embed: schedule.between_id, toy.weight: schedule.between_id}


@pytest.mark.parametrize("dropout", [False, True])
def test_dropout_is_seen(dropout: bool) -> None:
    assert Toy(dropout=dropout).run().has_dropout == dropout


def test_small_pieces_are_not_compiled() -> None:
    toy = Toy()
    for node in toy.graph.nodes:
        node.meta["tensor_meta"] = SimpleNamespace(requires_grad=True)
    for step in toy.run().steps:
        if step.index < 0:
            assert step.eager == (len(step.piece.nodes) <= EAGER_NODES)


def test_a_graph_without_a_sequence_has_no_schedule() -> None:
    toy = Toy()
    toy.seq = None
    assert split_steps(fx.GraphModule(torch.nn.Module(), toy.graph), toy) == 0
    assert toy.schedule is None


def with_logits(ids: Tensor, labels: Tensor, *weights: Tensor) -> Any:
    logits = F.linear(F.embedding(ids, weights[0]), weights[-1])
    return model(ids, labels, *weights), logits.logsumexp(-1), logits


def test_a_head_is_a_step_whose_logits_may_be_late() -> None:
    gm, ctx = trace(with_logits, *toy_inputs(), weights=7), context()
    run_passes(gm, ctx)
    assert ctx.schedule is not None
    steps = [s for s in ctx.schedule.steps if isinstance(s, HeadStep)]
    first, second = sorted(steps, key=lambda s: len(s.piece.outputs))
    assert [s.levers("tiled") for s in (steps[0], ctx.schedule.steps[0])] == ["tiled", ""]
    assert first.gives("").outputs == first.gives("tiled").outputs and not first.late("tiled")
    (logits,) = second.head.logits
    assert set(second.gives("").outputs) - set(second.gives("tiled").outputs) == {logits}
    assert not second.late("") and list(second.late("tiled")) == [logits]
    assert [n.name for n in second.late("tiled")[logits].outputs] == [logits.name]
    there = {n for n in gm.graph.nodes if n.op == "placeholder"}
    for step in ctx.schedule.steps:
        assert there.issuperset(step.piece.inputs)
        there.update(step.piece.outputs)


@pytest.mark.parametrize(
    ("extra", "why"),
    [((), ""), ((-1, True), "its gradient is sparse or scaled by frequency")],
)
def test_a_table_of_the_heads_words_may_be_shared_by_rows(extra: Any, why: str) -> None:
    toy, notes = Toy(), list[str]()
    toy.note = notes.append
    toy.heads = [SimpleNamespace(linears=[SimpleNamespace(args=(toy.x, toy.weight))], nodes=())]
    toy.x.args = (*toy.x.args, *extra)
    step = toy.run().steps[1]
    if why:
        assert not isinstance(step, LookUpStep)
        assert notes == [f"the table of {toy.x} is needed whole: {why}"]
        return
    assert isinstance(step, LookUpStep) and step.look_ups == (toy.x,) and not notes
    assert [step.levers(v) for v in ("", "tiled", "tiled+vocabulary")] == ["", "", "vocabulary"]
