"""What each block of a step costs, by what it took between its edges, where weights are sharded.

Weights are on their way while a neighbour runs, and so are their gradients. What is waited for
there, and what the neighbour's own messages take longer for it, lies between the neighbour's edges.
Two ranks on links of 0.5 Gbit/s, a Llama of hidden 256 at 512 tokens, milliseconds of a layer,
forward and backward: under ``megatron_ts`` attention took 57 and the MLP 53, under ``megatron_cz``
86 and 35. Added up as they are, attention of the one and the MLP of the other are 92 a layer; run
together, they took 133, and attention had 85 of them. Sums over all blocks are right; what they are
made of, the prediction tells better.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradyse.planning.costs import BlockCost

ALL_FROM = 0.25
"""Share of messages of weights in all that blocks are predicted to take, nothing of it hidden, from
which on only the sum over blocks is believed."""


def caused_s(spans_s: Sequence[float], costs: Sequence[BlockCost]) -> list[float]:
    """Seconds that each block causes; together as many as they took.

    Args:
        spans_s: seconds of all blocks of a step between their edges.
        costs: as predicted.
    """
    of_weights = sum(c.parts.weights_s for c in costs)
    share = min(1.0, of_weights / (sum(sum(c.parts) for c in costs) or 1.0) / ALL_FROM)
    ratio = sum(spans_s) / (sum(c.time_s for c in costs) or 1.0)
    return [
        (1 - share) * took + share * ratio * c.time_s
        for took, c in zip(spans_s, costs, strict=True)
    ]
