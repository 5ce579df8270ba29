"""The backend that ``torch.compile(model, backend="paradyse")`` finds by its entry point."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from paradyse.choice import choice_of
from paradyse.config import Options, parse_options, with_environment
from paradyse.distributed import collectives
from paradyse.distributed.agreement import Call, agreement_of
from paradyse.distributed.axis import Axis, GroupMesh, everyone_of, resolve_axis, resolve_replicas
from paradyse.distributed.checksums import BatchChecksum, checksum
from paradyse.distributed.facts import (
    GATHERS,
    GRADIENTS,
    INPUTS,
    NO_SYNC,
    OPTIMIZERS,
    PROFILE,
    PROGRAM,
    RANDOM_STATE,
    WEIGHTS,
    digest,
)
from paradyse.distributed.failures import OutOfMemoryError
from paradyse.distributed.session import Recent
from paradyse.distributed.together import Together
from paradyse.passes.dump import write
from paradyse.passes.pipeline import OPTIONAL
from paradyse.planning.alone import OTHER_BLOCKS
from paradyse.planning.explain import plan_table
from paradyse.profiling.step_reports import steps_of
from paradyse.runtime import registry
from paradyse.runtime.call_weights import CallWeights
from paradyse.runtime.capture import (
    as_tensor_of,
    build_alone,
    build_program,
    check_shards,
    empty_input,
    find_sizes,
    fingerprint,
    is_model_state,
    serves,
    shown_factors,
    sizes_of,
    trace_inputs,
)
from paradyse.runtime.computed_whole import allow_whole
from paradyse.runtime.describe import describe_blocks, describe_head
from paradyse.runtime.frame import current_frames
from paradyse.runtime.program import Program, StepConstants
from paradyse.runtime.weight_writes import apply_writes, take_writes
from paradyse.strategies.base import SPLIT, WHOLE
from paradyse.strategies.groups.rest_layout import rest_layouts
from paradyse.torch_private import lookup_backend, tree_leaves
from paradyse.types import Plan, Workload
from paradyse.weights.no_sync import AT_ONCE, gradients_are
from paradyse.weights.sharded_tensor import relayout
from paradyse.weights.unshard import Shelf, gather

log = logging.getLogger(__name__)

T = TypeVar("T")

Lengths = tuple[tuple[int, int], ...]
"""(batch, tokens) of sequences."""


def paradyse(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one graph of Dynamo's, ``gm`` with ``example_inputs``; ``options`` as in the README,
    those not given from the environment.

    Raises:
        ValueError: an option that is unknown or has a wrong value; a ``mode``, which is inductor's;
            a plan that does not fit the model; a time-out in the environment that is none.
        NotImplementedError: an operator that cannot be split, with ``on_unsupported="error"``.
    """
    if mode is not None:
        raise ValueError(
            f"mode={mode!r} chooses settings of inductor, and this backend has no modes: leave it "
            'out; options={"inner": "inductor"} has inductor compile the pieces, as is the default'
        )
    collectives.timeout()
    parsed = parse_options(with_environment(options), OPTIONAL)
    capture = Capture(gm, example_inputs, parsed, resolve_axis(parsed.mesh))
    registry.register(capture)
    return capture.run if capture.fallback is None else capture.run_whole


