"""accelerate's loop with everything prepared: accumulation, clipping, a schedule, evaluation.

    python examples/accelerate_loop.py                                  # one process
    torchrun --nproc-per-node 2 examples/accelerate_loop.py             # sequences over two ranks
    accelerate launch --config_file examples/accelerate.yaml examples/accelerate_loop.py

A small Llama learns Python from the standard library's sources, byte by byte. Rank 0 writes the
losses to OUT/losses.json; one process and two ranks give the same ones. Needs accelerate.
"""

from __future__ import annotations

import accelerate
import torch
from common import FOLDER, Documents, make_mesh, make_model, options_of, pad, write_losses

import paradyse


class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):
    """Accelerator, of which a group of ranks is one process."""


def main() -> None:
    args = options_of(__doc__, "accelerate-example").parse_args()
    mesh = make_mesh(args.replicas)
    torch.manual_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    accelerator = Accelerator(
        mesh=mesh,
        backend_options={"inner": args.inner, "plan": args.plan},
        gradient_accumulation_steps=2,
        cpu=not torch.cuda.is_available(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    train = Documents(FOLDER, 0, args.steps * args.batch * args.replicas, args.longest)
    evaluation = Documents(FOLDER, 40, 5, args.longest)
    loaders = [
        torch.utils.data.DataLoader(d, args.batch, collate_fn=pad) for d in (train, evaluation)
    ]
    model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, *loaders
    )
    losses: list[dict[str, float]] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            row = {"step": len(losses) + 1, "loss": loss.item()}
            if accelerator.sync_gradients:
                row["grad_norm"] = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(row)
    model.eval()
    with torch.no_grad():
        found = []
        for batch in eval_loader:
            loss = model(**batch).loss.repeat(len(batch["input_ids"]))
            found.append(accelerator.gather_for_metrics(loss))
    losses.append({"step": args.steps, "eval_loss": torch.cat(found).mean().item()})
    state = accelerator.get_state_dict(model)  # whole, on every rank
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out / "final", state_dict=state)
    write_losses(args.out, losses)


if __name__ == "__main__":
    main()
