"""The way from Dynamo's graph to a program, for static and for symbolic captures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.config import Options
from paradyse.distributed.axis import SINGLE, Axis, resolve_replicas
from paradyse.graph.factors import Factor
from paradyse.graph.subgraph import is_tensor, is_weight, structure
from paradyse.passes.explain_numbers import explain_numbers
from paradyse.passes.number_inputs import numbers_made_of
from paradyse.passes.pipeline import CaptureContext, run_passes
from paradyse.passes.retrace import InputLike, Untraceable, retrace, users_inside
from paradyse.passes.split_steps import BlockStep, Step
from paradyse.runtime.known_buffers import band_of
from paradyse.runtime.program import Program
from paradyse.runtime.trace_sizes import allowed, choose_sizes
from paradyse.strategies.base import SPLIT, WHOLE, Scope, VariantCache
from paradyse.torch_private import is_static_input, no_saved_tensors_hooks
from paradyse.weights.sharded_tensor import ShardedTensor, used_on

SizeSource = Mapping[str, tuple[int, int, int] | int]
"""Letter of a size -> the argument of a call and its dim that the size is read from, and how many
more it is than that; or the size itself, where the program holds for one: a number of patches that
no input shows."""


def is_model_state(node: fx.Node, example: Any) -> bool:
    """Whether the placeholder ``node`` is a parameter or a buffer, not data of the batch.

    Args:
        node: of Dynamo's graph.
        example: the value that it was captured with.
    """
    if isinstance(example, torch.nn.Parameter):
        return True
    if not isinstance(example, Tensor):
        return False
    name = str(node.target)
    return "_parameters_" in name or "_buffers_" in name or is_static_input(example)


NUMBER, _CPU = torch.float64, torch.device("cpu")
"""Of a Python number that is an input: what is computed with it has nothing to wait for."""


def _as_input(example: Any, meta: Any, values: Mapping[Any, int]) -> Any:
    """``example`` as an ``InputLike`` or a size, with symbolic sizes replaced by ``values``."""
    if not isinstance(example, Tensor):
        return _number(meta, values) if isinstance(meta, torch.SymInt) else example
    shape = meta.shape if isinstance(meta, Tensor) else example.shape
    sizes = tuple(_number(n, values) for n in shape)
    return InputLike(sizes, example.dtype, used_on(example), example.requires_grad)


def _number(n: Any, values: Mapping[Any, int]) -> int:
    return int(n.node.expr.xreplace(values)) if isinstance(n, torch.SymInt) else int(n)


@dataclass(frozen=True)
class TraceInputs:
    """What to trace a capture with, and what of a call must equal the trace."""

    values: tuple[Any, ...]
    """Per placeholder an ``InputLike`` or a number."""
    scalars: tuple[int, ...]
    """Placeholders that are numbers, not sizes: a call with others needs a program of its own."""
    scales: tuple[int, ...]
    """Placeholders that are numbers by which tensors are scaled: inputs, tensors of one number."""
    symbols: Mapping[tuple[int, int], Any]
    """(placeholder, dim) -> the symbolic size there."""
    sizes: Mapping[int, Any] = field(default_factory=dict)
    """Placeholder that is such a size -> it."""
    again: Callable[[Iterable[tuple[int, int]]], tuple[Any, ...] | None] = lambda keyed: None
    """(placeholder, dim)s to be kept -> ``values`` where all other sizes are others; None where
    there are none; () where Dynamo's guards allow no others."""
    traces: tuple[Mapping[Any, int], Mapping[Any, int]] = field(default_factory=lambda: ({}, {}))
    """Symbol of a size -> what it is in ``values``, and in what they are compared with."""
    merged: bool = False
    """Whether sizes that may differ in another call are equal in ``values``, for want of others
    that the guards allow."""


