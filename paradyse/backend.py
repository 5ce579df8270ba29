"""The backend that ``torch.compile(model, backend="paradyse")`` finds by its entry point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from paradyse.config import Options, parse_options, with_environment
from paradyse.distributed import collectives
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import (
    Axis,
    GroupMesh,
    check_device,
    everyone_of,
    lacks_group,
    resolve_axis,
    resolve_replicas,
)
from paradyse.distributed.calls import Call
from paradyse.distributed.compared import Compared
from paradyse.distributed.facts import GRADIENTS, INPUTS, JOINED, PROGRAM, WEIGHTS
from paradyse.distributed.session import Recent
from paradyse.distributed.together import Together
from paradyse.passes.explain_numbers import made_by_cases
from paradyse.passes.pipeline import OPTIONAL
from paradyse.planned_program import PlannedProgram
from paradyse.profiling.step_reports import calls_of
from paradyse.runtime import registry
from paradyse.runtime.backward import refuse_inside_backward, send_kept
from paradyse.runtime.call_weights import CallWeights
from paradyse.runtime.capture import (
    as_tensor_of,
    build_program,
    check_shards,
    empty_input,
    is_model_state,
    serves,
    shown_factors,
    trace_inputs,
)
from paradyse.runtime.computed_whole import allow_whole
from paradyse.runtime.deferred import DeferredTensor, materialize
from paradyse.runtime.graph_limit import make_room_for_graphs
from paradyse.runtime.output_sizes import OutputSizes
from paradyse.runtime.program import Program
from paradyse.runtime.run_again import stops_behind
from paradyse.runtime.weight_writes import apply_writes, may_write, take_writes
from paradyse.strategies.groups.rest_layout import rest_layouts
from paradyse.torch_private import break_of, keep_graphs_whole, lookup_backend
from paradyse.weights.moved_rows import relayout_weights
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.unshard import Shelf, gather, write_back

log = logging.getLogger(__name__)

T = TypeVar("T")

MANY_NUMBERS = 8
"""Of so many values of numbers, each with a program of its own, a warning is due."""

keep_graphs_whole("paradyse")  # Dynamo looks backends up before it traces


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
        RuntimeError: as ``make_room_for_graphs``.
    """
    if mode is not None:
        raise ValueError(
            f"mode={mode!r} chooses settings of inductor, and this backend has no modes: leave it "
            'out; options={"inner": "inductor"} has inductor compile the pieces, as is the default'
        )
    if num_ranks := lacks_group():
        _warn_alone(num_ranks)
    collectives.timeout()
    make_room_for_graphs()
    parsed = parse_options(with_environment(options), OPTIONAL)
    capture = Capture(gm, example_inputs, parsed, resolve_axis(parsed.mesh))
    registry.register(capture)
    return capture.run if capture.fallback is None else capture.run_whole


