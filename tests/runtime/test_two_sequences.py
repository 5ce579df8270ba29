"""Encoder and decoder in one graph: each sequence is split over the ranks by its own length."""

from __future__ import annotations

import random
from typing import Any

import encoder_decoder
import pytest
import torch
from harness import RankPool
from models import TOLERANCE, run_step, worst
from plans import PLANS, blocks_of, choose, head_of, small_pieces
from tiny import Tiny, tokens
from torch import Tensor
from torch.nn import functional as F

from paradyse.types import Plan

FLOAT64 = torch.float64
LENGTHS = [(13, 9), (7, 15), (22, 3)]


def train(
    family: str, dtype: torch.dtype, plans: tuple[str, ...], lengths: Any, how: str, sharded: bool
) -> tuple[dict[str, float], list[str], list[str]]:
    """What is further off than the tolerance, the kinds of blocks, and the notes."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    reference, model = (encoder_decoder.make(family, dtype) for _ in range(2))
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off = {}
    for source, target in lengths:
        batch = encoder_decoder.batch_of(family, source, target, how, dtype)
        want = run_step(reference, reference, batch, logits=True)
        for name in plans:
            error, what = worst(run_step(compiled, model, batch, logits=True), want)
            if not error <= TOLERANCE[dtype]:
                off[f"{source}, {target}, {name}: {what}"] = error
            current[0] = choose(name, blocks_of(compiled))
    found = captures_of(compiled)
    return off, [b.kind for b in blocks_of(compiled)], [n for c in found for n in c.notes]


class Meeting(Tiny):
    """Two streams that meet outside of blocks: scores of all tokens of one with those of another,
    and attention to what is no token's projection."""

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        x, y = self.embed(ids), self.embed(others)
        for layer in self.layers:
            x, y = self.attend(layer, x, x), self.attend(layer, y, y)
        scores = torch.tanh(x @ y.transpose(1, 2))
        x = x + scores @ y
        x = x + F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]).squeeze(1)
        logits = self.head(x)
        return logits.square().mean() + F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def attend(self, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + layer["proj"](o.transpose(1, 2).flatten(2))


def meet() -> tuple[list[float], list[str]]:
    """Largest errors of loss and gradients, and the notes."""
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Meeting(layers=1).double()
    options = {"plan": "megatron_cz", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    weights, errors = list(model.parameters()), []
    for n, m in ((13, 15), (10, 6), (4, 3)):
        ids, others = tokens(2, n), tokens(2, m, seed=1)
        found = []
        for call in (model, compiled):
            loss = call(ids, others)
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            found.append([loss.detach(), *(g for g in grads if g is not None)])
        pairs = zip(*found, strict=True)
        errors.append(max((a - b).norm().item() / (1e-12 + a.norm().item()) for a, b in pairs))
    return errors, [n for c in captures_of(compiled) for n in c.notes]


def test_what_reads_both_outside_blocks(pool2: RankPool) -> None:
    for errors, notes in pool2.run(meet, timeout_s=200):
        assert max(errors) < 1e-9
        assert any("which is of another sequence" in n for n in notes)
        assert any("its keys are of another sequence, and no block has it" in n for n in notes)


IN_SIX = ["attention", "mlp"] * 2 + ["attention", "attention", "mlp"] * 2
"""Kinds of the blocks of two layers each: those of the decoder see the encoder as well."""


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "how", "sharded", "nproc"),
    [
        pytest.param("T5", "plain", False, 2, marks=pytest.mark.slow),
        pytest.param("T5", "plain", True, 3, marks=pytest.mark.slow),
        pytest.param("T5", "padded", True, 2, marks=pytest.mark.slow),
        pytest.param("T5", "padded", False, 4, marks=pytest.mark.slow),
        pytest.param("T5", "plain", False, 1, marks=pytest.mark.slow),
        ("Bart", "padded", True, 2),
        pytest.param("Bart", "padded", False, 3, marks=pytest.mark.slow),
        pytest.param("Bart", "plain", True, 4, marks=pytest.mark.slow),
        pytest.param("Bart", "padded", False, 1, marks=pytest.mark.slow),
        pytest.param("Whisper", "plain", False, 2, marks=pytest.mark.slow),
        pytest.param("Whisper", "plain", True, 3, marks=pytest.mark.slow),
    ],
)
def test_exact_at_odd_lengths_of_both(
    family: str, how: str, sharded: bool, nproc: int, ranks: Any
) -> None:
    plans = ("megatron_cz",) if nproc == 1 else PLANS
    case = (family, FLOAT64, plans, LENGTHS, how, sharded)
    for off, kinds, notes in ranks(nproc).run(train, *case, timeout_s=400):
        assert not off and kinds == IN_SIX and not notes


