"""Everything of PyTorch that is not public: the one module to look at when a new version breaks.

Names of ``PLACES`` are looked up when they are imported from here, so that nothing is loaded that
is not used; functions stand for attributes, and for what differs between versions. Each has a
test of its name (``tests/test_torch_private.py``). Tried on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

_FAKE = "torch._subclasses.fake_tensor"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_DISPATCH = "torch.utils._python_dispatch"
_PRODUCT = "torch:ops.aten._scaled_dot_product"

PLACES = {
    "AUTOCAST_ENTER": "torch:amp.autocast_mode._enter_autocast",
    "AUTOCAST_EXIT": "torch:amp.autocast_mode._exit_autocast",
    "CompileContext": "torch._guards:CompileContext",
    "ConstantSource": "torch._dynamo.source:ConstantSource",
    "DimDynamic": f"{_SYMBOLS}:DimDynamic",
    "DisableTorchFunctionSubclass": "torch:_C.DisableTorchFunctionSubclass",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensor": f"{_FAKE}:FakeTensor",
    "FakeTensorMode": f"{_FAKE}:FakeTensorMode",
    "HigherOrderOperator": "torch._ops:HigherOrderOperator",
    "OpOverload": "torch._ops:OpOverload",
    "SET_GRAD_ENABLED": "torch:_C._set_grad_enabled",
    "ShapeEnv": f"{_SYMBOLS}:ShapeEnv",
    "StopRecomputation": "torch.utils.checkpoint:_StopRecomputationError",
    "StorageWeakRef": "torch.multiprocessing.reductions:StorageWeakRef",
    "TorchDispatchMode": f"{_DISPATCH}:TorchDispatchMode",
    "TracingContext": "torch._guards:TracingContext",
    "cpu_flash": f"{_PRODUCT}_flash_attention_for_cpu",
    "cpu_flash_backward": f"{_PRODUCT}_flash_attention_for_cpu_backward",
    "cudnn_attention": f"{_PRODUCT}_cudnn_attention",
    "cudnn_attention_backward": f"{_PRODUCT}_cudnn_attention_backward",
    "current_backward": "torch:_C._current_graph_task_id",
    "data_of": "torch:_C._autograd._get_data_attr",
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "disable_current_modes": f"{_DISPATCH}:_disable_current_modes",
    "disabled_torch_function": "torch:_C._disabled_torch_function_impl",
    "dynamo_config": "torch._dynamo:config",
    "flash_attention": f"{_PRODUCT}_flash_attention",
    "flash_attention_backward": f"{_PRODUCT}_flash_attention_backward",
    "flash_window": "torch:ops.aten._flash_attention_forward",
    "flash_window_backward": "torch:ops.aten._flash_attention_backward",
    "foreach_copy": "torch:_foreach_copy_",
    "get_current_meta": "torch.fx.traceback:get_current_meta",
    "is_traceable_wrapper_subclass": f"{_DISPATCH}:is_traceable_wrapper_subclass",
    "lookup_backend": "torch._dynamo:lookup_backend",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    "preserve_node_meta": "torch.fx.traceback:preserve_node_meta",
    "trace_structured": "torch._logging:trace_structured",
    "tracing": "torch._guards:tracing",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
    "unflatten_state_dict": "torch.distributed.checkpoint._nested_dict:unflatten_state_dict",
    "unset_fake_temporarily": f"{_FAKE}:unset_fake_temporarily",
}
"""Name here -> where PyTorch has it."""

BUILD_MAY_LACK = {"cpu_flash", "cpu_flash_backward"}
"""None where this build of PyTorch has no such operator."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        return resolve_name(PLACES[name])
    except (ImportError, AttributeError) as e:
        if name in BUILD_MAY_LACK:
            return None
        raise ImportError(
            f"torch {torch.__version__} has no {PLACES[name].replace(':', '.')}, which ParaDySe "
            "uses as of torch 2.13: install a version of torch that has it"
        ) from e


# Operators


def schema_of(op: Any) -> Any:
    """The schema of ``op``: an ``OpOverload``, or a ``torch.library.custom_op``."""
    return overload_of(op)._schema


def overload_of(op: Any) -> Any:
    """The ``OpOverload`` of ``op``, a ``torch.library.custom_op``; an ``OpOverload`` itself."""
    return getattr(op, "_opoverload", op)


def body_of(op: Any) -> Callable[..., Any]:
    """The function that ``op``, a ``torch.library.custom_op``, was made of."""
    body: Callable[..., Any] = op._init_fn
    return body


# Tracing and compiling


@contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """Inside, tracing passes over the hooks of the user's, such as those of a checkpoint, and
    these hear of nothing that it saves."""
    from torch._dynamo import utils

    name = "_disable_saved_tensors_hooks_during_tracing"
    with getattr(utils, name, nullcontext)(), ExitStack() as stack:
        if top_saved_tensors_hooks() is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            stack.enter_context(hooks)
        yield


