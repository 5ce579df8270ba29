"""Process groups of the ranks that compute together: made once, and kept as long as the world."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import (
    Axis,
    GroupMesh,
    device_of,
    register_axis,
    resolve_axis,
    unregister_axis,
)
from paradyse.distributed.control import count_groups_to
from paradyse.distributed.together import Together
from paradyse.torch_private import num_process_groups


class GroupMeshes:
    """Meshes of groups, by their ranks; of the world, in ``Session`` of its axis.

    A plan has groups of most ranks first, from rank 0 on, so where degrees are powers of two a rank
    is in one group for each of them at most.
    """

    def __init__(self) -> None:
        self._meshes: dict[range, DeviceMesh | None] = {}
        self._sharing: dict[range, GroupMesh | None] = {}

    def make(self, groups: Iterable[range], world: Axis) -> None:
        """Make the meshes of ``groups`` that there are not yet.

        Args:
            groups: the same ones in the same order on every rank.
            world: the axis of all ranks, each of which calls this at the same time.
        """
        device = device_of(world.group).type
        for ranks in groups:
            if ranks in self._meshes:
                continue
            group = dist.new_group(list(ranks))
            mine = world.rank in ranks
            mesh = self._meshes[ranks] = DeviceMesh.from_group(group, device) if mine else None
            _even_out(world)
            if mesh is not None:  # its ranks make further groups among themselves, now
                agreement_of(resolve_axis(mesh), mesh)

    def make_sharing(self, groups: Iterable[range], world: Axis) -> None:
        """Make what groups need whose weights lie over ``world``, as far as it is not there yet.

        Args:
            groups, world: as of ``make``, which has made their meshes.
        """
        for ranks in groups:
            if ranks in self._sharing:
                continue
            _even_out(world)
            self._sharing[ranks] = self._shared(ranks, world) if world.rank in ranks else None

    def _shared(self, ranks: range, world: Axis) -> GroupMesh:
        """The ``GroupMesh`` of ``ranks``, which ask for it at the same time."""
        mesh, size = self._meshes.get(ranks), len(ranks)
        group = mesh.get_group() if mesh is not None and size > 1 else None
        name = f"{world.name}:{ranks.start}-{ranks.stop - 1}"
        axis = register_axis(Axis(name, size, world.rank - ranks.start, group))
        if size == 1:  # there is no process group whose end would take it along
            world.session.at_end.append(partial(unregister_axis, axis))
        shared = GroupMesh(axis, world)
        agreement_of(axis, shared)
        return shared

    def sharing(self, ranks: range, world: Axis) -> Any:
        """The option ``mesh`` of ``ranks``, of which this one is part, with weights that lie over
        ``world``."""
        if len(ranks) == world.size:
            return None
        shared = self._sharing[ranks]
        assert shared is not None, f"rank {dist.get_rank()} is not in {ranks}"
        return shared

    def of(self, ranks: range) -> DeviceMesh:
        """The mesh of ``ranks``, of which this one is part."""
        mesh = self._meshes[ranks]
        assert mesh is not None, f"rank {dist.get_rank()} is not in {ranks}"
        return mesh


def _even_out(world: Axis) -> None:
    """Have all ranks of ``world`` in equally many process groups, which their names depend on."""
    together = Together(world, "making the groups of MixedBatches")
    count_groups_to(max(together.each(num_process_groups)))
