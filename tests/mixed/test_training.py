"""Training in groups of different degree equals one process on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import FAMILIES, TOLERANCE, VOCAB, Step, make_model, whole, worst
from step_search import ways_by_formula
from torch import Tensor, nn

import paradyse
from paradyse.mixed import training
from paradyse.mixed.batches import MixedStep, Share
from paradyse.mixed.ways import StepPlan, Way

BATCHES = ([40, 9, 7, 5, 1, 3, 11], [1, 1, 1, 2, 1, 1, 1, 1, 30], [30, 9, 9], [13, 17, 5, 5, 5])
"""One as long as all others together, many of one token, one alone, several of one length."""


def dataset_of(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Sequences of random tokens; some labels are ignored, never the last."""
    g = torch.Generator().manual_seed(sum(lengths))
    found = []
    for n in lengths:
        ids = torch.randint(3, VOCAB, (n,), generator=g)
        labels = torch.where(torch.rand(n, generator=g) < 0.2, -100, ids)
        labels[-1] = ids[-1]
        found.append({"input_ids": ids, "labels": labels})
    return found


def ways_for(num_ranks: int, room: int = 24) -> list[Way]:
    """Ways with which sequences beyond the ``room`` of a rank, in tokens, take several ranks."""
    return ways_by_formula(range(1, num_ranks + 1), room, 1e-6, messages=1.0)


def targets(family: str, sequence: Mapping[str, Tensor]) -> Tensor:
    """Labels as a loss of this sequence by itself counts them."""
    labels = sequence["labels"].clone()
    if FAMILIES[family].causal:
        labels[0] = -100
    return labels


def alone(model: Any, family: str, batch: Sequence[dict[str, Tensor]]) -> Step:
    """A step in one process, sequence by sequence, eagerly: the mean over all labels."""
    parts, count = [], 0
    for s in batch:
        labels = targets(family, s)
        num = int((labels != -100).sum())
        if num:
            inputs = {"input_ids": s["input_ids"][None], "labels": labels[None]}
            parts.append(model(**inputs).loss * num)
            count += num
    loss = torch.stack(parts).sum() / count
    loss.backward()
    return step_of(model, loss)


def step_of(model: Any, loss: Tensor) -> Step:
    """Loss and gradients, which are cleared."""
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(loss.item(), grads, loss_dtype=torch.float32)


