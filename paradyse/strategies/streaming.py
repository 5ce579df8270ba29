"""What variants share that compute one group after the other, with weights that come group by
group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from paradyse.strategies.base import Common, StepContext, Uses
from paradyse.strategies.weight_stream import Casts, GroupTensors, Streams, WeightStream
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.slices import Form
from paradyse.weights.unshard import streams


@dataclass(frozen=True)
class GroupContext:
    """What groups may know of their step (``StepContext``), besides tensors that may have
    gradients. Backward keeps it, so it keeps no values of the call."""

    sizes: Mapping[str, int]
    common: Common
    block_id: int
    sync: GradientSync
    streams: Streams


class Streaming:
    """A variant whose sharded weights come group by group."""

    used: Sequence[int]
    """Groups with something to compute, in order."""
    streamed: Uses
    """Their weights, each with the form in which ranks hold its rows if it comes group by group."""
    forms: Sequence[Form]
    """How a group takes each tensor: values of the rank's tokens, if any, and then the weights."""
    casts: Casts
    """Of these tensors."""

    def stream(self, raw: Callable[[fx.Node], Any], block_id: int) -> WeightStream:
        """The weights that come group by group, before the block is computed.

        Args:
            raw: a weight as it is given to the graph.
            block_id: of the block.
        """
        pairs = [(raw(node), form) for node, form in self.streamed]
        shards = [x if streams(x, form) else None for x, form in pairs]
        local = [None] * (len(self.forms) - len(shards))
        return WeightStream([*local, *shards], self.used, block_id, self.casts)

    def whole_or_shards(self, step: StepContext, uses: Uses) -> dict[fx.Node, Tensor]:
        """The weights of ``uses`` for ``step``: whole, or shards, which come group by group."""
        found = {node: step.raw(node) for node, _ in uses}
        whole = [node for node, form in uses if not streams(found[node], form)]
        return found | dict(zip(whole, step.weights([(n, None) for n in whole]), strict=True))

    def taken(
        self, at: GroupContext, tensors: Sequence[Tensor], again: bool, behind: Callable[[], None]
    ) -> GroupTensors:
        """The tensors, for groups to take their parts of.

        Args:
            at: of the step.
            tensors: values of the rank's tokens and weights, these whole or sharded by groups.
            again: whether backward will ask for them.
            behind: called when the last group's weights are on their way.
        """
        stream = at.streams.take(tensors, self.used, at.block_id, self.casts, again)
        return GroupTensors(tensors, self.forms, stream, at.sync, behind)
