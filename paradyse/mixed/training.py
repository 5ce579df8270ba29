"""A model that ranks train on batches of mixed lengths, each group by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paradyse.distributed import collectives
from paradyse.distributed.axis import device_of, resolve_axis
from paradyse.distributed.side_by_side import SideBySide
from paradyse.distributed.together import Together
from paradyse.mixed.batches import MixedStep, Share
from paradyse.mixed.group_meshes import GroupMeshes
from paradyse.mixed.step_reports import MixedReport, Stopwatch, with_times
from paradyse.torch_private import dynamo_config
from paradyse.weights.shard_comm import in_buckets
from paradyse.weights.sharded_tensor import ShardedTensor

MOST_GRAPHS = 64
"""Graphs of one function that Dynamo may keep: each degree has its own, for several sizes. It is an
error to need more, as the model would not be compiled any longer."""


class MixedModel:
    """A model, compiled for each group of ranks that this rank is in, with whole weights.

    Args:
        model: whose call returns an output with a ``loss``, the mean over the labels that are no
            -100; it is not compiled yet. Weights are equal on all ranks.
        options: of the backend, without ``mesh``.
    Raises:
        ValueError: ``model`` is no module, or ``options`` name a mesh.
        NotImplementedError: weights are sharded.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any] | None = None):
        if not isinstance(model, nn.Module):
            raise ValueError(f"give a torch.nn.Module, not {type(model).__name__}")
        if "mesh" in (options or {}):
            raise ValueError("option 'mesh': groups have meshes of their own; leave it out")
        if any(isinstance(p, ShardedTensor) for p in model.parameters()):
            raise NotImplementedError(
                "groups of different degree train whole weights alone: leave paradyse.shard out, "
                "or train with groups of all ranks"
            )
        self.model, self.options = model, dict(options or {})
        self._axis = resolve_axis()
        self._compiled: dict[range, Any] = {}
        self.last: MixedReport | None = None
        """Of the latest step that is over: its groups, their sequences and seconds."""

    def losses(self, step: MixedStep) -> Iterator[Tensor]:
        """For each micro-batch of this rank in ``step`` a loss, to be run backward before the next.

        After the last one the gradients of all ranks are summed: those of the mean over all labels
        of the whole batch, added to what was there before; ``step.loss`` is that mean, and
        ``step.report`` says what each group did. So go through all of them, on every rank, also
        where this rank has none. A step that fails, or that a rank does not go through, leaves
        there what was there before.

        Where one rank fails, all end the step within about a second of being ready to hear of it,
        and are in step again: that rank by its own error, in forward or in backward.

        Raises:
            ValueError: ranks are at different steps.
            RankFailedError: another rank failed, be it in another group.
            torch.OutOfMemoryError: a rank ran out of memory.
            CollectiveError: a rank is gone.
        """
        together = Together(self._axis, "a step of MixedModel")
        together.compare({"the sequences": str(step.indices)})
        weights = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in weights]
        for p in weights:
            p.grad = None
        total = torch.zeros((), dtype=torch.float64)
        watch = Stopwatch(device_of(self._axis.group))
        meshes = [self._mesh_of(share.ranks) for share in step.shares]
        side = SideBySide(self._axis, meshes, "a step of MixedModel")
        try:
            for k, share in enumerate(step.shares):
                side.enter(k)
                watch.begin()
                loss = self._loss(share, step.num_targets)
                side.computed(loss)
                total += loss.detach().double().cpu()
                yield loss
                side.leave()
                watch.end()
                del loss
            together.compare({"micro-batches": "all done"})
            self._sum(weights)
        except BaseException as e:  # also where the loop over the losses was left
            for p, grad in zip(weights, before, strict=True):
                p.grad = grad
            side.fail(e)
            raise
        finally:
            side.end()
        for p, grad in zip(weights, before, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
        step.loss = self._summed(total.to(device_of(self._axis.group))).cpu()
        numbers = [share.group for share in step.shares]
        told = together.each(lambda: list(zip(numbers, watch.read(), strict=True)))
        self.last = step.report = with_times(step.plan, step.indices, step.lengths, told)

    def _loss(self, share: Share, num_targets: int) -> Tensor:
        """This rank's summand of the loss of the whole batch: all ranks of a group have equal ones,
        and equal gradients."""
        compiled = self._compiled_for(share.ranks)
        device = device_of(self._axis.group)
        devices = [device] if device.type == "cuda" else []
        parts = []
        limits = {"recompile_limit": MOST_GRAPHS, "fail_on_recompile_limit_hit": True}
        with torch.random.fork_rng(devices), dynamo_config.patch(limits):
            torch.manual_seed(share.seed)
            for call, count in zip(share.calls, share.num_targets, strict=True):
                mean = compiled(**call).loss
                parts.append(mean * (count / (num_targets * len(share.ranks))))
        return torch.stack(parts).sum()

    def _mesh_of(self, ranks: range) -> Any:
        """Of a group of several ranks; None of one."""
        return self._axis.session.of(GroupMeshes).of(ranks) if len(ranks) > 1 else None

    def _compiled_for(self, ranks: range) -> Any:
        if ranks not in self._compiled:
            options = dict(self.options)
            if self._axis.size > 1:
                options["mesh"] = self._axis.session.of(GroupMeshes).of(ranks)
            self._compiled[ranks] = torch.compile(self.model, backend="paradyse", options=options)
        return self._compiled[ranks]

    @torch.no_grad()
    def _sum(self, weights: list[nn.Parameter]) -> None:
        """Sum the gradients of ``weights`` over all ranks; those that no rank has stay None."""
        if self._axis.size == 1:
            return
        device = device_of(self._axis.group)
        there = torch.tensor([float(p.grad is not None) for p in weights], device=device)
        trained = [p for p, n in zip(weights, self._summed(there).tolist()) if n]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        kinds = [(g.dtype, g.device) for g in grads]
        for index in in_buckets([g.nbytes for g in grads], kinds):
            flat = torch.cat([grads[i].reshape(-1) for i in index])
            parts = self._summed(flat).split([grads[i].numel() for i in index])
            for i, part in zip(index, parts, strict=True):
                trained[i].grad = part.view(grads[i].shape)

    def _summed(self, x: Tensor) -> Tensor:
        if self._axis.size == 1:
            return x
        shares = {collectives.OPTIMIZER: x.nbytes}
        return collectives.all_reduce_in_place(x.contiguous(), self._axis, shares)
