"""What changes between forward and backward: an error where PyTorch has one, and where a block that
runs again would read other values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, relative
from own_models import HEADS, WIDTH, Decoder, ids_of
from torch import Tensor

import paradyse
from paradyse.runtime.saved_memory import Saved
from paradyse.types import ALONG_SEQUENCE

SGD: Any = torch.optim.SGD
CHANGES: dict[str, Callable[[Any], object]] = {
    "an optimizer": lambda m: SGD(m.parameters(), 0.1, foreach=False).step(),
    "an optimizer by lists": lambda m: SGD(m.parameters(), 0.1, foreach=True).step(),
    "a fused optimizer": lambda m: SGD(m.parameters(), 0.1, fused=True).step(),
    "load_state_dict": lambda m: m.load_state_dict(paradyse.full_state_dict(m)),
    "load_checkpoint": lambda m: paradyse.load_checkpoint(m.saved, m),
    "load_safetensors": lambda m: paradyse.load_safetensors(m, m.saved + "/plain"),
    "one matrix": lambda m: m.model.layers[0].mlp.down_proj.weight.mul_(2),
    "through detach": lambda m: [p.detach().zero_() for p in m.parameters()],
    "an operator on whole tensors": lambda m: [
        p.detach().t().zero_() for p in m.parameters() if p.ndim == 2
    ],
}


def changed(plan: str, folder: str) -> dict[str, str]:
    """What backward says after each change, and behind ``.data``, whose writes do not count."""
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    paradyse.save_checkpoint(folder, model, step=1)
    state = paradyse.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder + "/plain", state_dict=state)
    torch.distributed.barrier()
    model.saved = folder
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
def test_a_backward_with_other_weights_is_an_error(
    plan: str, pool2: RankPool, tmp_path: Path
) -> None:
    for said in pool2.run(changed, plan, str(tmp_path), timeout_s=100):
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


class Centred(Decoder):
    """Blocks subtract a buffer and an input, which they need to run again, not for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH // HEADS))

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(layer, x, q, k, v) - self.mean - self.given

    def forward(self, ids: Tensor, given: Tensor) -> Any:
        self.given = given
        return super().forward(ids)


AGAIN: dict[str, Any] = {
    "recompute": "megatron_cz+recompute",
    "recompute, tensor parallel": "megatron_ts+recompute",
    "offload": "megatron_cz+offload",
    "recompute and tiled": {"attention": "megatron_cz+recompute", "mlp": "megatron_cz+tiled"},
}


def read_again(plan: Any, part: str, sharded: bool) -> str:
    """What backward says where ``part`` was changed in place since forward."""
    torch._dynamo.reset()
    model: Any = Centred()
    if sharded:
        paradyse.shard(model)
    options = {"inner": "eager", "plan": plan}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    given = torch.zeros(WIDTH // HEADS)
    parts = {"mean": model.mean, "given": given}
    loss = compiled(ids_of(13), given)
    with torch.no_grad():
        (parts[part] if part in parts else model.layers[-1][part].weight).add_(1)
    try:
        loss.backward()
    except RuntimeError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", AGAIN)
def test_what_backward_reads_again_may_not_change(
    how: str, sharded: bool, pool1: RankPool, pool2: RankPool
) -> None:
    for part in ("qkv", "down"):
        for pool in (pool1, pool2):
            for text in pool.run(read_again, AGAIN[how], part, sharded, timeout_s=100):
                assert "was changed in place after the forward" in text


@pytest.mark.parametrize("part", ["mean", "given"])
@pytest.mark.parametrize("how", AGAIN)
def test_no_other_tensor_may_change_where_a_block_reads_it_again(
    how: str, part: str, pool2: RankPool
) -> None:
    """Of what is not saved, as here by attention, eager has nothing to say either."""
    for text in pool2.run(read_again, AGAIN[how], part, False, timeout_s=100):
        assert ("was changed in place after the forward" in text) == how.startswith("recompute")


def test_what_is_saved_while_memory_is_measured_may_not_change() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Saved().watch():
        y = weight.clone().square() * weight
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after the forward"):
        y.sum().backward()