class Capture:
    """One graph: its program (one for each set of scalar arguments), its planner and its guard."""

    def __init__(self, gm: fx.GraphModule, examples: list[Any], options: Options, axis: Axis):
        self.gm, self.options, self.axis = gm, options, axis
        self.replicas = resolve_replicas(options.mesh)
        self.agreement = agreement_of(axis, options.mesh)
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        targets = (str(n.target).removeprefix("L_") for n in self.placeholders)
        self.names = [t.removeprefix("kwargs_").removesuffix("_") for t in targets]
        self.is_weight = [
            is_model_state(n, e) for n, e in zip(self.placeholders, examples, strict=True)
        ]
        self.weights, self.writes = CallWeights(examples), take_writes(gm, self.is_weight)
        check_shards(examples, everyone_of(axis, options.mesh))
        self.in_group = isinstance(options.mesh, GroupMesh)
        self.fallback: Any = None
        self.num_steps, self.is_first = 0, True
        self.steps = steps_of(self.weights.held())
        self.notes: list[str] = []
        self.graphs: dict[tuple[Any, ...], _Graph] = {}
        self._whole_at: dict[tuple[Any, ...], Any] = {}
        self.data = [
            i
            for i, (e, is_weight) in enumerate(zip(examples, self.is_weight, strict=True))
            if isinstance(e, Tensor) and not is_weight
        ]
        self._compared = self.data
        self.others: Sequence[Any] | None = None  # to tell arguments made of sizes by
        self._batch = BatchChecksum()
        self._replicas_agree = False
        plan = "a function" if callable(options.plan) else options.plan
        limits = options.levers, options.memory_limit, options.host_memory, options.smoothing
        self._options = str((plan, options.strategies, *limits, options.retry_out_of_memory))
        problem = empty_input(self.placeholders, examples)
        if problem:

            def fail(*args: Any) -> Any:
                raise ValueError(problem)

            self.fallback = fail
            return
        self.trace = trace_inputs(self.placeholders, examples)
        self._compared = sorted({*self.data, *self.trace.scales})  # with what scales tensors
        self.keyed_dims = tuple(self.trace.symbols) if self.trace.merged else ()
        graph = self._graph(self.trace.values)
        if graph is not None:
            self._check_sizes(graph)
        if graph is None:
            self._allow_whole(examples)
            self.fallback = self._whole_graph(examples)

    def _allow_whole(self, args: Sequence[Any]) -> None:
        """Say that calls like that with ``args`` are computed whole on every rank, if they may be.

        Raises:
            NotImplementedError: as ``allow_whole``.
        """
        sharded_in_group = self.in_group and bool(self.weights.sharded)
        how = self.options, self.axis, self.replicas, sharded_in_group
        allow_whole("; ".join(self.notes), args, *how)

    def run_whole(self, *args: Any) -> Any:
        """Called by Dynamo with the graph's inputs, where nothing of it is split."""
        self._begin(args)
        return self._computed_whole(args, self.fallback)

    def _computed_whole(self, args: Sequence[Any], compute: Any) -> Any:
        """``compute`` of ``args``, on every rank alike."""
        shapes = [tuple(args[i].shape) for i in self.data]
        call = self.agree(args, {"the shapes of the inputs": str(shapes)})
        if call is None:
            return compute(*args)
        return call.forward(lambda: compute(*args))

    def _begin(self, args: Sequence[Any]) -> None:
        """A call with ``args`` begins."""
        apply_writes(self.writes, args)
        self.num_steps, self.is_first = self.num_steps + 1, self.num_steps == 0
        if self.weights.are_of(args):
            return
        if self.weights.take(args):
            self.is_first, self._replicas_agree = True, False
            for graph in self.graphs.values():
                self._lay_out(graph.program)
        self.steps = steps_of(self.weights.held())

    def agree(self, args: Sequence[Any], facts: Mapping[str, Any]) -> Call | None:
        """Compare a call with ``args``, and ``facts`` of it, with the other ranks' calls."""
        if self.agreement is None:
            return None
        data = [i for i in self._compared if isinstance(args[i], Tensor)]
        names = (self.names[i] for i in data)
        trains = torch.is_grad_enabled()
        weights = self.weights.checksum(sharded=False) if self.is_first else "not compared"
        call = self.agreement.begin(
            trains and bool(self.weights.refs),
            {
                GRADIENTS: trains,
                INPUTS: ", ".join(names),
                "the options": self._options,
                **facts,
                **self._batch.fact([args[i] for i in data]),
                WEIGHTS: weights,
            },
            self.weights.refs,
        )
        if trains and not self._replicas_agree and (replicas := agreement_of(self.replicas)):
            self._replicas_agree = True
            replicas.compare("starts to train", {WEIGHTS: self.weights.checksum(sharded=True)})
        return call

    def _whole_graph(self, examples: Sequence[Any] | None) -> Any:
        """The graph as it is, on every rank, with whole weights; for calls like ``examples``, the
        graph's own, or None: like those to come."""
        inner, sharded = self.options.inner, self.weights.sharded
        if not sharded and examples is not None:
            return lookup_backend(inner)(self.gm, examples) if inner != "eager" else self.gm.forward
        # On first use: the inner compiler would hold whole weights against this trace's inputs.
        run = torch.compile(self.gm, backend=inner) if inner != "eager" else self.gm.forward
        if not sharded:
            return run
        between = collectives.register_block(self.axis, "whole graph")

        def with_whole_weights(*args: Any) -> Any:
            shards = [args[i] for i in sharded]
            wholes, _ = gather(shards, between, False, Shelf(ahead=False))
            given = dict(zip(sharded, wholes, strict=True))
            return run(*(given.get(i, a) for i, a in enumerate(args)))

        return with_whole_weights

    def _graph(self, inputs: Sequence[Any]) -> _Graph | None:
        how = self.is_weight, self.options, self.axis, None, self.others
        program, ctx = self.dumping(lambda: build_program(self.gm, inputs, *how))
        self.notes = ctx.notes
        if program is None:
            return None
        self._lay_out(program)
        graph = _Graph(program, self, inputs)
        named = shown_factors(program)
        if not self.keyed_dims:
            self.keyed_dims = tuple(
                (i, d)
                for i, d in self.trace.symbols
                if not set(program.scope.names.of(program.placeholders[i])[d]) <= named
            )
        self.graphs[self._key(inputs)] = graph
        return graph

    def dumping(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which writes dumps on one rank: what it raises all ranks raise."""
        if self.options.dump is None:
            return work()
        doing = "writing dumps (option 'dump', to be given on every rank)"
        return Together(self.axis, doing).all_of(work)

    def _key(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Numbers and sizes of a call that each need a program of their own."""
        numbers = tuple(_scalar(values[i]) for i in self.trace.scalars)
        return numbers + tuple(values[i].shape[d] for i, d in self.keyed_dims)

    def _lay_out(self, program: Program) -> None:
        """Move sharded weights to whole heads per rank, once, where a block asks for it. Groups,
        of which each would ask for other heads, gather them as they lie."""
        if self.in_group:
            return
        held = {program.placeholders[i]: w for i, w in self.weights.shards().items()}
        for step in program.block_steps:
            for node, layout in rest_layouts(program.scope_of(step), step.block).items():
                weight = held.pop(node, None)
                if weight is not None:
                    relayout(weight, layout)

    def _check_sizes(self, graph: _Graph) -> None:
        """Trace once more at other sizes: a size that no dim explains makes the programs differ."""
        again = self.trace.again(self.keyed_dims)
        how = self.is_weight, self.options, self.axis
        if again is None or serves(graph.program, self.gm, again, *how):
            return
        explained: _Graph | None = None
        if not self.keyed_dims:  # what looks like a constant may be made of a length
            self.others = again
            explained = self._graph(self.trace.values)
        at = self.gm, again, *how, self.trace.values
        if explained is None or not serves(explained.program, *at):
            self.others = None
            self.notes.append(
                "a size in this graph depends on the length in a way that no tensor's dim shows: "
                "each length gets a program of its own"
            )
            log.warning("%s", self.notes[-1])
            self.keyed_dims = tuple(self.trace.symbols)
            self.graphs = {self._key(self.trace.values): graph}

    def run(self, *args: Any) -> Any:
        """One call of the graph."""
        self._begin(args)
        key = self._key(args)
        graph = self.graphs.get(key)
        if graph is None and key not in self._whole_at:
            graph = self._graph(self._inputs_like(args))
            if graph is None:  # other numbers or sizes could be split
                self._allow_whole(args)
                self._whole_at[key] = self._whole_graph(None)
        if graph is None:
            return self._computed_whole(args, self._whole_at[key])
        if self.trace.scales:
            own = {i: as_tensor_of(args[i]) for i in self.trace.scales}
            args = tuple(own.get(i, a) for i, a in enumerate(args))
        return graph(args)

    def _inputs_like(self, args: Sequence[Any]) -> list[Any]:
        """The trace's inputs with the numbers and sizes of this call where they may not differ."""
        inputs = list(self.trace.values)
        for i in self.trace.scalars:
            inputs[i] = _scalar(args[i])
        of = {at: n.node.expr.free_symbols for at, n in self.trace.symbols.items()}
        keyed = set().union(*(of[at] for at in self.keyed_dims))
        for i, n in self.trace.sizes.items():
            if n.node.expr.free_symbols & keyed:
                inputs[i] = args[i]
        for i, d in (at for at, symbols in of.items() if symbols & keyed):
            shape = list(inputs[i].shape)
            shape[d] = args[i].shape[d]
            inputs[i] = replace(inputs[i], shape=tuple(shape))
        return inputs


def _scalar(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) else x


class _Graph:
    """A program with the guard that chooses its plan.

    Args:
        inputs: that it was traced with.
    """

    def __init__(self, program: Program, capture: Capture, inputs: Sequence[Any]):
        self.program, self.capture = program, capture
        self._inputs, self._others = inputs, capture.others
        self.sizes = find_sizes(program)
        self.axis = capture.axis
        self.blocks = describe_blocks(program)
        weights = capture.weights.held()
        text = fingerprint(program)
        how = capture.options, self.axis, capture.agreement
        head, replicas = describe_head(program), capture.replicas.size
        self.choice = choice_of(text, *how, self.blocks, weights, head, replicas)
        self.choice.watch(program)
        self._program_facts = {
            "how many outputs are asked for": len(tree_leaves(program.output)),
            "how many weights are trained": sum(w.requires_grad for w in weights),
            PROGRAM: zlib.crc32(text.encode()),
        }
        self._constants: Recent[Any, StepConstants] = Recent()

    def __call__(self, args: Sequence[Any]) -> Any:
        sizes, call = sizes_of(self.sizes, args, self.axis), None
        if self.capture.agreement is not None:
            args = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
            call = self.capture.agree(args, self._facts(sizes))
        guard = self.choice.guard
        shape = self._shape(sizes)
        if call is None:
            return self._run(args, sizes, guard(*shape))
        call.out_of_memory = partial(self.choice.ran_out, guard.workload(*shape))
        random_state = torch.get_rng_state() if self.program.schedule.has_dropout else None
        tried: list[Plan] = []

        def compute() -> Any:
            tried.append(self._plan(shape))
            return self._run(args, sizes, tried[-1])

        try:
            return call.forward(compute)
        except OutOfMemoryError as e:
            may_retry = self.capture.options.retry_out_of_memory and not self.capture.in_group
            if not (may_retry and e.may_repeat):
                raise
            safer = self._plan(shape)  # ranks agree on it: only where all of them come here
            if safer in tried:
                raise
            log.warning("%s. This forward is run again by the plan %s", e, safer.key)
        if random_state is not None:
            torch.set_rng_state(random_state)
        return call.forward(compute)

    def _run(self, args: Sequence[Any], sizes: dict[str, int], plan: Plan) -> Any:
        # counted before anything may raise on one rank alone: ranks run blocks together alike
        together = self.choice.uses.add(plan)
        workload = self.choice.guard.workload(*self._shape(sizes))
        steps = self.capture.steps
        if steps is None:
            return self._compute(args, sizes, plan, workload, together)
        device, predict = self.program.device, partial(self.choice.predict, plan, workload)
        step = steps.begin(device, workload, plan, predict)
        try:
            outputs = self._compute(args, sizes, plan, workload, together)
        except BaseException:
            step.failed()
            raise
        step.forward_ended(outputs, device)
        return outputs

    def _compute(
        self,
        args: Sequence[Any],
        sizes: dict[str, int],
        plan: Plan,
        workload: Workload,
        together: bool,
    ) -> Any:
        make_frame = current_frames()
        program = self.alone if plan.alone else self.program
        assert program is not None
        program.known_buffers.check(args)
        program.shown_keys.check(args, self.capture.names)
        constants = replace(self._make(program, sizes, plan), together=together)
        if program.in_group and self.capture.agreement is not None:
            order = digest(program.gathering_order(constants.strategy, args))
            self.capture.agreement.tell("gathers weights", {}, True, {GATHERS: order})
        feedback = self.choice.feedback
        if feedback is None or not workload.training:
            return make_frame(program, args, constants).run()
        return feedback.run(program, args, constants, workload, make_frame)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Those that were built so far."""
        alone = vars(self).get("alone")
        return (self.program,) if alone is None else (self.program, alone)

    @cached_property
    def alone(self) -> Program | None:
        """What computes the whole on every rank; None where that has other blocks."""
        at = self.capture
        built_of = at.gm, self._inputs, at.is_weight, at.options
        return build_alone(self.program, *built_of, self.axis, self._others)

    def _plan(self, shape: tuple[int, int, bool, bool, Lengths]) -> Plan:
        """The guard's for a call of this ``shape``, which can be run."""
        plan = self.choice.guard(*shape)
        if plan.alone and self.alone is None:
            log.warning("every rank cannot compute the whole: %s", OTHER_BLOCKS)
            self.choice.refuse_alone(OTHER_BLOCKS)
            plan = self.choice.guard(*shape)
        return plan

    def _shape(self, sizes: Mapping[str, int]) -> tuple[int, int, bool, bool, Lengths]:
        """What the guard asks of a call."""
        keeps_gradients = self._gradients() != AT_ONCE
        num_sequences = self.program.num_sequences(sizes)
        others = self.program.other_lengths(sizes)
        return num_sequences, sizes[WHOLE], torch.is_grad_enabled(), keeps_gradients, others

    def _gradients(self) -> str:
        if not torch.is_grad_enabled():
            return AT_ONCE
        return gradients_are(self.axis, self.capture.weights.held())

    def _make(self, program: Program, sizes: dict[str, int], plan: Plan) -> StepConstants:
        key = (*sizes.values(), plan)
        found = self._constants.get(key)
        if found is None:
            own = {k: n for k, n in sizes.items() if k != SPLIT} if plan.alone else sizes
            found = program.constants_for(own, plan.strategies, plan.head)
            self._constants[key] = found
            if self.capture.options.dump is not None:
                folder = Path(self.capture.options.dump)
                self.capture.dumping(lambda: self._dump_plan(folder, sizes, plan))
        return found

    def _dump_plan(self, folder: Path, sizes: Mapping[str, int], plan: Plan) -> None:
        """The first rank writes the table of the plan for these sizes, beside the graphs."""
        if self.axis.rank:
            return
        name = f"plan_batch{sizes.get('B', 1)}_length{sizes[WHOLE]}.txt"
        write(folder, name, plan_table(self.blocks, plan) + "\n")

    def _facts(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        first, dropout = self.capture.is_first, self.program.schedule.has_dropout
        profile = self.choice.cost_model
        return {
            "the sequence length": sizes[WHOLE],
            "the batch size": sizes.get("B", 1),
            "the lengths of other sequences": str(self.program.other_lengths(sizes)),
            **self._program_facts,
            NO_SYNC: self._gradients(),
            OPTIMIZERS: self.choice.optimizers.count,
            RANDOM_STATE: checksum([torch.get_rng_state()]) if dropout else 0,
            PROFILE: profile.profile.checksum if first and profile else 0,
        }
