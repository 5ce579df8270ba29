"""Sharded weights that change between forward and backward: an error where PyTorch has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, relative

import paradyse
from paradyse.types import ALONG_SEQUENCE

SGD: Any = torch.optim.SGD
CHANGES: dict[str, Callable[[Any], object]] = {
    "an optimizer": lambda m: SGD(m.parameters(), 0.1, foreach=False).step(),
    "an optimizer by lists": lambda m: SGD(m.parameters(), 0.1, foreach=True).step(),
    "a fused optimizer": lambda m: SGD(m.parameters(), 0.1, fused=True).step(),
    "load_state_dict": lambda m: m.load_state_dict(paradyse.full_state_dict(m)),
    "one matrix": lambda m: m.model.layers[0].mlp.down_proj.weight.mul_(2),
    "through detach": lambda m: [p.detach().zero_() for p in m.parameters()],
    "an operator on whole tensors": lambda m: [
        p.detach().t().zero_() for p in m.parameters() if p.ndim == 2
    ],
}


def changed(plan: str) -> dict[str, str]:
    """What backward says after each change, and behind ``.data``, whose writes do not count."""
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    options = {"inner": "eager", "plan": plan}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch, said = make_batch("plain", 2, 9), {}
    compiled(**batch).loss.backward()  # for the optimizers
    changes = CHANGES | {"through .data": lambda m: [p.data.mul_(1) for p in m.parameters()]}
    for name, change in changes.items():
        loss = compiled(**batch).loss
        with torch.no_grad():
            change(model)
        try:
            loss.backward()
            said[name] = ""
        except RuntimeError as e:
            said[name] = str(e)
        compiled(**batch).loss.backward()  # another forward is another matter
    return said


@pytest.mark.parametrize("plan", ALONG_SEQUENCE)
def test_a_backward_with_other_weights_is_an_error(plan: str, pool2: RankPool) -> None:
    for said in pool2.run(changed, plan, timeout_s=100):
        assert said.pop("through .data") == ""
        for name, text in said.items():
            assert "changed in place" in text or "inplace" in text, (
                name,
                text,
            )  # ours, or PyTorch's


def stepped_in_backward() -> list[float]:
    """How far weights are off those of steps behind backward, each stepped by a hook."""
    trained = []
    for hooked in (True, False):
        torch._dynamo.reset()
        model = paradyse.shard(make_model("llama", tie_word_embeddings=True))
        options = {"inner": "eager", "plan": "ulysses_z"}
        compiled: Any = torch.compile(model, backend="paradyse", options=options)
        steps = {p: SGD([p], 0.1) for p in model.parameters()}
        if hooked:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p, of=steps: of[p].step())
        for length in (9, 12):
            model.zero_grad()
            compiled(**make_batch("plain", 2, length)).loss.backward()
            for step in () if hooked else steps.values():
                step.step()
        trained.append([p.full_tensor().detach() for p in model.parameters()])
    return [relative(*pair) for pair in zip(*trained, strict=True)]


def test_steps_inside_backward_are_no_error(pool2: RankPool) -> None:
    for off in pool2.run(stepped_in_backward, timeout_s=100):
        assert max(off) < 1e-5
