"""Checks of ``test_torch_private.py``: of Dynamo and of checkpoints."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import make_batch, make_model
from torch import Tensor, nn
from torch._dynamo.repro.after_dynamo import WrapBackendDebug

import paradyse
from paradyse import torch_private as private
from paradyse.weights import sharded_tensor


def check_CompileContext() -> None:
    """How many graphs of the same function were compiled before."""
    seen = []

    def backend(gm: Any, examples: Any) -> Any:
        seen.append(private.CompileContext.current_compile_id().frame_compile_id)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    for n in (2, 3, 4):
        compiled(torch.ones(n))
    assert seen == [0, 1, 2]
    assert private.CompileContext.current_compile_id() is None


def check_current_backward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private.current_backward()))
    x.sum().backward()
    assert seen != [-1] and private.current_backward() == -1


def check_StopRecomputation() -> None:
    """What a checkpoint raises once it has made again what its backward asks for."""
    raised = []

    def fn(x: Tensor) -> Tensor:
        try:
            return x.exp() + 1
        except private.StopRecomputation as e:
            raised.append(e)
            raise

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False).sum().backward()
    assert len(raised) == 1 and x.grad is not None


def check_top_saved_tensors_hooks() -> None:
    assert private.top_saved_tensors_hooks() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert private.top_saved_tensors_hooks() == (pack, unpack)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert private.top_saved_tensors_hooks() is None


def check_break_of() -> None:
    seen = []

    def backend(gm: Any, examples: Any) -> Any:
        seen.append(private.break_of(gm).graph_break)
        return gm.forward

    def fn(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(torch.ones(2))
    assert seen == [True, False]


def check_pass_over_requiring_hooks() -> None:
    """The whole of it: ``tests/strategies/test_recompute.py``."""
    assert private.pass_over_requiring_hooks("paradyse")

    def make_inputs_require_grads(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model = nn.Sequential(nn.Embedding(5, 4).requires_grad_(False), nn.Linear(4, 3))
    model[0].register_forward_hook(make_inputs_require_grads)
    ids = torch.arange(5)
    torch._dynamo.reset()
    options = {"inner": "eager"}
    torch.compile(model, backend="paradyse", fullgraph=True, options=options)(ids).sum().backward()
    assert model[1].weight.grad is not None


def check_pass_over_warnings_once() -> None:
    """What a model logs once is logged while it is traced, and its graph goes on."""
    from transformers.utils.logging import get_logger

    assert private.pass_over_warnings_once("paradyse")
    log, said = get_logger("transformers.checked"), list[str]()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            log.warning_once(f"{self.out_features} wide")
            return super().forward(x)

    listening = Listening()
    log.addHandler(listening)
    try:
        torch._dynamo.reset()
        options = {"inner": "eager"}
        run = torch.compile(Model(4, 3), backend="paradyse", fullgraph=True, options=options)
        for n in (2, 5):
            assert run(torch.ones(n, 4)).shape == (n, 3)
    finally:
        log.removeHandler(listening)
    assert said == ["3 wide"]


def check_hang_collecting_hooks() -> None:
    """A first call may ask for hidden states, and is one graph."""
    assert private.hang_collecting_hooks("paradyse")
    model = make_model("llama")
    torch._dynamo.reset()
    options = {"inner": "eager"}
    run = torch.compile(model, backend="paradyse", fullgraph=True, options=options)
    batch = make_batch("plain", 2, 9)
    got = run(**batch, output_hidden_states=True).hidden_states
    want = model(**batch, output_hidden_states=True).hidden_states
    torch.testing.assert_close(got, want)


def check_pass_over_required_gradients() -> None:
    """A model of speech that is trained from its first layer on is one graph."""
    from transformers import Wav2Vec2Config
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2FeatureEncoder

    assert private.pass_over_required_gradients("paradyse")
    sizes = {"conv_dim": (4, 4), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    model = Wav2Vec2FeatureEncoder(Wav2Vec2Config(**sizes)).train()
    torch._dynamo.reset()
    options = {"inner": "eager"}
    run = torch.compile(model, backend="paradyse", fullgraph=True, options=options)
    run(torch.ones(2, 100)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def check_keep_graphs_whole() -> None:
    """Once for a backend: what is changed twice would call itself."""
    private.keep_graphs_whole("paradyse")
    private.keep_graphs_whole("paradyse")
    assert private.keep_graphs_whole.cache_info().misses == 1


def check__traces_for() -> None:
    """Dynamo's translator knows the backend by its name."""

    def tx(name: str) -> Any:
        return SimpleNamespace(output=SimpleNamespace(compiler_fn=WrapBackendDebug(print, name)))

    assert private._traces_for(tx("paradyse"), "paradyse")
    assert not private._traces_for(tx("inductor"), "paradyse")


def check_backend_traced_for() -> None:
    """What Dynamo traces for, while it does: here while it makes a fake tensor of a shard."""
    shard = paradyse.shard(nn.Linear(2, 2), offload="optimizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_tensor, "_check_backend", (seen := []).append)
        assert private.backend_traced_for() is None
        for name in "eager", "paradyse":
            torch._dynamo.reset()
            with torch.no_grad():
                torch.compile(shard, backend=name)(torch.ones(2, 2))
    assert set(seen) == {"eager", "paradyse"} and private.backend_traced_for() is None
