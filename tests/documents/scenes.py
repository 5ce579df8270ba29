"""What the documents' Python needs before it (models, batches) and must have done after it.

``before()`` gives the names that a block uses; ``after(names)`` holds what it left against a plain
model in one process. Both run on every rank, in a folder of their own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import TOLERANCE, make_batch, relative, run_step, whole
from torch import Tensor

Names = dict[str, Any]
CLOSE = TOLERANCE[torch.float32]


@dataclass(frozen=True)
class Scene:
    """How a block of Python is run."""

    document: str
    has: str
    """Text that this block alone has of its document's."""
    before: Callable[[], Names]
    after: Callable[[Names], Any]
    ranks: int = 2
    slow: bool = True
    puts: tuple[tuple[str, str], ...] = ()
    """What is written otherwise where there is no GPU, or fewer ranks."""


def small_llama(**config: Any) -> Any:
    """The model of ``models.py``, under the name that the documents give its class."""
    from models import make_model

    return make_model("llama", **config)


def same_weights(model: Any, plain: Any) -> None:
    """Every parameter of ``model``, whole or sharded, is that of ``plain``."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    worst = max(relative(whole(p).detach(), q.detach()) for p, q in pairs)
    assert worst <= CLOSE, worst


def to_shard() -> Names:
    model = small_llama()
    return {"model": model, "plain": copy.deepcopy(model), "torch": torch}


def sharded_trains(names: Names) -> None:
    model, plain = names["model"], names["plain"]
    assert any(hasattr(p, "full_tensor") for p in model.parameters())
    other = torch.optim.AdamW(plain.parameters())
    for length in (13, 22):
        batch = make_batch("plain", 2, length)
        loss, want = model(**batch).loss, plain(**batch).loss
        assert abs(loss.item() / want.item() - 1) <= CLOSE
        loss.backward(), want.backward()
        for optimizer in (names["optimizer"], other):
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, plain)


def to_keep_back() -> Names:
    import paradyse

    plain = small_llama()
    model = paradyse.shard(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [make_batch("plain", 2, 11 + 3 * i) for i in range(3)]
    model = torch.compile(model, backend="paradyse")
    return {"paradyse": paradyse, **locals()}


def kept_back(names: Names) -> None:
    plain = names["plain"]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in names["batches"]:
        plain(**batch).loss.backward()
    optimizer.step()
    same_weights(names["model"], plain)


def on_disk() -> Names:
    from transformers import AutoModelForCausalLM

    plain = small_llama()
    if torch.distributed.get_rank() == 0:
        plain.save_pretrained("path/to/folder", max_shard_size="50KB")
    torch.distributed.barrier()
    files = [*Path("path/to/folder").glob("*.safetensors")]
    assert len(files) > 1
    names = {"plain": plain, "config": plain.config, "torch": torch}
    return {**names, "AutoModelForCausalLM": AutoModelForCausalLM}


def loaded(names: Names) -> None:
    same_weights(names["model"], names["plain"])
    assert all(hasattr(p, "full_tensor") for p in names["model"].parameters())


def trained() -> Names:
    import paradyse

    model = paradyse.shard(small_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for step in range(3):  # noqa: B007
        compiled(**make_batch("plain", 2, 9)).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {**locals(), "dist": torch.distributed}


def saved(names: Names) -> None:
    import paradyse

    assert names["found"].step == names["step"] == 2
    assert names["found"].extra["scheduler"]["last_epoch"] == 3
    other = paradyse.shard(small_llama(seed=4))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    paradyse.load_checkpoint("run", other, optimizer)
    for p, q in zip(other.parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))
        average, wanted = (
            whole(o.state[w]["exp_avg"]) for o, w in ((optimizer, p), (names["optimizer"], q))
        )
        assert torch.equal(average, wanted)


def read_by_transformers(names: Names) -> None:
    from transformers import AutoModelForCausalLM

    torch.distributed.barrier()
    found = AutoModelForCausalLM.from_pretrained("out")
    for (name, p), q in zip(found.named_parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(p, whole(q)), name


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, all of one length: they are not padded."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = make_batch("plain", 1, 13, seed=i)["input_ids"][0]
        return {"input_ids": ids, "labels": ids}


def on_a_mesh() -> Names:
    model = small_llama()
    return {
        "model": model,
        "plain": copy.deepcopy(model),
        "dataset": Sequences(),
        "num_replicas": 2,
        "ranks_per_group": 2,
    }


def replicas_train(names: Names) -> None:
    """The loss of a call is that of the batches of all replicas joined."""
    names["sampler"].set_epoch(0)
    batch = next(iter(names["loader"]))
    batches: list[Any] = [None] * 4
    torch.distributed.all_gather_object(batches, batch)
    assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert not torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    joined = {k: torch.cat([batches[0][k], batches[2][k]]) for k in batch}
    loss = names["model"](**batch).loss
    want = run_step(names["plain"], names["plain"], joined)
    assert abs(loss.item() / want.loss - 1) <= CLOSE
    loss.backward()
    names["optimizer"].step()
    torch.distributed.destroy_process_group()


def one_group() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))


def to_look_into() -> Names:
    plain = small_llama()
    batch = make_batch("plain", 2, 17)
    model = torch.compile(copy.deepcopy(plain), backend="paradyse", options={"inner": "eager"})
    model(**batch).loss.backward()
    return {"model": model, "plain_model": plain, "batch": batch}


def looked_into(names: Names) -> None:
    import paradyse

    report = str(paradyse.explain(names["model"], batch_size=1, seq_len=8192))
    assert "8192" in report.replace(",", "") and "megatron_ts" in report
    assert paradyse.stats(names["model"]).steps == 1


def to_prepare() -> Names:
    from test_accelerator import Rows
    from test_trainer import fresh_accelerate

    world = contextlib.ExitStack()
    world.enter_context(fresh_accelerate())
    model = small_llama()
    names = {"model": model, "plain": copy.deepcopy(model), "mesh": one_group()}
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names["loader"] = torch.utils.data.DataLoader(Rows(), batch_size=2)
    return {"world": world, **names}


def prepared(names: Names) -> None:
    from test_accelerator import Rows

    names["world"].close()
    plain = names["plain"]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=2):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    same_weights(names["model"], plain)


class Writer:
    """Keeps what it is given, by the call that TensorBoard's has."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Names, int]] = []

    def add_scalars(self, tag: str, scalars: Names, step: int) -> None:
        self.kept.append((tag, scalars, step))


