"""Ways of groups as they are measured: a model's own steps, by degree and length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import resolve_axis
from paradyse.mixed.batches import MixedBatches
from paradyse.mixed.sequences import checked
from paradyse.mixed.sources import Data
from paradyse.mixed.training import MixedModel
from paradyse.mixed.ways import Group, MicroBatch, StepPlan, Way
from paradyse.token_scores import IGNORED


def measure_ways(
    model: MixedModel,
    dataset: Data,
    *,
    tokens_per_rank: int,
    lengths: Sequence[int] = (),
    degrees: Sequence[int] = (),
    repeats: int = 3,
    causal: bool = True,
    pack: bool = True,
) -> list[Way]:
    """What groups of each degree can do, measured by steps of the model itself.

    A step is forward and backward of one sequence of a length on each group of a degree, side by
    side as they are in training. Call it on every rank; it takes as many steps as there are
    degrees, lengths and repeats, and one more of each to warm up. Gradients are left as they were.

    Args:
        model: that is to be trained.
        dataset: as of ``MixedBatches``; its tokens are joined to sequences of the lengths.
        tokens_per_rank: that a rank has room for: what a group may hold is as much for each of its
            ranks. It is not measured, so give what is known to fit.
        lengths: tokens, ascending; those beyond what a degree has room for, or the model positions
            (``max_position_embeddings`` of its ``config``), are left out, and the most is put to
            them. Default: powers of four from 64 on.
        degrees: ranks of a group; default: powers of two, and all ranks.
        repeats: of which the median counts.
        causal: as of ``MixedBatches``.
        pack: as of ``MixedBatches``.
    Returns:
        A way for each degree, in seconds. ``fixed_s`` is where a line through the two shortest
        lengths is at no tokens, at most the shortest time.
    Raises:
        ValueError: a number makes no sense, the dataset is empty, or what it holds makes no sense.

    Example:

        groups = paradyse.MixedModel(model)
        ways = paradyse.measure_ways(groups, dataset, tokens_per_rank=1 << 15)
        batches = paradyse.MixedBatches(dataset, tokens_per_step=1 << 18, ways=ways)
    """
    if tokens_per_rank < 2 or repeats < 1:
        raise ValueError(
            f"tokens_per_rank={tokens_per_rank}, repeats={repeats}: give at least 2 and 1"
        )
    size = resolve_axis().size
    powers = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    if not len(dataset):
        raise ValueError("a dataset without sequences: give at least one")
    for degree in degrees:
        if not 1 <= degree <= size:
            raise ValueError(f"a degree of {degree}: give 1 to {size}, the number of ranks")
    positions = getattr(getattr(model.model, "config", None), "max_position_embeddings", None)
    found = []
    grads = [(p, p.grad) for p in model.model.parameters()]
    model.model.zero_grad(set_to_none=True)
    try:
        for degree in degrees or (*powers, size):
            most = tokens_per_rank * degree
            longest = min(most, positions or most)
            usual = [1 << k for k in range(6, 40, 2)]
            asked = sorted({n for n in (*(lengths or usual), longest) if 2 <= n <= longest})
            times = [_time_s(model, dataset, degree, n, repeats, causal, pack) for n in asked]
            found.append(way_through(degree, most, asked, times))
    finally:
        for p, grad in grads:
            p.grad = grad
    return found


def way_through(
    degree: int, max_tokens: int, lengths: Sequence[int], times_s: Sequence[float]
) -> Way:
    """A way of ``degree`` ranks with room for ``max_tokens`` whose groups of one sequence of each
    of ``lengths`` take ``times_s``.

    Args:
        lengths: tokens, ascending.
        times_s: seconds.
    """
    fixed = min(times_s)
    if len(lengths) > 1:
        slope = (times_s[1] - times_s[0]) / (lengths[1] - lengths[0])
        fixed = min(fixed, max(0.0, times_s[0] - slope * lengths[0]))
    adds = tuple(max(0.0, t - fixed) for t in times_s)
    return Way(degree, fixed, max_tokens, tuple(lengths), adds, "measured")


def _time_s(
    model: MixedModel,
    dataset: Any,
    degree: int,
    length: int,
    repeats: int,
    causal: bool,
    pack: bool,
) -> float:
    """Seconds of groups of ``degree`` ranks with a sequence of ``length`` tokens each."""
    num = resolve_axis().size // degree
    sequence = _joined(dataset, length)
    way = Way(degree, 0.0, length, (length,), (0.0,))
    batches = MixedBatches(
        [sequence] * num, tokens_per_step=length * num, ways=[way], causal=causal, pack=pack
    )
    groups = tuple(Group(way, (i,), i * degree, 0.0) for i in range(num))
    plan = StepPlan((MicroBatch(groups),))
    taken = []
    for _ in range(repeats + 1):
        step = batches.arranged(plan, range(num), [length] * num)
        for loss in model.losses(step):
            loss.backward()
        assert step.report is not None
        taken.append(max(g.taken_s or 0.0 for g in step.report.groups))
    return median(taken[1:])


def _joined(dataset: Any, length: int) -> dict[str, Tensor]:
    """The first sequences of ``dataset``, again and again, as many tokens as ``length``, of which
    some are targets if any of theirs are."""
    parts, held = list[dict[str, Tensor]](), 0
    while held < length:
        number = len(parts) % len(dataset)
        parts.append(checked(dataset[number], number))
        held += len(parts[-1]["input_ids"])
    joined = {name: torch.cat([x[name] for x in parts])[:length] for name in parts[0]}
    has_targets = any(bool((x["labels"] != IGNORED).any()) for x in parts)
    if has_targets and not bool((joined["labels"][1:] != IGNORED).any()):  # but the prompts alone
        joined["labels"] = joined["input_ids"]
    return joined
