"""Batches of mixed lengths in a loop of one's own: groups of ranks of different degree.

    torchrun --nproc-per-node 2 examples/mixed_loop.py                  # the standard library
    torchrun --nproc-per-node 2 examples/mixed_loop.py --text FOLDER    # sources and texts of yours

A small Llama learns the text byte by byte. What groups of each degree can do is measured first,
then each batch is planned: few long files, many short ones. Rank 0 shows loss, groups and tokens a
second of every step, and writes the losses to OUT/losses.json; one process gives the same ones.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from common import Texts, make_mesh, make_model, mixed_options_of, write_losses

import paradyse


def main() -> None:
    args = mixed_options_of(__doc__, "mixed-loop-example").parse_args()
    make_mesh()  # all ranks, of which groups are made step by step
    torch.manual_seed(0)
    net = make_model(args.longest)
    if not args.whole:
        paradyse.shard(net)
    dataset = Texts(args.text, args.longest)
    model = paradyse.MixedModel(net, {"inner": args.inner})
    ways = args.ways or paradyse.measure_ways(
        model, dataset, tokens_per_rank=args.longest, repeats=args.repeats
    )
    batches = paradyse.MixedBatches(dataset, tokens_per_step=args.tokens, ways=ways)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    shows = not dist.is_initialized() or dist.get_rank() == 0
    losses: list[dict[str, float]] = []
    while len(losses) < args.steps:
        for step in batches:
            for loss in model.losses(step):  # this rank's micro-batches
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append({"step": len(losses) + 1, "loss": step.loss.item()})
            if shows:
                report = step.report
                sys.stdout.write(
                    f"step {len(losses)} of {args.steps}: loss {step.loss.item():.4f}, groups "
                    f"{step.plan.in_words()}, {report.num_tokens:,} tokens, "
                    f"{report.num_tokens / report.taken_s:,.0f} a second\n"
                )
                sys.stdout.flush()
            if len(losses) == args.steps:
                break
    if shows:
        sys.stdout.write(f"{batches.explain(step)}\n")
    write_losses(args.out, losses)


if __name__ == "__main__":
    main()
