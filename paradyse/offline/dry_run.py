"""A model's real graph without its weights, its devices or its ranks.

``dry_run`` makes a model on the meta device, captures it as ``torch.compile`` would for one rank of
any number, over PyTorch's fake process group, and sends tensors without memory through every
distinct block under every strategy, forward and backward. It sees what each saves for backward and
needs while it runs, and has no formula per model.

Throughout, ``model`` is on the meta device and in training, and ``batch`` has its keyword
arguments, there too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis, TokenLayout
from paradyse.graph.lower import dim_size
from paradyse.graph.subgraph import has_gradient, is_tensor, is_weight
from paradyse.kernels.attention_mask import position_intervals
from paradyse.offline.capture import capture_program, fake_world
from paradyse.offline.ops import bodies
from paradyse.offline.timeline import Growth, Sample, Timeline, fit_growth
from paradyse.passes.split_steps import BlockStep, HeadStep, PieceStep, Step
from paradyse.planning.costs import Machine
from paradyse.planning.gathered import GatheredWork
from paradyse.planning.gathered_work import gathered_work
from paradyse.runtime.describe import describe_blocks, describe_head
from paradyse.runtime.frame import Frame
from paradyse.runtime.gathering import Wholes
from paradyse.runtime.program import Program
from paradyse.runtime.saved_memory import Saved
from paradyse.strategies import canonical_strategy
from paradyse.strategies.base import SPLIT, WHOLE, Uses, spec_dims
from paradyse.strategies.groups.heads import heads_at_once
from paradyse.strategies.groups.rest_layout import rest_layouts
from paradyse.strategies.host_memory import HostMemories, HostMemory, Pairs, Wait, nothing
from paradyse.strategies.tiles import cut_into
from paradyse.torch_private import FakeTensorMode
from paradyse.types import LEVERS, REPLICATED, BlockSpec, HeadSpec, Point, Workload
from paradyse.weights.layout import ShardLayout, even_layout
from paradyse.weights.optimizer_state import MOMENTS
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Form, Rows

CHUNKS = (8, 16, 32, 64)
"""Lengths to measure at, in chunks of which a rank holds two (``TokenLayout``). Sizes are linear in
the tokens, or quadratic where there are scores: two or three give the polynomial, and one more is
held against it."""

TILES = 2
"""How many tiles of tokens are run: each further one holds as much as the second."""

FEW_GROUPS = 3
"""How many groups of ``metp`` are run: each of the others adds as many bytes as the last one."""


@dataclass(frozen=True)
class Sizes:
    """Memory of one block (or piece between blocks) under one strategy."""

    growth: Growth
    before: Growth | None = None
    """The growth with one group of ``metp`` less, where not all groups are run."""
    num_more: int = 0
    """How many groups are not run."""
    lasting: bool = False
    """Whether blocks read its results to the end, without a gradient, such as a rotary table."""

    def at(self, tokens: int, tile: int | None = None, num_sequences: int = 1) -> tuple[int, int]:
        """Saved bytes and bytes of workspace with ``tokens`` on a rank, without weights.

        Args:
            tile: most tokens of a tile; None: it has all.
            num_sequences: of equal length, which share these tokens.
        """
        in_tile = tokens if tile is None else min(tile, tokens)
        saved, peak = self.growth.at(tokens, TILES * in_tile, num_sequences)
        if self.before is not None:
            less, lower = self.before.at(tokens, num_sequences=num_sequences)
            saved += self.num_more * (saved - less)
            peak += self.num_more * max(0, peak - lower)
        return saved, max(0, peak - saved)


@dataclass(frozen=True)
class DryRun:
    """What is known of a model on so many ranks before it has run anywhere."""

    blocks: tuple[BlockSpec, ...]
    sizes: Mapping[tuple[str, str], Sizes]
    """Structure of a block and its variant, with levers or without -> its memory. What goes to the
    host is measured as kept on the device."""
    between: tuple[Sizes, ...]
    """What lies between blocks or behind them and is not the head, and tables that blocks read."""
    num_ranks: int
    num_parameters: int
    static_bytes: int
    """Bytes of weights, gradients and two moments of an optimizer, on the device of the rank that
    has most; of frozen weights they alone."""
    notes: tuple[str, ...]
    before: tuple[Sizes, ...] = ()
    """What runs before the first block, and is done with its backward after it: the embedding."""
    head: HeadSpec | None = None
    """None: there is none that could be computed otherwise."""
    heads: Mapping[str, tuple[Sizes, ...]] = field(default_factory=dict)
    """Levers of the head, as ``Plan.head`` has them -> memory of each head that there is."""
    on_host_bytes: int = 0
    """Of weights, gradients and moments, where they lie on the host."""
    gathered: Callable[[Workload, Machine], tuple[GatheredWork, ...]] = lambda workload, machine: ()
    """What is computed on gathered tokens, and what it costs."""
    weight_dtype: torch.dtype | None = None
    """Of weights, where blocks compute in another one, under autocast."""
    beside: tuple[int, ...] = ()
    """Lengths of other dims of the same tokens, such as space beside time, as they were traced."""

    def tokens(self, seq_len: int, batch: int) -> int:
        """How many tokens of the split dim a rank holds in a workload of ``batch`` sequences of
        ``seq_len``, padding included; not counting those beside."""
        return self.num_alike(batch) * TokenLayout(self.num_ranks, seq_len).local_len

    def num_alike(self, batch: int) -> int:
        """How often ``batch`` sequences are what was run: one, or one for each token beside."""
        return batch // math.prod(self.beside)

    def workload(self, batch: int, seq_len: int, dtype: torch.dtype) -> Workload:
        """A step whose blocks compute in ``dtype``: ``batch`` sequences, or videos, of ``seq_len``
        tokens, or frames."""
        sequences = batch * math.prod(self.beside)
        others = tuple((sequences * seq_len // n, n) for n in self.beside)
        return Workload(
            sequences,
            seq_len,
            dtype,
            training=True,
            num_ranks=self.num_ranks,
            others=others,
            weight_dtype=self.weight_dtype,
        )

    def block(self, block: BlockSpec, point: str) -> Sizes:
        """Memory of ``block`` under ``point``, all of it on the device."""
        on_device = Point.parse(point).on_device
        return self.sizes[block.structure, canonical_strategy(block.kind, on_device)]


def dry_run(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    num_ranks: int,
    sharded: bool = True,
    on_host: bool = False,
    levers: Collection[str] = LEVERS,
    autocast: torch.dtype | None = None,
) -> DryRun:
    """Capture ``model`` for one of ``num_ranks`` ranks, and measure all its variants.

    Args:
        batch: one sequence of a few hundred tokens.
        sharded: weights at rest are 1/p on each rank.
        on_host: they lie on the host, with their gradients and what the optimizer holds.
        levers: that plans may use; nothing is measured with others.
        autocast: to which dtype ``torch.autocast`` casts, as of ``capture_program``.
    Raises:
        ValueError: as ``capture_program``.
    """
    with fake_world(num_ranks) as axis:
        program = capture_program(model, batch, axis, autocast=autocast)
        spread = sharded or on_host
        blocks = describe_blocks(program)
        sizes: dict[tuple[str, str], Sizes] = {}
        for step in program.block_steps:
            spec = blocks[step.index]
            strategies = spec.feasible() if num_ranks > 1 else (REPLICATED,)
            demanded = ("recompute",) if spec.recompute else ()
            points = (Point.parse(p) for p in spec.points(strategies))
            allowed = (p for p in points if {*p.levers} <= {*levers, *demanded})
            for point in dict.fromkeys(p.on_device for p in allowed):
                key = (spec.structure, canonical_strategy(spec.kind, point))
                if key not in sizes:
                    sizes[key] = measure_step(program, step, point, spread)
        before, between = _measure_pieces(program, spread)
        parameters = list(model.parameters())
        held = _static_bytes(program, parameters, sharded)
        return DryRun(
            blocks,
            sizes,
            between,
            num_ranks,
            sum(p.numel() for p in parameters),
            0 if on_host else held,
            tuple(program.ctx.notes),
            before,
            describe_head(program),
            _measure_heads(program, levers, spread),
            held if on_host else 0,
            partial(gathered_work, program),
            parameters[0].dtype if autocast is not None else None,
            _beside(program),
        )


def _beside(program: Program) -> tuple[int, ...]:
    """``DryRun.beside``."""
    letters, known = program.scope.labels(WHOLE).of, program.captured_at
    return tuple(known.get(letters.get(f, ""), f.size) for f in program.unsplit)


def _measure_pieces(program: Program, spread: bool) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    """``DryRun.before`` and ``DryRun.between``; ``spread``: as of ``measure_step``."""
    first = min(s.position for s in program.block_steps)
    before, between = list[Sizes](), list[Sizes]()
    for step in program.steps:
        if isinstance(step, PieceStep) and not isinstance(step, HeadStep):
            sizes = measure_step(program, step, "", spread)
            early = step.position < first and not sizes.lasting
            (before if early else between).append(sizes)
    return tuple(before), tuple(between)


def _measure_heads(
    program: Program, levers: Collection[str], spread: bool
) -> dict[str, tuple[Sizes, ...]]:
    """``DryRun.heads``, under sets of some of ``levers``; ``spread``: as of ``measure_step``."""
    spec, steps = describe_head(program), [s for s in program.steps if isinstance(s, HeadStep)]
    points = (v for v in (spec.points() if spec else ()) if not v or {*v.split("+")} <= {*levers})
    return {v: tuple(measure_step(program, step, v, spread) for step in steps) for v in points}


def _times(is_trained: bool) -> int:
    """How often a weight's bytes are held: with its gradient and what optimizers hold of it."""
    return 1 + (1 + MOMENTS) * is_trained