PAIRS = [(3 + 7 * i % 23, 3 + 5 * i % 19) for i in range(1, 25)]
"""Of at least 3 tokens: of a single label left after the shift Dynamo makes another graph."""


def capture_many(family: str) -> list[int]:
    """Programs after each pair of lengths; the second is of other lengths than the first."""
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    compiled = torch.compile(
        encoder_decoder.make(family), backend="paradyse", options={"inner": "eager"}
    )
    counts = []
    for source, target in PAIRS:
        compiled(**encoder_decoder.batch_of(family, source, target)).loss.backward()
        whole = len(list(captures_of(compiled, whole=True)))
        counts.append(whole + sum(len(c.graphs) for c in captures_of(compiled)))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("family", encoder_decoder.CONFIGS)
def test_two_captures_serve_all_pairs_of_lengths(family: str, pool2: RankPool) -> None:
    for counts in pool2.run(capture_many, family, timeout_s=400):
        assert counts[-1] <= 2, counts


def saved_bytes(family: str, source: int, target: int) -> int:
    """What autograd keeps of a forward on this rank, weights aside."""
    torch._dynamo.reset()
    model = encoder_decoder.make(family)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    compiled = torch.compile(
        model, backend="paradyse", options={"plan": "megatron_cz", "inner": "eager"}
    )
    batch = encoder_decoder.batch_of(family, source, target)
    compiled(**batch)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = compiled(**batch).loss
    total = sum(s.nbytes() for at, s in kept.items() if at not in weights)
    loss.backward()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(512, 32), (32, 512)])
@pytest.mark.parametrize("nproc", [2, 4])
def test_what_both_sequences_keep_is_shared_by_the_ranks(
    nproc: int, lengths: tuple[int, int], pool1: RankPool, ranks: Any
) -> None:
    (whole,) = pool1.run(saved_bytes, "T5", *lengths, timeout_s=200)
    for own in ranks(nproc).run(saved_bytes, "T5", *lengths, timeout_s=200):
        assert own < 1.15 * whole / nproc, (own, whole)


@small_pieces()
def train_by_random_plans(steps: int, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of T5, by SGD, under another plan at every step."""
    torch._dynamo.reset()
    model = encoder_decoder.make("T5")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lengths, plans = random.Random(1), random.Random(2)
    current: list[Any] = ["colossal_z"]
    call: Any = model
    if compiled:
        options = {"plan": lambda workload: current[0], "inner": "eager"}
        call = torch.compile(model, backend="paradyse", options=options)
    losses = []
    for step in range(steps):
        source, target = lengths.sample(range(2, 30), 2)
        if compiled and step:
            points = tuple(plans.choice(b.points()) for b in blocks_of(call))
            current[0] = Plan(points, plans.choice(head_of(call).points()))
        optimizer.zero_grad()
        loss = call(**encoder_decoder.batch_of("T5", source, target, "padded")).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.slow
def test_switching_over_random_plans(pool1: RankPool, pool2: RankPool) -> None:
    ((losses, weights),) = pool1.run(train_by_random_plans, 200, False, timeout_s=200)
    for got, reached in pool2.run(train_by_random_plans, 200, True, timeout_s=400):
        torch.testing.assert_close(got, losses, rtol=1e-3, atol=1e-3)
        for name, weight in weights.items():
            assert (reached[name] - weight).norm() <= 1e-3 * weight.norm(), name
