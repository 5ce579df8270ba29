"""Weights on their way to steps: which are summed over ranks, and where."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import make_batch, make_model, relative, whole
from tiny import Tiny, tokens
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.lanes import Overlap
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.joined import JoinedGradients
from paradyse.weights import gradients


def summed_before(sharded: bool, frozen: bool) -> tuple[list[tuple[int, int, int]], set[str], int]:
    """Of each weight that is summed: the step before which it is, its first reader, and the number
    of weights that the same message brings. Then the names of weights that are not, and how many
    there are in all."""
    model = Tiny()
    if sharded:
        paradyse.shard(model)
    if frozen:
        next(model.parameters()).requires_grad_(False)
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    ids, found = tokens(2, 11), list[tuple[int, int, int]]()
    original, frames = JoinedGradients.before, list[Frame]()

    def before(self: JoinedGradients, position: int) -> None:
        known = set(self.summed)
        original(self, position)
        now = [n for n in self.summed if n not in known]
        readers = self.program.schedule.first_readers
        found.extend((position, readers[n].position, len(now)) for n in now)

    class Kept(Frame):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            frames.append(self)

    # A byte is a bucket of its own: each weight is joined with its step's alone.
    with (
        patch.object(JoinedGradients, "before", before),
        patch.object(gradients, "TOGETHER_BYTES", 1),
        frames_by(Kept),
    ):
        compiled(ids, ids).backward()
    (frame,) = frames
    left = {n.name for n in frame.program.schedule.first_readers} - {
        n.name for n in frame._joined.summed
    }
    return found, left, len(list(model.parameters()))


@pytest.mark.parametrize("frozen", [False, True])
def test_every_whole_weight_is_summed_before_it_is_read(frozen: bool, pool2: RankPool) -> None:
    for found, left, number in pool2.run(summed_before, False, frozen):
        assert len(found) == number - frozen and len(left) == frozen
        assert all(position <= reader for position, reader, _ in found)
        assert len({position for position, _, _ in found}) > 2


def test_shards_are_not_summed_here(pool2: RankPool) -> None:
    for found, left, number in pool2.run(summed_before, True, False):
        assert not found and len(left) == number


def places_of_sums(replicas: int) -> list[int]:
    """At how many places of a step gradients are sent: where nothing was measured, where messages
    hide, and where on some ranks, or on all, they do not."""
    each = dist.get_world_size() // replicas
    mesh = dist.init_device_mesh("cpu", (replicas, each), mesh_dim_names=("data", "sequence"))
    compiled: Any = torch.compile(
        Tiny(), backend="paradyse", options={"inner": "eager", "plan": "megatron_cz", "mesh": mesh}
    )
    overlap, found = resolve_axis(mesh).session.of(Overlap), list[int]()
    original = JoinedGradients.begin

    def begin(self: JoinedGradients) -> None:
        original(self)
        found.append(len(self.sums))

    measured = overlap.hidden  # by a test before
    shares = [Overlap().hidden, 1.0, float(dist.get_rank() // each), 0.0]
    with patch.object(JoinedGradients, "begin", begin), patch.object(gradients, "LEAST_BYTES", 1):
        for share in shares if replicas > 1 else [*shares[:2], *shares[3:]]:
            overlap.hidden = share
            compiled(tokens(2, 11), tokens(2, 11)).backward()
    overlap.hidden = measured
    return found


def test_gradients_are_sent_at_fewer_places_where_messages_do_not_hide(pool2: RankPool) -> None:
    for unknown, hidden, exposed in pool2.run(places_of_sums, 1):
        assert unknown == hidden > 2
        assert exposed == 1


@pytest.mark.broad
def test_replicas_send_alike_whatever_each_has_measured(pool4: RankPool) -> None:
    for places in pool4.run(places_of_sums, 2):
        assert len(set(places)) == 1 and places[0] > 2


class Shared(Tiny):
    """A linear for tokens and for the pooled sequence, and what only the latter meets."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.weighed = torch.nn.Parameter(torch.ones(32))

    def extra(self, x: Tensor) -> Tensor:
        self.given = x
        return x

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Any = None) -> Any:
        loss = super().forward(ids, labels)
        pooled = self.given.mean(1)
        return loss + F.cross_entropy(self.head(self.weighed * pooled), ids[:, 0])


def errors_of_replicas(sharded: bool) -> list[float]:
    """Of all gradients, against those of the joined batch of two replicas."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)
    model, ids = Shared().double(), tokens(4, 11)
    weights = list(model.parameters())
    grads = torch.autograd.grad(model(ids, ids), weights)
    if sharded:
        paradyse.shard(model, mesh)
    options = {"plan": "megatron_cz", "inner": "eager", "mesh": mesh}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    at = 2 * mesh.get_local_rank("data")
    compiled(ids[at : at + 2], ids[at : at + 2]).backward()
    return [relative(whole(w.grad), g) for w, g in zip(model.parameters(), grads, strict=True)]


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_agree_on_weights_read_by_parts_and_whole(sharded: bool, pool4: RankPool) -> None:
    for errors in pool4.run(errors_of_replicas, sharded, timeout_s=100):
        assert max(errors) < 1e-12


def replicas_that_split(family: str, splits: tuple[str, str]) -> list[float]:
    """How far gradients are off one process' where replicas split along these dims."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    reference, model = make_model(family), make_model(family)
    batch = make_batch("plain", 4, 12)
    reference(**batch).loss.backward()
    own = mesh.get_local_rank("data")
    options = {"mesh": mesh, "inner": "eager", "plan": {"split": splits[own]}}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    compiled(**{k: x[2 * own : 2 * own + 2] for k, x in batch.items()}).loss.backward()
    of = zip(model.parameters(), reference.parameters(), strict=True)
    return [relative(w.grad, g.grad) for w, g in of if w.grad is not None and g.grad is not None]


@pytest.mark.broad
def test_replicas_may_split_along_different_dims(pool4: RankPool) -> None:
    given = "llama", ("batch", "")
    for errors in pool4.run(replicas_that_split, *given, timeout_s=60):
        assert len(errors) > 5 and max(errors) < 1e-4


def refused_split() -> str:
    with pytest.raises(ValueError) as error:
        replicas_that_split("gpt2", ("batch", "batch"))
    return str(error.value)


@pytest.mark.broad
def test_a_split_whose_messages_other_replicas_may_not_send_is_refused(pool4: RankPool) -> None:
    """GPT-2's table of positions is read by parts, or whole."""
    for text in pool4.run(refused_split, timeout_s=60):
        assert "tokens cannot lie split along 'batch'" in text and "with replicas" in text