def to_be_told() -> Names:
    return {**to_look_into(), "writer": Writer()}


def was_told(names: Names) -> None:
    names["model"](**names["batch"]).loss.backward()
    ((tag, scalars, step),) = names["writer"].kept
    assert (tag, step) == ("run", 2) and scalars["paradyse/seq_len"] == 17


def told_how_far_off(names: Names) -> None:
    import paradyse

    with contextlib.redirect_stdout(io.StringIO()) as said:
        names["model"](**names["batch"]).loss.backward()
    seq_len, plan, predicted_s, taken_s = said.getvalue().split()
    assert seq_len == "17" and plan == paradyse.stats(names["model"]).last.plan.key
    assert float(predicted_s) > 0 and float(taken_s) > 0


def of_mixed_lengths() -> Names:
    """A long sequence and short ones, and a file of ways that puts them in groups side by side."""
    from paradyse.mixed.ways import Way
    from paradyse.mixed.ways_file import write_ways

    ways = [Way(1, 1e-4, 40, (40,), (1.0,)), Way(2, 1e-4, 80, (10, 80), (0.3, 0.6))]
    if torch.distributed.get_rank() == 0:
        Path("plans").mkdir()
        write_ways(Path("plans/ways.json"), ways, "replicated")
    torch.distributed.barrier()
    model = small_llama(num_hidden_layers=1)
    lengths = (60, 12, 9, 11)
    data = [{"input_ids": make_batch("plain", 1, n)["input_ids"][0]} for n in lengths]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "plain": copy.deepcopy(model), "dataset": data, "optimizer": optimizer}


def mixed_trains(names: Names) -> None:
    """One step, as by the mean over the labels of all sequences."""
    plain, step = names["plain"], names["step"]
    assert step.plan.in_words() == "1 x 2; 2 x 1"
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    count = sum(len(s["input_ids"]) - 1 for s in names["dataset"])
    total = torch.zeros(())
    for s in names["dataset"]:
        ids = s["input_ids"][None]
        total = total + plain(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) / count
    total.backward()
    assert abs(step.loss.item() / total.item() - 1) <= CLOSE
    optimizer.step()
    same_weights(names["model"].model, plain)


def learns(names: Names) -> None:
    losses = names["losses"]
    assert len(losses) == 6 and losses[-1] < losses[0]


