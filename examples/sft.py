"""Fine-tuning by TRL's SFTTrainer, documents packed into sequences of equal length.

    python examples/sft.py                                              # one process
    torchrun --nproc-per-node 2 examples/sft.py                         # sequences over two ranks
    torchrun --nproc-per-node 4 examples/sft.py --replicas 2            # two groups of two

Documents of a pack do not see each other. --lora trains adapters alone. Weights lie in parts on the
ranks of a group (--whole: all on each). Rank 0 writes the losses to OUT/losses.json; one process
and any number of ranks give the same ones. Needs paradyse[trl].
"""

from __future__ import annotations

import datasets
import peft
import transformers
import trl
from common import (
    FOLDER,
    Documents,
    arguments,
    byte_tokenizer,
    history,
    make_mesh,
    make_model,
    options_of,
    write_losses,
)

import paradyse


class SFTTrainer(paradyse.TrainerMixin, trl.SFTTrainer):
    """SFTTrainer, with one batch for all ranks of a sequence group."""


def rows_of(longest: int) -> datasets.Dataset:
    """Source files as TRL takes them: tokens, and which of them are learnt, here all."""
    rows = Documents(FOLDER, 0, 40, longest)
    return datasets.Dataset.from_list(
        [{name: rows[i][name].tolist() for name in ("input_ids", "labels")} for i in range(40)]
    )


def main() -> None:
    parser = options_of(__doc__, "sft-example")
    parser.add_argument("--lora", action="store_true", help="train adapters of a frozen model")
    args = parser.parse_args()
    mesh = make_mesh(args.replicas)
    transformers.set_seed(0)
    model = make_model(args.longest)
    if args.lora:
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(model, adapters)
    if not args.whole:
        paradyse.shard(model, mesh)
    given = {"packing": True, "max_length": args.longest, "save_strategy": "no", "bf16": False}
    trainer = SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(args), **given, gradient_checkpointing=False),
        train_dataset=rows_of(args.longest),
        processing_class=byte_tokenizer(),
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
    )
    trainer.train()
    trainer.save_model(str(args.out / "final"))
    write_losses(args.out, history(trainer))


if __name__ == "__main__":
    main()