def epoch(
    family: str, lengths: Sequence[int], tokens: int, kept: bool = False, sharded: bool = False
) -> tuple[list[tuple[float, str]], list[str]]:
    """Largest error of loss and gradients of each batch of an epoch, and its groups in words.

    Args:
        tokens: of a batch.
        kept: gradients are there before a batch.
        sharded: weights lie spread over all ranks.
    """
    torch._dynamo.reset()
    reference, model = (make_model(family, num_hidden_layers=1) for _ in range(2))
    spec, data = FAMILIES[family], dataset_of(lengths)
    if sharded:
        paradyse.shard(model)
    batches = paradyse.MixedBatches(
        data,
        tokens_per_step=tokens,
        ways=ways_for(dist.get_world_size(), max(24, -(-max(lengths) // dist.get_world_size()))),
        causal=spec.causal,
        pack=spec.packs,
        shuffle=False,
    )
    mixed = paradyse.MixedModel(model, {"inner": "eager"})
    found, words = [], []
    for step in batches:
        want = alone(reference, family, [data[i] for i in step.indices])
        if kept:
            for n, p in model.named_parameters():
                p.grad = want.grads[n].clone()
        for loss in mixed.losses(step):
            loss.backward()
        assert step.loss is not None
        got = step_of(model, step.loss)
        if kept:
            got = replace(got, grads={n: g / 2 for n, g in got.grads.items()})
        found.append(worst(got, want))
        words.append(step.plan.in_words())
    return found, words


def check(results: list[tuple[list[tuple[float, str]], list[str]]]) -> list[str]:
    """All ranks have the gradients of one process; the groups of each batch."""
    for found, words in results:
        assert found and words == results[0][1]
        assert all(error <= TOLERANCE[torch.float32] for error, _ in found), (found, words)
    return results[0][1]


@pytest.mark.broad
@pytest.mark.parametrize("family", ["llama", "bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_two_ranks(family: str, pool2: RankPool) -> None:
    (words,) = check(pool2.run(epoch, family, BATCHES[0], 10**6))
    assert words == "1 x 2; 2 x 1"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("lengths", BATCHES)
def test_three_ranks(family: str, lengths: list[int], pool3: RankPool) -> None:
    check(pool3.run(epoch, family, lengths, 10**6))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("lengths", BATCHES)
def test_four_ranks(family: str, lengths: list[int], pool4: RankPool) -> None:
    check(pool4.run(epoch, family, lengths, 10**6))


@pytest.mark.slow
def test_an_epoch_of_batches_with_gradients_there_before(pool2: RankPool) -> None:
    words = check(pool2.run(epoch, "llama", [*BATCHES[0], *BATCHES[3]], 50, True))
    assert len(words) > 1


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("fails", [True, False, None])
def test_a_step_that_is_not_gone_through_leaves_gradients_as_they_were(
    fails: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at its second micro-batch, or the loop over its losses is left before; or (None) the
    groups of it cannot be made."""
    data, model = dataset_of([9, 7]), make_model("llama", num_hidden_layers=1)
    calls = [{n: x[None] for n, x in s.items()} for s in data]
    if fails:
        calls[1]["labels"] = calls[1]["labels"][:, :-1]
    share = [Share(range(1), (call,), (1,), (0,)) for call in calls]
    step = MixedStep(StepPlan(()), (0, 1), tuple(share), 2)
    mixed = paradyse.MixedModel(model, {"inner": "eager"})
    before = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        p.grad = before[n]
    losses = mixed.losses(step)
    if fails is None:
        monkeypatch.setattr(training, "SideBySide", None)
    else:
        next(losses).backward()
    if fails is not False:
        with pytest.raises(Exception, match=r".+"):
            next(losses)
    else:
        losses.close()
    for n, p in model.named_parameters():
        assert p.grad is before[n] and bool((p.grad == 1).all()), n


def packed_step(family: str, **config: Any) -> tuple[Step, Step]:
    """Three sequences in one call, and each by itself, in one process."""
    torch._dynamo.reset()
    data, model = dataset_of([9, 4, 7]), make_model(family, num_hidden_layers=1, **config)
    batches = paradyse.MixedBatches(
        data, tokens_per_step=20, ways=ways_for(1), causal=FAMILIES[family].causal
    )
    (step,) = batches
    want = alone(make_model(family, num_hidden_layers=1), family, data)
    for loss in paradyse.MixedModel(model, {"inner": "eager"}).losses(step):
        loss.backward()
    assert step.loss is not None
    return step_of(model, step.loss), want


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_keeps_a_cache_keeps_sequences_apart(family: str) -> None:
    """transformers' decoders do not look for documents where there is a cache."""
    error, name = worst(*packed_step(family, use_cache=True))
    assert error < TOLERANCE[torch.float32], name


def test_a_model_that_does_not_find_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not keep packed sequences apart.*pack=False"):
        packed_step("bert")


def one_by_one_and_packed(model: Any, calls: int = 1) -> None:
    """Steps of one sequence, and then of two in one call, in one process."""
    data = dataset_of([18, 9, 9])
    for _ in range(calls):
        mixed = paradyse.MixedModel(model, {"inner": "eager"})
        for step in paradyse.MixedBatches(
            data, tokens_per_step=18, ways=ways_for(1), shuffle=False
        ):
            for loss in mixed.losses(step):
                loss.backward()


def test_a_graph_that_was_made_before_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """By a call that was not packed, or by another ``MixedModel`` of the model."""
    torch._dynamo.reset()
    one_by_one_and_packed(make_model("llama", num_hidden_layers=1), calls=2)
    assert "cannot be told" not in caplog.text
    with pytest.raises(ValueError, match="does not keep packed sequences apart"):
        one_by_one_and_packed(make_model("bert", num_hidden_layers=1))


def test_where_it_cannot_be_told_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    training.check_apart(nn.Linear(2, 2), [])
    assert "whether Linear keeps packed sequences apart cannot be told" in caplog.text


def apart_in_steps(
    raises: int | None, seed_by_rank: bool = False, other_data: bool = False
) -> list[str]:
    """What two ranks, each a group by itself, are told in three steps, in the one of which that
    ``raises`` the second rank's model fails before it is traced; or those of the first error."""
    torch._dynamo.reset()
    rank = dist.get_rank()

    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model("llama", num_hidden_layers=1, seed=rank * seed_by_rank)
            self.raises = False

        def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Any:
            if self.raises:
                raise TypeError("mine")
            return self.inner(input_ids=input_ids, labels=labels, position_ids=position_ids)

    ways = [w for w in ways_for(2) if w.degree == 1]
    data, told = dataset_of([9, 7, 8, 6, 9, 7]), []
    if other_data and rank:
        data.reverse()
    batches = paradyse.MixedBatches(data, tokens_per_step=15, ways=ways, shuffle=False)
    inner = Raising()
    model = paradyse.MixedModel(inner, {"inner": "eager"})
    for number, step in enumerate(batches):
        inner.raises = rank == 1 and number == raises
        try:
            for loss in model.losses(step):
                loss.backward()
            told.append("")
        except Exception as e:
            told.append(f"{type(e).__name__}: {e}")
    return told


def refused_data() -> str:
    with pytest.raises(ValueError) as error:
        apart_in_steps(None, other_data=True)
    return str(error.value)


def test_a_rank_that_fails_before_its_call_is_told_of_as_failed(pool2: RankPool) -> None:
    first, second = pool2.run(apart_in_steps, 1, timeout_s=100)
    assert first[0] == first[2] == second[0] == second[2] == ""
    assert first[1].startswith("RankFailedError: ") and "mine" in first[1], first
    assert second[1].startswith("TypeError: mine"), second


def test_ranks_have_the_same_sequences_in_the_same_order(pool2: RankPool) -> None:
    said = pool2.run(refused_data, timeout_s=100)
    assert all(
        "sequence 1 of this rank's dataset has 9 tokens, and 7 on the first" in s for s in said
    )


def test_groups_of_single_ranks_have_the_same_weights(pool2: RankPool) -> None:
    for told in pool2.run(apart_in_steps, None, True, timeout_s=100):
        assert told[0].startswith("RanksDisagreeError: ") and "the weights" in told[0], told
