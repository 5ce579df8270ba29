"""What is made, or called, before a process group joins the ranks that torchrun has started."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paradyse
from paradyse import backend
from paradyse.distributed.axis import lacks_group

ROOT = Path(__file__).parents[1]

EARLY = {
    "paradyse.shard": lambda: paradyse.shard(torch.nn.Linear(2, 2)),
    "MixedBatches": lambda: paradyse.MixedBatches([{}], tokens_per_step=8, ways=[]),
    "MixedModel": lambda: paradyse.MixedModel(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_would_be_of_one_rank_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks_group() == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert lacks_group() == 4
    with pytest.raises(ValueError, match=rf"{name}: 4 ranks .*init_process_group before"):
        EARLY[name]()


def test_a_model_that_each_rank_computes_for_itself_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    backend._warn_alone.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with caplog.at_level(logging.WARNING, "paradyse"):
        for model in torch.nn.Linear(2, 2), torch.nn.Linear(3, 2):
            torch.compile(model, backend="paradyse")(torch.ones(1, model.in_features))
    assert [r.message for r in caplog.records if "no process group joins them" in r.message] == [
        "4 ranks were started (WORLD_SIZE), but no process group joins them: each computes for "
        "itself alone; call torch.distributed.init_process_group before the model"
    ]


QUICK_START = """
import os, sys
from pathlib import Path

import torch
import transformers
from transformers import training_args

sys.path.append(sys.argv[1])
import trainer as example

own = training_args.TrainingArguments.__init__
training_args.TrainingArguments.__init__ = lambda *x, **names: own(*x, **names, use_cpu=True)
trainer = example.Trainer(
    model=example.make_model(64),
    train_dataset=example.Documents(Path(os.__file__).parent, 0, 4, 64),
    data_collator=example.pad,
)
gathered = trainer.accelerator.gather(torch.ones(3))  # as counts of labels and losses are
print(f"counted {trainer.accelerator.num_processes} {len(gathered)}")
"""


def test_a_trainer_that_makes_its_own_arguments(tmp_path: Path) -> None:
    """Both ranks are one sequence group, which counts as one process: of it batches and losses."""
    (tmp_path / "train.py").write_text(QUICK_START)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "train.py", str(ROOT / "examples")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 1 3") == 2
