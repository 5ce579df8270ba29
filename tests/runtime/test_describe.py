"""What planner and reports are told of a program's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import make_batch, make_model
from tiny import Tiny, tokens

from paradyse.runtime.describe import describe_blocks, describe_head, describe_masks
from paradyse.runtime.registry import captures_of


def test_blocks_of_a_model() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Tiny(), backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7))
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    blocks = describe_blocks(graph.program)
    assert blocks == graph.blocks
    assert [b.name for b in blocks] == [
        f"layers.{i}.{kind}" for i in range(2) for kind in ("attention", "mlp")
    ]
    attention, mlp = blocks[:2]
    assert (attention.hidden, attention.num_heads, attention.head_dim) == (32, 4, 8)
    assert attention.num_kv_heads == 4 and attention.intermediate == 0
    assert attention.num_split_weight_elements == 4 * 32 * 32 + 3 * 32  # biases of q, k and v
    assert attention.num_shared_weight_elements == 0
    assert all(b.shares_vectors for b in blocks)  # norms, and biases of what comes down
    assert mlp.intermediate == 128 and mlp.mask is None
    assert mlp.num_weight_elements == 2 * 32 * 128 + 128 + 32 + 2 * 32
    assert describe_masks(blocks) == "causal"


def structures(
    family: str, batch: int, dynamic: bool | None = None, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Of the blocks of a capture of its own."""
    torch._dynamo.reset()
    model, options = make_model(family, dtype), {"inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options, dynamic=dynamic)
    compiled(**make_batch("plain", batch, 13))
    (capture,) = captures_of(compiled)
    return [b.structure for g in capture.graphs.values() for b in g.blocks]


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "gemma3", "mixtral")]


@pytest.mark.broad(but="bert")
@pytest.mark.parametrize("family", ["llama", "bert", *SLOW])
def test_a_batch_of_one_has_the_same_blocks(family: str) -> None:
    """What was measured with one sequence serves several: Dynamo makes a batch of one a number."""
    of_one = structures(family, 1)
    assert of_one and of_one == structures(family, 3)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", *SLOW])
def test_numbers_that_are_inputs_leave_blocks_the_same(family: str, dtype: torch.dtype) -> None:
    """A profile serves a model that is compiled with ``dynamic=True``, which makes norms'
    epsilons inputs."""
    constants = structures(family, 2, None, dtype)
    assert constants and constants == structures(family, 2, True, dtype)


def test_the_head_of_a_model() -> None:
    torch._dynamo.reset()
    model = Tiny()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7), tokens(2, 7))
    (graph,) = (g for c in captures_of(compiled) for g in c.graphs.values())
    head = describe_head(graph.program)
    assert head is not None and head == graph.choice.planner.head
    assert (head.hidden, head.vocabulary, head.num_looked_up) == (32, 50, 0)
    assert head.points() == ("", "tiled") and "one rank" in head.infeasible["vocabulary"]
    assert not head.returned  # a Tiny with labels gives its loss alone
