"""Loss and every gradient equal one-device eager: all families, strategies, numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import (
    FAMILIES,
    TOLERANCE,
    draws_at_layers,
    make_batch,
    make_model,
    run_step,
    worst,
)
from plans import PLANS, Blocks, blocks_of, choose

from paradyse.distributed import token_linears
from paradyse.runtime import runs
from paradyse.strategies.groups import heads
from paradyse.types import DSP

Batches = Mapping[str, tuple[tuple[int, int], ...]]
"""Kind of batch -> (B, S) of each."""
Rows = list[tuple[str, str, float, str]]
"""(batch, plan, largest error, what it is of)."""
BATCHES: Batches = {
    "plain": ((3, 13), (3, 2)),
    "left": ((3, 11), (3, 6)),
    "packed": ((1, 17),),
    "right": ((3, 11), (3, 2)),
}
"""Lengths that no number of ranks divides, and shorter than it."""

COMPILED = ("llama_odd", "gpt2")
"""Families whose pieces go through AOTAutograd on few ranks: it takes twice the time, and does not
look at the family."""


def compare_plans(
    family: str,
    dtype: torch.dtype,
    batches: Batches,
    inner: str,
    plans: tuple[str, ...],
    sharded: bool = False,
) -> tuple[Rows, Blocks]:
    """Every plan on every batch against eager; the blocks with what they refuse.

    Args:
        sharded: the compiled model's weights lie spread over the ranks.
    """
    import paradyse

    num_ranks = torch.distributed.get_world_size()
    sizes = {"num_hidden_layers": layers_of(family)}
    reference = model = make_model(family, dtype, **sizes)
    if sharded:
        model = paradyse.shard(make_model(family, dtype, **sizes))
    rows: Rows = []
    for how, shapes in batches.items():
        if how == "packed" and not FAMILIES[family].packs:
            continue
        torch._dynamo.reset()  # each kind of batch is a graph of its own
        current: list[Any] = ["colossal_z"]
        options = {"plan": lambda workload: current[0], "inner": inner}  # noqa: B023
        compiled = torch.compile(model, backend="paradyse", options=options)
        for k, (batch, seq_len) in enumerate(shapes):
            inputs = make_batch(how, batch, seq_len)
            # One graph for all lengths; some plain batches let Dynamo find out.
            if how != "plain" or num_ranks > 2 or family not in COMPILED:
                for x in inputs.values():
                    for dim in range(batch == 1, 2):
                        torch._dynamo.maybe_mark_dynamic(x, dim)
            want = run_step(reference, reference, inputs, logits=True)
            current[0] = "colossal_z"  # no block refuses it
            run_step(compiled, model, inputs)
            blocks = blocks_of(compiled)
            for name in plans:
                current[0] = choose(name, blocks)
                got = run_step(compiled, model, inputs, logits=k == 0)
                rows.append((f"{how} {batch}x{seq_len}", name, *worst(got, want)))
    return rows, [(b.kind, dict(b.infeasible)) for b in blocks]


def layers_of(family: str) -> int:
    """Two where layers differ, and where blocks of one structure are to share their variants."""
    return 2 if family in ("llama_odd", "gemma3") else 1


def assert_exact(
    family: str, results: list[tuple[Rows, Blocks]], dtype: torch.dtype = torch.float32
) -> None:
    wrong = [
        f"rank {rank}, {batch}, {plan}: {what} {error:.1e}"
        for rank, (rows, _) in enumerate(results)
        for batch, plan, error, what in rows
        if not error <= TOLERANCE[dtype]
    ]
    assert not wrong, "\n".join(wrong)
    spec = FAMILIES[family]
    for rows, blocks in results:
        assert rows
        assert [kind for kind, _ in blocks] == [*spec.kinds] * layers_of(family)
        for kind, refused in blocks:
            expected = spec.refuses if kind == "attention" else {}
            if kind == "attention" and family == "opt" and draws_at_layers() and DSP in refused:
                expected = expected | {DSP: "split twice"}  # its mask is given, of all queries
            if "no dim besides" in refused.get(DSP, ""):  # a batch of one
                expected = expected | {DSP: "no dim besides"}
            assert refused.keys() == expected.keys()
            assert all(text in refused[s] for s, text in expected.items())


def inner_for(family: str) -> str:
    return "aot_eager" if family in COMPILED else "eager"


def in_turn(family: str, shift: int = 0) -> Batches:
    """One kind of batch: families that follow each other take turns."""
    hows = [how for how in BATCHES if how != "packed" or FAMILIES[family].packs]
    how = hows[(list(FAMILIES).index(family) + shift) % len(hows)]
    return {how: BATCHES[how]}


def families(*quick: str) -> pytest.MarkDecorator:
    """Every family; all but ``quick`` are slow."""
    marks = {f: () if f in quick else pytest.mark.slow for f in FAMILIES}
    return pytest.mark.parametrize("family", [pytest.param(f, marks=m) for f, m in marks.items()])


@pytest.mark.broad(but="falcon")
@families(*FAMILIES)
def test_one_rank(family: str, pool1: RankPool) -> None:
    args = (family, torch.float32, in_turn(family), inner_for(family), ("mixed 0",))
    assert_exact(family, pool1.run(compare_plans, *args, timeout_s=300))


@families("mixtral")
def test_sharded_over_two_ranks(family: str, pool2: RankPool) -> None:
    """Every strategy, the weights spread over the ranks."""
    batches = {how: shapes[:1] for how, shapes in in_turn(family, 1).items()}
    args = (family, torch.float32, batches, "eager", PLANS[:-1], True)
    assert_exact(family, pool2.run(compare_plans, *args, timeout_s=300))


@pytest.mark.broad
@families("llama_odd")
def test_sharded_over_three_ranks(family: str, pool3: RankPool) -> None:
    """Weights that hold q, k and v apart, and fused, on ranks that divide nothing."""
    args = (family, torch.float32, in_turn(family, 1), "eager", PLANS, True)
    assert_exact(family, pool3.run(compare_plans, *args, timeout_s=300))


@families("llama_odd")
def test_two_ranks(family: str, pool2: RankPool) -> None:
    args = (family, torch.float32, in_turn(family), inner_for(family), PLANS)
    assert_exact(family, pool2.run(compare_plans, *args, timeout_s=300))


@families()
def test_four_ranks(family: str, pool4: RankPool) -> None:
    args = (family, torch.float32, in_turn(family, 2), "eager", PLANS)
    assert_exact(family, pool4.run(compare_plans, *args, timeout_s=300))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_batch(family: str, pool2: RankPool) -> None:
    args = (family, torch.float32, BATCHES, inner_for(family), PLANS)
    assert_exact(family, pool2.run(compare_plans, *args, timeout_s=300))


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc"),
    [
        ("gpt2", 2),
        *(
            pytest.param(f, n, marks=pytest.mark.slow)
            for f, n in (("gpt2", 1), ("llama", 1), ("bert", 1), ("llama", 2), ("bert", 2))
        ),
    ],
)
def test_double_precision(family: str, nproc: int, ranks: Callable[[int], RankPool]) -> None:
    plans = PLANS if nproc > 1 else PLANS[-1:]  # one rank has nothing to choose
    args = (family, torch.float64, in_turn(family, 2), "eager", plans)
    assert_exact(family, ranks(nproc).run(compare_plans, *args, timeout_s=300), torch.float64)


@pytest.mark.broad
@pytest.mark.parametrize(
    "plans", [("mixed 0",), pytest.param(PLANS, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_inductor(plans: tuple[str, ...], pool2: RankPool) -> None:
    """The default inner compiler."""
    args = ("llama", torch.float32, {"left": ((3, 13), (3, 10))}, "inductor", plans)
    assert_exact("llama", pool2.run(compare_plans, *args, timeout_s=500))


def compare_apart(*args: Any) -> Any:
    with patch.object(token_linears, "MIN_ROWS", 1):
        return compare_plans(*args)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc"),
    [
        ("gpt2", 2),
        ("llama_odd", 3),
        *(
            pytest.param(f, n, marks=pytest.mark.slow)
            for f, n in product(FAMILIES, (2, 3, 4))
            if (f, n) not in (("gpt2", 2), ("llama_odd", 3))
        ),
    ],
)
def test_own_tokens_multiplied_apart(
    family: str, nproc: int, ranks: Callable[[int], RankPool]
) -> None:
    """As of long sequences: a rank multiplies its own tokens before the others' are there."""
    args = (family, torch.float64, in_turn(family, 2), "eager", ("megatron_ts",))
    assert_exact(family, ranks(nproc).run(compare_apart, *args, timeout_s=300), torch.float64)


