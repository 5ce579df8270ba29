"""Fine-tuning a saved model: load, shard, train with a schedule, save, go on, and export.

    python examples/fine_tune.py                                        # one process
    torchrun --nproc-per-node 2 examples/fine_tune.py                   # sequences over two ranks
    torchrun --nproc-per-node 2 examples/fine_tune.py --resume --steps 16   # goes on

Tokens are bytes: a model of yours that reads bytes goes to --model, a folder or a name of the hub
(for any other, tokenize in ``Documents`` first); without one a small Llama with random weights is
saved to OUT/base first. OUT/final is a folder that plain transformers loads. Rank 0
writes the losses to OUT/losses.json; one process and two ranks give the same ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from common import FOLDER, Documents, device, make_mesh, make_model, options_of, pad, write_losses

import paradyse


def make_base(folder: Path, longest: int) -> str:
    """Rank 0 writes a small model with random weights; a folder, on every rank."""
    torch.manual_seed(0)
    if not dist.is_initialized() or dist.get_rank() == 0:
        make_model(longest).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return str(folder)


def main() -> None:
    parser = options_of(__doc__, "fine-tune-example")
    parser.add_argument("--model", help="folder or name of a causal language model of bytes")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    mesh = make_mesh(args.replicas)  # dist.init_process_group is in it
    name = args.model or make_base(args.out / "base", args.longest)
    model = transformers.AutoModelForCausalLM.from_pretrained(name)  # whole, on the host
    model.train()
    model.to(device())
    if not args.whole:
        paradyse.shard(model, mesh)  # before the optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, args.steps)
    options = {"mesh": mesh, "inner": args.inner, "plan": args.plan}
    model = torch.compile(model, backend="paradyse", options=options)

    first = 0
    if args.resume:  # anywhere after the optimizer is made; the compiled model will do
        found = paradyse.load_checkpoint(args.out / "checkpoint", model, optimizer)
        schedule.load_state_dict(found.extra["schedule"])
        first = found.step

    number = args.steps * args.batch * args.replicas
    dataset = Documents(FOLDER, 0, number, args.longest)
    sampler = paradyse.replica_sampler(dataset, mesh, shuffle=False) if mesh is not None else None
    loader = torch.utils.data.DataLoader(dataset, args.batch, sampler=sampler, collate_fn=pad)
    losses = []
    for step, batch in enumerate(loader, 1):
        if step <= first:
            continue
        loss = model(**{k: x.to(model.device) for k, x in batch.items()}).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
        if step % 4 == 0:
            state = {"schedule": schedule.state_dict()}
            paradyse.save_checkpoint(
                args.out / "checkpoint", model, optimizer, step=step, extra=state
            )

    state = paradyse.full_state_dict(model, cpu=True, rank0_only=True)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    model.save_pretrained(args.out / "final", state_dict=state, is_main_process=is_first)
    write_losses(args.out, losses)  # dist.destroy_process_group is in it


if __name__ == "__main__":
    main()
