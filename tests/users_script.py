"""What a user may write: every public name once, in a script that ``mypy --strict`` takes.

It is checked and not run (``test_packaging.py``).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import paradyse


class Trainer(paradyse.TrainerMixin, transformers.Trainer): ...


class Accelerator(paradyse.AcceleratorMixin): ...


def plan(workload: paradyse.Workload) -> paradyse.Plan:
    return paradyse.Plan(("metp" if workload.seq_len > 8192 else "megatron_ts",) * 2)


def log(step: paradyse.StepReport) -> None:
    print(step.number, step.workload.batch, step.plan.key, step.scalars()["paradyse/time_s"])


def train(model: torch.nn.Linear, batch: Mapping[str, Tensor], mesh: DeviceMesh) -> Tensor:
    linear: torch.nn.Linear = paradyse.shard(model, mesh, reduce_dtype=torch.float32)
    optimizer = torch.optim.AdamW(linear.parameters())
    compiled = torch.compile(linear, backend="paradyse", options={"plan": plan})
    remove = paradyse.on_step(compiled, log)
    with paradyse.no_sync(compiled):
        compiled(**batch).loss.backward()
    remove()
    saved: Path = paradyse.save_checkpoint("run", compiled, optimizer, step=1, keep=2)
    step: int = paradyse.load_checkpoint(saved, compiled, optimizer).step
    loaded: paradyse.LoadReport = paradyse.load_safetensors(compiled, saved, strict=False)
    weights: dict[str, Tensor] = paradyse.full_state_dict(compiled, cpu=True)
    print(step, loaded.num_tensors, weights["weight"].shape, paradyse.__version__)
    return weights["weight"]


def look(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> bool:
    compiled = torch.compile(model, backend="paradyse")
    report: paradyse.PlanReport = paradyse.explain(compiled, batch_size=1, seq_len=512)
    stats: paradyse.Stats = paradyse.stats(compiled)
    seconds: float = stats.last.time_s if stats.last else report.time_s
    profile = paradyse.profile(compiled, Path("a100.jsonl"), [512, 1024], memory_limit="80GiB")
    verified: paradyse.VerifyReport = paradyse.verify(model, batch)
    print(seconds, len(profile.measurements))
    return verified.ok


def mixed(model: torch.nn.Module, rows: list[dict[str, Tensor]]) -> Iterator[float]:
    replica, num_replicas = paradyse.replica_of()
    sequences = paradyse.sequences_of(rows[replica::num_replicas])
    groups = paradyse.MixedModel(model, options={"inner": "eager"})
    ways: list[paradyse.Way] = paradyse.measure_ways(groups, sequences, tokens_per_rank=4096)
    batches = paradyse.MixedBatches(sequences, tokens_per_step=8192, ways=ways)
    for step in batches:
        for loss in groups.losses(step):
            torch.autograd.backward(loss)  # loss.backward() has no annotations in PyTorch
        report: paradyse.MixedReport = batches.explain(step)
        slowest: paradyse.GroupReport = max(report.groups, key=lambda g: g.taken_s or 0.0)
        yield slowest.predicted_s + ways[0].group_s(slowest.lengths)


def loaders(dataset: torch.utils.data.Dataset[dict[str, Tensor]], mesh: DeviceMesh) -> None:
    sampler = paradyse.replica_sampler(dataset, mesh, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler)
    batches = paradyse.MixedBatches(loader, ways="plans/ways.json")
    Trainer(mesh=mesh, backend_options={"memory_limit": "12GiB"}, batches=batches)
    Accelerator(mesh=mesh, backend_options={"levers": ["recompute"]})
