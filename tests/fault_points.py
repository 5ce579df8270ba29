"""Points of ``faults.py``: what all ranks do, where one of them is lost, what the others say."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Tiny, tokens
from torch.nn.utils import clip_grad_norm_

import paradyse
from paradyse import backend
from paradyse.distributed import agreement, collectives
from paradyse.planning import machine
from paradyse.profiling.online import Feedback
from paradyse.profiling.steps import Steps
from paradyse.strategies import base
from paradyse.types import ATTENTION_STRATEGIES
from paradyse.weights.unshard import Shelf

SENT_S = 0.3
"""In which small messages that have been started arrive."""


@dataclass(frozen=True)
class Place:
    """A rank, and how it is lost if it is the one."""

    rank: int
    size: int
    folder: Path
    """Of the case, shared by its ranks."""
    loss: signal.Signals | None = None
    """Sent to this process; None: it survives."""

    def lose(self) -> None:
        """Lose the rank here, if it is the one."""
        if self.loss is not None:
            os.kill(os.getpid(), self.loss)

    def lose_at(self, owner: Any, name: str, nth: int = 1, after: bool = False) -> None:
        """Lose the rank, if it is the one, at its ``nth`` call of ``owner.name`` from now on:
        before the call, or ``after`` it. At a message, what it has sent before arrives."""
        if self.loss is None:
            return
        called, calls = getattr(owner, name), itertools.count(1)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            here = next(calls) == nth
            if here and not after:
                time.sleep(SENT_S if name == "_start" else 0)
                self.lose()
            out = called(*args, **kwargs)
            if here and after:
                self.lose()
            return out

        setattr(owner, name, hooked)


class Loop:
    """A training loop on one rank, warmed up unless ``steps`` is 0."""

    def __init__(
        self,
        plan: str = "megatron_cz",
        sharded: bool = False,
        mesh: Any = None,
        steps: int = 1,
        inner: str = "eager",
    ) -> None:
        torch.manual_seed(0)
        self.model = Tiny(layers=1)
        if sharded:
            paradyse.shard(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        options = {"inner": inner, "plan": plan, "mesh": mesh}
        self.compiled: Any = torch.compile(self.model, backend="paradyse", options=options)
        self.ids = tokens(2, 12)
        for _ in range(steps):
            self.step()

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.compiled(self.ids, self.ids)
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


def first_call(place: Place) -> None:
    loop = Loop(steps=0)
    place.lose()
    loop.step()


def capture(place: Place) -> None:
    loop = Loop(steps=0)
    place.lose_at(backend, "build_program")
    loop.step()


def compilation(place: Place) -> None:
    loop = Loop(steps=0, inner="aot_eager")
    place.lose_at(base, "compile_function", nth=2)
    loop.step()


def forward(strategy: str, place: Place) -> None:
    loop = Loop(strategy)
    place.lose_at(collectives, "_start", nth=2)  # the first message is the agreement's
    loop.forward()


def backward(strategy: str, place: Place) -> None:
    loop = Loop(strategy)
    loss = loop.forward()
    place.lose_at(collectives, "_start", nth=2)
    loss.backward()


def between_start_and_wait(place: Place) -> None:
    loop = Loop("ulysses_z")
    place.lose_at(collectives.Pending, "wait", nth=2)
    loop.forward()
    loop.forward()


def look_ahead(place: Place) -> None:
    loop = Loop("ulysses_z", sharded=True)
    place.lose_at(Shelf, "fetch", after=True)
    loop.forward()
    loop.forward()


def look_ahead_in_backward(place: Place) -> None:
    loop = Loop("ulysses_z", sharded=True)
    loss = loop.forward()
    place.lose_at(Shelf, "fetch", after=True)
    loss.backward()
    loop.forward()


def streamed_weights(place: Place) -> None:
    loop = Loop("metp", sharded=True)
    place.lose_at(collectives, "broadcast")
    loop.forward()


def streamed_gradients(place: Place) -> None:
    loop = Loop("metp", sharded=True)
    loss = loop.forward()
    place.lose_at(collectives, "reduce_to")
    loss.backward()


def summed_gradients(place: Place) -> None:
    loop = Loop()
    loss = loop.forward()
    place.lose_at(collectives, "start_all_reduce")
    loss.backward()


def scattered_gradients(place: Place) -> None:
    loop = Loop(sharded=True)
    loss = loop.forward()
    place.lose_at(collectives, "start_reduce_scatter")
    loss.backward()


def replicas(place: Place) -> None:
    mesh = dist.init_device_mesh("cpu", (2, place.size // 2), mesh_dim_names=("data", "sequence"))
    loop = Loop(mesh=mesh)
    loss = loop.forward()
    place.lose_at(collectives, "start_all_reduce", nth=1 + (place.size > 2))
    loss.backward()


def norm_of_gradients(place: Place) -> None:
    loop = Loop(sharded=True)
    place.lose_at(collectives, "_start", nth=2)
    clip_grad_norm_(loop.model.parameters(), 1.0)


def optimizer_step(place: Place) -> None:
    loop = Loop(sharded=True)
    place.lose_at(loop.optimizer, "step")
    loop.step()
    loop.step()


def between_steps(place: Place) -> None:
    loop = Loop()
    place.lose()
    loop.step()


def output_read(place: Place) -> None:
    loop = Loop()
    logits = loop.compiled(loop.ids)
    place.lose_at(collectives, "_start", nth=2)
    logits.sum().item()


def whole_weights(place: Place) -> None:
    loop = Loop(sharded=True)
    place.lose_at(collectives, "_start", nth=3)
    paradyse.full_state_dict(loop.model)


def sharding(place: Place) -> None:
    place.lose_at(agreement.Agreement, "compare")
    Loop(sharded=True, steps=0)


def control_group(place: Place) -> None:
    place.lose_at(dist, "new_group")
    Loop()


def facts_exchanged(place: Place) -> None:
    loop = Loop()
    place.lose_at(collectives, "gather_objects")
    if place.rank == 0:
        loop.ids = tokens(2, 12, seed=1)
    loop.forward()


def _saved(place: Place) -> tuple[Loop, Path]:
    loop = Loop(sharded=True)
    folder = place.folder / "run"
    paradyse.save_checkpoint(folder, loop.model, loop.optimizer, step=1)
    return loop, folder


def save(place: Place) -> None:
    loop, folder = _saved(place)
    place.lose_at(dcp.FileSystemWriter, "prepare_local_plan")
    paradyse.save_checkpoint(folder, loop.model, loop.optimizer, step=2)


def save_written(place: Place) -> None:
    loop, folder = _saved(place)
    place.lose_at(dcp.FileSystemWriter, "write_data", after=True)
    paradyse.save_checkpoint(folder, loop.model, loop.optimizer, step=2)


def load(place: Place) -> None:
    loop, folder = _saved(place)
    place.lose_at(dcp.FileSystemReader, "prepare_local_plan")
    paradyse.load_checkpoint(folder, loop.model, loop.optimizer)


def load_read(place: Place) -> None:
    loop, folder = _saved(place)
    place.lose_at(dcp.FileSystemReader, "read_data", after=True)
    paradyse.load_checkpoint(folder, loop.model, loop.optimizer)


def _profile(place: Place) -> None:
    def batch(size: int, seq_len: int) -> dict[str, torch.Tensor]:
        return {"ids": tokens(size, seq_len), "labels": tokens(size, seq_len)}

    model, path = Tiny(layers=1), place.folder / "profile.jsonl"
    options = {"inner": "eager"}
    paradyse.profile(model, path, [12], repeats=1, options=options, make_batch=batch)


def profile_memory(place: Place) -> None:
    place.lose_at(Steps, "memory")
    _profile(place)


def profile_times(place: Place) -> None:
    place.lose_at(Steps, "times", nth=2)
    _profile(place)


def profile_file(place: Place) -> None:
    place.lose_at(Steps, "find_blocks")
    _profile(place)


def machine_rates(place: Place) -> None:
    place.lose_at(machine, "_agree")
    Loop("auto")


def first_plan(place: Place) -> None:
    place.lose_at(agreement.Agreement, "first_says")
    Loop("auto")


def online_sent(place: Place) -> None:
    place.lose_at(Feedback, "_start_agreement", after=True)
    Loop("auto", steps=40)


def online_read(place: Place) -> None:
    place.lose_at(Feedback, "_finish_agreement", nth=2)
    Loop("auto", steps=40)


@dataclass(frozen=True)
class Point:
    """What ranks do when one of them is lost."""

    run: Callable[[Place], None]
    says: str
    """A regular expression that what every survivor raises has."""


_CONTROL = "of block 'agreement"
_GRAPH = r"of block '(layers\.0\.\w+|between blocks)'"
_BLOCK = r"of block 'layers\.0\.\w+' \(strategy {}\)"

POINTS: dict[str, Point] = {
    "first call": Point(first_call, _CONTROL),
    "capture": Point(capture, _CONTROL),
    "compilation": Point(compilation, _GRAPH),
    **{
        f"{part.__name__}, {s}": Point(partial(part, s), _BLOCK.format(s))
        for part in (forward, backward)
        for s in ATTENTION_STRATEGIES
    },
    "a message under way": Point(between_start_and_wait, _GRAPH),
    "look-ahead, forward": Point(look_ahead, _GRAPH),
    "look-ahead, backward": Point(look_ahead_in_backward, _GRAPH),
    "streamed weights": Point(streamed_weights, _BLOCK.format("metp")),
    "streamed gradients": Point(streamed_gradients, _BLOCK.format("metp")),
    "gradients summed": Point(summed_gradients, f"all_reduce {_GRAPH}"),
    "gradients scattered": Point(scattered_gradients, f"reduce_scatter {_GRAPH}"),
    "gradients averaged over replicas": Point(replicas, f"of block 'data parallel'|{_CONTROL}"),
    "norm of gradients": Point(norm_of_gradients, "of block 'optimizer'"),
    "optimizer": Point(optimizer_step, _CONTROL),
    "between steps": Point(between_steps, _CONTROL),
    "output read": Point(output_read, _GRAPH),
    "whole weights": Point(whole_weights, "agreement: gathers a sharded tensor"),
    "sharding": Point(sharding, "agreement: shards a model"),
    "control group": Point(control_group, _CONTROL),
    "facts exchanged": Point(facts_exchanged, _CONTROL),
    "save": Point(save, "saving checkpoint"),
    "save, written": Point(save_written, "saving checkpoint"),
    "load": Point(load, "loading checkpoint"),
    "load, read": Point(load_read, "loading checkpoint"),
    "profile, file": Point(profile_file, _CONTROL),
    "profile, memory": Point(profile_memory, f"{_GRAPH}|{_CONTROL}"),
    "profile, times": Point(profile_times, "of block 'profile'"),
    "rates of the machine": Point(machine_rates, "measurement of the machine"),
    "first plan": Point(first_plan, "agreement: chooses a plan"),
    "online exchange, sent": Point(online_sent, f"{_GRAPH}|{_CONTROL}|online costs"),
    "online exchange, read": Point(online_read, f"{_GRAPH}|{_CONTROL}|online costs"),
}
