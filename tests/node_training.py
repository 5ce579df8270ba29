"""What the ranks of ``two_nodes.py`` run: a training that saves, and goes on from what was saved.

Started by torchrun, on every node, with an argument: ``Training`` as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import make_batch, make_model

import paradyse

BATCH = 4
"""Sequences of a step, of all replicas together: so many that every replica has equally many."""
EVERY = 4
"""Steps between two checkpoints."""


@dataclass(frozen=True)
class Training:
    """What is trained, and where it is written to."""

    folder: str
    """For the losses of each rank, ``losses-<rank>.jsonl``, and for checkpoints."""
    group: int
    """Ranks of a sequence group; other ranks are replicas."""
    steps: int


@dataclass(frozen=True)
class Loss:
    """A line of the losses."""

    restart: int
    """How often torchrun had started the ranks before."""
    size: int
    """Number of ranks."""
    step: int
    loss: float


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The batch of all replicas."""
    return make_batch("plain", BATCH, random.Random(step).randint(8, 40), seed=step)


def model_and_optimizer(mesh: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    """Equal ones on all ranks, sharded over the sequence axis of ``mesh`` if there is one."""
    model = make_model("llama", num_hidden_layers=1)
    if mesh is not None:
        paradyse.shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses_of(
    call: Any, optimizer: torch.optim.Optimizer, steps: range, rows: slice = slice(None)
) -> Iterator[tuple[int, float]]:
    """Train ``call`` in ``steps`` on ``rows`` of their batches: each step, and its loss."""
    for step in steps:
        optimizer.zero_grad()
        loss = call(**{name: x[rows] for name, x in batch_of(step).items()}).loss
        loss.backward()
        optimizer.step()
        yield step, loss.item()


def main() -> None:
    training = Training(**json.loads(sys.argv[1]))
    folder, run = Path(training.folder), Path(training.folder) / "run"
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    group = min(training.group, size)
    shape = {"mesh_shape": (size // group, group), "mesh_dim_names": ("data", "sequence")}
    mesh = dist.init_device_mesh("cpu", **shape)
    model, optimizer = model_and_optimizer(mesh)
    options = {"inner": "eager", "mesh": mesh}
    compiled = torch.compile(model, backend="paradyse", options=options)
    done = 0
    if run.exists():
        done = paradyse.load_checkpoint(run, model, optimizer).step
    replica, num_replicas = paradyse.replica_of(mesh)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = range(done + 1, training.steps + 1)
    rows = slice(replica, None, num_replicas)
    with open(folder / f"losses-{dist.get_rank()}.jsonl", "a", buffering=1) as file:
        for step, loss in losses_of(compiled, optimizer, steps, rows):
            if step % EVERY == 0:
                paradyse.save_checkpoint(run, model, optimizer, step=step, keep=2)
            file.write(json.dumps(vars(Loss(restart, size, step, loss))) + "\n")


if __name__ == "__main__":
    main()