@contextmanager
def compiling_backward_at_once() -> Iterator[None]:
    """Inside, AOTAutograd compiles backward with forward, and not when it first runs. What its
    compiler assumes of sizes is known then, and noted in AOTAutograd's cache, which would hand to
    all sizes what was compiled for some. As nobody knows yet whether the graph will be kept for
    another backward (``retain_graph``), nothing that is saved may be written to (no donated
    buffers): a backward that writes there refuses to run where it is."""
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile

    tag, name = torch.compiler.config.cache_key_tag, "collect_bw_donated_buffer_idxs"
    found = getattr(graph_compile, name, None)  # torch 2.11 to 2.14
    with (
        config.patch(force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=f"{tag} donates nothing"),
    ):
        if found is not None:
            setattr(graph_compile, name, lambda *args, **kwargs: [])
        try:
            yield
        finally:
            if found is not None:
                setattr(graph_compile, name, found)


def _traces_for(tx: Any, backend: str) -> bool:
    """Whether the translator ``tx`` of Dynamo traces for ``backend``."""
    return getattr(tx.output.compiler_fn, "_compiler_name", None) == backend


def backend_traced_for() -> str | None:
    """The name of the backend that Dynamo traces for now; None where it traces nothing."""
    if torch._guards.TracingContext.try_get() is None:  # guards ask of each shard in each call
        return None
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # it has traced nothing yet
        return None
    output = getattr(tx, "output", None)  # of None once it has: while guards are made and later
    return getattr(getattr(output, "compiler_fn", None), "_compiler_name", None)


_REQUIRING_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")


def pass_over_requiring_hooks(backend: str) -> bool:
    """Have Dynamo pass over what forward hooks of transformers and peft do where it traces for
    ``backend``: embeddings that are frozen get ``requires_grad`` (as checkpoints that are reentrant
    need it), which ends the graph. In a graph nothing reads that gradient.

    Args:
        backend: its name.
    Returns:
        Whether this PyTorch has what is changed for that.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    name = "requires_grad_"
    entry = getattr(TensorVariable, "tp_methods", {}).get(name)  # torch 2.14
    method = getattr(TensorVariable, f"method_{name}", None)
    found = method if entry is None else entry.handler
    if found is None:
        return False

    def handler(x: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_hook = x.source is None and tx.f_code.co_name in _REQUIRING_HOOKS
        if is_hook and _traces_for(tx, backend):
            return x
        return found(x, tx, *args, **kwargs)

    if entry is None:
        setattr(TensorVariable, f"method_{name}", handler)
    else:
        entry.handler = handler
    return True


def pass_over_required_gradients(backend: str) -> bool:
    """The same where a model of transformers itself asks for the gradient of what it is given, by
    ``x.requires_grad = True``, as those of speech do in training.

    Args:
        backend: its name.
    Returns:
        Whether this PyTorch has what is changed for that.
    """
    from torch._dynamo.variables import builtin

    names = "_call_setattr", "call_setattr"  # the second: torch 2.11
    classes = [c for c in vars(builtin).values() if isinstance(c, type)]
    of = [(c, name) for c in classes for name in names if name in vars(c)]
    if not of:
        return False
    (cls, name), *_ = of
    found = getattr(cls, name)

    def handler(self: Any, tx: Any, obj: Any, name_var: Any, val: Any) -> Any:
        known = name_var.is_python_constant() and val.is_python_constant()
        given = (name_var.as_python_constant(), val.as_python_constant()) if known else ()
        asks = obj.is_tensor() and given == ("requires_grad", True)
        theirs = str(tx.f_globals.get("__name__")).startswith("transformers.")
        if asks and theirs and _traces_for(tx, backend):
            return val
        return found(self, tx, obj, name_var, val)

    setattr(cls, name, handler)
    return True


def pass_over_warnings_once(backend: str) -> bool:
    """Have Dynamo log what models log once, by ``Logger.warning_once`` of transformers, when it
    traces for ``backend``, instead of ending the graph there.

    Args:
        backend: its name.
    Returns:
        Whether this PyTorch has what is changed for that.
    """
    from torch._dynamo import variables
    from torch._dynamo.variables import misc

    logger = getattr(misc, "LoggingLoggerVariable", None)
    if logger is None:
        return False
    found = logger.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        known = name == "warning_once" and all(x.is_python_constant() for x in given)
        if known and _traces_for(tx, backend):
            log = getattr(self.value, name)
            log(
                *(x.as_python_constant() for x in args),
                **{key: x.as_python_constant() for key, x in kwargs.items()},
            )
            return variables.ConstantVariable.create(None)
        return found(self, tx, name, args, kwargs)

    logger.call_method = call_method
    return True


def hang_collecting_hooks(backend: str) -> bool:
    """Have transformers hang the hooks that collect hidden states and attentions when Dynamo traces
    a first call that asks for these, for ``backend``, instead of ending the graph there.

    Args:
        backend: its name.
    Returns:
        Whether this PyTorch has what is changed for that.
    """
    from torch._dynamo import variables

    function = getattr(variables, "UserFunctionVariable", None)
    if function is None:
        return False
    found = function.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        hangs = getattr(self.fn, "__name__", "") == "maybe_install_capturing_hooks"
        if hangs and _traces_for(tx, backend):
            model = getattr(args[0], "value", None) if len(args) == 1 else None
            if isinstance(model, nn.Module):
                self.fn(model)
                return variables.ConstantVariable.create(None)
        return found(self, tx, args, kwargs)

    function.call_function = call_function
    return True


@cache
def keep_graphs_whole(backend: str) -> None:
    """Have Dynamo go on, where it traces for ``backend``, at the lines of transformers and peft
    that would end a graph: ``pass_over_requiring_hooks``, ``pass_over_required_gradients``,
    ``pass_over_warnings_once`` and ``hang_collecting_hooks``."""
    pass_over_requiring_hooks(backend)
    pass_over_required_gradients(backend)
    hang_collecting_hooks(backend)
    pass_over_warnings_once(backend)


def break_of(gm: Any) -> Any:
    """Why Dynamo ended ``gm``: ``graph_break`` of it says whether Python goes on behind it."""
    return getattr(gm, "compile_subgraph_reason", None)


def symbol_values(shape_env: Any) -> Any:
    """Symbol of ``shape_env`` -> the number that it was made from."""
    return getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val  # before 2.12


def is_static_input(x: Tensor) -> bool:
    """Whether Dynamo marked ``x`` as the same tensor in every call, as parameters are."""
    return hasattr(x, "_dynamo_static_input_type")


# Memory, and what autograd keeps


def storage_key(x: Tensor) -> int:
    """Identity of the memory of ``x``, while it is alive."""
    key: int = x.untyped_storage()._cdata
    return key


def storage_bytes(reference: Any) -> int:
    """Bytes of the memory of ``reference``, a ``StorageWeakRef``; 0 where it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def saved_tensors_hooks_are_free() -> bool:
    """Whether nobody else's hooks take what autograd saves, or forbid them."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    return bool(enabled) and top_saved_tensors_hooks() is None


def top_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """What packs and unpacks what autograd saves; None where nothing does, or may."""
    functions: Any = torch._C._autograd
    if not functions._saved_tensors_hooks_is_enabled():
        return None
    hooks: Any = functions._top_saved_tensors_default_hooks(False)
    return hooks


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once the backward under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(p: Tensor) -> bool:
    """Whether something was registered that is called with the gradient of ``p``."""
    hooked: Any = p
    return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)


def only_accumulates(node: Any) -> bool:
    """Whether the backward under way adds what reaches ``node`` of its graph to the ``.grad`` of a
    leaf, and nobody's hook looks at it."""
    leaf = getattr(node, "variable", None)
    if leaf is None or has_gradient_hooks(leaf):
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is what torch.autograd.grad was asked for
        return False


