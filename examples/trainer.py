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

import transformers
from common import (
    FOLDER,
    Documents,
    arguments,
    history,
    make_mesh,
    make_model,
    options_of,
    pad,
    write_losses,
)

import paradyse


class Trainer(paradyse.TrainerMixin, transformers.Trainer):
    """Trainer, with one batch for all ranks of a sequence group."""


def main() -> None:
    parser = options_of(__doc__, "trainer-example")
    parser.add_argument("--save-every", type=int, default=4, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    mesh = make_mesh(args.replicas)
    transformers.set_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(
            **arguments(args),
            per_device_eval_batch_size=args.batch,
            eval_strategy="steps",
            eval_steps=args.save_every,
            save_steps=args.save_every,
            prediction_loss_only=True,
        ),
        train_dataset=Documents(FOLDER, 0, 40, args.longest),
        eval_dataset=Documents(FOLDER, 40, 5, args.longest),
        data_collator=pad,
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "final"))
    write_losses(args.out, history(trainer))


if __name__ == "__main__":
    main()
