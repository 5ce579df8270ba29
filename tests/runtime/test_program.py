"""A program as data: constants of a call, and what each step gathers, known before it has run."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import make_batch, make_model, run_step
from tiny import Tiny, tokens

from paradyse.distributed.axis import resolve_axis
from paradyse.runtime.deferred import DeferredTensor
from paradyse.runtime.registry import captures_of
from paradyse.strategies.base import SPLIT, WHOLE


def test_constants_follow_from_sizes_and_plan() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Tiny(), backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7))
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    program = graph.program
    made = program.constants_for({WHOLE: 9, "B": 3}, ("replicated",) * 4)
    for of in made.scopes:
        assert of.whole.tolist() == of.local.tolist() == list(range(9)) and len(of.beside) == 3
    assert [i.tolist() for i in made.infos] == [[9, s.block_id] for s in program.steps]
    seed = torch.tensor(5)
    for step in program.steps:
        assert made.common(step, seed)[3][1] == step.block_id
        assert made.strategy(step) == ("replicated" if step.index >= 0 else "")


def test_what_waits_to_be_read_is_described_once() -> None:
    """Not by each call: the text of a piece takes long to write."""
    torch._dynamo.reset()
    model, batch = make_model("llama", num_hidden_layers=1), make_batch("plain", 2, 7)
    options = {"plan": {"head": "tiled"}, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    logits = compiled(**batch).logits
    with patch("paradyse.strategies.base.structure") as written:
        again = compiled(**batch).logits
    assert not written.called and type(again) is DeferredTensor
    assert torch.equal(again, logits)


def count_messages(plan: str) -> dict[str, object]:
    """Messages that bring weights in a first and in a later step, and those of them under way while
    an earlier step ran; what each step gathers."""
    import paradyse
    from paradyse.weights.unshard import Shelf

    model = paradyse.shard(make_model("llama"))
    options = {"plan": plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    taken: list[list[bool]] = []
    take = Shelf.take

    def watched(shelf: Shelf, shards: object) -> object:
        coming = take(shelf, shards)  # type: ignore[arg-type]
        taken[-1].append(coming is not None)
        return coming

    Shelf.take = watched  # type: ignore[assignment,method-assign]
    try:
        for _ in range(2):
            taken.append([])
            run_step(compiled, model, make_batch("plain", 2, 12))
    finally:
        Shelf.take = take  # type: ignore[method-assign]
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    program = graph.program
    weights = dict(zip(program.placeholders, capture_args(capture), strict=True))
    gathers = [
        len(program.gathers(s, plan if s.index >= 0 else "", weights)) for s in program.steps
    ]
    own = [  # vectors alone come with those of other steps
        any(weights[n].ndim > 1 for n in program.gathers(s, plan if s.index >= 0 else "", weights))
        for s in program.steps
    ]
    return {"taken": taken, "gathers": gathers, "own": sum(own), "p": dist.get_world_size()}


def capture_args(capture: object) -> list[object]:
    """The sharded weights of a capture, at their places among its arguments."""
    shards = capture.weights.shards()  # type: ignore[attr-defined]
    return [shards.get(i) for i in range(len(capture.placeholders))]  # type: ignore[attr-defined]


@pytest.mark.broad
def test_look_ahead_begins_with_the_first_call(pool2: RankPool) -> None:
    """All but the first message of forward and of backward are on their way before they are
    needed, in the first step as in later ones."""
    for plan in ("megatron_cz", "megatron_ts"):
        for found in pool2.run(count_messages, plan, timeout_s=100):
            first, later = found["taken"]
            assert first == later
            assert len(first) >= 2 * found["own"] - 1 > 0
            assert first.count(False) <= 2


@pytest.mark.broad
def test_what_lies_right_is_not_gathered(pool2: RankPool) -> None:
    whole, parts = (
        pool2.run(count_messages, plan, timeout_s=100)[0]["gathers"]
        for plan in ("megatron_cz", "megatron_ts")
    )
    assert sum(parts) < sum(whole)
    assert all(a <= b for a, b in zip(parts, whole, strict=True))


def split_sizes() -> list[int]:
    axis = resolve_axis()
    torch._dynamo.reset()
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled = torch.compile(Tiny(), backend="paradyse", options=options)
    compiled(tokens(2, 7))
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    sizes = {WHOLE: 7, SPLIT: axis.layout(7).local_len, "B": 2}
    made = graph.program.constants_for(sizes, ("megatron_cz",) * 4)
    return list(made.scopes[0].local.tolist())


def test_ranks_hold_their_own_positions(pool2: RankPool) -> None:
    assert pool2.run(split_sizes, timeout_s=100) == [[0, 1, 6, 7], [2, 3, 4, 5]]
