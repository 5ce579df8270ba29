"""Graphs, or sizes of one, of which nothing can be split: every rank computes the whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.config import Options
from paradyse.distributed.axis import Axis

log = logging.getLogger(__name__)


class _Told(set[str]):
    """What was said on an axis: models break into graphs, of which many have the same to say."""

    def say(self, notes: str, num_ranks: int) -> None:
        """Log once that a graph is computed whole, and why; all of a step is a large share."""
        level = logging.DEBUG if notes in self else logging.WARNING
        cost = "each of %d ranks does all of its work and holds all of its activations"
        log.log(level, f"computed whole on every rank: %s; {cost}", notes, num_ranks)
        self.add(notes)


def allow_whole(
    why: str,
    inputs: Sequence[Any],
    options: Options,
    axis: Axis,
    replicas: Axis,
    sharded_in_group: bool,
) -> None:
    """Say that a graph is computed whole on every rank.

    Args:
        why: nothing of it can be split.
        inputs: of a call.
        options: of the backend.
        axis: the sequence axis.
        replicas: the data-parallel axis.
        sharded_in_group: groups of ranks side by side would compute it with sharded weights.
    Raises:
        NotImplementedError: the option ``on_unsupported`` is "error"; or it could not be trained
            so.
    """
    if options.on_unsupported == "error" and axis.size > 1:
        raise NotImplementedError(
            f"nothing in this graph can be split: {why}. "
            'on_unsupported="gather" computes it whole on every rank.'
        )
    if sharded_in_group:
        raise NotImplementedError(
            f"nothing in this graph can be split: {why}. Groups of ranks cannot train it with "
            "sharded weights: leave paradyse.shard out"
        )
    weights = [x for x in inputs if isinstance(x, torch.nn.Parameter)]
    if replicas.size > 1:
        if any(w.requires_grad for w in weights) and torch.is_grad_enabled():
            raise NotImplementedError(
                f"nothing in this graph can be split: {why}. With a data-parallel axis it cannot "
                "be trained: use a 1-D mesh, or DistributedDataParallel; of a model that Dynamo "
                "breaks (TORCH_LOGS=graph_breaks) paradyse.shard has the weights behind the break "
                "trained; of an input that another compiled model gave, pass the .clone(); once "
                "the model has raised an exception, as for wrong arguments, Dynamo breaks it until "
                "torch._dynamo.reset()"
            )
        if any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            log.warning(
                "a graph without weights is computed by each replica for itself (%s): a mean over "
                "tokens in it, such as the loss, is averaged over replicas with equal weights",
                why,
            )
    if axis.size > 1 and weights:
        axis.session.of(_Told).say(why, axis.size)
