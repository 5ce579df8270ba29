"""A loop may write what a sharded model gave in place, as Trainer does with losses."""

from __future__ import annotations

from typing import Any

import torch
from harness import RankPool
from models import relative, whole

import paradyse


def classifier() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=96, num_attention_heads=4, num_labels=3, **sizes, **drops)
    )


def scaled() -> float:
    """Largest error of gradients of a loss and of logits that are scaled in place, but for those of
    biases of keys, which are zero."""
    torch._dynamo.reset()
    reference, model = classifier(), paradyse.shard(classifier())
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    ids = torch.arange(24).reshape(2, 12)
    for call in (compiled, reference):
        out = call(input_ids=ids, labels=torch.tensor([0, 2]))
        loss, logits = out.loss, out.logits
        loss *= 3
        logits /= 2
        (loss + logits.square().mean()).backward()
    want = dict(reference.named_parameters())
    found = {n: whole(p.grad) for n, p in model.named_parameters()}
    return max(relative(g, want[n].grad) for n, g in found.items() if "key.bias" not in n)


def test_what_a_sharded_model_gives_may_be_written(pool2: RankPool) -> None:
    for error in pool2.run(scaled, timeout_s=100):
        assert error < 1e-4
