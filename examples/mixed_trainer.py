"""Batches of mixed lengths by HuggingFace's Trainer: groups of ranks of different degree.

    torchrun --nproc-per-node 2 examples/mixed_trainer.py               # the standard library
    torchrun --nproc-per-node 2 examples/mixed_trainer.py --text FOLDER # sources and texts of yours

A small Llama learns the text byte by byte. What groups of each degree can do is measured first, or
read from a file of ways. Trainer logs loss and tokens a second of every step. Rank 0 writes the
losses to OUT/losses.json; one process gives the same ones. Needs transformers and accelerate.
"""

from __future__ import annotations

import transformers
from common import (
    Texts,
    arguments,
    history,
    make_mesh,
    make_model,
    mixed_options_of,
    write_losses,
)

import paradyse


class Trainer(paradyse.TrainerMixin, transformers.Trainer):
    """Trainer, with a batch of mixed lengths for each step."""


def main() -> None:
    args = mixed_options_of(__doc__, "mixed-trainer-example").parse_args()
    make_mesh()
    transformers.set_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model)
    dataset = Texts(args.text, args.longest)
    options = {"inner": args.inner}
    ways = args.ways or paradyse.measure_ways(
        paradyse.MixedModel(model, options),
        dataset,
        tokens_per_rank=args.longest,
        repeats=args.repeats,
    )
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments(args), save_strategy="no"),
        batches=paradyse.MixedBatches(dataset, tokens_per_step=args.tokens, ways=ways),
        backend_options=options,
    )
    trainer.train()
    write_losses(args.out, history(trainer))


if __name__ == "__main__":
    main()