def _static_bytes(program: Program, parameters: Sequence[Tensor], sharded: bool) -> int:
    """Bytes of ``parameters``, their gradients and moments: the most of any rank. Those that are
    ``sharded`` lie as ``paradyse.shard`` leaves them, and of whole heads where blocks of
    ``program`` have them moved."""
    if not sharded:
        return sum(p.nbytes * _times(p.requires_grad) for p in parameters)
    axis, ranks = program.axis, range(program.axis.size)
    rows_of = cache(lambda num_rows: np.array(even_layout(axis, num_rows).num_rows))

    def even(w: Tensor) -> np.ndarray:
        if not w.ndim:
            return np.full(axis.size, w.nbytes)
        return rows_of(w.shape[0]) * (math.prod(w.shape[1:]) * w.element_size())

    of_rank = np.zeros(axis.size, dtype=np.int64)
    for w in parameters:
        of_rank += even(w) * _times(w.requires_grad)
    layouts: dict[fx.Node, ShardLayout] = {}
    for step in program.block_steps:
        for node, layout in rest_layouts(program.scope_of(step), step.block).items():
            layouts.setdefault(node, layout)
    for node, layout in layouts.items():
        w = node.meta["val"]
        moved = [layout.numel(w.shape, r) * w.element_size() for r in ranks]
        of_rank += (np.array(moved) - even(w)) * _times(has_gradient(node))
    return int(of_rank.max())


