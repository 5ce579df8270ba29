"""One rank does something else than the others: all are told what, at once, and go on in step."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import make_batch, make_model, relative, whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import Started
from paradyse.types import Plan

SOON_S = 20.0


class Loop:
    """A training loop on one rank; ``odd`` is the rank that does something else."""

    def __init__(self, sharded: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.reference = make_model("llama", num_hidden_layers=1)
        self.model = make_model("llama", num_hidden_layers=1)
        self.model.load_state_dict(self.reference.state_dict())
        if sharded:
            paradyse.shard(self.model)
        self.options = {"inner": "eager", "plan": "megatron_cz", **options}
        self.compiled: Any = torch.compile(self.model, backend="paradyse", options=self.options)
        self.odd = dist.get_rank() == dist.get_world_size() - 1
        self.batch = make_batch("plain", 2, 12)

    def call(self, **changes: Any) -> Any:
        batch = {**self.batch, **changes}
        return self.compiled(**{k: v for k, v in batch.items() if v is not None})

    def step(self, **changes: Any) -> None:
        self.model.zero_grad()
        self.call(**changes).loss.backward()

    def is_exact(self) -> bool:
        """A step on all ranks gives the gradients of one process."""
        self.reference.zero_grad()
        self.reference(**self.batch).loss.backward()
        self.step()
        got = {n: whole(p.grad) for n, p in self.model.named_parameters()}
        return all(relative(got[n], p.grad) < 1e-4 for n, p in self.reference.named_parameters())


def changed(ids: Tensor, at: int) -> Tensor:
    other = ids.clone()
    other[0, at] = (other[0, at] + 1) % 8
    return other


def other_tokens(loop: Loop) -> None:
    ids = loop.batch["input_ids"]
    loop.step(input_ids=changed(ids, 3) if loop.odd else ids)


def other_labels(loop: Loop) -> None:
    labels = loop.batch["labels"]
    loop.step(labels=changed(labels, 5) if loop.odd else labels)


def other_length(loop: Loop) -> None:
    loop.step(**(make_batch("plain", 2, 15) if loop.odd else {}))


def shorter_by_one(loop: Loop) -> None:
    loop.step(**(make_batch("plain", 2, 11) if loop.odd else {}))


def other_batch_size(loop: Loop) -> None:
    loop.step(**(make_batch("plain", 3, 12) if loop.odd else {}))


def mask_given(loop: Loop) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    loop.step(attention_mask=mask if loop.odd else None)


def other_mask(loop: Loop) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, : 4 if loop.odd else 3] = 0
    loop.step(attention_mask=mask)


def positions_given(loop: Loop) -> None:
    positions = torch.arange(12).expand(2, 12)
    loop.step(position_ids=positions if loop.odd else None)


def labels_left_out(loop: Loop) -> None:
    out = loop.call(labels=None) if loop.odd else loop.call()
    (out.logits if loop.odd else out.loss).mean().backward()


def embeddings_given(loop: Loop) -> None:
    x = torch.zeros(2, 12, loop.model.config.hidden_size)
    loop.step(**({"input_ids": None, "inputs_embeds": x} if loop.odd else {}))


def other_count_of_items(loop: Loop) -> None:
    loop.step(num_items_in_batch=torch.tensor(20 + loop.odd))


def other_dtype_of_tokens(loop: Loop) -> None:
    ids = loop.batch["input_ids"]
    loop.step(input_ids=ids.int() if loop.odd else ids)


def no_gradients(loop: Loop) -> None:
    with torch.set_grad_enabled(not loop.odd):
        out = loop.call()
    if not loop.odd:
        out.loss.backward()


def inference_mode(loop: Loop) -> None:
    with torch.inference_mode(loop.odd):
        out = loop.call()
    if not loop.odd:
        out.loss.backward()


def hidden_states_asked_for(loop: Loop) -> None:
    loop.step(output_hidden_states=True if loop.odd else None)


def autocast(loop: Loop) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=loop.odd):
        out = loop.call()
    out.loss.backward()


def checkpointing(loop: Loop) -> None:
    with warnings.catch_warnings():  # transformers renames both
        warnings.simplefilter("ignore", FutureWarning)
        if loop.odd:
            loop.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            loop.step()
        finally:
            loop.model.gradient_checkpointing_disable()


def frozen_weights(loop: Loop) -> None:
    weight = loop.model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(not loop.odd)
    try:
        loop.step()
    finally:
        weight.requires_grad_(True)


def another_weight_frozen(loop: Loop) -> None:
    mlp = loop.model.model.layers[0].mlp
    weight = (mlp.gate_proj if loop.odd else mlp.up_proj).weight
    weight.requires_grad_(False)
    try:
        loop.step()
    finally:
        weight.requires_grad_(True)


def skips_a_batch(loop: Loop) -> None:
    batches = [make_batch("plain", 2, 12 + i) for i in range(3)]
    for batch in batches[1:] if loop.odd else batches:
        loop.step(**batch)


def skips_a_batch_of_one_length(loop: Loop) -> None:
    ids = loop.batch["input_ids"]
    batches = [changed(ids, i) for i in range(3)]
    for tokens in batches[1:] if loop.odd else batches:
        loop.step(input_ids=tokens)


def skips_backward(loop: Loop) -> None:
    loss = loop.call().loss
    if not loop.odd:
        loss.backward()
    loop.step()


def backward_twice(loop: Loop) -> None:
    loss = loop.call().loss
    loss.backward(retain_graph=True)
    if loop.odd:
        loss.backward()
    loop.step()


def backward_of_another_output(loop: Loop) -> None:
    out = loop.call()
    (out.logits.mean() if loop.odd else out.loss).backward()


def reads_logits(loop: Loop) -> None:
    out = loop.call()
    if loop.odd:
        out.logits.argmax(-1)
    out.loss.backward()


def prints_logits_without_gradients(loop: Loop) -> None:
    with torch.no_grad():
        out = loop.call()
        if loop.odd:
            str(out.logits)
        loop.call()


def fails_between(loop: Loop) -> None:
    loss = loop.call().loss
    try:
        if loop.odd:
            raise RuntimeError("of the user's own")
        loss.backward()
    except RuntimeError:
        pass
    loop.step()


def calls_once_more(loop: Loop) -> None:
    if loop.odd:
        loop.call()
    loop.step()


def evaluates_alone(loop: Loop) -> None:
    if loop.odd:
        with torch.no_grad():
            loop.call()
    loop.step()


def another_plan(loop: Loop) -> None:
    name = "metp" if loop.odd else "megatron_ts"
    options = {**loop.options, "plan": name}
    torch.compile(loop.model, backend="paradyse", options=options)(**loop.batch)


def another_function(loop: Loop) -> None:
    name = "metp" if loop.odd else "megatron_ts"
    options = {**loop.options, "plan": lambda workload: name}
    torch.compile(loop.model, backend="paradyse", options=options)(**loop.batch)


def other_weights(loop: Loop) -> None:
    model = make_model("gpt2", num_hidden_layers=1)
    if loop.odd:
        with torch.no_grad():
            model.transformer.wte.weight[0, 0] += 1
    torch.compile(model, backend="paradyse", options=loop.options)(**loop.batch)


def other_random_state(loop: Loop) -> None:
    model = make_model("gpt2", num_hidden_layers=1, attn_pdrop=0.5)
    torch.manual_seed(int(loop.odd))
    torch.compile(model, backend="paradyse", options=loop.options)(**loop.batch)


def evaluates_a_model_with_dropout(loop: Loop) -> None:
    model = make_model("gpt2", num_hidden_layers=1, attn_pdrop=0.5).train(not loop.odd)
    torch.compile(model, backend="paradyse", options=loop.options)(**loop.batch)


def computed_whole(loop: Loop) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.full((2, 3, 4), float(loop.odd))
    torch.compile(model, backend="paradyse", options=loop.options)(x).sum().backward()


def clips_gradients(loop: Loop) -> None:
    loop.step()
    if loop.odd:
        clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.step()


def gathers_a_weight(loop: Loop) -> None:
    if loop.odd:
        loop.model.lm_head.weight.full_tensor()
    loop.step()


def gathers_all_weights(loop: Loop) -> None:
    loop.step()
    if loop.odd:
        paradyse.full_state_dict(loop.model)
    loop.step()


WHOLE_OR_SHARDED: dict[Callable[[Loop], None], str] = {
    other_tokens: "disagree on the batch",
    other_labels: "disagree on the batch",
    other_length: "disagree on the sequence length: rank 0: 12, ",
    shorter_by_one: "disagree on the sequence length: rank 0: 12, ",
    other_batch_size: "disagree on the batch size: rank 0: 2, ",
    mask_given: "disagree on the inputs given: .*attention_mask",
    other_mask: "disagree on the batch",
    positions_given: "disagree on the inputs given: .*position_ids",
    labels_left_out: "disagree on the inputs given: .*labels",
    embeddings_given: "disagree on the inputs given: .*inputs_embeds",
    other_count_of_items: "disagree on the batch",
    other_dtype_of_tokens: "disagree on",
    no_gradients: r"training call \d+.*call without gradients",
    inference_mode: r"training call \d+.*call without gradients",
    hidden_states_asked_for: "disagree on (how many outputs are asked for|the inputs given)",
    autocast: "disagree on the program .*autocast",
    checkpointing: "disagree on the program .*gradient checkpointing",
    frozen_weights: "disagree on how many weights are trained",
    skips_a_batch: "disagree on the sequence length: rank 0: 12, ",
    skips_a_batch_of_one_length: "disagree on the batch",
    skips_backward: r"runs backward of training call \d+.*calls the model .training call \d+",
    backward_twice: r"calls the model .training call \d+.*runs backward of training call \d+",
    backward_of_another_output: "disagree on what they do",
    reads_logits: r"runs backward of training call \d+.*reads the output .*same lines",
    prints_logits_without_gradients: "calls the model .*reads the output .*same lines",
    fails_between: r"runs backward of training call \d+.*calls the model .training call \d+",
    calls_once_more: r"runs backward of training call \d+.*calls the model .training call \d+",
    evaluates_alone: r"calls the model .training call \d+.*call without gradients",
    another_plan: "disagree on the options",
    another_function: "disagree on the plan: .*megatron_ts.*metp",
    other_weights: "disagree on the weights .*before the model is built",
    other_random_state: "disagree on the random state",
    evaluates_a_model_with_dropout: "disagree on",
    computed_whole: "disagree on the batch",
    another_weight_frozen: "disagree on which weights are trained .*requires_grad",
}
SHARDED: dict[Callable[[Loop], None], str] = {
    clips_gradients: "calls the model .*computes norms",
    gathers_a_weight: "calls the model .*gathers a sharded tensor",
    gathers_all_weights: "calls the model .*gathers a sharded tensor",
}


def differ(name: str, sharded: bool) -> str:
    """What this rank hears; then it is in step with the others."""
    torch._dynamo.reset()
    loop = Loop(sharded)
    for _ in range(2):
        loop.step()
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        globals()[name](loop)
    took = time.monotonic() - start
    assert took < SOON_S, took
    assert loop.is_exact()
    loop.step(**make_batch("plain", 2, 13))  # by a graph that some ranks alone may have now
    return str(error.value)


CASES = [(fn.__name__, text, s) for fn, text in WHOLE_OR_SHARDED.items() for s in (False, True)]
CASES += [(fn.__name__, text, True) for fn, text in SHARDED.items()]
MOSTLY_SLOW = [
    pytest.param(*case, marks=() if i % 10 == 0 else pytest.mark.slow)
    for i, case in enumerate(CASES)
]


@pytest.mark.broad(but="skips_backward")
@pytest.mark.parametrize(("name", "text", "sharded"), MOSTLY_SLOW)
def test_two_ranks(name: str, text: str, sharded: bool, pool2: RankPool) -> None:
    check(pool2.run(differ, name, sharded, timeout_s=60), text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "sharded"), CASES)
def test_three_ranks(name: str, text: str, sharded: bool, pool3: RankPool) -> None:
    check(pool3.run(differ, name, sharded, timeout_s=60), text)


def goes_on_choosing() -> tuple[list[str], int]:
    """The plans of the calls after one that a rank has left out, by what ranks count, and how many
    messages this one has started in all."""
    from paradyse.profiling import trials
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    both = ["megatron_cz", "ulysses_z"]
    loop = Loop(False, plan="auto", strategies=both, levers=[], splits=[])
    plans, batches = list[str](), [make_batch("plain", 2, n) for n in (12, 40)]
    with patch.object(trials, "NEAR", 1e9), patch.object(trials, "ROUNDS", 2):
        for i in range(19):
            loop.step(**batches[i % 2])
        with pytest.raises(ValueError, match="disagree on the sequence length"):
            loop.step(**batches[0 if loop.odd else 1])
        for i in range(80):  # with as many agreements on what was measured, and trials
            loop.step(**batches[i % 2])
            plans.append(str(paradyse.stats(loop.compiled).last.plan))
            if i == 0:  # as if both had run at other lengths
                graphs = [g for c in captures_of(loop.compiled) for g in c.graphs.values()]
                (choice,) = {g.choice for g in graphs}
                choice.trials._ran |= dict.fromkeys(Plan((s, both[0])) for s in both)
    assert loop.is_exact()
    return plans, resolve_axis().session.of(Started).count


def test_ranks_go_on_choosing_the_same_plans(pool2: RankPool) -> None:
    """One has counted the call that was dropped at another length than the other."""
    (plans, num_sent), other = pool2.run(goes_on_choosing, timeout_s=100)
    assert (plans, num_sent) == other
    assert len(set(plans)) > 1  # others were tried


def different_weights() -> list[str]:
    """What two calls of a model raise that has other weights on this rank."""
    torch._dynamo.reset()
    loop, heard = Loop(False), list[str]()
    if loop.odd:
        with torch.no_grad():
            loop.model.lm_head.weight[0, 0] += 1
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            loop.step()
        heard.append(str(error.value))
    return heard


def test_different_weights_are_told_of_until_they_are_equal(pool2: RankPool) -> None:
    for heard in pool2.run(different_weights, timeout_s=60):
        assert all("disagree on the weights" in text for text in heard)


def check(heard: list[str], text: str) -> None:
    assert len(set(heard)) == 1, heard
    assert re.search(text, heard[0]), heard[0]
