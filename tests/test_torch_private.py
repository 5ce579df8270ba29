"""What is not public in PyTorch, name by name: that it is there, and that it does what we rely on.

A failure here names what a new version changed; ``paradyse.torch_private`` is the one module to
mend. Tried on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import private_compiling
import private_operators
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from paradyse import torch_private as private

aten = torch.ops.aten


@torch.library.custom_op("paradyse_tests::doubled", mutates_args=())
def doubled(x: Tensor, times: int) -> Tensor:
    return x * 2


class Wrapper(Tensor):
    """A tensor subclass that counts the functions it is asked for."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


# One check per name. The names of functions here are those of ``private``.


def check_AUTOCAST_ENTER() -> None:
    token = private.AUTOCAST_ENTER("cpu", torch.bfloat16, True, False)
    assert torch.is_autocast_enabled("cpu")
    private.AUTOCAST_EXIT(token)
    assert not torch.is_autocast_enabled("cpu")


check_AUTOCAST_EXIT = check_AUTOCAST_ENTER


def check_ShapeEnv() -> None:
    env = private.ShapeEnv(duck_shape=False)
    source = private.ConstantSource("n")
    symbol = env.create_symbol(5, source, private.DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=5, source=source)
    with private.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        assert torch.empty(size, 2).numel() == 10  # which is a guard
    assert [g.expr.free_symbols for g in env.guards] == [{symbol}]
    assert private.symbol_values(env)[symbol] == 5


check_ConstantSource = check_DimDynamic = check_FakeTensorMode = check_symbol_values = (
    check_ShapeEnv
)


def check_FakeTensor() -> None:
    mode = private.FakeTensorMode()
    with mode:
        x = torch.empty(3)
        with private.unset_fake_temporarily():
            assert not isinstance(torch.empty(3), private.FakeTensor)
        with private.disable_current_modes():
            assert not isinstance(torch.empty(3), private.FakeTensor)
    assert isinstance(x, private.FakeTensor) and x.fake_mode is mode


check_unset_fake_temporarily = check_disable_current_modes = check_FakeTensor


def check_FakeStore() -> None:
    torch.distributed.init_process_group("fake", store=private.FakeStore(), rank=0, world_size=3)
    try:
        torch.distributed.all_reduce(torch.ones(2))
        assert torch.distributed.get_world_size() == 3
    finally:
        torch.distributed.destroy_process_group()


def check_data_of() -> None:
    """How Dynamo writes ``weight.data``, which shares memory and no version."""
    weight, targets = torch.ones(2, requires_grad=True), []

    def backend(gm: Any, examples: Any) -> Any:
        targets.extend(n.target for n in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda w: w.data * 2, backend=backend)(weight)
    assert private.data_of in targets
    private.data_of(weight).mul_(3)
    assert weight.tolist() == [3, 3] and weight._version == 0


def check_default_store() -> None:
    """What ranks ring an alarm by: ``check`` does not wait."""
    held = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=held, rank=0, world_size=1)
    try:
        store = private.default_store()
        assert not store.check(["rung"])
        store.set("rung", "")
        assert store.check(["rung"])
    finally:
        torch.distributed.destroy_process_group()


def check_profiler_is_on() -> None:
    assert not private.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiler_is_on()
    assert not private.profiler_is_on()


def check_num_process_groups() -> None:
    made = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **made)
    try:
        before = private.num_process_groups()
        torch.distributed.new_group([0], use_local_synchronization=True)
        assert private.num_process_groups() == before + 1
    finally:
        torch.distributed.destroy_process_group()


def check_timeout_of() -> None:
    limit, cpu = timedelta(seconds=77), torch.device("cpu")
    made = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1, "timeout": limit}
    torch.distributed.init_process_group("gloo", **made)
    try:
        assert private.timeout_of(torch.distributed.group.WORLD, cpu) == limit
    finally:
        torch.distributed.destroy_process_group()


def check_OpOverload() -> None:
    assert isinstance(aten.add.Tensor, private.OpOverload)
    assert aten.add.Tensor.overloadpacket is aten.add
    assert aten.mm in flop_registry


def check_HigherOrderOperator() -> None:
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    assert isinstance(checkpoint, private.HigherOrderOperator)


def check_make_fx() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            private.get_current_meta()["ours"] = True
            y = nn.functional.linear(x, w)
        return y

    with private.preserve_node_meta():
        gm = private.make_fx(fn, pre_dispatch=True)(torch.randn(3, 4), torch.randn(5, 4))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.target for n in nodes] == [
        private.SET_GRAD_ENABLED,
        aten.linear.default,
        private.SET_GRAD_ENABLED,
    ]
    assert [n.args for n in nodes[::2]] == [(False,), (True,)]
    assert "val" in nodes[1].meta


check_SET_GRAD_ENABLED = check_get_current_meta = check_preserve_node_meta = check_make_fx


def check_tracing() -> None:
    mode = private.FakeTensorMode()
    with private.tracing(private.TracingContext(mode)):
        assert private.TracingContext.get().fake_mode is mode


