"""One call of a program: its values, in the layouts asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from paradyse.distributed import collectives
from paradyse.distributed.tokens import GatherTokens, ReduceGrad, SplitTokens, SumOverRanks
from paradyse.graph.lower import Dims, dim_size
from paradyse.graph.subgraph import Piece, is_weight, live_nodes, make_piece, run
from paradyse.runtime.deferred import DeferredTensor
from paradyse.strategies.base import (
    SPLIT,
    WHOLE,
    bind_factors,
    dropout_overrides,
    spec_dims,
)
from paradyse.weights.gradients import AverageGradients, SumGradients
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Form
from paradyse.weights.unshard import Gathered, Shelf, fits, gather, group_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paradyse.runtime.program import BlockStep, PieceStep, Program, StepConstants


class Frame:
    """Values of one call, in the layouts asked for."""

    def __init__(self, program: Program, args: Sequence[Any], constants: StepConstants):
        self.program, self.constants = program, constants
        self.axis = program.axis
        self.ctx = program.ctx
        self.sizes = constants.sizes
        self.env: dict[fx.Node, Any] = dict(zip(program.placeholders, args, strict=True))
        self.env.update(program.constants)
        self.forms: dict[tuple[fx.Node, str], Any] = {}
        n = len(program.block_steps) + 1
        if program.has_dropout:
            drawn = torch.randint(2**62, (n,)).to(program.device)
            self.seeds: Sequence[Tensor] = drawn.unbind(0)
        else:
            self.seeds = [_zero(program.device)] * n
        self.step_id = program.between_id
        self.common: Any = ()
        self._summed: dict[fx.Node, Tensor] | None = None
        self.position: int | None = None
        """Of the step that runs; None after forward."""
        self._shelf = Shelf()
        self._gathered: list[Gathered] = []
        self._joined: set[fx.Node] = set()

    def _at(self, index: int, block_id: int) -> None:
        c = self.constants
        self.step_id = block_id
        self.common = (c.whole, c.local, c.batch, c.infos[index], self.seeds[index])

    def join_replicas(self, position: int) -> None:
        """Have the gradients of the weights of step ``position`` averaged over replicas."""
        if position >= len(self.program.steps):
            return
        nodes = [
            n
            for n in self.program.steps[position].piece.inputs
            if is_weight(n) and n not in self._joined and self._averages(n)
        ]
        if nodes:
            weights = [self.env[n] for n in nodes]
            out = AverageGradients.apply(self.program.replicas, *weights)
            self.env.update(zip(nodes, out, strict=True))
            self._joined.update(nodes)

    def _averages(self, node: fx.Node) -> bool:
        """Whether the average is not part of the sum over ranks, as for replicated weights."""
        weight = self.env[node]
        if not weight.requires_grad:
            return False
        summed = self.axis.size > 1 and node in self.program.weight_owners
        return isinstance(weight, ShardedTensor) or not summed

    def free(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self.env.pop(node, None)
            self.forms.pop((node, SPLIT), None)
            self.forms.pop((node, WHOLE), None)
            self.forms.pop((node, "replicated"), None)

    def get(self, node: fx.Node, layout: str) -> Any:
        """``node`` for use in a piece on split tokens (or on one rank), in ``layout``."""
        value = self.env.get(node)
        if self.axis.size == 1 or not isinstance(value, Tensor):
            return value
        if (node in self.ctx.split and node.op != "placeholder") and layout == SPLIT:
            return value
        key = (node, layout)
        if key not in self.forms:
            self.forms[key] = self._convert(node, value, layout)
        return self.forms[key]

    def _convert(self, node: fx.Node, value: Tensor, layout: str) -> Tensor:
        dims = spec_dims(self.program.scope, node, WHOLE)
        if layout == WHOLE or not any(WHOLE in d for d in dims):
            # whole, but used for a part of the work: its gradient is a part too
            return (
                ReduceGrad.apply(value, self.axis, self.step_id) if value.requires_grad else value
            )
        fill = self.ctx.fills.get(node)
        return _on_sequence(
            value,
            dims,
            self.sizes,
            lambda x, dim: SplitTokens.apply(x, dim, self.axis, self.step_id, fill),
        )

    def replicated(self, node: fx.Node) -> Any:
        """``node`` whole on every rank, for use in work that every rank repeats."""
        value = self.env[node]
        if node not in self.ctx.split or self.axis.size == 1 or node.op == "placeholder":
            return value
        key = (node, "replicated")
        if key not in self.forms:
            if node in self.ctx.partial:
                self.forms[key] = SumOverRanks.apply(value, self.axis, self.program.between_id)
            else:
                self.forms[key] = self._gather(node, value)
        return self.forms[key]

    def _gather(self, node: fx.Node, value: Tensor) -> Tensor:
        dims = spec_dims(self.program.scope, node, WHOLE)
        local = {**self.sizes, WHOLE: self.sizes[SPLIT]}
        where = (self.sizes[WHOLE], self.axis, self.program.between_id)
        return _on_sequence(value, dims, local, lambda x, dim: GatherTokens.apply(x, dim, *where))

    def raw(self, node: fx.Node) -> Any:
        """A weight as the call was given it: whole, or sharded."""
        return self.env[node]

    def weights(
        self, nodes: Sequence[fx.Node], forms: Sequence[Form], summed: bool = True
    ) -> tuple[Tensor, ...]:
        """Weights in ``forms``: of replicated ones parts, of sharded ones what lies here or what is
        gathered for this step.

        Args:
            summed: each rank computes a part of the gradients; else all compute the whole.
        """
        values = [self.env[n] for n in nodes]
        away = [
            i
            for i, (x, form) in enumerate(zip(values, forms, strict=True))
            if isinstance(x, ShardedTensor) and not fits(x, form)
        ]
        whole: dict[int, Tensor] = {}
        if away:
            shards = [values[i] for i in away]
            found, gathered = gather(shards, self.step_id, summed, self._shelf)
            whole = dict(zip(away, found, strict=True))
            if gathered is not None:
                self._gathered.append(gathered)
        self._fetch_next([nodes[i] for i in away])
        taken = []
        for i, (node, x, form) in enumerate(zip(nodes, values, forms, strict=True)):
            if isinstance(x, ShardedTensor) and i not in whole:
                assert form is not None
                taken.append(group_rows(x, form))
                continue
            x = whole[i] if i in whole else self._replicated_weight(node) if summed else x
            taken.append(x if form is None else form.take(x, self.axis.rank))
        return tuple(taken)

    def _fetch_next(self, gathered: list[fx.Node]) -> None:
        """Start on the weights that the next step gathered when it last ran."""
        if self.position is None:
            return
        program, strategies = self.program, self.constants.strategies
        program.fetches[program.step_key(self.position, strategies)] = gathered
        if self.position + 1 < len(program.steps):
            coming = program.fetches.get(program.step_key(self.position + 1, strategies), [])
            step = program.steps[self.position + 1]
            block_id = getattr(step, "block_id", program.between_id)
            self._shelf.fetch([self.env[n] for n in coming], block_id)

    def _replicated_weight(self, node: fx.Node) -> Tensor:
        """A weight of which every rank has the whole. Gradients of all these are summed over ranks
        when all are there."""
        if self.axis.size == 1 or not torch.is_grad_enabled():
            return self.env[node]
        if self._summed is None:
            owners = self.program.weight_owners
            held = {
                n: i
                for n, i in owners.items()
                if self.env[n].requires_grad and not isinstance(self.env[n], ShardedTensor)
            }
            tensors = [self.env[n] for n in held]
            where = (self.axis, self.program.replicas, list(held.values()))
            summed = SumGradients.apply(*where, *tensors) if held else ()
            self._summed = dict(zip(held, summed, strict=True))
        return self._summed.get(node, self.env[node])

    def _release(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Give back the whole weights of the step that made ``outputs``."""
        gathered, self._gathered = self._gathered, []
        for g in gathered:
            outputs = g.release(outputs)
        return outputs

    def run_block(self, step: BlockStep, strategy: str) -> None:
        collectives.traffic(step.block_id).strategy = strategy
        self._at(step.index, step.block_id)
        if step.sides and self.axis.size > 1:
            for node in step.sides:
                self.env[node] = self._side(step, node)
        variant = self.program.variant(step, strategy)
        if step.recompute and torch.is_grad_enabled():
            recorded = _Recorded(self)
            outputs: Sequence[Any] = checkpoint(
                lambda: tuple(variant(recorded)), use_reentrant=False, preserve_rng_state=False
            )
            recorded.release()
        else:
            outputs = self._release(variant(self))
        for node, value in zip(step.piece.outputs, outputs, strict=True):
            self.env[node] = value

    def run_piece(self, step: PieceStep) -> None:
        self._at(len(self.constants.infos) - 1, self.program.between_id)
        read = step.piece.inputs if step.eager else step.body.weight_nodes
        nodes = [n for n in read if is_weight(n)]
        weights = self.weights(nodes, [None] * len(nodes), step.split)
        outputs: Sequence[Any]
        if step.eager:
            env = dict(zip(nodes, weights, strict=True))
            for n in step.piece.inputs:
                if n not in env:
                    env[n] = self.get(n, SPLIT) if step.split else self.replicated(n)
            values = [env[n] for n in step.piece.inputs]
            outputs = self._interpret(step.piece, values, SPLIT if step.split else WHOLE)
        else:
            outputs = step.body(self if step.split else _Replicated(self), weights)
        outputs = self._release(outputs)
        for node, value in zip(step.piece.outputs, outputs, strict=True):
            self.env[node] = value

    def _interpret(self, piece: Piece, values: Sequence[Any], layout: str) -> tuple[Any, ...]:
        scope = self.program.scope
        sizes = dict(self.sizes)
        overrides = dropout_overrides(scope, piece.nodes, layout, sizes, self.common)
        return run(piece, values, scope.names, bind_factors(scope, layout, sizes), overrides)

    def _side(self, step: BlockStep, node: fx.Node) -> DeferredTensor:
        """A value inside a block, recomputed from the block's inputs if it is ever read."""
        piece = make_piece(f"{step.piece.name} side", live_nodes(step.piece.nodes, [node]), [node])
        common, step_id = self.common, step.block_id
        inputs = [self.env[n] if is_weight(n) else self.get(n, SPLIT) for n in piece.inputs]
        grad = torch.is_grad_enabled()

        def taken(n: fx.Node, x: Any) -> Any:
            if isinstance(x, ShardedTensor):
                return gather([x], step_id, True, self._shelf)[0][0]
            if is_weight(n) and grad and x.requires_grad:
                return ReduceGrad.apply(x, self.axis, step_id)
            return x

        def compute() -> Tensor:
            self.common, self.step_id = common, step_id
            with torch.set_grad_enabled(grad):
                values = [taken(n, x) for n, x in zip(piece.inputs, inputs, strict=True)]
                (value,) = self._interpret(piece, values, SPLIT)
                return self._gather(node, value)

        return self._deferred(node, compute)

    def _tail(self, node: fx.Node, piece: Piece) -> DeferredTensor:
        """An output made from the inside of blocks, on whole values, if it is ever read."""
        values = [self.env[n] for n in piece.inputs]

        def compute() -> Tensor:
            whole = [
                self._gather(n, v)
                if n in self.ctx.split and not isinstance(v, DeferredTensor)
                else v
                for n, v in zip(piece.inputs, values, strict=True)
            ]
            (out,) = self._interpret(piece, whole, WHOLE)
            return out

        return self._deferred(node, compute)

    def _deferred(self, node: fx.Node, compute: Callable[[], Tensor]) -> DeferredTensor:
        val = node.meta["val"]
        shape = tuple(dim_size(d, self.sizes) for d in spec_dims(self.program.scope, node, WHOLE))
        out: DeferredTensor = DeferredTensor(compute, shape, val.dtype, val.device)
        return out

    def result(self, node: fx.Node) -> Any:
        """``node`` as an output of the program."""
        if node in self.program.tails:
            return self._tail(node, self.program.tails[node])
        value = self.env[node]
        if self.axis.size == 1 or node not in self.ctx.split or isinstance(value, DeferredTensor):
            return value
        if node in self.ctx.partial or node.op == "placeholder":
            return self.replicated(node)
        grad = torch.is_grad_enabled()

        def compute() -> Tensor:
            with torch.set_grad_enabled(grad):
                return self._gather(node, value)

        return self._deferred(node, compute)