def measure_step(program: Program, step: Step, strategy: str, spread: bool = True) -> Sizes:
    """Memory of ``step`` of ``program`` under ``strategy``, at any length.

    Args:
        spread: weights lie elsewhere at rest, such as 1/p on each rank: whole ones come in the
            dtype that the step casts them to, where others are copied.
    """
    variant = program.variant(step, strategy)
    used = getattr(variant, "used", ())  # groups of ``metp``
    if len(used) <= FEW_GROUPS:
        lasting = isinstance(step, PieceStep) and not any(map(has_gradient, step.piece.outputs))
        return Sizes(_growth(program, step, strategy, spread), lasting=lasting)
    try:
        variant.used = used[: FEW_GROUPS - 1]
        before = _growth(program, step, strategy, spread)
        variant.used = used[:FEW_GROUPS]
        return Sizes(_growth(program, step, strategy, spread), before, len(used) - FEW_GROUPS)
    finally:
        variant.used = used


def _growth(program: Program, step: Step, strategy: str, spread: bool) -> Growth:
    def sample(chunk: int) -> Sample:
        seq_len = 2 * program.axis.size * chunk
        try:
            return _run_alone(program, step, strategy, seq_len, spread)
        except (RuntimeError, IndexError) as e:
            raise ValueError(
                f"{step.piece.name} cannot be computed at {seq_len} tokens by the graph that was "
                f"captured at {program.scope.seq.size}: where each length has a program of its "
                "own, plan on ranks that exist (without --gpus)"
            ) from e

    tokens = [2 * chunk for chunk in CHUNKS]
    sample(CHUNKS[0])  # it compiles
    samples = [sample(chunk) for chunk in CHUNKS[:-1]]
    with contextlib.suppress(ValueError):
        return fit_growth(tokens[:-1], samples)
    return fit_growth(tokens, [*samples, sample(CHUNKS[-1])])