def on_ranks() -> Names:
    """What the tutorial's script for one device gives."""
    from blocks import ROOT, blocks_of

    first = next(b for b in blocks_of(ROOT / TUTORIAL) if "# train.py" in b.text)
    names: Names = {}
    exec(compile(first.text, first.at, "exec"), names)
    return {"want": names["losses"]}


def as_on_one_device(names: Names) -> None:
    for loss, want in zip(names["losses"], names["want"], strict=True):
        assert abs(loss / want - 1) <= CLOSE


def to_limit() -> Names:
    return {"model": small_llama(), "batch": make_batch("plain", 2, 17)}


def limited(names: Names) -> None:
    report = names["report"]
    assert report.limit_bytes == 12 * 2**30
    assert 0 < report.peak_bytes == sum(held for _, held in report.held)


def to_measure() -> Names:
    model = small_llama()
    return {"model": model, "plain": copy.deepcopy(model), "dist": torch.distributed}


def measured(names: Names) -> None:
    batch = make_batch("plain", 1, 64)
    loss, want = names["model"](**batch).loss, names["plain"](**batch).loss
    assert abs(loss.item() / want.item() - 1) <= CLOSE
    names["dist"].barrier()
    assert len(Path("profile.jsonl").read_text().splitlines()) > 10


class Late(list[Any]):
    """Batches that the second rank is slow to read."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            time.sleep(0.4 * torch.distributed.get_rank())
            yield batch


def with_one_slow() -> Names:
    model = torch.compile(small_llama(), backend="paradyse")
    batch = make_batch("plain", 2, 17)
    model(**batch).loss.backward()
    return {"model": model, "batches": Late([batch] * 3)}


def slow_is_found(names: Names) -> None:
    assert names["slowest"] == 1 and names["waited"][0] > 1.0, names["waited"]


def from_elsewhere() -> Names:
    """A checkpoint of another layout: whole weights."""
    import paradyse

    model = small_llama(seed=7)
    paradyse.save_checkpoint("run", model, torch.optim.AdamW(model.parameters()), step=5)
    return {"model": small_llama(), "saved": model}


def gone_on(names: Names) -> None:
    assert names["step"] == 5
    same_weights(names["model"], names["saved"])


README = "README.md"
HOW_TO = "docs/how_to.md"
TUTORIAL = "docs/tutorial.md"
MIXED = "docs/mixed_lengths.md"
SCENES = (
    Scene(README, "paradyse.shard(model)  # every param", to_shard, sharded_trains, slow=False),
    Scene(README, "with paradyse.no_sync(model):", to_keep_back, kept_back),
    Scene(README, 'torch.device("meta")', on_disk, loaded),
    Scene(README, "found = paradyse.load_checkpoint", trained, saved, slow=False),
    Scene(README, "rank0_only=True)", trained, read_by_transformers),
    Scene(
        README,
        "replica_sampler(dataset, mesh)",
        on_a_mesh,
        replicas_train,
        ranks=4,
        puts=(('"nccl"', '"gloo"'), ('"cuda"', '"cpu"'), ("torch.cuda.set_device", "int")),
    ),
    Scene(README, "MixedBatches(", of_mixed_lengths, mixed_trains, slow=False),
    Scene(MIXED, "MixedBatches(", of_mixed_lengths, mixed_trains),
    Scene(README, "accelerate.Accelerator)", to_prepare, prepared),
    Scene(README, "paradyse.explain(model", to_look_into, looked_into),
    Scene(README, "paradyse.on_step(model, print)", to_be_told, was_told),
    Scene(HOW_TO, '"memory_limit": "12GiB"', to_limit, limited),
    Scene(HOW_TO, "paradyse.profile(model", to_measure, measured),
    Scene(HOW_TO, "step.predicted_s", to_look_into, told_how_far_off),
    Scene(HOW_TO, "exposed_waits(trace)", with_one_slow, slow_is_found),
    Scene(HOW_TO, "except FileNotFoundError", from_elsewhere, gone_on),
    Scene(TUTORIAL, "# train.py", dict, learns, ranks=1),
    Scene(TUTORIAL, "# train_on_ranks.py", on_ranks, as_on_one_device),
    Scene(TUTORIAL, "paradyse.on_step(model, print)", to_look_into, looked_into),
)
"""Of every block of Python but those that ``test_blocks.py`` names otherwise."""