class _Recorded:
    """A frame seen by a block that runs again in backward, when the frame has let go of values."""

    def __init__(self, frame: Frame):
        self.frame, self.sizes, self.common = frame, frame.sizes, frame.common
        self.step_id = frame.step_id
        self.known: dict[Any, Any] = {}
        self.gathered: list[Gathered] = []

    def get(self, node: fx.Node, layout: str) -> Any:
        key = (node, layout)
        if key not in self.known:
            self.known[key] = self.frame.get(node, layout)
        return self.known[key]

    def raw(self, node: fx.Node) -> Any:
        return self.frame.raw(node)

    def weights(self, nodes: Sequence[fx.Node], forms: Sequence[Form]) -> tuple[Tensor, ...]:
        self.frame.step_id = self.step_id
        out = self.frame.weights(nodes, forms)
        self.gathered, self.frame._gathered = self.frame._gathered, []
        return out

    def release(self) -> None:
        """Forward is done: backward gathers again when it runs the block again."""
        for gathered in self.gathered:
            gathered.free()
        self.gathered = []


class _Replicated:
    """A frame seen by a piece that every rank repeats on whole values."""

    def __init__(self, frame: Frame):
        self.sizes, self.common, self.get = (
            frame.sizes,
            frame.common,
            lambda n, layout: frame.replicated(n),
        )


_ZEROS: dict[torch.device, Tensor] = {}


def _zero(device: torch.device) -> Tensor:
    if device not in _ZEROS:
        _ZEROS[device] = torch.zeros((), dtype=torch.int64, device=device)
    return _ZEROS[device]


def _on_sequence(
    x: Tensor,
    dims: Dims,
    sizes: Mapping[str, int],
    fn: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Apply ``fn(x, dim)`` to the sequence dim of ``x``, apart from others merged into the same
    dim.

    Args:
        dims: per dim of x its factors, the sequence as "S". sizes: their sizes in ``x``.
    """
    at = next(i for i, d in enumerate(dims) if WHOLE in d)
    if len(dims[at]) == 1:
        return fn(x, at)
    inner = [dim_size((f,), sizes) for f in dims[at]]
    apart = x.reshape([*x.shape[:at], *inner, *x.shape[at + 1 :]])
    out = fn(apart, at + dims[at].index(WHOLE))
    return out.reshape([*x.shape[:at], -1, *x.shape[at + 1 :]])
