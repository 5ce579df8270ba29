"""What dropout drops of a sequence that is a call of its own does not depend on the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import RankPool
from models import TOLERANCE, make_model, worst
from test_sharded_training import Micro, batches_of, plan_of, step_by
from test_training import dataset_of, step_of
from torch import Tensor, nn

import paradyse

DROPOUT = {
    "llama": {"attention_dropout": 0.2},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
}
LENGTHS = [9, 4, 5, 13]


class Norm(nn.Module):
    """Transformers' RMSNorm without its cast to float32."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def in_float64(model: Any, family: str) -> Any:
    """``model`` without its casts to float32, in which gradients of a loss that three ranks divide
    differ in the last digits."""
    if family != "bert":
        model.loss_function = next_token_loss
    for name, module in [*model.named_modules()]:
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, Norm(module.weight))
    return model.double()


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """Transformers' loss of a causal model without its cast to float32."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    how = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), shifted, ignore_index=-100, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def steps(
    family: str, plans: Sequence[Sequence[Micro]], sharded: bool
) -> list[tuple[float, float, str]]:
    """Of each step by one of ``plans`` its loss, and its largest difference from the first one."""
    torch._dynamo.reset()
    model = make_model(family, num_hidden_layers=1, **DROPOUT[family])
    model = in_float64(model, family).train()
    if sharded:
        paradyse.shard(model)
    batches = batches_of(family, dataset_of(LENGTHS), apart=True)
    mixed, done = paradyse.MixedModel(model, {"inner": "eager"}), []
    for plan in plans:
        step = step_by(batches, plan_of(plan))
        for loss in mixed.losses(step):
            loss.backward()
        assert step.loss is not None
        done.append(step_of(model, step.loss))
    return [(got.loss, *worst(got, done[0])) for got in done]


PLANS: dict[int, list[list[Micro]]] = {
    2: [[[(2, [0, 1, 2, 3])]], [[(1, [3, 0]), (1, [1, 2])]], [[(2, [3])], [(1, [0, 1]), (1, [2])]]],
    3: [[[(3, [0, 1, 2, 3])]], [[(2, [3, 0]), (1, [1, 2])]], [[(1, [2]), (1, [1]), (1, [0, 3])]]],
}


def check(results: list[list[tuple[float, float, str]]]) -> None:
    """All steps have one loss, and the gradients of the first."""
    close = TOLERANCE[torch.float64]
    for found in results:
        assert all(abs(loss - found[0][0]) <= 1e-6 * loss for loss, *_ in found), found
        assert all(error <= close for _, error, _ in found), found


@pytest.mark.slow
def test_two_ranks(pool2: RankPool) -> None:
    check(pool2.run(steps, "gpt2", PLANS[2], False, timeout_s=120))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(DROPOUT))
@pytest.mark.parametrize("sharded", [False, True])
def test_three_ranks(family: str, sharded: bool, pool3: RankPool) -> None:
    check(pool3.run(steps, family, PLANS[3], sharded, timeout_s=240))


@pytest.mark.slow
def test_another_step_drops_others(pool2: RankPool) -> None:
    """Two steps of one epoch, of the same sequences by the same plan."""
    for first, second in pool2.run(two_steps, timeout_s=120):
        assert first != second


def two_steps() -> list[float]:
    """The losses of two steps that differ in their number alone."""
    torch._dynamo.reset()
    model = make_model("gpt2", num_hidden_layers=1, **DROPOUT["gpt2"]).train()
    batches = batches_of("gpt2", dataset_of(LENGTHS), apart=True)
    mixed, found = paradyse.MixedModel(model, {"inner": "eager"}), []
    for number in range(2):
        step = step_by(batches, plan_of([[(2, [0, 1, 2, 3])]]), number)
        for loss in mixed.losses(step):
            loss.backward()
        assert step.loss is not None
        found.append(step.loss.item())
    return found
