"""The first steps check that all ranks of a group hold the same batch, plan and weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, device_of

CHECKED_STEPS = 5
"""Steps at the start of an axis' life whose batches are compared across ranks."""


@dataclass
class _Checks:
    """The checks of one axis."""

    done: int = 0
    """How many there were: equal on all ranks, since every step runs on every rank."""


WEIGHTS = "the weights (checksum)"
"""What errors call the weights."""

PROFILE = "the profile (checksum)"
"""What errors call the file given as option 'cost_model'."""

WAYS_OUT = {
    "the random state": "call torch.manual_seed with the same seed on every rank of the group "
    "(dropout draws from it)",
    WEIGHTS: "call torch.manual_seed with the same seed on every rank before the "
    "model is built, or load the same checkpoint on all",
    PROFILE: "give option 'cost_model' a copy of one file on every rank",
}
SAME_BATCH = (
    "every rank of a sequence-parallel group must be given the same global batch; split data only "
    "across data-parallel replicas"
)


def must_check(axis: Axis, first_call: bool) -> bool:
    """Whether this call is one of those that are compared on ``axis``: its first ones and each
    capture's ``first_call``. The same answer on every rank."""
    if axis.size == 1:
        return False
    checks = axis.session.of(_Checks)
    checks.done += 1
    return first_call or checks.done <= CHECKED_STEPS


def check_agreement(
    axis: Axis, tensors: Sequence[Tensor], numbers: Mapping[str, int], plan_key: str
) -> None:
    """Compare batch, plan and ``numbers`` across ranks.

    Args:
        axis: its ranks are compared; all of them call this.
        tensors: the batch.
        numbers: what it is called -> an int64 that ranks must share.
        plan_key: the plan, as text.
    Raises:
        ValueError: on every rank, naming what differs, which rank holds what, and the way out.
    """
    named = {
        **numbers,
        "the batch (checksum)": checksum(tensors),
        "the plan (checksum)": zlib.crc32(plan_key.encode()),
    }
    mine = torch.tensor(list(named.values()), dtype=torch.int64, device=device_of(axis.group))
    everyone = collectives.all_gather(mine, axis, collectives.AGREEMENT).cpu()
    for i, name in enumerate(named):
        values = everyone[:, i].tolist()
        if len(set(values)) > 1:
            held = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
            way_out = WAYS_OUT.get(name, SAME_BATCH)
            raise ValueError(f"ranks of one group disagree on {name}: {held}. {way_out}.")


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that equal ``tensors`` share and different ones, in practice, do not."""
    total = 0
    for i, t in enumerate(tensors):
        with torch.no_grad():
            flat = t.detach().reshape(-1)
            bits = flat.view(torch.uint8) if t.is_floating_point() else flat
            flat = bits.to(torch.int64)
            weights = torch.arange(1, flat.numel() + 1, device=flat.device) * (2 * i + 1)
            total = (total * 31 + int((flat * weights).sum())) % (2**62)
    return total
