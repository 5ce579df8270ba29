"""Blocks of experts, by every strategy: whole on local tokens, each on its rank, in groups."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import RankPool
from models import TOLERANCE, make_batch, make_model, redraw, run_step, worst
from plans import PLANS, blocks_of, choose, head_of, small_pieces

from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.strategies.experts.model import deal_experts
from paradyse.types import ATTENTION_STRATEGIES, EXPERTS, Plan

Rows = list[tuple[str, float, str]]
"""(what was run, largest error, what it is of)."""


def make_mixtral(experts: int, top: int, dtype: torch.dtype, **config: Any) -> Any:
    sizes = {"num_local_experts": experts, "num_experts_per_tok": top, "num_hidden_layers": 1}
    return make_model("mixtral", dtype, **sizes, **config)


def make_gpt_oss(experts: int, top: int, dtype: torch.dtype) -> Any:
    """Experts with biases, gates that interleave, and a router with a bias."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes |= {"num_local_experts": experts, "num_experts_per_tok": top}
    config = transformers.GptOssConfig(**sizes, use_cache=False)
    return redraw(transformers.GptOssForCausalLM(config)).to(dtype)


def mark_dynamic(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for x in batch.values():
        for dim in range(2):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    return batch


def compiled_by(model: Any, inner: str) -> tuple[Any, list[Any]]:
    """The compiled model, and what holds the plan of its next call."""
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": inner}
    return torch.compile(model, backend="paradyse", options=options), current


def compare(
    make: Callable[..., Any],
    args: Sequence[Any],
    config: dict[str, Any],
    plans: Sequence[str],
    lengths: Sequence[int],
    sharded: bool,
    inner: str = "eager",
) -> tuple[Rows, list[dict[str, str]]]:
    """Each plan at each length against a model that loops over its experts; what blocks of experts
    refuse."""
    import paradyse

    torch._dynamo.reset()
    reference, model = make(*args, **config), make(*args, **config)
    reference.set_experts_implementation("eager")
    if sharded:
        paradyse.shard(model)
    compiled, current = compiled_by(model, inner)
    rows: Rows = []
    for n in lengths:
        batch = mark_dynamic(make_batch("plain", 3, n))
        want = run_step(reference, reference, batch)
        current[0] = "colossal_z"
        run_step(compiled, model, batch)
        blocks = blocks_of(compiled)
        for name in plans:
            current[0] = choose(name, blocks)
            rows.append((f"{n} {name}", *worst(run_step(compiled, model, batch), want)))
    return rows, [dict(b.infeasible) for b in blocks if b.kind == EXPERTS]


def assert_exact(results: list[Any], dtype: torch.dtype) -> None:
    for rank, (rows, refused) in enumerate(results):
        wrong = [row for row in rows if not row[1] <= TOLERANCE[dtype]]
        assert rows and not wrong, (rank, wrong)
        assert refused == [{}]


F64 = torch.float64
OWN = ("megatron_ts", "metp")
"""Strategies by which experts are computed apart."""

SLOW = pytest.mark.slow


@pytest.mark.broad
@pytest.mark.parametrize(
    ("p", "experts", "top", "sharded"),
    [
        (2, 5, 2, True),
        *(
            pytest.param(p, *case, marks=SLOW)
            for p in (1, 2, 3, 4)
            for case in ((5, 2, False), (3, 3, True))
        ),
    ],
)
def test_mixtral_in_double_precision(
    p: int, experts: int, top: int, sharded: bool, ranks: Callable[[int], RankPool]
) -> None:
    """Experts that no number of ranks divides, more ranks than experts, lengths below both."""
    many = (p, experts) != (2, 5)
    plans = (PLANS if many else OWN) if p > 1 else ("colossal_z",)
    lengths = (13, 2, 22, 31) if many else (13, 2)
    args = (make_mixtral, (experts, top, F64), {}, plans, lengths, sharded)
    assert_exact(ranks(p).run(compare, *args, timeout_s=300), F64)


@pytest.mark.broad
@pytest.mark.parametrize("p", [1, *(pytest.param(p, marks=SLOW) for p in (2, 3, 4))])
def test_router_losses(p: int, ranks: Callable[[int], RankPool]) -> None:
    """The load is balanced over the tokens of all ranks. Routers' choices are read beside the
    block, by the loss."""
    config = {"output_router_logits": True, "router_aux_loss_coef": 2.0}
    plans = PLANS if p > 1 else ("colossal_z",)
    args = (make_mixtral, (4, 2, F64), config, plans, (13, 2, 22) if p > 1 else (13,), False)
    assert_exact(ranks(p).run(compare, *args, timeout_s=300), F64)


@pytest.mark.slow
def test_inductor(pool2: RankPool) -> None:
    """Groups of rows of any number are one compiled program."""
    args = (make_mixtral, (4, 2, torch.float32), {}, PLANS, (13, 22), True, "inductor")
    assert_exact(pool2.run(compare, *args, timeout_s=400), torch.float32)


def move_the_load(sharded: bool, steps: int) -> Rows:
    """Steps whose router is told by its bias which experts to take: one has all tokens, others
    none, another one each time; and left to itself in between."""
    import paradyse

    torch._dynamo.reset()
    experts, choices = 5, random.Random(0)
    reference, model = (make_gpt_oss(experts, 1, F64) for _ in range(2))
    reference.set_experts_implementation("eager")
    if sharded:
        paradyse.shard(model)
    compiled, current = compiled_by(model, "eager")
    run_step(compiled, model, mark_dynamic(make_batch("plain", 2, 11)))
    blocks, rows = blocks_of(compiled), list[tuple[str, float, str]]()
    for step in range(steps):
        bias = torch.zeros(experts, dtype=F64)
        if step % 3 < 2:
            bias[choices.randrange(experts)] = 1e3
        for of in (reference, model):
            state = {"model.layers.0.mlp.router.bias": bias}
            of.load_state_dict(state, strict=False)
        batch = mark_dynamic(make_batch("plain", 2, choices.randint(2, 30), seed=step))
        name = OWN[step % 2] if step < 4 else choices.choice(PLANS)
        current[0] = choose(name, blocks)
        want = run_step(reference, reference, batch)
        rows.append((f"{step} {name}", *worst(run_step(compiled, model, batch), want)))
    return rows


@pytest.mark.broad
@pytest.mark.parametrize(
    ("p", "sharded", "steps"),
    [(2, True, 4), *(pytest.param(p, s, 12, marks=SLOW) for p in (3, 4) for s in (False, True))],
)
def test_one_expert_has_all_tokens_and_others_none(
    p: int, sharded: bool, steps: int, ranks: Callable[[int], RankPool]
) -> None:
    for rows in ranks(p).run(move_the_load, sharded, steps, timeout_s=300):
        assert len(rows) == steps
        wrong = [row for row in rows if not row[1] <= TOLERANCE[F64]]
        assert not wrong


@small_pieces()
def switch(steps: int) -> tuple[list[float], list[float], int]:
    """Losses of a run under a plan drawn anew each step, those of one process, and the captures
    over all its lengths."""
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    made = [make_mixtral(4, 2, torch.float32, output_router_logits=True) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in made]
    compiled, current = compiled_by(made[1], "eager")
    made[1](**make_batch("plain", 2, 3))  # transformers adds hooks at the first call
    drawn, losses = random.Random(3), ([], [])
    for step in range(steps):
        batch = make_batch("plain", 2, drawn.randint(3, 40), seed=step)
        if step:
            points = tuple(drawn.choice(b.points()) for b in blocks_of(compiled))
            current[0] = Plan(points, drawn.choice(head_of(compiled).points()))
        for call, optimizer, into in zip((made[0], compiled), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = call(**batch).loss
            loss.backward()
            optimizer.step()
            into.append(loss.item())
    return *losses, sum(1 for _ in captures_of(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3])
def test_training_under_random_plans(p: int, ranks: Callable[[int], RankPool]) -> None:
    for want, got, captures in ranks(p).run(switch, 200, timeout_s=400):
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(want), rtol=TOLERANCE[torch.float32], atol=0
        )
        assert sum(got[-20:]) < sum(got[:20])
        assert captures <= 2


def rest_rows() -> dict[str, tuple[int, int]]:
    """Name of each weight of experts -> elements that this rank holds, and all of them."""
    import paradyse

    model = paradyse.shard(make_mixtral(4, 2, torch.float32))
    batch = make_batch("plain", 2, 9)
    run_step(compiled_by(model, "eager")[0], model, batch)
    of_experts = {n: p for n, p in model.named_parameters() if "experts" in n}
    return {n: (p.local.numel(), p.numel()) for n, p in of_experts.items()}


def test_weights_at_rest_are_those_of_a_ranks_own_experts(pool2: RankPool) -> None:
    for rows in pool2.run(rest_rows):
        assert len(rows) == 2
        assert all(held * 2 == whole for held, whole in rows.values())


def calls_that_stay() -> list[str]:
    """Plans under which what ran a call is still there when its loss is gone."""
    torch._dynamo.reset()
    model, batch = make_mixtral(4, 2, torch.float32), make_batch("plain", 2, 9)
    compiled, current = compiled_by(model, "eager")
    run_step(compiled, model, batch)
    blocks, frames, stayed = blocks_of(compiled), list[weakref.ref[Frame]](), list[str]()

    def note(*of: Any) -> Frame:
        frame = Frame(*of)
        frames.append(weakref.ref(frame))
        return frame

    for name in PLANS:
        current[0] = choose(name, blocks)
        with frames_by(note):
            loss = compiled(**batch).loss
        loss.backward()
        del loss
        gc.collect()
        stayed += [name] * (frames[-1]() is not None)
    assert len(frames) == len(PLANS)
    return stayed


def test_a_call_goes_with_its_loss(pool2: RankPool) -> None:
    """Nobody searches autograd's graph for garbage: what backward keeps must not hold a call, whose
    values hold that graph."""
    assert pool2.run(calls_that_stay) == [[], []]


@pytest.mark.parametrize(("experts", "p"), [(8, 4), (5, 3), (2, 4), (7, 1)])
def test_experts_are_dealt_in_order_and_evenly(experts: int, p: int) -> None:
    dealt = deal_experts(experts, p)
    assert len(dealt) == p and len({len(group) for group in dealt}) == 1
    assert [e for group in dealt for e in group if e >= 0] == list(range(experts))
    counts = [sum(e >= 0 for e in group) for group in dealt]
    assert max(counts) - min(counts) <= 1


def explained() -> tuple[str, list[str]]:
    """What ``auto`` says of a Mixtral, and the strategies that it has priced its experts under."""
    import paradyse

    model = make_mixtral(4, 2, torch.float32)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    run_step(compiled, model, make_batch("plain", 2, 9))
    report = paradyse.explain(compiled, 2, 64)
    (block,) = [b for b in report.blocks if b.kind == EXPERTS]
    return str(report), [row.strategy for row in block.rows]


@pytest.mark.slow
def test_experts_are_priced_and_explained(pool2: RankPool) -> None:
    for text, priced in pool2.run(explained):
        assert "experts" in text
        assert set(ATTENTION_STRATEGIES) <= {name.split("+")[0] for name in priced}
