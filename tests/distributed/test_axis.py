"""Axes: which tokens lie where, names that other processes share, groups that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, run_ranks
from tiny import Tiny, tokens

from paradyse import backend
from paradyse.distributed import axis as axis_module
from paradyse.distributed.axis import (
    MOST_IN_ONE_CHUNK,
    SINGLE,
    Axis,
    TokenLayout,
    axis_named,
    check_device,
    device_of,
    live_axes,
    local_positions,
    resolve_axis,
    resolve_replicas,
)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 8, 17, 33, 100])
def test_every_token_lies_on_one_rank_and_all_do_as_much_causal_work(p: int, seq_len: int) -> None:
    layout = TokenLayout(p, seq_len)
    held = [local_positions(layout, r) for r in range(p)]
    assert {len(x) for x in held} == {layout.local_len}
    assert torch.cat(held).sort().values.tolist() == list(range(p * layout.local_len))
    assert seq_len <= p * layout.local_len < seq_len + 2 * p
    if p == 1 or layout.local_len % 2 == 0:
        assert len({int(x.sum()) for x in held}) == 1
    else:  # few tokens in one chunk, as few as can be
        assert layout.local_len == -(-seq_len // p) <= MOST_IN_ONE_CHUNK
        assert [int(x[0]) for x in held] == [r * layout.local_len for r in range(p)]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert resolve_axis() is SINGLE and resolve_replicas() is SINGLE
    assert axis_named(SINGLE.name) is SINGLE
    with pytest.raises(ValueError, match="no process group exists"):
        resolve_axis(_Mesh(None))


def names() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    world = resolve_axis()
    assert resolve_axis() is world is axis_named(world.name)
    twin = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    assert resolve_replicas(mesh) is SINGLE
    other = resolve_axis(_Mesh(twin))
    assert other.name != world.name and axis_named(other.name) is other
    dist.destroy_process_group(twin)
    again = resolve_axis(_Mesh(dist.new_group([0, 1])))
    assert other not in live_axes() and again in live_axes()
    return [world.name, other.name, again.name]


class _Mesh:
    """As much of a mesh as an axis is made of."""

    ndim = 1

    def __init__(self, group: Any) -> None:
        self.get_group = lambda dim: group

    def size(self) -> int:
        return 2

    def get_coordinate(self) -> list[int]:
        return [dist.get_rank()]


def test_groups_over_the_same_ranks_have_names_of_their_own(pool2: RankPool) -> None:
    first, second = pool2.run(names)
    assert first == second and len(set(first)) == 3
    assert first[0] == "gloo:0:0-1"  # nothing of this process is in it


def join_twice() -> bool:
    """A world that was left and joined anew has the same name and none of the same state."""
    before = resolve_axis()
    before.session.of(list).append("measured")
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("2", store), rank=rank, world_size=2)
    after = resolve_axis()
    assert after.name == before.name and axis_named(after.name) is after
    assert before not in live_axes()
    return after is not before and after.session.of(list) == []


def test_a_world_joined_anew_is_another_one() -> None:
    assert run_ranks(join_twice, 2) == [True, True]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has some; the current one is the first. Groups say what carries them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(axis_module, "backend_of", lambda group: group.backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)


def group(backend: str, device: str | None = None) -> Any:
    bound = None if device is None else torch.device(device)
    return SimpleNamespace(backend=backend, bound_device_id=bound)


@pytest.mark.usefixtures("gpus")
def test_a_group_computes_on_the_device_that_it_was_made_for() -> None:
    assert device_of(None) == device_of(group("nccl")) == torch.device("cuda:0")
    assert device_of(group("nccl", "cuda:2")) == torch.device("cuda:2")
    assert device_of(SimpleNamespace(backend="nccl")) == torch.device("cuda:0")
    assert device_of(group("gloo", "cuda:2")) == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("of", "device", "fits"),
    [
        (group("nccl"), "cuda:0", True),
        (group("nccl"), "cuda", True),
        (group("nccl", "cuda:1"), "cuda:1", True),
        (group("gloo"), "cuda:1", True),
        (group("gloo"), "cpu", True),
        (group("nccl"), "cpu", False),
        (group("nccl"), "cuda:1", False),
        (group("nccl", "cuda:1"), "cuda:0", False),
    ],
)
def test_a_model_lies_where_nccl_carries_messages_from(of: Any, device: str, fits: bool) -> None:
    axes = SINGLE, Axis("of the test", 4, 3, of)
    if fits:
        return check_device(torch.device(device), axes)
    text = f"model is on {device}, but NCCL carries messages of rank 3 from {device_of(of)}"
    with pytest.raises(ValueError, match=rf"{text}: .*set_device.*\.to\(.*\(\"gloo\"\)"):
        check_device(torch.device(device), axes)


def test_each_program_is_asked_where_its_model_lies() -> None:
    asked: list[Any] = []
    model = torch.compile(Tiny(layers=1), backend="paradyse", options={"inner": "eager"})
    with patch.object(backend, "check_device", lambda *given: asked.append(given)):
        model(tokens(2, 9))
    assert asked == [(torch.device("cpu"), (SINGLE, SINGLE))]
