"""Dropouts of a graph, and their numbers in it and in a piece of it."""

from __future__ import annotations

from torch import fx

from paradyse.graph.attention_call import ATTENTION
from paradyse.graph.dropouts import (
    DROPOUT,
    dropout_places,
    first_place,
    has_dropout,
    is_dropout,
    number_dropouts,
)
from paradyse.graph.subgraph import make_piece


def test_a_piece_counts_from_its_first_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mask = (None, None, None, None, 0, -1, -1, 1.0, 0.0)
    first = graph.call_function(DROPOUT, (x, 0.1, True))
    attention = graph.call_function(ATTENTION, (first, first, first, *mask, 0.2))
    without = graph.call_function(ATTENTION, (first, first, first, *mask, 0.0))
    last = graph.call_function(DROPOUT, (attention, 0.1, True))
    number_dropouts(graph)
    attention.prepend(last)
    assert dropout_places([*graph.nodes]) == {first: 0, attention: 1, last: 2}
    assert dropout_places([first, without, last]) == {first: 0, last: 2}
    assert dropout_places([attention, last]) == {attention: 0, last: 1}
    assert dropout_places([last]) == {last: 0} and first_place([last]) == 2
    assert dropout_places([without]) == {} and first_place([without]) == 0
    assert is_dropout(attention) and not is_dropout(without)
    assert has_dropout(make_piece("last", [last], [last]))
    assert not has_dropout(make_piece("without", [without], [without]))