def trace_inputs(placeholders: Sequence[fx.Node], examples: Sequence[Any]) -> TraceInputs:
    """Sizes and numbers to trace with. Symbolic sizes get values that no weight has, where guards
    allow.

    Args:
        placeholders: of Dynamo's graph.
        examples: their values in the call that is captured.
    """
    metas = [n.meta.get("example_value") for n in placeholders]
    symbols: dict[tuple[int, int], Any] = {}
    for i, meta in enumerate(metas):
        for d, n in enumerate(meta.shape if isinstance(meta, Tensor) else ()):
            if isinstance(n, torch.SymInt) and n.node.maybe_as_int() is None:
                symbols[i, d] = n
    values, others, merged = choose_sizes(list(symbols.values()), metas)
    sizes = {n.node.expr for n in symbols.values()}
    scalars: dict[int, Any] = {}
    shown: dict[int, Any] = {}
    for i, (node, example, meta) in enumerate(zip(placeholders, examples, metas, strict=True)):
        if isinstance(meta, torch.SymInt):
            if meta.node.expr in sizes:
                shown[i] = meta
            else:
                symbolic = isinstance(example, torch.SymInt)
                scalars[i] = int(meta.node.hint) if symbolic else example
        elif isinstance(example, int | float | torch.SymFloat):
            scalars[i] = float(example) if isinstance(example, torch.SymFloat) else example
        elif _is_number(node, example):
            scalars[i] = example.item()

    scales = {
        i: InputLike((), NUMBER, _CPU, False, number=x)
        for i, x in scalars.items()
        if numbers_made_of(placeholders[i], type(x)) is not None
    }
    scalars = {i: x for i, x in scalars.items() if i not in scales}
    fixed = scalars | scales
    states = enumerate(zip(placeholders, examples, strict=True))
    bands = {i: band_of(e) for i, (n, e) in states if is_model_state(n, e)}
    bands = {i: band for i, band in bands.items() if band is not None}

    def inputs(values: Mapping[Any, int]) -> tuple[Any, ...]:
        pairs = enumerate(zip(examples, metas, strict=True))
        found = [fixed[i] if i in fixed else _as_input(*pair, values) for i, pair in pairs]
        return tuple(
            replace(found[i], band=bands[i]) if i in bands else x for i, x in enumerate(found)
        )

    def again(keyed: Iterable[tuple[int, int]]) -> tuple[Any, ...] | None:
        kept = {s for at in keyed for s in symbols[at].node.expr.free_symbols}
        while more := {s for e in sizes if e.free_symbols & kept for s in e.free_symbols} - kept:
            kept |= more
        if not (moved := values.keys() - kept):
            return None
        mixed = {s: others.get(s, n) if s in moved else n for s, n in values.items()}
        env = next(iter(symbols.values())).node.shape_env
        return inputs(mixed) if moved <= others.keys() and allowed(env, mixed) else ()

    return TraceInputs(
        inputs(values),
        scalars=tuple(scalars),
        scales=tuple(scales),
        symbols=symbols,
        sizes=shown,
        again=again,
        traces=(values, {**values, **others}),
        merged=merged,
    )


def as_tensor_of(number: Any) -> Tensor:
    """``number`` as programs take one that scales tensors; Dynamo gives some as tensors already."""
    return torch.as_tensor(number, dtype=NUMBER, device=_CPU)


def _is_number(node: fx.Node, example: Any) -> bool:
    """A Python float that Dynamo passes as a scalar tensor (``dynamic=True``)."""
    items = [u.op == "call_method" and u.target == "item" for u in users_inside(node)]
    return isinstance(example, Tensor) and example.ndim == 0 and bool(items) and all(items)


def build_program(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: Sequence[bool],
    options: Options,
    axis: Axis,
    ranks: Axis | None = None,
    others: Sequence[Any] | None = None,
    at_rest: str = "",
) -> tuple[Program | None, CaptureContext]:
    """Run the passes on ``gm`` at the sizes of ``inputs``; None where there is nothing to switch.

    Args:
        inputs: per placeholder an ``InputLike`` or a number, see ``trace_inputs``.
        weights: per placeholder whether it is a parameter or a buffer.
        options: of the backend.
        axis: the sequence axis.
        ranks: as of ``Program``.
        others: as ``inputs``, at other sizes: what they are compared with to find the numbers among
            operators' arguments that are made of a size; None: all are taken for constants.
        at_rest: which dim tokens lie split along, as ``Plan.split`` has it.
    Returns:
        The program, or None, and what the passes found out, with notes that say why.
    Raises:
        NotImplementedError: an operator cannot be split, with ``on_unsupported="error"``.
    """
    ctx = CaptureContext(options, axis, resolve_replicas(options.mesh), at_rest=at_rest)
    try:
        with no_saved_tensors_hooks():
            traced = _traced(gm, inputs)
            twin = None if others is None else _traced(gm, others)
            placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
            for node, weight, given in zip(placeholders, weights, inputs, strict=True):
                node.meta["weight"], node.meta["band"] = weight, getattr(given, "band", None)
                node.meta["band_uses"] = set()  # one, in whatever copies of the graph passes make
                node.meta["number"] = getattr(given, "number", None)
            ctx.lengths = {} if twin is None else explain_numbers(traced, twin)
            run_passes(traced, ctx, options.dump)
    except Untraceable as e:
        ctx.note(str(e))
        return None, ctx
    if ctx.schedule is None or ctx.seq is None:
        return None, ctx
    cache = axis.session.of(VariantCache)
    others = _other_sizes(placeholders, ctx)
    scope = Scope(ctx.names, ctx.seq, ctx.batch, axis, options.inner, cache, others)
    return Program(traced, ctx, scope, ranks), ctx


