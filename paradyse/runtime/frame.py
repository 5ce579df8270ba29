"""One call of a program: it runs the steps, and holds values in the layouts asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from paradyse.distributed import collectives
from paradyse.distributed.agreement import current_call
from paradyse.distributed.regions import region
from paradyse.distributed.tokens import (
    GatherTokens,
    ReduceGrad,
    SplitTokens,
    SumOverRanks,
    take_own,
)
from paradyse.graph.factors import Factor, size_of
from paradyse.graph.subgraph import Piece, is_weight
from paradyse.kernels.dropout import seeds_of
from paradyse.passes.split_steps import Step, input_of
from paradyse.runtime.backward import BeginOnce, begin_backward
from paradyse.runtime.deferred import DeferredTensor, defer
from paradyse.runtime.gathering import Gathering, Wholes
from paradyse.runtime.joined import JoinedGradients
from paradyse.runtime.offload import Inputs, SavedBlock, SavedByCall
from paradyse.runtime.program import Program, StepConstants
from paradyse.runtime.remake import not_kept, remade
from paradyse.runtime.runs import Run, Unit
from paradyse.runtime.saved_memory import storages
from paradyse.strategies.base import SPLIT, WHOLE, Scope, StepContext, Uses, bind_factors
from paradyse.strategies.groups.analyse import factors_of
from paradyse.strategies.groups.evaluate import on_tokens
from paradyse.strategies.host_memory import HostMemories
from paradyse.strategies.streaming import Streaming
from paradyse.torch_private import unset_fake_temporarily
from paradyse.types import Point
from paradyse.weights.gradients import SumGradients
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.sharded_tensor import ShardedTensor, rows_here
from paradyse.weights.unshard import Gathered, group_rows
from paradyse.weights.versions import Read

_REPLICATED = "replicated"
"""Layout of a value that is whole on every rank, for work that every rank repeats."""


class Frame:
    """One call of ``program``.

    Args:
        args: the graph's inputs, in the order of its placeholders.
        constants: of the call's sizes and plan.
    """

    fuses = True
    """Whether blocks in a row may run as one (``Runs``); else ``run_step`` sees each of them."""

    def __init__(self, program: Program, args: Sequence[Any], constants: StepConstants):
        self.program, self.constants = program, constants
        self.axis, self.ctx, self.sizes = program.axis, program.ctx, constants.sizes
        self.call = current_call(program.everyone if program.in_group else program.ranks)
        self.env: dict[fx.Node, Any] = dict(zip(program.placeholders, args, strict=True))
        for node in (n for n in program.index_nodes if self.env[n] is not None):  # in a dry run
            # What kernels keep of a mask goes with the tensor that it was made of: at the end of
            # the call, as a collective may fill the caller's own without counting as a write.
            self.env[node] = self.env[node].detach()
        held = ((n, self.env[n]) for n in program.weight_nodes)
        self._given = {n: x for n, x in held if isinstance(x, Tensor)}
        """The weights of the call; in ``env`` are those that gradients are averaged behind."""
        self.env.update(program.constants)
        self.forms: dict[fx.Node, dict[str, Any]] = {}
        """Values in layouts other than the one that they were made in."""
        self._seeds: Sequence[Tensor] | None = None
        if program.schedule.has_dropout:
            with unset_fake_temporarily():  # a dry run draws a number as well
                number = int(torch.randint(2**62, (), device="cpu"))
            blocks, last = len(program.schedule.block_steps), max(program.schedule.seed_of)
            rest = max(0, last + 1 - blocks)
            self._seeds = seeds_of(number, blocks, rest, program.device).unbind(0)
        between = collectives.OPTIMIZER if program.alone else program.schedule.between_id
        self.sync = GradientSync([*self._given.values()], program.ranks, program.replicas, between)
        self.gathering = Gathering(program, constants, self.env, self.sync)
        self._begin = BeginOnce(self.call, self.sync)
        self._on_host = SavedByCall(self.axis.session.of(HostMemories)[program.device])
        self._joined = JoinedGradients(program, self.env, self.sync)
        self._remade: tuple[fx.Node | None, Any] = (None, None)
        """What the last block gave and makes again, and its node in autograd's graph."""

    def run(self) -> Any:
        """The graph's outputs."""
        device = self.program.device.type
        on = torch.is_autocast_enabled(device)  # its casts are in the graph already
        with self._on_device(), torch.autocast(device, enabled=False) if on else nullcontext():
            return self._run()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Inside, Triton's kernels are launched where the tensors of the program are, as PyTorch's
        are anywhere; autograd sees to that in backward."""
        device = self.program.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _run(self) -> Any:
        program = self.program
        self._joined.begin()
        self.gathering.begin()
        units: Sequence[Unit] = program.steps
        if self.constants.together and self.fuses:
            apart = self._joined.sums, self.gathering.apart
            units = program.runs.units(self.constants.strategies, self.sizes, *apart)
        for unit in units:
            steps = unit.steps if isinstance(unit, Run) else (unit,)
            for step in steps:
                self._joined.before(step.position)
            if isinstance(unit, Run):
                self._run_together(unit)
            else:
                self.run_step(unit, self.constants.strategy(unit))
            for step in steps:
                self.free(program.schedule.freed[step.position])
        self._on_host.settle()
        self.gathering.streams.in_forward = False
        out = fx.map_arg(program.output, self.result)
        # They know this frame: held here too, both would wait for Python's search for garbage.
        self.free([n for n, x in self.env.items() if isinstance(x, DeferredTensor)])
        return out

    def _run_together(self, run: Run) -> None:
        """Compute the outputs of all steps of ``run``, whose weights are here."""
        contexts, passed = [], None
        as_they_are = self.axis.size == 1 and not self.gathering.is_sharded and run.is_made
        for step in run.steps:
            traffic = collectives.traffic(self.axis, step.block_id)
            traffic.strategy = self.constants.strategy(step)
            if not as_they_are:
                wholes, gathered = self.gathering.unshard(step)
                contexts.append(self.context(step, wholes))
                passed = gathered or passed
        if self.call is not None:
            self.call.at = self.axis, run.block_id
        self.gathering.fetch_behind(run.steps[-1], run.steps[0])
        self.gathering.streams.begin_following()
        self._on_host.settle()
        with self._region(run.block_id):
            if as_they_are:
                common = [self.constants.common(s, self.seed(s)) for s in run.steps]
                outputs = run.on_values(self.env, common, self._sizes_of(run.steps[0]))
            else:
                outputs = run(contexts)
        if passed is not None:
            outputs = passed.release(outputs)
        self.env.update(zip(run.outputs, outputs, strict=True))
        for step in run.steps:
            for node, piece in step.sides.items():
                self.env[node] = self._side(step, node, piece)
        if self.call is not None:
            self.call.all_ended = False

    def run_step(self, step: Step, strategy: str) -> None:
        """Compute the outputs of ``step`` by ``strategy``, which may have levers ("" for a piece
        between blocks)."""
        collectives.traffic(self.axis, step.block_id).strategy = strategy
        if self.call is not None:
            self.call.at = self.axis, step.block_id
        for node, piece in step.late(strategy).items():
            self.env[node] = self._side(step, node, piece)
        variant, point = self.program.variant(step, strategy), Point.parse(strategy)
        wholes, gathered = self.gathering.unshard(step)
        self.gathering.fetch_behind(step)
        if not isinstance(variant, Streaming):  # else it does so behind its own
            self.gathering.streams.begin_following()
        outputs: Sequence[Any]
        with self._saving(step, point, wholes) as saved:
            if point.recomputes and torch.is_grad_enabled():
                outputs = self._checkpointed(step, strategy, (wholes, gathered), saved)
                if gathered is not None:
                    gathered.leave()
            else:
                with self._not_keeping_input(step), self._region(step.block_id):
                    outputs = variant(self.context(step, wholes))
                if gathered is not None:
                    again = self.program.read_again(step, strategy, list(wholes))
                    outputs = gathered.release(outputs, again)
        self.env.update(zip(step.gives(strategy).outputs, outputs, strict=True))
        if step.split and self.call is not None:
            self.call.all_ended = False

    def _saving(
        self, step: Step, point: Point, wholes: Wholes
    ) -> AbstractContextManager[SavedBlock | None]:
        """Inside, what ``step`` saves for backward goes to the host, where ``point`` says so."""
        if point.offloads and torch.is_grad_enabled():
            return self._on_host.saving(self._shared(step, wholes))
        self._on_host.settle()
        return nullcontext()

    def _shared(self, step: Step, wholes: Wholes) -> frozenset[int]:
        """Identities of what ``step`` reads and other steps too: weights, and tables that have no
        gradient."""
        found: list[Any] = [*wholes.values(), *self.constants.common(step, self.seed(step))]
        for node in step.piece.inputs:
            values = self.env.get(node), *self.forms.get(node, {}).values()
            tensors = (rows_here(x) for x in values if isinstance(x, Tensor))
            found += [x for x in tensors if is_weight(node) or not x.requires_grad]
        return frozenset(storages(found))

    def _checkpointed(
        self,
        step: Step,
        strategy: str,
        unsharded: tuple[Wholes, Gathered | None],
        saved: SavedBlock | None,
    ) -> Sequence[Any]:
        """The step's outputs; it runs again in backward, when the frame has let go of values, and
        gathers what is ``unsharded`` now. Its inputs go where ``saved`` says."""
        variant, context = self.program.variant(step, strategy), self.context(step, {})
        inputs, (wholes, gathered) = Inputs(context.get), unsharded
        first, asked = [wholes], (self.env[n] for n in step.piece.inputs if n in self._given)
        weights = [Read.of(x) for x in asked]
        context, read_again = replace(context, get=inputs.get), self._read_again(step, strategy)

        def compute() -> tuple[Any, ...]:
            if first:
                mine = first.pop()
            else:
                for weight in weights:
                    weight.again()
                mine, _ = self.gathering.unshard(step)
                if gathered is not None:
                    gathered.fetch_before()
            with self._region(step.block_id):
                out = variant(replace(context, weights=partial(self.weights, step, mine)))
            pairs = zip(step.gives(strategy).outputs, out, strict=True)
            return tuple(remade(x) if node is read_again else x for node, x in pairs)

        outputs: Sequence[Any] = checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
        if read_again is not None:
            at = step.gives(strategy).outputs.index(read_again)
            self._remade = read_again, outputs[at].grad_fn
        if saved is not None:
            inputs.move(saved)
        return outputs

    def _read_again(self, step: Step, strategy: str) -> fx.Node | None:
        """What the block behind ``step``, under ``strategy``, reads and does not keep."""
        steps, at = self.program.steps, step.position + 1
        node = input_of(steps, steps[at]) if at < len(steps) else None
        if node is None:
            return None
        behind = Point.parse(self.constants.strategy(steps[at]))
        return node if Point.parse(strategy).makes_input_of(behind) else None

    def _not_keeping_input(self, step: Step) -> AbstractContextManager[None]:
        """Inside, ``step`` does not save what the block before it makes again."""
        (node, grad_fn), self._remade = self._remade, (None, None)
        if grad_fn is None or node not in step.piece.inputs:
            return nullcontext()  # without gradients nothing is made again
        return not_kept(self.env[node], grad_fn)

    def seed(self, step: Step) -> Tensor:
        """Of the dropouts of ``step``, int64."""
        if self._seeds is None:
            return self.constants.no_seed
        return self._seeds[self.program.schedule.seed_of[step.position]]

    def _region(self, block_id: int) -> AbstractContextManager[Any]:
        """Inside, a profiler notes that the rank computes the block, or run, ``block_id``."""
        block = collectives.traffic(self.axis, block_id)
        return region(block.name, block.strategy)

    def context(self, step: Step, wholes: Wholes) -> StepContext:
        """What ``step`` may know and ask for; ``wholes`` are the weights gathered for it."""
        return StepContext(
            step.position,
            step.block_id,
            self._sizes_of(step),
            self.constants.common(step, self.seed(step)),
            partial(self.get, step) if step.split else lambda n, _: self.replicated(n),
            self.raw,
            partial(self.weights, step, wholes),
            self.sync,
            self.gathering.streams,
        )

    def _sizes_of(self, step: Step) -> Mapping[str, int]:
        """Of the call, by letters of the scope of ``step``."""
        return self.constants.scopes[step.position].sizes

    # ---- values

    def free(self, nodes: Sequence[fx.Node]) -> None:
        """Let go of the values of ``nodes``."""
        for node in nodes:
            self.env.pop(node, None)
            self.forms.pop(node, None)

    def get(self, step: Step, node: fx.Node, layout: str) -> Any:
        """``node`` for use in ``step``, on split tokens (or on one rank), in ``layout``."""
        value = self.env.get(node)
        if self.axis.size == 1 or not isinstance(value, Tensor):
            return value
        if (along := self._along(node)) is None:
            mine = factors_of(self.program.scope, node) if layout == SPLIT else ()
            own = next((f for f in (step.seq, step.keys) if f in mine), None)
            return self._form(node, own or WHOLE, lambda: self._convert(step, node, value, own))
        if layout == SPLIT and along in (step.seq, step.keys):
            return value
        return self._form(node, WHOLE, lambda: self._gather(node, value, summed=True))

    def _along(self, node: fx.Node) -> Factor | None:
        """The sequence that the value of ``node`` lies split along; None where it is whole."""
        if self.axis.size == 1 or node.op == "placeholder":
            return None
        return self.ctx.split.get(node)

    def _form(self, node: fx.Node, form: Any, make: Callable[[], Tensor]) -> Tensor:
        """The value of ``node`` in ``form``: ``_REPLICATED``; ``WHOLE``, for a part of the work; or
        split along a sequence."""
        forms = self.forms.setdefault(node, {})
        if form not in forms:
            forms[form] = make()
        return forms[form]

    def _convert(self, step: Step, node: fx.Node, value: Tensor, own: Factor | None) -> Tensor:
        """The whole ``value`` of ``node`` for use in ``step``: the rank's tokens of the sequence
        ``own``, or the whole."""
        if own is None:
            # whole, but used for a part of the work: its gradient is a part too
            where = (self.axis, step.block_id)
            return ReduceGrad.apply(value, *where) if value.requires_grad else value
        last = (self.axis, step.block_id, self.ctx.fills.get(node))
        scope = self.program.scope_of(step)
        sizes = bind_factors(scope, WHOLE, self.constants.scopes[step.position].sizes)
        return on_tokens(scope, node, value, sizes, lambda x, d: SplitTokens.apply(x, d, *last))

    def replicated(self, node: fx.Node) -> Any:
        """``node`` whole on every rank, for use in work that every rank repeats."""
        value = self.env[node]
        if self._along(node) is None:
            return value
        if node in self.ctx.partial:
            return self._form(node, _REPLICATED, lambda: self._sum_over_ranks(value))
        return self._form(node, _REPLICATED, lambda: self._gather(node, value))

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total: Tensor = SumOverRanks.apply(value, self.axis, self.program.schedule.between_id)
        others = self.program.in_group or self.program.replicas.size > 1
        if self.call is not None and not others:
            self.call.all_ended = collectives.waits_on_host(self.axis)
        return total

    def _gather(self, node: fx.Node, value: Tensor, summed: bool = False) -> Tensor:
        """The split ``value`` of ``node`` whole; ``summed``: its gradient is a rank's summand."""
        if self.axis.size == 1:
            return value
        scope, sizes = self._scope_along(node)
        where = (sizes[WHOLE], self.axis, self.program.schedule.between_id, summed)
        factors = bind_factors(scope, SPLIT, sizes)
        return on_tokens(scope, node, value, factors, lambda x, d: GatherTokens.apply(x, d, *where))

    def _scope_along(self, node: fx.Node) -> tuple[Scope, Mapping[str, int]]:
        """The scope of steps over the sequence that ``node`` is split along, and its sizes."""
        scope = self.program.scope_along(self.ctx.split[node])
        return scope, self.program.sizes_in(scope, self.sizes)

    # ---- weights

    def raw(self, node: fx.Node) -> Any:
        """The weight ``node`` as the call was given it: whole, or sharded."""
        return self.env[node]

    def weights(self, step: Step, wholes: Wholes, uses: Uses) -> tuple[Tensor, ...]:
        """The weights of ``uses``, each in its form, for ``step``: what is in ``wholes`` or whole
        at rest is cut, of others it is the rows that lie here."""
        taken = []
        for node, form in uses:
            x = wholes.get(node)
            if x is None:
                joined = self._joined.summed if step.split else self._joined.replicated
                x = joined.get(node, self.env[node])
            if isinstance(x, ShardedTensor):
                assert form is not None
                taken.append(group_rows(x, form))
            else:
                taken.append(x if form is None else form.take(x, self.axis.rank))
        return tuple(taken)

    # ---- outputs

    def _side(self, step: Step, node: fx.Node, piece: Piece) -> DeferredTensor:
        """A value inside a block or head, computed from what the step reads if it is ever read."""
        body = self.program.late(node, piece, step)
        context, num_inputs = self.context(step, {}), len(body.inputs)

        def taken(x: Any) -> Any:
            if isinstance(x, ShardedTensor):
                return self.gathering.gather(step, x)
            summed = x.requires_grad and self.axis.size > 1
            return SumGradients.apply(self.sync, [step.block_id], x)[0] if summed else x

        def compute(*given: Any) -> Tensor:
            values = dict(zip(body.inputs, given, strict=False))
            weights = tuple(map(taken, given[num_inputs:]))
            (value,) = body(replace(context, get=lambda n, _: values[n], weights=lambda _: weights))
            return self._gather(node, value)

        values = [self.get(step, n, body.layout) for n in body.inputs]
        given = [*values, *map(self.raw, body.weight_nodes)]
        return self._deferred(node, compute, given, body.weight_nodes)

    def _tail(self, node: fx.Node, piece: Piece) -> DeferredTensor:
        """An output made from the inside of blocks, on whole values, if it is ever read."""
        body = self.program.late(node, piece)
        late = {n for n, x in self.env.items() if isinstance(x, DeferredTensor)}
        apart = {n for n in piece.inputs if n in self.ctx.split and n not in late}
        steps, scope_of = self.program.steps, self.program.scope_of
        context = self.context(next(s for s in reversed(steps) if scope_of(s) is body.scope), {})

        def compute(*given: Any) -> Tensor:
            values = {
                n: self._gather(n, x) if n in apart else x
                for n, x in zip(piece.inputs, given, strict=True)
            }
            (out,) = body(
                replace(
                    context,
                    get=lambda n, _: values[n],
                    weights=lambda uses: tuple(values[n] for n, _ in uses),
                )
            )
            return out

        self._joined.average(piece.inputs)
        given = [self._joined.replicated.get(n, self.env[n]) for n in piece.inputs]
        return self._deferred(node, compute, given, piece.inputs)

    def _deferred(
        self,
        node: fx.Node,
        compute: Callable[..., Tensor],
        inputs: Sequence[Any],
        of: Sequence[fx.Node] = (),
        pull: Any = None,
    ) -> DeferredTensor:
        """``node`` whole, by ``compute`` of ``inputs`` and weights in ``of``, once it is read."""
        scope, val, call = self.program.scope, node.meta["val"], self.call
        sizes = bind_factors(scope, WHOLE, self.sizes)
        shape = [size_of(d, sizes) for d in scope.names.of(node)]

        def read(*given: Any) -> Tensor:
            with self._on_device():
                if call is None:
                    return compute(*given)
                return call.read(node.name, lambda: compute(*given))

        weights = [self._given[n] for n in of if n in self._given]
        return defer(read, inputs, shape, val.dtype, val.device, pull, weights)

    def result(self, node: fx.Node) -> Any:
        """``node`` as an output of the program."""
        value, program = self._output(node), self.program
        split = self.axis.size > 1 or program.replicas.size > 1 or program.in_group
        if split and isinstance(value, Tensor) and value.grad_fn and node.op != "placeholder":
            how = {"compares": self._joined.compares}
            begin = partial(begin_backward, self.call, self.sync, node.name, **how)
            value.register_hook(self._begin if program.in_group else begin)
        return value

    def _output(self, node: fx.Node) -> Any:
        tail = self.program.schedule.tails.get(node)
        if tail is not None:
            return self._tail(node, tail)
        value = self.env[node]
        if self.axis.size == 1 or node not in self.ctx.split or isinstance(value, DeferredTensor):
            return value
        if node in self.ctx.partial or node.op == "placeholder":
            return self.replicated(node)
        scope, sizes = self._scope_along(node)
        layout, rank = self.axis.layout(sizes[WHOLE]), self.axis.rank
        factors = bind_factors(scope, WHOLE, sizes)

        def own_rows(grad: Tensor) -> tuple[Tensor]:
            rows = on_tokens(scope, node, grad, factors, lambda x, d: take_own(x, layout, rank, d))
            return (rows,)

        return self._deferred(node, lambda x: self._gather(node, x), [value], pull=own_rows)
