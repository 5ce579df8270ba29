"""HuggingFace's Trainer over sequence-parallel ranks: training, evaluation, saving, resuming.

    python examples/trainer.py                                          # one process
    torchrun --nproc-per-node 2 examples/trainer.py                     # sequences over two ranks
    torchrun --nproc-per-node 4 examples/trainer.py --replicas 2        # two groups of two ranks
    torchrun --nproc-per-node 2 examples/trainer.py --resume            # goes on from the last save

A small Llama learns Python from the standard library's sources, byte by byte. Rank 0 writes the
losses to OUT/losses.json; one process and two ranks give the same ones. Needs transformers and
accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import paradyse


class Trainer(paradyse.TrainerMixin, transformers.Trainer):
    """Trainer, with one batch for all ranks of a sequence group."""


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Source files as bytes, of very different lengths."""

    def __init__(self, folder: Path, skip: int, number: int, longest: int):
        self.files = sorted(folder.glob("*.py"))[skip : skip + number]
        self.longest = longest

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor(list(self.files[index].read_bytes()[: self.longest]))
        return {"input_ids": ids, "labels": ids}


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of one batch on one length; labels do not count padding."""

    def column(name: str, value: int) -> Tensor:
        values = [row[name] for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)

    ids = column("input_ids", 0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": column("labels", -100), "attention_mask": mask}


def make_model(longest: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def make_mesh(replicas: int) -> Any:
    """(replicas, ranks of a sequence group); None in one process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    if world % replicas:
        raise SystemExit(f"--replicas {replicas} does not divide the {world} ranks")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    shape = (replicas, world // replicas)
    return dist.init_device_mesh(
        "cuda" if on_gpu else "cpu", shape, mesh_dim_names=("data", "sequence")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("trainer-example"), help="folder")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=4, help="steps")
    parser.add_argument("--batch", type=int, default=2, help="sequences of one group of ranks")
    parser.add_argument("--longest", type=int, default=512, help="bytes of a file that are used")
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks")
    parser.add_argument("--whole", action="store_true", help="every rank holds all weights")
    parser.add_argument("--inner", default="inductor", help="compiler of the pieces")
    parser.add_argument("--plan", default="auto", help="auto, or one strategy for all lengths")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    mesh = make_mesh(args.replicas)
    transformers.set_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    folder = Path(os.__file__).parent
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            learning_rate=1e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=args.save_every,
            save_steps=args.save_every,
            prediction_loss_only=True,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Documents(folder, 0, 40, args.longest),
        eval_dataset=Documents(folder, 40, 5, args.longest),
        data_collator=pad,
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "final"))
    if trainer.is_world_process_zero():
        kept = ("step", "loss", "grad_norm", "eval_loss")
        history = [{k: row[k] for k in kept if k in row} for row in trainer.state.log_history]
        (args.out / "losses.json").write_text(json.dumps(history, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
