"""Adapters of peft on a sharded base model, by Trainer.

    python examples/lora.py                                             # one process
    torchrun --nproc-per-node 2 examples/lora.py                        # sequences over two ranks

The frozen base lies in parts on the ranks, without gradients or states of an optimizer; adapters
are saved as peft saves them. Rank 0 writes the losses to OUT/losses.json; one process and two ranks
give the same ones. Needs transformers, accelerate and peft.
"""

from __future__ import annotations

import peft
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
    args = options_of(__doc__, "lora-example").parse_args()
    mesh = make_mesh(args.replicas)
    transformers.set_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(make_model(args.longest), adapters)
    if not args.whole:
        paradyse.shard(model, mesh)
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments(args), save_strategy="no"),
        train_dataset=Documents(FOLDER, 0, 40, args.longest),
        data_collator=pad,
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
    )
    trainer.train()
    trainer.save_model(str(args.out / "adapters"))
    write_losses(args.out, history(trainer))


if __name__ == "__main__":
    main()
