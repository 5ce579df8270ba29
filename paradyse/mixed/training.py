"""A model that ranks train on batches of mixed lengths, each group by itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paradyse.config import with_environment
from paradyse.distributed import collectives
from paradyse.distributed.axis import check_group, device_of, resolve_axis
from paradyse.distributed.facts import WEIGHTS
from paradyse.distributed.side_by_side import SideBySide
from paradyse.distributed.together import Together
from paradyse.mixed.batches import MixedStep, Share
from paradyse.mixed.group_meshes import GroupMeshes
from paradyse.mixed.step_reports import MixedReport, Stopwatch, with_times
from paradyse.mixed.ways_file import SHARDED, WHOLE, check_weights
from paradyse.runtime.call_weights import CallWeights
from paradyse.runtime.capture import check_shards
from paradyse.runtime.registry import captures_of
from paradyse.torch_private import dynamo_config
from paradyse.types import GROUP_LEVERS, WHOLE_WEIGHTS, BlockSpec
from paradyse.weights.no_sync import AT_ONCE, gradients_are
from paradyse.weights.shard import check_module, is_sharded
from paradyse.weights.shard_comm import in_buckets
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.weight_numbers import WeightNumbers

log = logging.getLogger(__name__)

MOST_GRAPHS = 64
"""Graphs of one function that Dynamo may keep: each degree has its own, for several sizes. It is an
error to need more, as the model would not be compiled any longer."""


class MixedModel:
    """A model, compiled for each group of ranks that this rank is in.

    Weights are whole on all ranks, or ``paradyse.shard`` has spread them over all ranks, whatever
    the groups: then every group gathers those of a block over all ranks, and gradients go to the
    ranks that keep them in every backward (``docs/mixed_lengths.md``).

    Args:
        model: whose call returns an output with a ``loss``, the mean over the labels that are no
            -100; it is not compiled yet. Weights are equal on all ranks.
        options: of the backend, without ``mesh``.
    Raises:
        ValueError: ``model`` is no module, ``options`` name a mesh, or weights are sharded over
            other ranks than all.

    Example:

        groups = paradyse.MixedModel(model)
        for step in batches:
            for loss in groups.losses(step):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(step.loss)  # the mean over all labels of the batch
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any] | None = None):
        check_module(model)
        if "mesh" in (options or {}):
            raise ValueError("option 'mesh': groups have meshes of their own; leave it out")
        self.model, self.options = model, dict(options or {})
        check_group("MixedModel")
        self._axis = resolve_axis()
        self._is_sharded = is_sharded(model)
        if self._is_sharded and self._axis.size > 1:
            check_shards(list(model.parameters()), self._axis)
            self._axis.session.of(WeightNumbers).add(model.parameters())
            asked = with_environment(options)
            for name, legal in (("strategies", WHOLE_WEIGHTS), ("levers", GROUP_LEVERS)):
                self.options.setdefault(name, asked.get(name, list(legal)))
        self._compiled: dict[range, Any] = {}
        self._are_equal = False
        """Whether all ranks were seen to have the same weights."""
        self._captures: dict[range, list[Any]] = {}
        """What was captured for groups, of which no call was packed yet."""
        self._apart: set[range] = set()
        """Groups in which packed sequences were seen to be kept apart."""
        caches = bool(getattr(getattr(model, "config", None), "use_cache", False))
        self._without_cache = {"use_cache": False} if caches and _takes(model, "use_cache") else {}
        """With a cache transformers' decoders do not look for documents in ``position_ids``."""
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
            ValueError: ranks are at different steps, the step is planned for weights that lie
                otherwise, or sharded weights are inside ``paradyse.no_sync``.
            RankFailedError: another rank failed, be it in another group.
            torch.OutOfMemoryError: a rank ran out of memory.
            CollectiveError: a rank is gone.
        """
        if self._axis.size > 1:
            check_weights(step.weights, SHARDED if self._is_sharded else WHOLE)
        together = Together(self._axis, "a step of MixedModel")
        together.compare({"the sequences": str(step.indices)})
        if self._axis.size > 1 and not self._are_equal:
            held = CallWeights(list(self.model.parameters()))  # groups of few ranks compare theirs
            together.compare({WEIGHTS: held.checksum(sharded=False)})
            self._are_equal = True
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if self._takes_part:
            self._begin(step, weights)
        kept: dict[nn.Parameter, Tensor] = {}
        device = device_of(self._axis.group)
        total = torch.zeros((), dtype=torch.float64, device=device)
        watch = Stopwatch(device)
        shares = [s for s in step.shares if s.calls or (self._takes_part and s.idle)]
        meshes = [self._mesh_of(share.ranks) for share in shares]
        side = SideBySide(self._axis, meshes, "a step of MixedModel")
        before = [p.grad for p in weights]
        for p in weights:
            p.grad = None
        try:
            for k, share in enumerate(shares):
                side.enter(k)
                watch.begin()
                loss = self._loss(share, step.num_targets)
                side.computed(loss)
                total += loss.detach().double().to(device) / self._times_counted(share)
                yield loss
                side.leave()
                watch.end()
                del loss
                if self._takes_part:
                    _keep_whole(weights, kept, len(share.ranks))
            for p, grad in kept.items():
                p.grad = grad
            together.compare({"micro-batches": "all done"})
            self._sum([p for p in weights if not isinstance(p, ShardedTensor)])
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
        step.loss = self._summed(total).cpu()
        numbers = [share.group for share in shares]
        told = together.each(lambda: list(zip(numbers, watch.read(), strict=True)))
        self.last = step.report = with_times(step.plan, step.indices, step.lengths, told)

    @property
    def _takes_part(self) -> bool:
        """Whether a rank without work takes part in messages of weights."""
        return self._is_sharded and self._axis.size > 1

    def _begin(self, step: MixedStep, weights: Sequence[nn.Parameter]) -> None:
        """Make what groups of sharded weights need in ``step``.

        Raises:
            ValueError: gradients of ``weights`` are kept back.
        """
        if gradients_are(self._axis, weights) != AT_ONCE:
            raise ValueError(
                "a step of MixedModel with sharded weights sends their gradients in every "
                "backward: leave paradyse.no_sync out"
            )
        size = self._axis.size
        groups = [g.ranks for micro in step.plan.micro_batches for g in micro.groups]
        alone = [range(rank, rank + 1) for rank in range(size)]
        made = [ranks for ranks in (*groups, *alone) if len(ranks) < size]
        meshes = self._axis.session.of(GroupMeshes)
        meshes.make((ranks for ranks in made if len(ranks) > 1), self._axis)
        meshes.make_sharing(made, self._axis)

    def _times_counted(self, share: Share) -> int:
        """How many ranks have what ``_loss`` gives for ``share``, undivided."""
        return len(share.ranks) if self._takes_part else 1

    def _loss(self, share: Share, num_targets: int) -> Tensor:
        """This rank's summand of the loss of the whole batch: all ranks of a group have equal ones.
        With whole weights they are shares of the group's, as are their gradients."""
        device = device_of(self._axis.group)
        devices = [device] if device.type == "cuda" else []
        parts = []
        limits = {"recompile_limit": MOST_GRAPHS, "fail_on_recompile_limit_hit": True}
        ranks = 1 if self._takes_part else len(share.ranks)
        counted = zip(share.calls, share.num_targets, share.seeds, strict=True)
        with torch.random.fork_rng(devices), dynamo_config.patch(limits):
            for call, count, seed in counted:
                torch.manual_seed(seed)
                mean = self._called(share.ranks, call).loss
                parts.append(mean * (count / (num_targets * ranks)))
            for call in share.idle if self._takes_part else ():
                rank = self._axis.rank
                parts.append(self._called(range(rank, rank + 1), call).loss * 0)
        return torch.stack(parts).sum()

    def _called(self, ranks: range, call: Mapping[str, Tensor]) -> Any:
        """What the model gives for ``call`` in the group of ``ranks``.

        Raises:
            ValueError: sequences are packed, and tokens see those of others.
        """
        run = self._compiled_for(ranks)
        if ranks in self._apart:
            return run(**call, **self._without_cache)
        before = set(map(id, captures_of(self.model)))
        out = run(**call, **self._without_cache)
        made = self._captures.setdefault(ranks, [])
        made += [c for c in captures_of(self.model) if id(c) not in before]
        if _is_packed(call):
            graphs = [
                g for c in made or _that_read_positions(self.model) for g in c.graphs.values()
            ]
            mixing = any(g.program.ctx.mixing for g in graphs)
            check_apart(self.model, [b for g in graphs for b in g.blocks], mixing)
            self._apart.add(ranks)
            del self._captures[ranks]
        return out

    def _mesh_of(self, ranks: range) -> Any:
        """Of a group; None where there is nobody to tell beside all ranks: one rank with whole
        weights, or all ranks with sharded ones."""
        meshes = self._axis.session.of(GroupMeshes)
        if self._takes_part:
            return meshes.sharing(ranks, self._axis)
        return meshes.of(ranks) if len(ranks) > 1 else None

    def _compiled_for(self, ranks: range) -> Any:
        if ranks not in self._compiled:
            options = dict(self.options)
            meshes = self._axis.session.of(GroupMeshes)
            if self._axis.size > 1:
                options["mesh"] = self._mesh_of(ranks) if self._takes_part else meshes.of(ranks)
            self._compiled[ranks] = torch.compile(self.model, backend="paradyse", options=options)
        return self._compiled[ranks]

    @torch.no_grad()
    def _sum(self, weights: list[nn.Parameter]) -> None:
        """Sum the gradients of ``weights`` over all ranks; those that no rank has stay None."""
        if self._axis.size == 1 or not weights:
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