def keeps_graph() -> bool:
    """Whether the backward under way leaves its graph to another one (``retain_graph=True``)."""
    functions: Any = torch._C._autograd
    keeps = getattr(functions, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())


def profiler_is_on() -> bool:
    """Whether a profiler of PyTorch's would note a region."""
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled)


def profiled_events(profile: Any) -> list[Any]:
    """The roots of the event tree of ``profile``, a ``torch.profiler.profile`` that has ended."""
    return list(profile.profiler.kineto_results.experimental_event_tree())


def is_allocation(event: Any) -> bool:
    """Whether ``event``, of ``profiled_events``, is memory taken or given back."""
    return bool(event.tag == torch._C._profiler._EventType.Allocation)


# Process groups


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long a message of ``group`` between tensors of ``device`` may take before it fails."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def num_process_groups() -> int:
    """How many process groups this rank counts: those it is one of, from torch 2.14 on those it has
    made. Ranks that make a group among themselves (``use_local_synchronization``), from torch 2.14
    on any group, name it by this number, and hang where they differ in it:
    https://github.com/pytorch/pytorch/issues/173608"""
    from torch.distributed import distributed_c10d

    world, counts_all = distributed_c10d._world, TorchVersion(torch.__version__) >= (2, 14)
    return world.group_count if counts_all else len(world.pg_names)


# Optimizers


def join_foreach_types(kind: type[Tensor]) -> None:
    """Have optimizers and ``clip_grad_norm_`` take tensors of ``kind`` in lists wherever they take
    plain ones so, as PyTorch's own DTensor does; one by one in versions without such lists."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        kinds = getattr(module, "_foreach_supported_types", None)
        if isinstance(kinds, list) and kind not in kinds:
            kinds.append(kind)


# Modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name -> parameter of ``module`` alone; may be written."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Name -> buffer of ``module`` alone; may be written."""
    return module._buffers


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Names of the buffers of ``module`` that are in no state dict."""
    return module._non_persistent_buffers_set


def original_module(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, if ``model`` is what it returned."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


def compiled_call_of(module: nn.Module) -> Any:
    """What ``module.compile()`` made the call of ``module``; None where it was not called."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Make ``call`` the call of ``module``, as ``module.compile()`` does; None undoes it."""
    module._compiled_call_impl = call