_CPU = torch.device("cpu")


class _NoHost(HostMemory):
    """Host memory of a rank that does not exist: nothing is copied, and its pages take nothing of
    what is counted."""

    def make(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @property
    def copy(self) -> Callable[[Pairs], Wait]:
        return lambda pairs: nothing


@contextlib.contextmanager
def _no_host(axis: Axis) -> Iterator[None]:
    """Inside, what goes to the host of this rank of ``axis`` is gone."""
    memories = axis.session.of(HostMemories)
    before = memories.pop(_CPU, None)
    memories[_CPU] = _NoHost(_CPU)
    try:
        yield
    finally:
        del memories[_CPU]
        if before is not None:
            memories[_CPU] = before


class _Alone(Frame):
    """A frame in which one step runs by itself: its inputs and weights are there when it begins."""

    def __init__(
        self, program: Program, constants: Any, step: Step, timeline: Timeline, spread: bool
    ):
        super().__init__(program, [None] * len(program.placeholders), constants)
        self.timeline, self.spread = timeline, spread
        self.gathered: dict[fx.Node, int] = {}
        """Bytes of the weights that the step takes whole."""
        self.given: list[Tensor] = []
        self.tables = constants.common(step, self.seed(step))
        self.held: list[Tensor] = []
        """Weights that the step took."""
        self.layouts = (
            rest_layouts(program.scope_of(step), step.block) if isinstance(step, BlockStep) else {}
        )
        for node in step.piece.inputs:
            if is_tensor(node) and not is_weight(node):
                self.env[node] = self._input(node)

    def _input(self, node: fx.Node) -> Tensor:
        here = node in self.ctx.split and node.op != "placeholder" and self.axis.size > 1
        scope, sizes = self._scope_along(node) if here else (self.program.scope, self.sizes)
        dims = spec_dims(scope, node, SPLIT if here else WHOLE)
        like = node.meta["val"]
        x = torch.empty([dim_size(d, sizes) for d in dims], dtype=like.dtype)
        self.given.append(x.requires_grad_(has_gradient(node)))
        return x

    def raw(self, node: fx.Node) -> Tensor:
        like = node.meta["val"]
        if self.axis.size == 1 or not like.ndim:
            return self._weight(node, None)
        layout = self._layout(node)
        rows = torch.empty(layout.shape(like.shape, self.axis.rank), dtype=like.dtype)
        self._hold(rows)
        return ShardedTensor(rows, layout, like.shape).requires_grad_(has_gradient(node))

    def _read_again(self, step: Step, strategy: str) -> None:
        """No step is behind this one."""

    def weights(self, step: Step, wholes: Wholes, uses: Uses) -> tuple[Tensor, ...]:
        return tuple(self._weight(*use, self.program.cast(step, use[0])) for use in uses)

    def _weight(self, node: fx.Node, form: Form, cast: torch.dtype | None = None) -> Tensor:
        like, shape = node.meta["val"], list(node.meta["val"].shape)
        comes = form is None or not self._lies_here(node, form)
        dtype = cast if cast is not None and comes and self.spread else like.dtype
        if form is not None:
            shape[form.dim] = len(form.groups[self.axis.rank])
        w = torch.empty(shape, dtype=dtype).requires_grad_(has_gradient(node))
        self._hold(w)
        if comes:
            self.gathered[node] = like.numel() * dtype.itemsize
        return w

    def _lies_here(self, node: fx.Node, form: Rows) -> bool:
        """Whether what ``form`` takes of the weight ``node`` are its rows at rest."""
        layout = self._layout(node)
        return (form.dim, form.present) == (layout.dim, layout.runs)

    def _layout(self, node: fx.Node) -> ShardLayout:
        return self.layouts.get(node) or even_layout(self.axis, node.meta["val"].shape[0])

    def _hold(self, weight: Tensor) -> None:
        self.held.append(weight)
        self.timeline.given([weight])

    def shared(self) -> list[Tensor]:
        """Tensors that do not belong to the step: weights, and tables that all blocks read."""
        forms = [x for found in self.forms.values() for x in found.values()]
        tables = [*self.tables, *self.env.values(), *forms]
        return [*self.held, *(x for x in tables if isinstance(x, Tensor) and not x.requires_grad)]


def _run_alone(
    program: Program, step: Step, strategy: str, seq_len: int, spread: bool = True, batch: int = 1
) -> Sample:
    """Run ``step`` under ``strategy`` on ``batch`` sequences, forward and backward, without memory,
    with weights ``spread`` as of ``measure_step``; where there are several sequences of each, such
    as an encoder's and a decoder's, all have ``seq_len`` tokens."""
    seqs = program.ctx.seqs
    lengths = dict.fromkeys(seqs.values(), batch) | dict.fromkeys(seqs, seq_len)
    sizes, known = {WHOLE: seq_len, "B": batch}, program.captured_at
    for letter, f in program.scope.beside.items():
        size = known.get(letter, f.size)
        sizes[letter] = size if f in program.unsplit else lengths.get(f, size)
    if program.axis.size > 1:
        sizes[SPLIT] = program.axis.layout(seq_len).local_len
    with contextlib.ExitStack() as stack:
        # A run shows the same operators every time, and leaves no tensor without memory where a
        # real one is expected.
        position_intervals.cache_clear()
        stack.callback(position_intervals.cache_clear)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(cut_into(TILES))
        stack.enter_context(heads_at_once())
        stack.enter_context(_no_host(program.axis))
        constants = program.make_constants(sizes)
        timeline, saved = Timeline(bodies(program.axis)), Saved()
        frame = _Alone(program, constants, step, timeline, spread)
        timeline.given([*frame.tables, *frame.env.values()])
        with timeline:
            with saved.watch():
                frame.run_step(step, strategy)
            made = {n: frame.env[n] for n in step.gives(strategy).outputs}
            logits = step.logits if isinstance(step, HeadStep) else {}  # held, and not read
            found = [x for n, x in made.items() if n not in logits]
            outputs = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
            kept = saved.num_bytes(frame.shared())
            if outputs:
                grads = [torch.empty_like(x) for x in outputs]
                frame.env.clear()
                torch.autograd.backward(outputs, grads)
            timeline.mark()
            if not outputs:  # tables that blocks read to the end
                kept = timeline.alive_bytes[-1]
    given = sum(x.nbytes for x in frame.given if x.requires_grad)
    if Point.parse(strategy).recomputes:  # held by what runs again, where no hook sees it
        kept += given
    in_tile = tuple(timeline.tile_bytes) if any(timeline.tile_bytes) else ()
    apart = in_tile or (0,) * len(timeline.alive_bytes)
    alive = tuple(n - m + given for n, m in zip(timeline.alive_bytes, apart, strict=True))
    gathered = sum(frame.gathered.values())
    return Sample(kept, alive, gathered, timeline.flops, in_tile)