check_TracingContext = check_tracing


def check_lookup_backend() -> None:
    gm = private.make_fx(lambda x: (x + 1,))(torch.ones(2))
    assert private.lookup_backend("eager")(gm, [torch.ones(2)])(torch.ones(2))[0].sum() == 4


def check_dynamo_config() -> None:
    known = private.dynamo_config.ignore_logging_functions
    with private.dynamo_config.patch(ignore_logging_functions={*known, print}):
        assert print in private.dynamo_config.ignore_logging_functions


def check_trace_structured() -> None:
    metadata = {"name": "x", "encoding": "string"}
    private.trace_structured("artifact", lambda: metadata, payload_fn=lambda: "text")


def check_StorageWeakRef() -> None:
    x = torch.empty(6)
    ref, key = private.StorageWeakRef(x.untyped_storage()), private.storage_key(x)
    assert private.storage_key(x[2:]) == key != private.storage_key(torch.empty(6))
    assert private.storage_bytes(ref) == 24 and not ref.expired()
    x.untyped_storage().resize_(0)
    assert private.storage_bytes(ref) == 0 and not ref.expired()
    del x
    gc.collect()
    assert private.storage_bytes(ref) == 0 and ref.expired()


check_storage_key = check_storage_bytes = check_StorageWeakRef


def check_TorchDispatchMode() -> None:
    seen = []

    class Watch(private.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2).add(1)
    assert seen == [aten.ones.default, aten.add.Tensor]


def check_make_wrapper_subclass() -> None:
    x = private.make_wrapper_subclass(Wrapper, (3, 4), dtype=torch.float64, device="cpu")
    assert isinstance(x, Wrapper) and not private.is_traceable_wrapper_subclass(x)
    asked = Wrapper.asked
    with private.DisableTorchFunctionSubclass():
        assert x.shape == (3, 4) and x.dtype == torch.float64
    assert Wrapper.asked == asked
    assert x.ndim == 2 and Wrapper.asked == asked + 1


check_DisableTorchFunctionSubclass = check_make_wrapper_subclass


def check_disabled_torch_function() -> None:
    class Quiet(Tensor):
        __torch_function__ = private.disabled_torch_function

    out = torch.ones(2).as_subclass(Quiet) + 1
    assert type(out) is Tensor  # and no subclass of it


def check_is_traceable_wrapper_subclass() -> None:
    class Inner(Tensor):
        def __tensor_flatten__(self) -> Any:
            return ["token"], ()

        @staticmethod
        def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
            return inner["token"]

    assert private.is_traceable_wrapper_subclass(torch.ones(2).as_subclass(Inner))
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


def check_tree_map_only() -> None:
    tree = {"a": [1, (2, None)], "b": "x"}
    assert private.tree_leaves(tree) == [1, 2, None, "x"]
    assert private.tree_map_only(int, lambda n: n + 1, tree) == {"a": [2, (3, None)], "b": "x"}


check_tree_leaves = check_tree_map_only


def check_unflatten_state_dict() -> None:
    paths = {"a.b": ("a", "b"), "c.1.d": ("c", 1, "d"), "c.0.d": ("c", 0, "d"), "e": ("e",)}
    nested = private.unflatten_state_dict({"c.1.d": 2, "a.b": 1, "c.0.d": [3]}, paths)
    assert nested == {"a": {"b": 1}, "c": [{"d": [3]}, {"d": 2}]}


