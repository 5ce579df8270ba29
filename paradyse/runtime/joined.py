"""Weights of one call on their way to the steps that read them: where their gradients are joined.

What ranks compute parts of is summed over the sequence axis, and averaged over replicas, by nodes
of autograd's graph through which weights pass before they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.lanes import Overlap
from paradyse.graph.subgraph import is_weight
from paradyse.passes.split_steps import Step
from paradyse.runtime.program import Program
from paradyse.weights.gradients import AverageGradients, SumGradients, joined_by_use
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.same_gradients import SameGradients, may_be_same
from paradyse.weights.sharded_tensor import ShardedTensor


def gradient_order(program: Program) -> list[Any]:
    """For the steps of ``program`` the numbers of weights whose gradients are summed behind one,
    and of those that it reads beside: replicas whose programs have the same send the same messages.
    """
    first = program.schedule.first_readers
    number = {n: i for i, n in enumerate(filter(is_weight, program.placeholders))}
    found = []
    for step in program.steps:
        summed = [number[n] for n, at in first.items() if at is step and n in number]
        beside = [n for n in step.piece.inputs if n in number]  # not constants of the graph
        read = [number[n] for n in beside if not (step.split and n in first)]
        if summed or read:
            found.append((summed, read))
    return found


class JoinedGradients:
    """Of one call of ``program``.

    Args:
        env: the values of the call; weights in it become those whose gradients are averaged.
        sync: how gradients of the call come together.
    """

    def __init__(self, program: Program, env: dict[fx.Node, Any], sync: GradientSync):
        self.program, self.env, self.sync = program, env, sync
        self.summed: dict[fx.Node, Tensor] = {}
        """Weights for use in a part of the work: their gradients are summed over ranks."""
        self.replicated: dict[fx.Node, Tensor] = {}
        """The same for use in what every rank computes whole, where there are replicas."""
        self._to_sum: dict[fx.Node, Step] = {}
        self._sums: dict[int, list[fx.Node]] = {}
        """Position of a step -> which of ``_to_sum`` it has summed."""
        self._averages = False
        """Whether gradients are averaged over replicas."""
        self._averaged: set[fx.Node] = set()
        self.compares = program.alone and may_be_same(program.replicas, program.device)
        """Whether gradients are the same on all ranks, as far as is known."""

    def begin(self) -> None:
        """The call is about to run: find out which weights are summed, and where."""
        self._to_sum = self._whole_weights()
        self._averages = self.program.replicas.size > 1 and torch.is_grad_enabled()
        self._averages &= not self.program.alone  # else all are in ``_to_sum``
        nodes = list(self._to_sum)
        first = [step.position for step in self._to_sum.values()]
        if first and self.compares:
            self._sums = {min(first): nodes}
        else:
            sizes = [self.env[n].nbytes for n in nodes]
            found = joined_by_use(first, sizes, self._hidden())
            self._sums = {at: [nodes[i] for i in index] for at, index in found.items()}

    def _hidden(self) -> float:
        """Share of a message that computations hide. Other replicas or groups, which must send the
        same, may have measured another one."""
        program = self.program
        if program.replicas.size > 1 or program.in_group:
            return 1.0
        return program.axis.session.of(Overlap).hidden

    @property
    def sums(self) -> frozenset[int]:
        """Positions of the steps after whose backward gradients are sent."""
        return frozenset(self._sums)

    def before(self, position: int) -> None:
        """The step at ``position`` is about to run."""
        if position in self._sums:
            self._sum(position)
        if self._averages:
            self._average(position)
            self._average(position + 1)  # fetched while this step runs

    def _whole_weights(self) -> dict[fx.Node, Step]:
        """Weights of which every rank has the whole and computes a part of the gradients, with the
        first step that reads each."""
        if not torch.is_grad_enabled():
            return {}
        if self.program.alone:
            return self._read_alone()
        if self.program.axis.size == 1:
            return {}
        return {
            n: step
            for n, step in self.program.schedule.first_readers.items()
            if self.env[n].requires_grad and not isinstance(self.env[n], ShardedTensor)
        }

    def _read_alone(self) -> dict[fx.Node, Step]:
        """Trained weights, of which every rank computes the whole gradient, with the first step
        that reads each."""
        found: dict[fx.Node, Step] = {}
        for step in self.program.steps:
            for node in filter(is_weight, step.piece.inputs):
                if isinstance(self.env[node], Tensor) and self.env[node].requires_grad:
                    found.setdefault(node, step)
        return found

    def _sum(self, position: int) -> None:
        """Have gradients summed over ranks that are all there when the backward of the step at
        ``position`` is over, or compared or averaged where all ranks compute the whole. Autograd
        runs nodes that were made later first, so that of the sum runs as soon as it can."""
        nodes = self._sums[position]
        if self.program.alone:
            way = SameGradients if self.compares else AverageGradients
            out = way.apply(self.sync, *(self.env[n] for n in nodes))
            self.env.update(zip(nodes, out, strict=True))
            return
        owners = [self._to_sum[n].block_id for n in nodes]
        out = SumGradients.apply(self.sync, owners, *(self.env[n] for n in nodes))
        self.summed.update(zip(nodes, out, strict=True))

    def _average(self, position: int) -> None:
        """Have the gradients of the weights of the step at ``position`` averaged over replicas,
        where that is no part of the sum over ranks."""
        steps = self.program.steps
        if position < len(steps):
            step = steps[position]
            self.average(n for n in step.piece.inputs if not (step.split and n in self._to_sum))

    def average(self, read: Iterable[fx.Node]) -> None:
        """The weights among ``read`` are about to be read whole by what every rank computes."""
        nodes = [
            n
            for n in read
            if self._averages
            and is_weight(n)
            and n not in self._averaged
            and self.env[n].requires_grad
        ]
        if nodes:
            out = AverageGradients.apply(self.sync, *(self.env[n] for n in nodes))
            for n, x in zip(nodes, out, strict=True):
                (self.replicated if n in self._to_sum else self.env)[n] = x
            self._averaged.update(nodes)