def compare_in_turns(*args: Any) -> Any:
    with patch.object(heads, "LEAST_TURN_BYTES", {"gloo": 1}):
        return compare_plans(*args)


@pytest.mark.broad
@families("gpt2", "bert")
def test_heads_in_turns(family: str, pool2: RankPool) -> None:
    """As of long sequences: some heads are on their way while others are computed."""
    args = (family, torch.float32, in_turn(family, 1), inner_for(family), ("ulysses_z",), True)
    assert_exact(family, pool2.run(compare_in_turns, *args, timeout_s=300))


def compare_in_runs(*args: Any) -> Any:
    with patch.object(runs, "FUSE_AFTER", -1):
        return compare_plans(*args)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_runs(family: str, nproc: int, ranks: Callable[[int], RankPool]) -> None:
    """Blocks in a row as one piece from the first call on."""
    plans = PLANS if nproc > 1 else PLANS[-1:]
    args = (family, torch.float32, in_turn(family), "aot_eager", plans)
    assert_exact(family, ranks(nproc).run(compare_in_runs, *args, timeout_s=500))


def ask_for_a_batch_of_one() -> str:
    model = make_model("llama_odd", num_hidden_layers=1)
    compiled = torch.compile(model, backend="paradyse", options={"plan": DSP, "inner": "eager"})
    with pytest.raises(ValueError) as refusal:
        run_step(compiled, model, make_batch("plain", 1, 13))
    return str(refusal.value)


def test_dsp_refuses_a_batch_of_one(pool2: RankPool) -> None:
    for text in pool2.run(ask_for_a_batch_of_one, timeout_s=100):
        assert "'dsp' cannot compute block 'layers.0.attention': its tokens have no dim" in text
        assert "give a batch of more than one; feasible there: megatron_ts" in text


def ask_for_refused() -> list[str]:
    model = make_model("olmo2", num_hidden_layers=1)
    texts = []
    for strategy in ("megatron_ts", "metp"):
        options = {"plan": {"attention": strategy}, "inner": "eager"}
        compiled = torch.compile(model, backend="paradyse", options=options)
        with pytest.raises(ValueError) as refusal:
            run_step(compiled, model, make_batch("plain", 2, 13))
        texts.append(str(refusal.value))
    return texts


@pytest.mark.broad
def test_refused_by_name(pool2: RankPool) -> None:
    for texts in pool2.run(ask_for_refused, timeout_s=100):
        for strategy, text in zip(("megatron_ts", "metp"), texts, strict=True):
            assert f"{strategy!r} cannot compute block 'layers.0.attention'" in text
            assert "q_norm mixes all heads" in text
            assert "feasible there: megatron_cz, ulysses_z, colossal_z" in text