def _keep_whole(
    weights: Sequence[nn.Parameter], kept: dict[nn.Parameter, Tensor], size: int
) -> None:
    """Add to ``kept`` this rank's share of the gradients that all ``size`` ranks of its group have,
    those of weights that are whole beside sharded ones, and clear them."""
    for p in weights:
        if not isinstance(p, ShardedTensor) and p.grad is not None:
            share = p.grad / size
            kept[p] = kept[p] + share if p in kept else share
            p.grad = None


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of ``model`` has an argument ``name``, or hands on any."""
    has = inspect.signature(model.forward).parameters
    return name in has or any(p.kind is p.VAR_KEYWORD for p in has.values())


def _is_packed(call: Mapping[str, Tensor]) -> bool:
    """Whether a row of ``call`` has several sequences, of which each begins at position 0."""
    return "position_ids" in call and bool(((call["position_ids"] == 0).sum(-1) > 1).any())


def _that_read_positions(model: nn.Module) -> list[Any]:
    """Captures of earlier calls of ``model``, which Dynamo goes on with: those that are given
    ``position_ids``; all, where none is."""

    def reads(capture: Any) -> bool:
        inputs = (n for g in capture.graphs.values() for n in g.program.placeholders)
        return any("position_ids" in str(n.target) for n in inputs)

    known = list(captures_of(model))
    return [c for c in known if reads(c)] or known


def check_apart(model: nn.Module, blocks: Sequence[BlockSpec], mixing: bool = False) -> None:
    """Raise if attention of ``model`` goes across packed sequences; warn where it cannot be told.

    Args:
        blocks: of the graphs that packed sequences were computed by.
        mixing: whether these mix tokens otherwise than by attention, as convolutions do.
    Raises:
        ValueError: it does.
    """
    name, way_out = type(model).__name__, "paradyse.MixedBatches(..., pack=False) does not pack"
    masks = [(b.name, b.mask) for b in blocks if b.kind == "attention"]
    for block, mask in masks:
        if mask is not None and not mask.documents:
            raise ValueError(
                f"{name} does not keep packed sequences apart by position_ids: {block} has the "
                f"mask '{mask}', by which tokens see those of other sequences. {way_out}"
            )
    if mixing or not masks or None in [mask for _, mask in masks]:
        log.warning("whether %s keeps packed sequences apart cannot be told: %s", name, way_out)
