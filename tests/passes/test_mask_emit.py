"""Nodes made of formulas hold what the formulas say."""

from __future__ import annotations

import random

import pytest
import torch
from mask_graphs import evaluate
from pass_graphs import run, trace
from test_mask_domain import number, truth
from torch import Tensor, fx

from paradyse.passes import mask_domain as d
from paradyse.passes.mask_emit import Emitter

B, S = 2, 5
IDS = torch.tensor([[2, 0, 1, 1, 4], [1, 1, 3, 0, 2]])
HERE = (d.var(0), d.var(1))


def emitted(*formulas: d.Expr) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph that makes a table of each formula, and the tables."""
    gm = trace(lambda *given: given[0] + 0, IDS)
    place = next(n for n in gm.graph.nodes if n.op == "call_function")
    emitter = Emitter(gm.graph, place, (B, S))
    made = [emitter.table(f) for f in formulas]
    gm.graph.output_node().args = (tuple(made),)
    return gm, list(run(gm, IDS))


def check(formula: d.Expr, table: Tensor) -> None:
    assert table.shape == (B, S)
    assert table.dtype == (torch.int64 if isinstance(formula, d.Lin) else torch.bool)
    for b in range(B):
        for s in range(S):
            known = {"arg0_1": IDS}
            assert table[b, s].item() == evaluate(formula, {0: b, 1: s}, known), formula


@pytest.mark.parametrize("seed", range(12))
def test_tables_of_any_formula(seed: int) -> None:
    rng = random.Random(seed)
    formulas: list[d.Expr] = [number(rng, 3), truth(rng, 3), number(rng, 0), truth(rng, 1)]
    for formula, table in zip(formulas, emitted(*formulas)[1], strict=True):
        check(formula, table)


def test_a_table_that_is_there_is_not_looked_up() -> None:
    gm = trace(lambda *given: given[0] + 0, IDS)
    ids, place, _ = gm.graph.nodes
    emitter = Emitter(gm.graph, place, (B, S))
    assert emitter.table(d.atom(d.Load(ids, HERE))) is ids
    shifted = d.atom(d.Load(ids, (d.var(0), d.where(d.le0(d.var(1)), d.ZERO, d.ONE))))
    node = emitter.table(shifted)
    assert node.target == torch.ops.aten.index.Tensor
    gm.graph.output_node().args = (node,)
    check(shifted, run(gm, IDS))


def test_documents_are_equal_where_all_their_numbers_are() -> None:
    gm = trace(lambda *given: given[0] + 0, IDS)
    ids, place, _ = gm.graph.nodes
    pairs = d.floor_div(d.var(1), 2)
    node = Emitter(gm.graph, place, (B, S)).documents((d.atom(d.Load(ids, HERE)), pairs))
    gm.graph.output_node().args = (node,)
    table = run(gm, IDS)
    for b in range(B):
        for s in range(S):
            for t in range(S):
                same = IDS[b, s] == IDS[b, t] and s // 2 == t // 2
                assert (table[b, s] == table[b, t]).item() == bool(same)
