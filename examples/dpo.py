"""Preferences by TRL's DPOTrainer: a model, and the frozen one that it is compared with.

    python examples/dpo.py                                              # one process
    torchrun --nproc-per-node 2 examples/dpo.py                         # sequences over two ranks

Of each file its own next lines are preferred to those of another file. Both models are compiled and
lie in parts on the ranks (--whole: all on each); they have the same code, so that the second one
costs no compilation. Rank 0 writes the losses to OUT/losses.json; one process and any number of
ranks give the same ones. Needs paradyse[trl].
"""

from __future__ import annotations

import copy

import datasets
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


class DPOTrainer(paradyse.TrainerMixin, trl.DPOTrainer):
    """DPOTrainer, with one batch for all ranks of a sequence group."""


def preferences(longest: int) -> datasets.Dataset:
    """Half of a file as prompt; what follows it is chosen over the end of the next file."""
    files = [bytes(row["input_ids"].tolist()) for row in Documents(FOLDER, 0, 21, longest)]
    texts = [file.decode("latin-1") for file in files]
    half = longest // 2
    rows = zip(texts, texts[1:], strict=False)
    return datasets.Dataset.from_list(
        [
            {"prompt": own[:half], "chosen": own[half:], "rejected": other[half:]}
            for own, other in rows
            if len(own) > half and len(other) > half
        ]
    )


def main() -> None:
    args = options_of(__doc__, "dpo-example").parse_args()
    mesh = make_mesh(args.replicas)
    transformers.set_seed(0)
    model = make_model(args.longest + 8)
    reference = copy.deepcopy(model)
    for one in () if args.whole else (model, reference):
        paradyse.shard(one, mesh)
    given = {"max_length": args.longest, "save_strategy": "no", "bf16": False, "beta": 0.5}
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(**arguments(args), **given, gradient_checkpointing=False),
        train_dataset=preferences(args.longest),
        processing_class=byte_tokenizer(),
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
    )
    trainer.train()
    trainer.save_model(str(args.out / "final"))
    write_losses(args.out, history(trainer))


if __name__ == "__main__":
    main()