def check_cpu_flash() -> None:
    q, k, v, grad = (torch.randn(2, 3, 5, 8) for _ in range(4))
    bias = torch.zeros(2, 3, 5, 5)
    out, lse = private.cpu_flash(q, k, v, 0.0, True, attn_mask=None, scale=0.3)
    want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    scores = (0.3 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    given = (grad, q, k, v, out, lse, 0.0, True)
    grads = private.cpu_flash_backward(*given, attn_mask=bias, scale=0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    for got, want in zip(grads, torch.autograd.grad(out, leaves, grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


check_cpu_flash_backward = check_cpu_flash


def check_schema_of() -> None:
    assert [a.name for a in private.schema_of(doubled).arguments] == ["x", "times"]
    schema = private.schema_of(aten.add_.Tensor)
    assert schema.is_mutable and schema.arguments[0].alias_info.is_write
    assert schema.name == "aten::add_" and schema.overload_name == "Tensor"


def check_overload_of() -> None:
    assert private.overload_of(doubled) is torch.ops.paradyse_tests.doubled.default
    assert private.overload_of(aten.add.Tensor) is aten.add.Tensor


def check_body_of() -> None:
    assert private.body_of(doubled)(3, 1) == 6


def check_no_saved_tensors_hooks() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with private.no_saved_tensors_hooks():
            private.make_fx(lambda x: x * x)(torch.ones(2, requires_grad=True))


def check_compiling_backward_at_once() -> None:
    """What comes of it: ``tests/graph/test_lower.py``."""
    from torch._functorch import config

    tag = torch.compiler.config.cache_key_tag
    with private.compiling_backward_at_once():
        assert config.force_non_lazy_backward_lowering
        assert torch.compiler.config.cache_key_tag != tag
    assert not config.force_non_lazy_backward_lowering
    assert torch.compiler.config.cache_key_tag == tag


def check_is_static_input() -> None:
    x = torch.ones(2)
    assert not private.is_static_input(x)
    torch._dynamo.mark_static_address(x)
    assert private.is_static_input(x)


def check_saved_tensors_hooks_are_free() -> None:
    assert private.saved_tensors_hooks_are_free()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not private.saved_tensors_hooks_are_free()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not private.saved_tensors_hooks_are_free()


def check_at_end_of_backward() -> None:
    order = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            private.at_end_of_backward(lambda: order.append("end"))
            order.append("node")
            return grad

    Node.apply(torch.ones(2, requires_grad=True).exp()).sum().backward()
    assert order == ["node", "end"]


def check_only_accumulates() -> None:
    leaf, found = nn.Parameter(torch.ones(2)), list[bool]()

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(private.only_accumulates(ctx.next_functions[0][0]))
            return grad

    Node.apply(leaf).sum().backward()
    Node.apply(leaf).sum().backward(inputs=[leaf])
    assert found == [True, True]
    torch.autograd.grad(Node.apply(leaf).sum(), [leaf])
    Node.apply(leaf * 2).sum().backward()
    assert found[2:] == [False, False]
    for hook in (leaf.register_hook, leaf.register_post_accumulate_grad_hook):
        held = hook(lambda _: None)
        Node.apply(leaf).sum().backward()
        held.remove()
        assert found.pop() is False
    Node.apply(leaf).sum().backward()
    assert found[-1] is True


def check_keeps_graph() -> None:
    found: list[bool] = []
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: found.append(private.keeps_graph()))
    for keep in (True, False):
        y.backward(retain_graph=keep)
    assert found == [True, False]


def check_is_allocation() -> None:
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as run:
        x = torch.empty(1000)
    stack, found = private.profiled_events(run), []
    while stack:
        event = stack.pop()
        stack += event.children
        if private.is_allocation(event):
            found.append((event.extra_fields.alloc_size, event.extra_fields.device.type))
    assert (4000, "cpu") in found and x.numel() == 1000


check_profiled_events = check_is_allocation


def check_join_foreach_types() -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists: list[Any] = [m._foreach_supported_types for m in (optimizer, _foreach_utils)]
    assert all(type(x) is list and Tensor in x for x in lists)
    try:
        for _ in range(2):
            private.join_foreach_types(Wrapper)
        assert [x.count(Wrapper) for x in lists] == [1, 1]
    finally:
        for x in lists:
            x.remove(Wrapper)


def check_parameters_of() -> None:
    module = nn.BatchNorm1d(3)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert private.parameters_of(module) == dict(module.named_parameters())
    assert private.buffers_of(module) == dict(module.named_buffers())
    assert private.unsaved_buffers_of(module) == {"passing"}
    private.parameters_of(module)["weight"] = new = nn.Parameter(torch.zeros(3))
    assert module.weight is new


check_buffers_of = check_unsaved_buffers_of = check_parameters_of


def check_original_module() -> None:
    module = nn.Linear(2, 3)
    compiled = torch.compile(module, backend="eager")
    assert private.original_module(compiled) is module is private.original_module(module)


def check_compiled_call_of() -> None:
    module = nn.Linear(2, 3)
    assert private.compiled_call_of(module) is None
    module.compile(backend="eager")
    call = private.compiled_call_of(module)
    assert call is not None
    private.set_compiled_call(module, None)
    assert private.compiled_call_of(module) is None
    private.set_compiled_call(module, lambda x: "called")
    assert module(torch.ones(1, 2)) == "called"


check_set_compiled_call = check_compiled_call_of

CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): fn
    for name, fn in {**vars(private_operators), **vars(private_compiling), **globals()}.items()
    if name.startswith("check_")
}
FUNCTIONS = {
    n for n, x in vars(private).items() if callable(x) and x.__module__ == private.__name__
}


@pytest.mark.broad(but="DimDynamic")
@pytest.mark.parametrize("name", sorted({*private.PLACES, *FUNCTIONS} - {"__getattr__"}))
def test_it_is_there_and_does_what_we_rely_on(name: str) -> None:
    assert name in CHECKS, f"{name} has no check in {Path(__file__).name}"
    assert getattr(private, name) is not None
    CHECKS[name]()


def test_what_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.PLACES, "make_fx", "torch.fx.experimental.proxy_tensor:gone")
    with pytest.raises(ImportError, match=r"has no torch\.fx\.experimental\.proxy_tensor\.gone"):
        private.make_fx  # noqa: B018
    monkeypatch.setitem(private.PLACES, "cpu_flash", "torch:ops.aten._gone")
    assert private.cpu_flash is None