def _traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """``retrace`` of ``gm``, whose sizes may not go with values that it computes."""
    try:
        return retrace(gm, list(inputs))
    except Untraceable:
        raise
    except (RuntimeError, ValueError) as e:
        why = str(e).splitlines()[0]
        raise Untraceable(f"the graph cannot be traced at sizes that it allows: {why}") from e


def _other_sizes(placeholders: Sequence[fx.Node], ctx: CaptureContext) -> tuple[Factor, ...]:
    """Sizes that vary besides the first sequence and its batch: other sequences and their batches,
    other dims of the same tokens, and dims of index inputs, such as token ids, that no weight has.
    """
    inputs = [n for n in placeholders if is_tensor(n)]
    mine = ctx.seq, ctx.batch
    given = {f for n in inputs if not is_weight(n) for dim in ctx.names.of(n) for f in dim}
    shown = (f for f in ctx.unsplit if f in given)  # others have the size that was traced
    of_all = (*(f for pair in ctx.seqs.items() for f in pair), *shown)
    others = dict.fromkeys(f for f in of_all if f is not None and f not in mine)
    known = {f for n in inputs if is_weight(n) for dim in ctx.names.of(n) for f in dim}
    known |= {f for f in (*mine, *others) if f is not None}
    data = [n for n in inputs if not is_weight(n) and not n.meta["val"].is_floating_point()]
    dims = [dim for n in data for dim in ctx.names.of(n) if len(dim) == 1]
    found = dict.fromkeys(f for (f,) in dims if f.base is None and f not in known)
    return (*others, *found)


def fingerprint(program: Program) -> str:
    """Text of ``program`` that another one, also of another process, shares exactly when they
    differ in nothing but the sizes traced at."""
    labels = [(s, program.scope_of(s).labels(WHOLE)) for s in program.steps]
    names = program.scope.names
    texts = (
        f"{structure(s.piece, names, of)}\n{s.recompute}{_sequences(program, s)}"
        for s, of in labels
    )
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n\n".join(texts))
    return text.replace(program.replicas.name, "replicas")


def _sequences(program: Program, step: Step) -> list[int | None]:
    """Numbers of the sequences that ``step`` is over, which its labels do not tell apart."""
    found = [step.seq, step.keys]
    found += [step.block.over, step.block.switch] if isinstance(step, BlockStep) else []
    return [program.number_of(f) for f in found]


def find_sizes(program: Program) -> SizeSource:
    """Where the sizes that vary stand in the arguments of ``program``; a size that none shows is
    what ``program`` was traced at."""
    scope = program.scope
    found: dict[Factor, tuple[int, int, int]] = {}
    related: dict[Factor, tuple[int, int, int]] = {}
    for i, node in enumerate(program.placeholders):
        if is_tensor(node) and not is_weight(node):
            for d, dim in enumerate(scope.names.of(node)):
                if len(dim) == 1:
                    origin, more = dim[0].origin()
                    found.setdefault(dim[0], (i, d, 0))
                    related.setdefault(origin, (i, d, -more))

    def source(f: Factor) -> tuple[int, int, int] | int:
        if f in found:
            return found[f]
        origin, more = f.origin()
        if origin not in related:
            return f.size
        i, d, less = related[origin]
        return i, d, less + more

    return {letter: source(f) for f, letter in scope.labels(WHOLE).of.items()}


def shown_factors(program: Program) -> set[Factor]:
    """The factors of ``program`` whose sizes are read off the arguments of each call, and those of
    its arguments that are some more, or less."""
    source, letters = find_sizes(program), program.scope.labels(WHOLE).of
    shown = {f for f, letter in letters.items() if not isinstance(source[letter], int)}
    origins = {f.origin()[0] for f in shown}
    given = (dim for n in program.placeholders if is_tensor(n) for dim in program.scope.names.of(n))
    return shown | {f for dim in given for f in dim if f.origin()[0] in origins}


