"""What the examples share: a small Llama, source files as text of very different lengths, a mesh.

None of it is of ParaDySe: a script of yours has its own model and data in these places.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

FOLDER = Path(os.__file__).parent
"""The standard library's sources."""


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """``number`` source files as bytes, of very different lengths: from the first again behind the
    last one."""

    def __init__(self, folder: Path, skip: int, number: int, longest: int):
        files = sorted(folder.glob("*.py"))
        self.files = [files[i % len(files)] for i in range(skip, skip + number)]
        self.longest = longest

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor(list(self.files[index].read_bytes()[: self.longest]))
        return {"input_ids": ids, "labels": ids}


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sources and texts of a folder, and of those below it, as bytes; each is a sequence of its own
    length, cut behind ``longest``."""

    SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js")

    def __init__(self, folder: Path, longest: int):
        found = (f for f in sorted(folder.rglob("*")) if f.suffix in self.SUFFIXES)
        self.files = [f for f in found if f.is_file() and f.stat().st_size > 1]
        self.longest = longest
        if not self.files:
            raise SystemExit(f"--text {folder}: no files of {', '.join(self.SUFFIXES)} are there")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with self.files[index].open("rb") as file:
            return {"input_ids": torch.tensor(list(file.read(self.longest)))}


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of one batch on one length; labels do not count padding."""

    def column(name: str, value: int) -> Tensor:
        values = [row[name] for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)

    ids = column("input_ids", 0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": column("labels", -100), "attention_mask": mask}


def device() -> torch.device:
    """Where this process computes; ``make_mesh`` has chosen the GPU of each rank."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(longest: int, **config: Any) -> Any:
    """Of bytes, on ``device``; ``config`` changes its configuration."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"vocab_size": 256, "max_position_embeddings": longest, "use_cache": False}
    made = transformers.LlamaConfig(**{**sizes, **heads, **given, **config})
    return transformers.AutoModelForCausalLM.from_config(made).to(device())


def byte_tokenizer() -> Any:
    """A token is a byte; 0 pads, 10 (the end of a line) ends a text."""
    import tokenizers

    letters = {chr(i): i for i in range(256)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token=chr(0), eos_token="\n", unk_token="?"
    )


def make_mesh(replicas: int = 1) -> Any:
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


def options_of(doc: str | None, out: str) -> argparse.ArgumentParser:
    """The options of an example with the docstring ``doc``.

    Args:
        doc: shown by --help.
        out: default folder for what it writes.
    """
    parser = _shared_options(doc, out)
    parser.add_argument("--batch", type=int, default=2, help="sequences of one group of ranks")
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks")
    parser.add_argument("--plan", default="auto", help="auto, or one strategy for all lengths")
    return parser


def _shared_options(doc: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512, help="bytes of a file that are used")
    parser.add_argument("--whole", action="store_true", help="every rank holds all weights")
    parser.add_argument("--inner", default="inductor", help="compiler of the pieces")
    return parser


def mixed_options_of(doc: str | None, out: str) -> argparse.ArgumentParser:
    """As ``options_of``, of an example with batches of mixed lengths, which are dealt to groups of
    ranks by plans of their own."""
    parser = _shared_options(doc, out)
    text = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--text", type=Path, default=text, help="folder of sources and texts")
    parser.add_argument("--tokens", type=int, default=8192, help="of a batch, at most")
    parser.add_argument("--ways", help="file of ways; default: they are measured")
    parser.add_argument("--repeats", type=int, default=2, help="of each measurement")
    parser.set_defaults(longest=2048, batch=1)  # of Trainer, which deals no batches here
    return parser


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Of Trainer and its like, what all examples give."""
    return {
        "output_dir": str(args.out),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def write_losses(folder: Path, losses: list[dict[str, float]]) -> None:
    """Rank 0 writes FOLDER/losses.json; the process group ends."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def history(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged of steps and evaluations."""
    kept = ("step", "loss", "grad_norm", "eval_loss")
    rows = ({k: row[k] for k in kept if k in row} for row in trainer.state.log_history)
    return [row for row in rows if len(row) > 1]
