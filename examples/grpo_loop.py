"""Policy optimization as GRPO has it, on sharded weights: sample, reward, and two steps on each.

    python examples/grpo_loop.py                                        # one process
    torchrun --nproc-per-node 2 examples/grpo_loop.py                   # sequences over two ranks

A small Llama is rewarded for writing letters after the first bytes of source files. The loss is
computed inside the compiled function, so that no rank holds the logits of all tokens. Rank 0 writes
losses and rewards to OUT/losses.json; one process and two ranks give the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from common import FOLDER, Documents, device, make_mesh, make_model, options_of, write_losses
from torch import Tensor

import paradyse

GROUP = 4
"""Answers to one prompt, which are compared with each other."""
PROMPT, ANSWER = 24, 16
"""Tokens."""
STEPS_EACH = 2
"""On the same answers."""


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of the token behind each of ``ids`` [B, S], given it and those before: [B, S], the last void.

    Tokens that are cut off, ``logits[:, :-1]``, would have whole logits gathered where no loss sums
    them up.
    """
    logits = model(input_ids=ids).logits
    return logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)


def policy_loss(model: Any, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Clipped ratios to the policy that answered, over the tokens of ``mask`` [B, S]."""
    ratio = (log_probabilities(model, ids) - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((gain * mask).sum(-1) / mask.sum(-1)).mean()


def rewards_of(answers: Tensor) -> Tensor:
    """The share of letters in each of ``answers`` [B, N]."""
    return ((answers >= ord("a")) & (answers <= ord("z"))).float().mean(-1)


def main() -> None:
    args = options_of(__doc__, "grpo-example").parse_args()
    mesh = make_mesh(args.replicas)
    torch.manual_seed(0)
    model = make_model(args.longest)
    if not args.whole:
        paradyse.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"mesh": mesh, "inner": args.inner, "plan": args.plan}
    score = torch.compile(log_probabilities, backend="paradyse", options=options)
    loss_of = torch.compile(policy_loss, backend="paradyse", options=options)

    first = paradyse.replica_of(mesh)[0] * args.batch if mesh is not None else 0
    files = Documents(FOLDER, first, args.batch, PROMPT)
    prompts = torch.stack([files[i]["input_ids"] for i in range(args.batch)])
    prompts = prompts.repeat_interleave(GROUP, 0).to(device())
    rows = []
    for step in range(args.steps):
        torch.manual_seed(step)  # ranks of a group are to draw the same answers
        with torch.no_grad():
            ids = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                pad_token_id=0,
            )
            old = score(model, ids)
        rewards = rewards_of(ids[:, PROMPT:])
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
        mask = torch.zeros_like(old)
        mask[:, PROMPT - 1 : -1] = 1.0
        for _ in range(STEPS_EACH):
            loss = loss_of(model, ids, old, advantages.flatten()[:, None], mask)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        row = {"step": step + 1, "loss": loss.item(), "grad_norm": norm.item()}
        rows.append({**row, "reward": rewards.mean().item()})
    write_losses(args.out, rows)


if __name__ == "__main__":
    main()
