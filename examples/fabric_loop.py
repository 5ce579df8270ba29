"""Lightning Fabric's loop: mixed precision, clipping, evaluation.

    python examples/fabric_loop.py                                      # one process
    torchrun --nproc-per-node 2 examples/fabric_loop.py                 # sequences over two ranks

A small Llama learns Python from the standard library's sources, byte by byte. Rank 0 writes the
losses to OUT/losses.json; one process and two ranks give the same ones. Needs lightning-fabric.
"""

from __future__ import annotations

import os

import torch
from common import FOLDER, Documents, make_mesh, make_model, options_of, pad, write_losses
from lightning_fabric import Fabric
from lightning_fabric.strategies import SingleDeviceStrategy

import paradyse


def main() -> None:
    parser = options_of(__doc__, "fabric-example")
    parser.add_argument("--precision", default="32-true", help="as Fabric has it: bf16-mixed, ...")
    args = parser.parse_args()
    mesh = make_mesh(args.replicas)
    where = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    # The ranks of a sequence group get the same batches, and the backend sums gradients: for
    # Fabric each rank is one device by itself.
    fabric = Fabric(strategy=SingleDeviceStrategy(where), precision=args.precision)
    fabric.seed_everything(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"mesh": mesh, "inner": args.inner, "plan": args.plan}
    compiled = torch.compile(model, backend="paradyse", options=options)
    compiled, optimizer = fabric.setup(compiled, optimizer)

    loaders = []
    for first, number in ((0, args.steps * args.batch * args.replicas), (100, 4)):
        dataset = Documents(FOLDER, first, number, args.longest)
        sampler = paradyse.replica_sampler(dataset, mesh, shuffle=False) if mesh else None
        loader = torch.utils.data.DataLoader(dataset, args.batch, sampler=sampler, collate_fn=pad)
        loaders.append(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
    train, evaluation = loaders

    losses: list[dict[str, float]] = []
    for batch in train:
        loss = compiled(**batch).loss
        fabric.backward(loss)
        norm = fabric.clip_gradients(compiled, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": len(losses) + 1, "loss": loss.item(), "grad_norm": float(norm)}
        losses.append(row)
    compiled.eval()
    with torch.no_grad():
        found = [compiled(**batch).loss.item() for batch in evaluation]
    losses.append({"step": args.steps, "eval_loss": sum(found) / len(found)})
    paradyse.save_checkpoint(args.out / "checkpoint", model, optimizer.optimizer, step=args.steps)
    write_losses(args.out, losses)


if __name__ == "__main__":
    main()
