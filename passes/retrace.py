"""Retrace: the Dynamo graph as pre-dispatch ATen, with plain integer sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paradyse.graph.subgraph import is_tensor
from paradyse.passes.number_inputs import Numbers, numbers_made_of, scale
from paradyse.passes.own_gradients import apply_with_slope, why_no_slope
from paradyse.passes.plain_vmaps import plain_vmaps
from paradyse.torch_private import (
    AUTOCAST_ENTER,
    AUTOCAST_EXIT,
    SET_GRAD_ENABLED,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    get_current_meta,
    make_fx,
    preserve_node_meta,
)

aten = torch.ops.aten

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_OWN_GRADIENT = torch.ops.higher_order.autograd_function_apply


class Untraceable(NotImplementedError):
    """The graph has something the passes cannot carry (for example a write into a view)."""


@dataclass(frozen=True)
class InputLike:
    """A tensor input as the trace sees it: everything but its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    band: Any = None
    """The ``Band`` that a buffer is known to be."""
    number: float | None = field(default=None, compare=False)
    """The ``int`` or ``float`` of the captured call, where it stands for one that only scales
    tensors."""


def retrace(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
    """Trace ``gm`` on fake tensors with the sizes of ``inputs`` into pre-dispatch ATen.

    ``aten.linear``, ``aten.scaled_dot_product_attention``, ``aten.layer_norm`` stay whole and the
    result is differentiable. Sizes become plain integers; later passes name them again. Tensors
    that the graph holds as constants become attributes of the new module.

    Raises:
        Untraceable: the graph has an operator with a body of its own (a custom autograd function
            that is more than an elementwise function and its slope). Activation checkpointing is
            one too, but its body is traced in its place; its nodes carry ``meta["recompute"]``. Or
            a value got lost on the way, as in ``torch.func.vmap``.

    Args:
        gm: the graph Dynamo hands to a backend.
        inputs: one value per placeholder: an ``InputLike``, or a Python number. A number where the
            graph has a scalar tensor stands for what ``item()`` gives.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            _check_body(node, module)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    numbers = _number_inputs(gm, inputs)

    def fake(x: Any) -> Any:
        if not isinstance(x, InputLike):
            return x
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out.requires_grad_(x.requires_grad)

    with fake_mode, preserve_node_meta():
        fakes = [fake(x) for x in inputs]
        run = _Interpreter(gm, numbers)
        how = {"pre_dispatch": True, "decomposition_table": _SPELT_OUT}
        traced = make_fx(lambda *args: run.run(*args), **how)(*fakes)
    _check_constants(traced, gm)
    write_numbers(traced)
    for node in traced.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["module"] = list(stack.values())[-1][0]
    return traced


def _repeated(x: torch.Tensor, repeats: Sequence[int]) -> Any:
    """``x.repeat(repeats)`` of dims of one element, whose sizes show in the dims of the result."""
    shape = [1] * (len(repeats) - x.ndim) + [*x.shape]
    if any(n > 1 and size > 1 for n, size in zip(repeats, shape, strict=True)):
        return NotImplemented
    sizes = [n * size for n, size in zip(repeats, shape, strict=True)]
    return x.expand(sizes).clone()


_SPELT_OUT = {aten.repeat.default: _repeated}


def _check_body(node: fx.Node, gm: fx.GraphModule) -> None:
    """Refuse ``node`` of ``gm`` if it has a body that cannot be written in its place."""
    if not isinstance(node.target, HigherOrderOperator) or node.target is _CHECKPOINT:
        return
    why = ""
    if node.target is _OWN_GRADIENT:
        fwd, bwd = (gm.get_submodule(body.target) for body in node.args[:2])
        examples = [a.meta.get("example_value", 0) for a in node.args[2:]]
        if any(u.target is not operator.getitem or u.args[1] for u in node.users):
            why = "it gives more than one tensor"
        elif not (why := why_no_slope(fwd, bwd, examples)):
            return
        why = f" ({why})"
    raise Untraceable(
        f"the graph contains {node.target}, whose body and gradient the passes do not see into{why}"
    )


_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""What is written as a number in the program (``torch.tensor(1.0)``) enters the graph by these."""


def _check_constants(traced: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Refuse transforms of functions. A value that tracing lost track of becomes a constant, which
    holds in no other call; PyTorch up to 2.11 has the transforms themselves in the graph, where
    what lies between their begin and their end cannot be told from what does not."""
    modules = list(gm.modules())
    own = [v for m in modules for v in (*m.parameters(False), *m.buffers(False), *vars(m).values())]
    why = ""
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced, node.target)
            if not any(value is v for v in own) and not all(u.target in _LIFTS for u in node.users):
                why = f"{next(iter(node.users))} reads a value that tracing took for a constant"
        elif getattr(node.target, "__module__", "").startswith("torch._functorch"):
            why = f"{node} is a step of one"
        if why:
            raise Untraceable(
                f"{why}: the graph transforms functions (torch.func, associative_scan), which the "
                "passes do not see into"
            )


def write_numbers(traced: fx.GraphModule) -> None:
    """Write tensors of one number as such, in the graph ``traced``.

    before: c = lift_fresh_copy(_tensor_constant0)
    after:  c = full([], 1.0)
    """
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        for lift in list(node.users):
            if value.ndim or lift.target not in _LIFTS:
                continue
            out = lift.meta["val"]
            given = {"dtype": out.dtype, "device": out.device}
            with traced.graph.inserting_before(lift):
                full = traced.graph.call_function(aten.full.default, ([], value.item()), given)
            full.meta = dict(lift.meta)
            lift.replace_all_uses_with(full)
            traced.graph.erase_node(lift)


_VIEWS_IN_PLACE = {
    f"{name}_": name for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims")
}
"""Methods that change the shape of a tensor itself -> those that give a view of it."""


class _Interpreter(fx.Interpreter):
    """Runs the bodies of checkpointed regions in place, and marks what they compute. Switches of
    autocast are made in earnest: the functions that Dynamo writes down for them do nothing where a
    graph is traced."""

    def __init__(
        self, gm: fx.GraphModule, numbers: Numbers | None = None, recompute: bool = False
    ) -> None:
        super().__init__(gm)
        self.numbers, self.recompute = numbers or {}, recompute
        self.plain = plain_vmaps(gm)
        self._inside = list[torch.autocast]()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``fx.Interpreter``, with ``args`` and ``kwargs`` of its own."""
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._inside:  # after an error
                self._inside.pop().__exit__(None, None, None)

    def run_node(self, n: fx.Node) -> Any:
        if any(a in self.numbers for a in n.all_input_nodes):
            return scale(n, self.fetch_args_kwargs_from_env(n)[0], self.numbers)
        if n in self.plain:
            return self.fetch_args_kwargs_from_env(n)[0][0] if n.all_input_nodes else None
        if n.target is _CHECKPOINT:
            body, *args = self.fetch_args_kwargs_from_env(n)[0]
            return _Interpreter(body, recompute=True).run(*args)
        if n.target is AUTOCAST_ENTER:
            self._inside.append(torch.autocast(*self.fetch_args_kwargs_from_env(n)[0]))
            return self._inside[-1].__enter__()
        if n.target is AUTOCAST_EXIT:
            return self._inside.pop().__exit__(None, None, None)
        if n.target is _OWN_GRADIENT:
            return apply_with_slope(*self.fetch_args_kwargs_from_env(n)[0])
        out = super().run_node(n)
        if n.op == "call_method" and n.target in _VIEWS_IN_PLACE:
            # whoever reads the tensor itself from here on reads the view
            viewed = self.fetch_args_kwargs_from_env(n)[0][0]
            self.env |= {node: out for node, value in self.env.items() if value is viewed}
        return out

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.recompute:
            get_current_meta()["recompute"] = True  # nodes traced from here on inherit it
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and isinstance(args[0], int | float):
            return args[0]  # an input that is given as the number
        if self.recompute:
            get_current_meta()["recompute"] = True
        return super().call_method(_VIEWS_IN_PLACE.get(target, target), args, kwargs)


def users_inside(node: fx.Node) -> Iterator[fx.Node]:
    """Who uses ``node`` of Dynamo's graph: inside a checkpointed region that is given it."""
    for user in node.users:
        if user.target is not _CHECKPOINT:
            yield user
            continue
        body, *args = user.args
        assert isinstance(body, fx.Node) and user.graph.owning_module is not None
        graph = user.graph.owning_module.get_submodule(str(body.target)).graph
        for inner, arg in zip(graph.find_nodes(op="placeholder"), args, strict=True):
            if arg is node:
                yield from users_inside(inner)


def _number_inputs(gm: fx.GraphModule, inputs: list[Any]) -> Numbers:
    """The numbers of ``gm`` that are made of inputs which stand for one."""
    found: Numbers = {}
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        number = getattr(given, "number", None)
        if number is not None:
            found |= numbers_made_of(node, type(number)) or {}
    return found


def drop_grad_mode(gm: fx.GraphModule, ctx: Any) -> int:
    """Replace grad-mode switches by detaching what enters a no-grad region.

    before: _set_grad_enabled(False); y = mul(x, w); _set_grad_enabled(True)
    after:  y = mul(detach(x), detach(w))
    Refuses nothing; values that carry no gradient are left alone.
    """
    count, enabled = 0, True
    inside: set[fx.Node] = set()
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
            gm.graph.erase_node(node)
            count += 1
        elif not enabled and node.op == "call_function":
            inside.add(node)
            for arg in node.all_input_nodes:
                val, meta = arg.meta.get("val"), arg.meta.get("tensor_meta")
                if arg not in inside and getattr(meta, "requires_grad", False):
                    with gm.graph.inserting_before(node):
                        cut = gm.graph.call_function(aten.detach.default, (arg,))
                    cut.meta = {**arg.meta, "val": val.detach()}
                    node.replace_input_with(arg, cut)
    return count


_PRODUCTS = {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.scaled_dot_product_attention.default,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
"""Operators that take inputs of one dtype; fake tensors do not hold them to it."""

_AUTOCAST = (AUTOCAST_ENTER, AUTOCAST_EXIT)


def make_autocast_explicit(gm: fx.GraphModule, ctx: Any) -> int:
    """Write the casts that autocast makes into the graph, so that pieces run without it.

    before: y[bf16] = linear(x[f32], w[f32])           under autocast
    after:  y[bf16] = linear(to(x, bf16), to(w, bf16))
    Refuses (Untraceable) an operator whose output dtype no cast of its inputs explains.
    """
    values = (n.meta.get("val") for n in gm.graph.nodes)
    devices = {x.device.type for x in values if isinstance(x, torch.Tensor)}
    entered = [n for n in gm.graph.nodes if n.target in _AUTOCAST]
    if not entered and not any(map(torch.is_autocast_enabled, devices)):
        return 0
    for node in reversed(entered):  # the exit is the enter's user
        gm.graph.erase_node(node)
    count = len(entered)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(gm.graph.nodes):
        if not is_tensor(node) or not isinstance(node.target, OpOverload):
            continue
        dtype, inputs = node.meta["val"].dtype, filter(is_tensor, node.all_input_nodes)
        floats = [a for a in inputs if a.meta["val"].is_floating_point()]
        if not dtype.is_floating_point or not floats:
            continue
        mixed = node.target in _PRODUCTS and any(a.meta["val"].dtype != dtype for a in floats)
        if not mixed and _runs_to(node, dtype, None):
            continue
        if not _runs_to(node, dtype, dtype):
            raise Untraceable(
                f"under autocast {node.target} gives {dtype}, which no input cast explains"
            )
        for arg in floats:
            if arg.meta["val"].dtype == dtype:
                continue
            if (arg, dtype) not in casts:
                with gm.graph.inserting_after(arg):
                    cast = gm.graph.call_function(aten.to.dtype, (arg, dtype))
                cast.meta = {**arg.meta, "val": arg.meta["val"].to(dtype)}
                casts[arg, dtype] = cast
            node.replace_input_with(arg, casts[arg, dtype])
        count += 1
    if casts:  # a cast of a placeholder may have landed between placeholders
        first = next(n for n in gm.graph.nodes if n.op != "placeholder")
        for node in gm.graph.find_nodes(op="placeholder"):
            first.prepend(node)
    return count


def _runs_to(node: fx.Node, dtype: torch.dtype, cast: torch.dtype | None) -> bool:
    """Whether the operator, without autocast and with its inputs cast, gives ``dtype``."""

    def value(n: fx.Node) -> Any:
        v = n.meta["val"]
        return v.to(cast) if cast and isinstance(v, torch.Tensor) and v.is_floating_point() else v

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    device = node.meta["val"].device.type
    try:
        with torch.autocast(device, enabled=False), node.meta["val"].fake_mode:
            out = node.target(*args, **kwargs)
    except RuntimeError:
        return False
    return bool(out.dtype == dtype)
