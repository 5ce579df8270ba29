"""A loop of one's own: schedule, clipping, accumulation, checkpoints, and a line for every call.

    python examples/plain_loop.py                                       # one process
    torchrun --nproc-per-node 2 examples/plain_loop.py                  # sequences over two ranks
    torchrun --nproc-per-node 2 examples/plain_loop.py --resume         # goes on from the last save

A small Llama learns Python from the standard library's sources, byte by byte. Rank 0 writes the
losses to OUT/losses.json; one process and two ranks give the same ones.
"""

from __future__ import annotations

import torch
from common import FOLDER, Documents, device, make_mesh, make_model, options_of, pad, write_losses

import paradyse

ACCUMULATE = 2
"""Calls before a step."""


def main() -> None:
    parser = options_of(__doc__, "plain-loop-example")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    mesh = make_mesh(args.replicas)
    torch.manual_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    options = {"mesh": mesh, "inner": args.inner, "plan": args.plan}
    compiled = torch.compile(model, backend="paradyse", options=options)
    if mesh is None or mesh.get_rank() == 0:
        paradyse.on_step(model, print)

    dataset = Documents(
        FOLDER, 0, args.steps * ACCUMULATE * args.batch * args.replicas, args.longest
    )
    sampler = paradyse.replica_sampler(dataset, mesh, shuffle=False) if mesh is not None else None
    loader = torch.utils.data.DataLoader(dataset, args.batch, sampler=sampler, collate_fn=pad)
    batches = [{name: x.to(device()) for name, x in batch.items()} for batch in loader]

    folder, first = args.out / "checkpoint", 0
    if args.resume:
        found = paradyse.load_checkpoint(folder, model, optimizer)
        scheduler.load_state_dict(found.extra["scheduler"])
        first = found.step
    losses = []
    for step in range(first, args.steps):
        *before, last = batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        total = 0.0
        with paradyse.no_sync(model):  # gradients travel once a step
            for batch in before:
                loss = compiled(**batch).loss / ACCUMULATE
                loss.backward()
                total += loss.item()
        loss = compiled(**last).loss / ACCUMULATE
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append({"step": step + 1, "loss": total + loss.item(), "grad_norm": norm.item()})
        if (step + 1) % 2 == 0:
            state = {"scheduler": scheduler.state_dict()}
            paradyse.save_checkpoint(folder, model, optimizer, step=step + 1, extra=state)
    write_losses(args.out, losses)


if __name__ == "__main__":
    main()
