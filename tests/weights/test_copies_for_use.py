"""Rows on the host are not written to while a device is still copying them.

The device's event stands for the copy: it is over when it has been asked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import paradyse
from paradyse.distributed.axis import SINGLE, Axis
from paradyse.weights import copies_for_use, sharded_tensor
from paradyse.weights.copies_for_use import CopiesUnderWay
from paradyse.weights.layout import even_layout
from paradyse.weights.sharded_tensor import ShardedTensor, relayout

CUDA = torch.device("cuda", 1)
ROWS = torch.arange(12.0).view(3, 4)


class Copy:
    """A copy of the rows of ``weight``, and what they held whenever somebody asked for it."""

    def __init__(self, weight: Any) -> None:
        self.rows = weight.local
        self.seen: list[Tensor] = []

    def query(self) -> bool:
        self.seen.append(self.rows.clone())
        return len(self.seen) > 1


@pytest.fixture
def weight() -> Iterator[Any]:
    """A parameter of 3 x 4 on the host."""
    layout = even_layout(Axis("of the test", 1, 0), 3)
    rows = ROWS.clone()
    yield nn.Parameter(ShardedTensor(rows, layout, (3, 4), used_on=torch.device("cpu")))


def copied(weight: Any) -> Copy:
    """A device begins to copy the rows of ``weight``."""
    copy = Copy(weight)
    with (
        patch.object(torch.cuda, "current_stream", lambda device: f"stream of {device}"),
        patch.object(copies_for_use, "event_on", lambda device: copy),
    ):
        weight.placement.axis.session.of(CopiesUnderWay).note(CUDA)
    return copy


def of_state(w: Any) -> None:
    holder = nn.Module()
    holder.weight = w
    holder.load_state_dict({"weight": torch.ones(3, 4)})


def stepped(w: Any, **options: Any) -> None:
    w.grad = w.detach().with_rows(torch.ones(3, 4))
    torch.optim.SGD([w], lr=0.5, **options).step()


WRITES: dict[str, Callable[[Any], Any]] = {
    "operator": lambda w: w.detach().add_(1),
    "data": lambda w: w.data.copy_(torch.zeros(3, 4)),
    "state": of_state,
    "lists": lambda w: torch._foreach_mul_([w.detach()], 2.0),
    "step": stepped,
    "fused step": lambda w: stepped(w, fused=True),
    "view": lambda w: w.detach()[0].fill_(7),
    "whole": lambda w: w.detach().t().zero_(),
    "out": lambda w: torch.add(ROWS, 1, out=w.detach()),
}


@pytest.mark.parametrize("how", WRITES)
def test_who_writes_waits_for_the_copy(weight: Any, how: str) -> None:
    copy = copied(weight)
    WRITES[how](weight)
    assert len(copy.seen) >= 2 and all(seen.equal(ROWS) for seen in copy.seen[:2])
    assert not weight.local.equal(ROWS)


def test_who_reads_does_not_wait(weight: Any) -> None:
    copy = copied(weight)
    assert (weight.detach() + 1).local.equal(ROWS + 1)
    assert weight.detach().sum() == ROWS.sum() and weight.full_tensor().equal(ROWS)
    weight.data = torch.zeros(3, 4)  # has other memory, and leaves the former as it was
    assert copy.rows.equal(ROWS) and not copy.seen


def test_a_checkpoint_is_read_into_rows_behind_the_copy(weight: Any) -> None:
    copy = copied(weight)
    index = SimpleNamespace(offset=torch.Size([0, 0]), fqn="weight")
    weight.__get_tensor_shard__(index).zero_()
    assert [seen.equal(ROWS) for seen in copy.seen] == [True, True]


def test_a_file_is_read_into_rows_behind_the_copy(weight: Any, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    holder, copy = nn.Module(), copied(weight)
    holder.weight = weight
    paradyse.load_safetensors(holder, tmp_path)
    assert weight.local.equal(torch.ones(3, 4))
    assert [seen.equal(ROWS) for seen in copy.seen] == [True, True]


def test_rows_that_are_copied_for_use_are_noted() -> None:
    """A device other than the host, whose copies are none of CUDA's, stands for it."""
    meta, noted = torch.device("meta"), list[Any]()
    layout = even_layout(SINGLE, 3)
    of_host = ShardedTensor(ROWS, layout, (3, 4), used_on=meta)
    of_device = ShardedTensor(ROWS, layout, (3, 4))
    with patch.object(CopiesUnderWay, "note", lambda self, device: noted.append((self, device))):
        assert of_host.for_use.is_meta and of_device.for_use is ROWS
    assert noted == [(SINGLE.session.of(CopiesUnderWay), meta)]


def test_of_each_stream_the_latest_copy_counts() -> None:
    copies, asked = CopiesUnderWay(), list[str]()

    def event(name: str) -> Any:
        return SimpleNamespace(query=lambda: asked.append(name) or True)

    for stream, name in [("a", "one"), ("b", "two"), ("a", "three")]:
        with (
            patch.object(torch.cuda, "current_stream", lambda device, s=stream: s),
            patch.object(copies_for_use, "event_on", lambda device, n=name: event(n)),
        ):
            copies.note(CUDA)
    copies.note(torch.device("cpu"))
    copies.wait(SINGLE)
    assert asked == ["three", "two"]


def test_rows_on_their_way_to_the_host_are_waited_for_over_their_axis() -> None:
    """They may be the result of a message that never comes."""
    axis, given = Axis("of the test", 1, 0), list[Any]()

    def to_host(rows: Tensor, axis: Axis) -> Tensor:
        given.append(axis)
        return rows

    x = ShardedTensor(ROWS.clone(), even_layout(axis, 3), (3, 4), used_on=torch.device("cpu"))
    with patch.object(sharded_tensor, "to_host", to_host):
        x.with_rows(ROWS)
        relayout(x, even_layout(axis, 4, 1))
    assert given and all(each is axis for each in given)
