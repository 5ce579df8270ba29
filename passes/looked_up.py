"""Where no attention says what the sequence is: that of the token ids that are looked up."""

from __future__ import annotations

import torch
from torch import fx

from paradyse.graph.factors import Dim, Factor, Names
from paradyse.graph.subgraph import is_tensor, is_weight

aten = torch.ops.aten


def looked_up_sequences(graph: fx.Graph, names: Names) -> dict[Factor, dict[Dim, None]]:
    """Sequences of token ids [.., B, S] whose rows are looked up in a table: each with its batches.

    Ids are those of the call: of what the graph counts itself, such as distances, nothing is known.

    Args:
        graph: with fake values, before or after any pass.
        names: of its dims.
    """
    found: dict[Factor, dict[Dim, None]] = {}
    for ids in _token_ids(graph):
        *batches, dim = names.of(ids)
        if len(dim) == 1 and dim[0].base is None and not any(dim[0] in b for b in batches):
            found.setdefault(dim[0], {})[batches[0]] = None
    return found


def cut_sequences(graph: fx.Graph, names: Names) -> set[Dim]:
    """Those dims of token ids that a view cuts into several, such as chunks.

    Args:
        graph, names: as of ``looked_up_sequences``.
    """
    dims = (names.of(ids)[-1] for ids in _token_ids(graph))
    return {dim for dim in dims if len(dim) > 1}


def inputs_of(graph: fx.Graph, names: Names, dims: set[Dim]) -> list[tuple[fx.Node, int]]:
    """Inputs of the call, and which dim of them is one of ``dims``.

    Args:
        graph, names: as of ``looked_up_sequences``.
        dims: of several factors.
    """
    given = (n for n in graph.find_nodes(op="placeholder") if is_tensor(n) and not is_weight(n))
    return [(n, d) for n in given for d, dim in enumerate(names.of(n)) if dim in dims]


def _token_ids(graph: fx.Graph) -> list[fx.Node]:
    """[.., B, S] integers that are inputs of the call, or computed of these, and that an
    ``embedding`` looks up."""
    given: set[fx.Node] = set()
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        if node.target == aten.embedding.default and node.args[1] in given:
            found[node.args[1]] = None
        elif not node.meta["val"].is_floating_point():
            data = node.op == "placeholder" and not is_weight(node)
            if data or any(a in given for a in node.all_input_nodes):
                given.add(node)
    return [n for n in found if n.meta["val"].ndim > 1]
