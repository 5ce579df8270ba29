"""HuggingFace's gradient_checkpointing_enable(): exact under every strategy, and it keeps less."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step
from plans import PLANS, blocks_of, choose
from torch import Tensor

Ranks = Callable[[int], RankPool]


def _saved_bytes(call: Any, batch: Any) -> int:
    """What autograd keeps for backward of one call."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = getattr(x, "local", x).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = call(**batch).loss
    loss.backward()
    return sum(kept.values())


def compare(family: str, sharded: bool) -> list[tuple[int, int]]:
    """Raises where a gradient differs; bytes kept with and without, per plan."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    reference = make_model(family)
    batch = make_batch("plain", 2, 13)
    want = run_step(reference, reference, batch)
    found = []
    for recompute in (True, False):
        torch._dynamo.reset()
        model = make_model(family)
        if sharded:
            paradyse.shard(model)
        if recompute:
            with warnings.catch_warnings():  # transformers 5.23 has a newer name for it
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable()
        model.train()
        current: list[Any] = ["colossal_z"]
        options = {"plan": lambda workload: current[0], "inner": "aot_eager"}  # noqa: B023
        compiled = torch.compile(model, backend="paradyse", options=options)
        check(run_step(compiled, model, batch), want, what="first")
        blocks = blocks_of(compiled)
        assert [b.kind for b in blocks] == ["attention", "mlp"] * 2
        (graph,) = [g for c in captures_of(compiled) for g in c.graphs.values()]
        assert all(s.recompute == recompute for s in graph.program.block_steps)
        sizes = []
        for name in PLANS:
            current[0] = choose(name, blocks)
            check(run_step(compiled, model, batch), want, what=name)
            sizes.append(_saved_bytes(compiled, batch))
        found.append(sizes)
    return list(zip(*found, strict=True))


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc", "sharded"),
    [
        ("gpt2", 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt2", 2, True),
                ("gpt2", 2, False),
                ("llama", 1, False),
                ("llama", 2, False),
            )
        ),
        pytest.param("llama", 2, True, marks=pytest.mark.slow),
    ],
)
def test_checkpointing(family: str, nproc: int, sharded: bool, ranks: Ranks) -> None:
    for sizes in ranks(nproc).run(compare, family, sharded, timeout_s=200):
        for recomputed, kept in sizes:
            assert recomputed < 0.6 * kept


def frozen_embedding(sharded: bool, inner: str) -> float:
    """How far the loss is off; the embedding is frozen, so that transformers has a hook of it ask
    for gradients."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    reference, model = (make_model("llama", torch.float64).train() for _ in range(2))
    for m in (reference, model):
        m.get_input_embeddings().requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            m.gradient_checkpointing_enable()
        m.enable_input_require_grads()
    if sharded:
        paradyse.shard(model)
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": inner})
    batch = make_batch("plain", 2, 13)
    want, got = (run_step(run, m, batch) for run, m in ((reference, reference), (compiled, model)))
    (graph,) = [g for c in captures_of(compiled) for g in c.graphs.values()]
    assert all(s.recompute for s in graph.program.block_steps)
    check(got, want)
    return abs(got.loss - want.loss)


@pytest.mark.broad(but="2-True-aot_eager")
@pytest.mark.parametrize(
    ("nproc", "sharded", "inner"), [(1, False, "eager"), (2, True, "aot_eager")]
)
def test_checkpointing_with_a_frozen_embedding(
    nproc: int, sharded: bool, inner: str, ranks: Ranks
) -> None:
    for off in ranks(nproc).run(frozen_embedding, sharded, inner, timeout_s=100):
        assert off < 1e-6
