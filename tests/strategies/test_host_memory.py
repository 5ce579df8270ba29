"""Rows on the host: what was written where is read from there, and pages are given back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_pages import CountedMemory

from paradyse.strategies import host_memory
from paradyse.strategies.host_memory import Fetched, HostRows, one_ahead


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 100)
    return CountedMemory(torch.device("cpu"))


def test_rows_are_read_where_they_were_written(host: CountedMemory) -> None:
    rows = HostRows(host, 9, (2, 3), torch.float64)  # of 48 bytes: some lie on two pages
    assert host.num_used == 5
    x = torch.arange(54.0).view(9, 2, 3)
    rows.write(((6, 3), (0, 2)), x[:5].float())
    rows.write(((2, 4),), x[5:].double())
    got = rows.read(((0, 9),)).get()
    assert got.dtype == torch.float64
    assert torch.equal(got, torch.cat([x[3:5], x[5:], x[:3]]).double())
    assert torch.equal(rows.read(((7, 1), (1, 2))).get(), got[[7, 1, 2]])
    rows.fill((3, 2), -1)
    assert (rows.read(((3, 2),)).get() == -1).all()
    less = rows.empty_like(torch.float32)
    assert (less.num_rows, less.shape, less.dtype) == (9, (2, 3), torch.float32)
    del rows, less
    assert host.num_used == 0


def test_pages_that_an_evaluation_made_are_written_to_in_training(host: CountedMemory) -> None:
    with torch.inference_mode():
        rows = HostRows(host, 4, (3,), torch.float32)
        del rows
    rows = HostRows(host, 4, (3,), torch.float32)
    rows.write(((0, 4),), torch.ones(4, 3))
    assert rows.read(((0, 4),)).get().sum() == 12
    assert host.num_made == 1


def test_what_is_fetched_is_kept_by_nobody_else(host: CountedMemory) -> None:
    rows = HostRows(host, 4, (3,), torch.float32)
    rows.write(((0, 4),), torch.ones(4, 3))
    fetched = rows.read(((0, 4),))
    assert fetched.get().sum() == 12
    with pytest.raises(IndexError):
        fetched.get()


def test_the_next_read_has_begun_before_one_is_given(host: CountedMemory) -> None:
    rows, begun = HostRows(host, 4, (), torch.int64), list[int]()
    rows.write(((0, 4),), torch.arange(4))

    def read(i: int) -> list[Fetched]:
        begun.append(i)
        return [rows.read(((i, 1),))]

    found = []
    for (x,) in one_ahead(partial(read, i) for i in range(4)):
        found.append((x.item(), list(begun)))
    assert [x for x, _ in found] == [0, 1, 2, 3]
    assert [len(before) for _, before in found] == [2, 3, 4, 4]
    assert not list(one_ahead([]))
