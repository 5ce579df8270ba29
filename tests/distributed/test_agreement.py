"""Ranks that do not hold the same thing are told so on the first steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from tiny import Tiny, tokens
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paradyse.distributed.agreement import agreement_of, compare
from paradyse.distributed.axis import live_axes, resolve_axis
from paradyse.distributed.collectives import Watchers


def differ(what):
    rank = dist.get_rank()
    torch.manual_seed(rank if what == "weights" else 0)
    model = Tiny()
    compiled = torch.compile(
        model, backend="paradyse", options={"inner": "eager", "plan": "ulysses_z"}
    )
    ids = tokens(2, 9)
    if what == "later length":
        compiled(ids, ids)
    if rank == 1 and what == "tokens":
        ids = ids.flip(1)
    if rank == 1 and "length" in what:
        ids = ids[:, :7].contiguous()
    compiled(ids, ids)


@pytest.mark.broad(but="tokens")
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("tokens", "disagree on the batch .*same global batch"),
        ("length", "disagree on the sequence length: rank 0: 9, rank 1: 7"),
        ("later length", "disagree on the sequence length: rank 0: 9, rank 1: 7"),
        ("weights", "disagree on the weights .*before the model is built"),
    ],
)
def test_what_ranks_disagree_on_is_named(what, text):
    with pytest.raises(RankFailure, match=f"(?s){text}"):
        run_ranks(differ, 2, what, timeout_s=90)


def compare_among_uneven_groups() -> bool:
    """One rank is in a group of its own that the other is not in."""
    dist.new_group([0], use_local_synchronization=True)
    compare(resolve_axis(), "compares")
    return True


def test_ranks_may_be_in_different_numbers_of_groups() -> None:
    assert run_ranks(compare_among_uneven_groups, 2) == [True, True]


def compare_in_a_sub_mesh() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    dist.new_group([0], use_local_synchronization=True)
    compare(resolve_axis(mesh), "compares")
    return True


def test_ranks_of_a_sub_mesh_may_be_in_different_numbers_of_groups() -> None:
    assert run_ranks(compare_in_a_sub_mesh, 4) == [True] * 4


def watchers_of_groups() -> list[int]:
    counts = []
    for _ in range(3):
        group = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group(group, "cpu")
        assert agreement_of(resolve_axis(mesh), mesh) is not None
        dist.destroy_process_group(group)
        live_axes()
        counts.append(len(resolve_axis().session.of(Watchers)))
    return counts


def test_nothing_listens_for_groups_that_are_gone() -> None:
    for counts in run_ranks(watchers_of_groups, 2):
        assert len({*counts}) == 1
