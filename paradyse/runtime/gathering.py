"""What the steps of one call gather of sharded weights: which, in which form, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed import collectives
from paradyse.distributed.held import forget_held
from paradyse.distributed.lanes import Overlap
from paradyse.distributed.named_blocks import NamedBlocks
from paradyse.passes.split_steps import HeadStep, Step
from paradyse.runtime.program import Program, StepConstants
from paradyse.strategies.base import PieceVariant
from paradyse.strategies.streaming import Streaming
from paradyse.strategies.weight_stream import Streams, WeightStream
from paradyse.weights import unshard
from paradyse.weights.cast_shard import CastShard, at_rest
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.unshard import Gathered, Shelf
from paradyse.weights.vectors import Vectors

Wholes = Mapping[fx.Node, Tensor]
"""Weights that were gathered for one step."""
Shards = Mapping[fx.Node, ShardedTensor | CastShard]
"""Weights at rest, as one step takes them."""


class Gathering:
    """Of one call of ``program``.

    Args:
        constants: of the call's sizes and plan.
        env: the values of the call; its weights are read when a step asks for them.
        sync: how gradients of the call come together.
    """

    def __init__(
        self,
        program: Program,
        constants: StepConstants,
        env: Mapping[fx.Node, Any],
        sync: GradientSync,
    ) -> None:
        self.program, self.constants, self.env = program, constants, env
        ahead, in_group = program.everyone.session.of(Overlap).on, program.in_group
        self.shelf = Shelf(ahead, sync, program.axis.size if in_group else 0)
        self.streams = Streams(ahead and not in_group, self._stream)
        """Weights that come group by group."""
        self.is_sharded = any(isinstance(env[n], ShardedTensor) for n in program.weight_nodes)
        """Whether any weight is."""
        self._vectors: Vectors | None = None
        self._casts: dict[tuple[fx.Node, torch.dtype], CastShard] = {}

    def begin(self) -> None:
        """The call is about to run: bring the vectors that blocks have in one message."""
        program = self.program
        forget_held(program.axis)
        if self.is_sharded and not program.in_group and program.replicas.size == 1:
            self._vectors = Vectors(program.schedule.between_id)
            # a head by rows of the vocabulary gathers its norm for itself, as plans reckon with
            steps = (s for s in program.steps if s.split and not isinstance(s, HeadStep))
            asked = ((s.block_id, self._shards(s).values()) for s in steps)
            self._vectors.gather(asked, self.shelf)

    @property
    def apart(self) -> frozenset[int]:
        """Positions of the steps that gather weights of their own."""
        needed = ((s, self._shards(s)) for s in self.program.steps)
        return frozenset(
            s.position for s, shards in needed if shards and self._vectors_of(s, shards) is None
        )

    def unshard(self, step: Step) -> tuple[Wholes, Gathered | None]:
        """The weights that ``step`` needs gathered, and what gives them back."""
        shards = self._shards(step)
        if not shards:
            return {}, None
        vectors = self._vectors_of(step, shards)
        bring = unshard.gather if vectors is None else vectors.take
        wholes, gathered = bring(shards.values(), self._booked_to(step), step.split, self.shelf)
        if gathered is not None:
            gathered.holds = self._begins_with_message(step.position)
        return dict(zip(shards, wholes, strict=True)), gathered

    def gather(self, step: Step, shard: ShardedTensor) -> Tensor:
        """``shard`` whole, for a part of the work of ``step``."""
        return unshard.gather([shard], self._booked_to(step), True, self.shelf)[0][0]

    def fetch_behind(self, step: Step, first: Step | None = None) -> None:
        """``step`` is about to run, or a run of steps from ``first`` to it: start on the weights
        that the one behind will gather."""
        self.streams.position = step.position
        behind = step.position + 1
        if self.is_sharded and behind < len(self.program.steps):
            following = self.program.steps[behind]
            shards = self._shards(following)
            if self._vectors_of(following, shards) is None:
                held = self._begins_with_message((first or step).position)
                self.shelf.fetch([*shards.values()], self._booked_to(following), held)

    def _begins_with_message(self, position: int) -> bool:
        """Whether the step at ``position`` waits for a message first, behind which others start."""
        program = self.program
        if program.in_group:
            return False
        step = program.steps[position]
        variant = program.variant(step, self.constants.strategy(step))
        return isinstance(variant, PieceVariant) and variant.begins_with_message

    def _vectors_of(self, step: Step, shards: Shards) -> Vectors | None:
        """What came when the call began, if all ``shards``, which ``step`` needs, are there."""
        if self._vectors is not None and self._vectors.have(shards.values(), step.split):
            return self._vectors
        return None

    def _shards(self, step: Step) -> Shards:
        """The weights that ``step`` needs in another form than they lie in, as it takes them."""
        if not self.is_sharded:
            return {}
        nodes = self.program.gathers(step, self.constants.strategy(step), self.env)
        return {n: self._shard(step, n) for n in nodes}

    def _shard(self, step: Step, node: fx.Node) -> ShardedTensor | CastShard:
        dtype, shard = self.program.cast(step, node), self.env[node]
        if dtype is None:
            return shard
        cast = self._casts.get((node, dtype))
        if cast is None or at_rest(cast) is not shard:  # a weight that is averaged is another one
            cast = self._casts[node, dtype] = CastShard(shard, dtype)
        return cast

    def _stream(self, position: int) -> WeightStream | None:
        """The weights of the step at ``position``, if they come group by group."""
        if not self.is_sharded or position >= len(self.program.steps):
            return None
        step = self.program.steps[position]
        variant = self.program.variant(step, self.constants.strategy(step))
        if not isinstance(variant, Streaming):
            return None
        return variant.stream(lambda n: self.env[n], step.block_id)

    def _booked_to(self, step: Step) -> int:
        """The block id of ``step`` on the axis that its weights lie over."""
        program = self.program
        if not program.in_group:
            return step.block_id
        block = collectives.traffic(program.axis, step.block_id)
        return program.everyone.session.of(NamedBlocks).id(program.everyone, block.name)