def sizes_of(source: SizeSource, args: Sequence[Any], axis: Axis) -> dict[str, int]:
    """The sizes of a call with ``args``, read where ``source`` says: "S", if ``axis`` has several
    ranks "s", and the letters of ``Scope.beside``."""
    sizes: dict[str, int] = {
        letter: at if isinstance(at, int) else args[at[0]].shape[at[1]] + at[2]
        for letter, at in source.items()
    }
    if axis.size > 1:
        sizes[SPLIT] = axis.layout(sizes[WHOLE]).local_len
    return sizes


def serves(
    program: Program,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: Sequence[bool],
    options: Options,
    axis: Axis,
    others: Sequence[Any] | None = None,
) -> bool:
    """Whether ``program``, made at other sizes, is what comes of ``inputs`` as well.

    Args:
        gm, inputs, weights, options, axis, others: as of ``build_program``.
    """
    again, _ = build_program(gm, inputs, weights, replace(options, dump=None), axis, others=others)
    return again is not None and _identity(again) == _identity(program)


def _identity(program: Program) -> tuple[str, list[int]]:
    """Of ``program``; equal for those of one graph that differ in nothing but a call's sizes."""
    known = [n if isinstance(n, int) else n[2] for n in find_sizes(program).values()]
    return fingerprint(program), known


def empty_input(
    placeholders: Sequence[fx.Node], examples: Sequence[Any]
) -> tuple[str | None, bool]:
    """Which of ``examples``, the values of ``placeholders``, has no elements, and whether none of
    the others has a batch either."""
    pairs = zip(placeholders, examples, strict=True)
    data = [(n, e) for n, e in pairs if isinstance(e, Tensor) and not is_model_state(n, e)]
    for node, example in data:
        if 0 in example.shape:
            name = str(node.target).removeprefix("L_").removesuffix("_")
            text = f"input '{name}' has shape {list(example.shape)}"
            return text, all(0 in e.shape for _, e in data if e.ndim > 1)
    return None, False


def check_shards(examples: Sequence[Any], axis: Axis) -> None:
    """
    Args:
        examples: of a capture's inputs.
        axis: over which weights are to lie.
    Raises:
        ValueError: shards among ``examples`` lie on other ranks than those of ``axis``.
    """
    for e in examples:
        if isinstance(e, ShardedTensor) and e.placement.axis != axis:
            at = e.placement.axis
            raise ValueError(
                f"the weights are sharded over {at.size} ranks ({at.name}), but "
                f"the backend's mesh has {axis.size} ({axis.name}): give paradyse.shard and "
                "the option 'mesh' the same mesh"
            )


def build_alone(
    like: Program,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: Sequence[bool],
    options: Options,
    ranks: Axis,
    others: Sequence[Any] | None,
) -> Program | None:
    """What computes the whole of ``like`` on each of ``ranks``; None where that has other blocks.

    Args:
        gm, inputs, weights, options, others: that ``like`` was built of.
    """
    program, _ = build_program(
        gm, inputs, weights, replace(options, dump=None), SINGLE, ranks, others
    )
    kinds = [step.block.kind for step in like.block_steps]
    if program is None or [step.block.kind for step in program.block_steps] != kinds:
        return None
    return program if find_sizes(program).keys() == find_sizes(like).keys() else None


def build_split(
    like: Program,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    weights: Sequence[bool],
    options: Options,
    others: Sequence[Any] | None,
    at_rest: str,
) -> tuple[Program | None, str]:
    """What computes ``like`` with its tokens split along ``at_rest``; or None, and why there is no
    such program.

    Args:
        gm, inputs, weights, options, others: that ``like`` was built of.
        at_rest: as of ``build_program``.
    """
    # what cannot be split is a reason, and no error: the sequence may be split all the same
    of_split = replace(options, dump=None, on_unsupported="gather")
    program, ctx = build_program(
        gm, inputs, weights, of_split, like.axis, others=others, at_rest=at_rest
    )
    if program is None:
        return None, "; ".join(ctx.notes)
    more = [note for note in ctx.notes if note not in like.ctx.notes]
    if more:
        return None, "; ".join(more)
    return program, ""
