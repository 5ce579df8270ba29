"""A step copies nothing between host and device once it has run.

Everything is on the meta device, which stands for a GPU: copies to it show as they would there, and
reading a value of it raises. What attention's operators do inside is in
``tests/kernels/test_launches.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from host_traffic import HostTraffic
from torch import Tensor

from paradyse.config import Options
from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.offline.capture import fake_world
from paradyse.runtime.capture import build_program, is_model_state, trace_inputs
from paradyse.runtime.describe import describe_blocks
from paradyse.runtime.frame import Frame
from paradyse.runtime.program import Program
from paradyse.torch_private import keep_graphs_whole
from paradyse.types import ATTENTION_STRATEGIES

BATCH, TOKENS = 2, 59
SIZE = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 96, "n_positions": 64}


class _Captured(Exception):
    """Ends a capture, whose graph is not run."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    def arrived(x: Tensor, axis: Axis, block_id: int) -> collectives.Pending:
        return collectives.Pending([], x, "ring_exchange", axis, block_id, None)

    # No process group takes tensors of this device point to point, and autocast knows it not.
    monkeypatch.setattr(collectives, "ring_exchange", arrived)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    torch._dynamo.reset()
    yield torch.device("meta")


def gpt2(device: torch.device) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """With every kind of dropout, and a batch for it."""
    import transformers

    with device:
        config = transformers.GPT2Config(
            **SIZE, use_cache=False, bos_token_id=None, eos_token_id=None
        )
        assert config.attn_pdrop and config.resid_pdrop and config.embd_pdrop
        model = transformers.GPT2LMHeadModel._from_config(config)
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return model.train(), {"input_ids": ids, "labels": ids}


def captured(
    model: torch.nn.Module, batch: dict[str, Tensor], axis: Axis
) -> tuple[Program, list[Tensor]]:
    """The program of ``model`` on one of the ranks of ``axis``, and inputs for it."""
    found: list[tuple[Program, list[Tensor]]] = []

    def capture(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        weights = [is_model_state(n, e) for n, e in zip(nodes, examples, strict=True)]
        inputs = trace_inputs(nodes, examples).values
        program, _ = build_program(gm, inputs, weights, Options(inner="eager"), axis)
        assert program is not None
        args = [
            torch.empty(e.shape, dtype=e.dtype, device="meta").requires_grad_(e.requires_grad)
            for e in examples
        ]
        found.append((program, args))
        raise _Captured

    capture.__name__ = "paradyse"  # Dynamo traces as it does for the backend of that name
    keep_graphs_whole(capture.__name__)
    with contextlib.suppress(Exception):
        torch.compile(model, backend=capture, dynamic=False)(**batch)
    return found[0]


def step(program: Program, args: list[Tensor], strategy: str) -> Counter[str]:
    """What one step, forward and backward, copies."""
    sizes = {"B": BATCH, "S": TOKENS, "s": program.axis.layout(TOKENS).local_len}
    feasible = (b.feasible() for b in describe_blocks(program))
    strategies = tuple(strategy if strategy in f else f[0] for f in feasible)
    with HostTraffic() as traffic:
        out = Frame(program, args, program.constants_for(sizes, strategies)).run()
        loss = next(x for x in out if isinstance(x, Tensor) and not x.dim())
        loss.backward()
    return traffic.found


@pytest.mark.broad
def test_a_step_copies_nothing_once_it_has_run(device: torch.device) -> None:
    model, batch = gpt2(device)
    with fake_world(3) as axis:
        program, args = captured(model, batch, axis)
        assert program.device == device and program.schedule.has_dropout
        for strategy in ATTENTION_STRATEGIES:
            step(program, args, strategy)
            found = step(program, args, strategy)
            assert not found, (strategy, found)


def test_what_is_copied_is_seen(device: torch.device) -> None:
    with HostTraffic() as traffic:
        torch.zeros(2, device=device).to("meta")
        torch.zeros((), device="cpu").item()
        assert not traffic.found
        torch.tensor([1, 2], device=device)
        torch.zeros(2).to(device)
        torch.zeros(2, device=device).copy_(torch.zeros(2))
        with pytest.raises(RuntimeError, match="meta"):
            torch.zeros(2, device=device).sum().item()
    assert sum(traffic.found.values()) == 3