@cache
def _warn_alone(num_ranks: int) -> None:
    log.warning(
        "%d ranks were started (WORLD_SIZE), but no process group joins them: each computes for "
        "itself alone; call torch.distributed.init_process_group before the model",
        num_ranks,
    )


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
        if self.agreement is not None and not any(self.is_weight):
            refuse_inside_backward()
        self.output_sizes = OutputSizes(gm)
        self.is_broken = bool(getattr(break_of(gm), "graph_break", False))
        """Whether Python runs behind the graph, which Dynamo could not follow."""
        self.weights, self.writes = CallWeights(examples), take_writes(gm, self.is_weight)
        check_shards(examples, everyone_of(axis, options.mesh))
        self.in_group = isinstance(options.mesh, GroupMesh)
        self.fallback: Any = None
        self.num_steps = 0
        self._agreed: Any = None
        """What the weights of the latest call were compared for, of the ranks and of replicas."""
        self._replicas_agree = False
        self.calls = calls_of(self.weights.held())
        self._own_notes: list[str] = []
        self._program_notes: Sequence[str] = []
        self.graphs: Recent[tuple[Any, ...], PlannedProgram] = Recent()
        self._whole_at: Recent[tuple[Any, ...], Any] = Recent()
        self.data = [
            i
            for i, (e, is_weight) in enumerate(zip(examples, self.is_weight, strict=True))
            if isinstance(e, Tensor) and not is_weight
        ]
        self._compared = self.data
        self.others: Sequence[Any] | None = None  # to tell arguments made of sizes by
        plan = "a function" if callable(options.plan) else options.plan
        limits = options.levers, options.memory_limit, options.host_memory, options.smoothing
        self._options = str((plan, options.strategies, *limits, options.retry_out_of_memory))
        empty, all_are = empty_input(self.placeholders, examples)
        if all_are:

            def fail(*args: Any) -> Any:
                raise ValueError(
                    f"{empty}: batch and sequence must both be at least 1; drop empty batches "
                    "before calling the model"
                )

            self.fallback = fail
            return
        if empty:  # as of a batch of images without objects
            self._own_notes.append(empty)
            self._allow_whole(examples)
            self.fallback = self._whole_graph(examples)
            return
        self.trace = trace_inputs(self.placeholders, examples)
        self._compared = sorted({*self.data, *self.trace.scales})  # with what scales tensors
        self.keyed_dims = tuple(self.trace.symbols) if self.trace.merged else ()
        if made_by_cases(gm, self.trace.traces):
            self._key_all()
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
        with stops_behind(bool(self.weights.sharded)):
            self._begin(args)
            return self._computed_whole(args, self.fallback)

    def _computed_whole(self, args: Sequence[Any], compute: Any) -> Any:
        """``compute`` of ``args``, on every rank alike."""
        shapes = [tuple(args[i].shape) for i in self.data]
        common = {JOINED: "the whole graph"} if self.replicas.size > 1 else {}
        call = self.agree(args, {"the shapes of the inputs": str(shapes)}, common)
        if call is None:
            return compute(*args)
        outputs = call.forward(lambda: compute(*args))
        if call.trains:
            send_kept(call, GradientSync(self.weights.held(), self.axis, self.replicas), outputs)
        return outputs

    def _begin(self, args: Sequence[Any]) -> None:
        """A call with ``args`` begins."""
        apply_writes(self.writes, args)
        self.num_steps += 1
        if self.weights.are_of(args):
            return
        self._agreed, self._replicas_agree = None, False
        if self.weights.take(args):
            for graph in self.graphs.values():
                self._lay_out(graph.program)
        self.calls = calls_of(self.weights.held())

    def agree(
        self, args: Sequence[Any], facts: Mapping[str, Any], common: Mapping[str, Any]
    ) -> Call | None:
        """Compare a call with ``args``, and ``facts`` of it, with the other ranks' calls; of one
        that trains what is ``common`` with replicas' calls too."""
        trains = torch.is_grad_enabled()
        if self.agreement is None:
            self._agree_with_replicas(trains)
            return None
        data = [i for i in self._compared if isinstance(args[i], Tensor)]
        names = (self.names[i] for i in data)
        compared = self.axis.session.of(Compared)
        compared.since(self.agreement.num_dropped)
        weights: Any = "not compared"
        program = facts.get(PROGRAM)
        agreed = compared.num_dropped, program
        if self._agreed != agreed and not compared.has(program, self.weights.held()):
            weights = self.weights.checksum(sharded=False)
        self._agreed = agreed
        call = self.agreement.begin(
            trains and bool(self.weights.refs),
            {
                GRADIENTS: trains,
                INPUTS: ", ".join(names),
                "the options": self._options,
                **facts,
                **compared.batch.fact([args[i] for i in data]),
                WEIGHTS: weights,
            },
            self.weights.refs,
            common,
        )
        self._agree_with_replicas(trains)
        return call

    def _agree_with_replicas(self, trains: bool) -> None:
        """Compare the weights that a first call with them ``trains`` with those of replicas."""
        if not trains or self._replicas_agree:
            return
        self._replicas_agree = True
        if (replicas := agreement_of(self.replicas)) is not None:
            if not self.replicas.session.of(Compared).has("training", self.weights.held()):
                replicas.compare("starts to train", {WEIGHTS: self.weights.checksum(sharded=True)})

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
        writes = may_write(self.gm)

        def with_whole_weights(*args: Any) -> Any:
            shards = [args[i] for i in sharded]
            wholes, gathered = gather(shards, between, False, Shelf(ahead=False))
            given = dict(zip(sharded, wholes, strict=True))
            out = run(*(given.get(i, a) for i, a in enumerate(args)))
            if writes:
                write_back(shards, wholes)
            if gathered is not None:
                gathered.stays = True
            return out

        return with_whole_weights

    def _graph(self, inputs: Sequence[Any]) -> PlannedProgram | None:
        how = self.is_weight, self.options, self.axis, None, self.others
        program, ctx = self.dumping(lambda: build_program(self.gm, inputs, *how))
        self._program_notes = ctx.notes
        if program is None:
            return None
        check_device(program.device, (program.everyone, program.replicas))
        self._lay_out(program)
        graph = PlannedProgram(program, self, inputs)
        named = shown_factors(program)
        if not self.keyed_dims:
            self.keyed_dims = tuple(
                (i, d)
                for i, d in self.trace.symbols
                if not set(program.scope.names.of(program.placeholders[i])[d]) <= named
            )
        self.graphs[self._key(inputs)] = graph
        numbers = [*dict.fromkeys(key[: len(self.trace.scalars)] for key in self.graphs)]
        if len(numbers) == MANY_NUMBERS:
            log.warning(
                "numbers that the model is given differ from call to call (%s, ..), and for each "
                "the model is captured anew: give them as tensors",
                ", ".join(", ".join(map(str, given)) for given in numbers[:3]),
            )
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
        layouts = []
        for step in program.block_steps:
            for node, layout in rest_layouts(program.scope_of(step), step.block).items():
                if (weight := held.pop(node, None)) is not None:
                    layouts.append((weight, layout))
        relayout_weights(layouts)

    def _check_sizes(self, graph: PlannedProgram) -> None:
        """Trace once more at other sizes: a size that no dim explains makes the programs differ."""
        again = self.trace.again(self.keyed_dims)
        how = self.is_weight, self.options, self.axis
        if again is None or (again and serves(graph.program, self.gm, again, *how)):
            return
        explained: PlannedProgram | None = None
        if again and not self.keyed_dims:  # what looks like a constant may be made of a length
            self.others = again
            explained = self._graph(self.trace.values)
        at = self.gm, again, *how, self.trace.values
        if explained is None or not serves(explained.program, *at):
            self.others = None
            self._key_all()
            self.graphs.clear()
            self.graphs[self._key(self.trace.values)] = graph

    def notes_of(self, of_program: Sequence[str]) -> list[str]:
        """What is to be known of this graph, and ``of_program``, what is of one of its programs."""
        return [*self._own_notes, *of_program]

    @property
    def notes(self) -> list[str]:
        """Of this graph and of the program that was made last, or could not be."""
        return self.notes_of(self._program_notes)

    def _key_all(self) -> None:
        """From now on calls of other sizes get other programs."""
        self._own_notes.append(
            "a size in this graph depends on the length in a way that no tensor's dim shows: "
            "each length gets a program of its own"
        )
        log.warning("%s", self._own_notes[-1])
        self.keyed_dims = tuple(self.trace.symbols)

    def run(self, *args: Any) -> Any:
        """One call of the graph."""
        with stops_behind(bool(self.weights.sharded)):
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
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
        out = self.output_sizes.of_call(args, graph(args))
        if self.is_broken and self.replicas.size > 1 and not self.weights.sharded:
            # what is behind is a graph then, which refuses weights that each replica would keep
            return [materialize(x) if isinstance(x, DeferredTensor) else x for x in out]
        return out

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
