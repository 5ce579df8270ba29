"""Steps of a model under one strategy after the other: run, timed, or with their memory watched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.config import AUTO, PlanOption
from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.planning.measured import head_structure
from paradyse.planning.prior import left_bytes
from paradyse.planning.profile_file import REST
from paradyse.profiling.marks import (
    END,
    LOSS,
    START,
    Clock,
    DeviceMemory,
    HostAllocations,
    StepMemory,
    StepTimes,
    Watch,
    WatchedFrame,
    mark_ids,
    memory_of,
    times_of,
)
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.registry import captures_of
from paradyse.strategies import canonical_strategy
from paradyse.torch_private import compiled_call_of, original_module, set_compiled_call
from paradyse.types import (
    ATTENTION_STRATEGIES,
    HEAD,
    REPLICATED,
    BlockSpec,
    HeadSpec,
    Plan,
    Point,
    Workload,
)
from paradyse.weights.sharded_tensor import ShardedTensor, lies_on_host, rows_here, used_on

MakeBatch = Callable[[int, int], Mapping[str, Any]]
"""From (batch, seq_len) to the keyword arguments of one call, equal on all ranks."""


PartKey = tuple[str, str, str]
"""Structure, kind and variant: what is measured at each length."""

REST_PART: PartKey = ("", REST, "")
"""All that is in no block."""


class _Present:
    """The plan option: whatever ``plan`` is at the time. It outlives a measurement, in what chooses
    plans, so it knows nothing of the model."""

    def __init__(self) -> None:
        self.plan: Any = AUTO

    def __call__(self, workload: Workload) -> Any:
        return self.plan


class Steps:
    """Runs steps of ``model``, which is compiled once, with a plan that is set before each.

    Args:
        model: compiled or not; what was compiled before is left as it is.
        options: of the backend, without ``plan``.
        training: with gradients and in training mode; False: forward alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Mapping[str, Any],
        batch: int,
        training: bool,
        make_batch: MakeBatch | None,
    ) -> None:
        self.model: torch.nn.Module = original_module(model)
        self.axis = resolve_axis(options.get("mesh"))
        self.batch, self.training = batch, training
        self.make_batch = make_batch or _random_tokens(self.model)
        self.in_multiples = make_batch is not None
        """Whether batches may have lengths that are multiples of some number alone."""
        self.parameters = list(self.model.parameters())
        shards = [p for p in self.parameters if isinstance(p, ShardedTensor)]
        self.sharded = bool(shards)
        self.reduce_dtype = shards[0].reduce_dtype if shards else None
        """As of ``Workload``."""
        self.device = used_on(self.parameters[0])
        self.dtype = self.parameters[0].dtype
        """That blocks compute in; until these are known, as far as autocast tells."""
        if torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)
        self.blocks: tuple[BlockSpec, ...] = ()
        """Blocks in the order of computation."""
        self.head: HeadSpec | None = None
        """None: there is none that could be computed otherwise."""
        self.part_of: dict[int, BlockSpec | HeadSpec] = {}
        """The number of marks -> the block, or the head, of every program so far."""
        self.notes: list[str] = []
        self._present = _Present()
        self._compiled = torch.compile(
            self.model, backend="paradyse", options={**options, "plan": self._present}
        )

    @property
    def parts(self) -> tuple[BlockSpec | HeadSpec, ...]:
        """The blocks, and last the head, where there is one."""
        return (*self.blocks, self.head) if self.head else self.blocks

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, the model is ready for steps; afterwards the mode of each module, the random
        state and all gradients are as before."""
        kept = [p.grad for p in self.parameters]
        modes = {module: module.training for module in self.model.modules()}
        called = compiled_call_of(self.model)
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.set_grad_enabled(self.training):
                torch.manual_seed(0)
                self.model.train(self.training)
                set_compiled_call(self.model, None)
                self.model.zero_grad(set_to_none=True)
                yield
        finally:
            set_compiled_call(self.model, called)
            for module, training in modes.items():
                module.training = training
            for p, grad in zip(self.parameters, kept, strict=True):
                p.grad = grad

    def find_blocks(self, seq_len: int) -> None:
        """Run steps of ``seq_len`` tokens and of fewer, which bring the graph for any length: a
        model may have no positions for more, and a batch of the user's own no odd length.

        Raises:
            ValueError: there is no block whose strategy can be chosen.
        """
        for n in (seq_len, self._another(seq_len)):
            self.run(n, AUTO)
        if not self.blocks:
            why = f" ({'; '.join(self.notes)})" if self.notes else ""
            raise ValueError(f"no block of this model can be switched{why}: nothing to measure")

    def _another(self, seq_len: int) -> int:
        """A length beside ``seq_len``, and shorter, unless only one token would be left."""
        if self.in_multiples and seq_len % 2 == 0 and seq_len > 2:
            return seq_len // 2
        return seq_len - 1 if seq_len > 2 else seq_len + 1

    def run(self, seq_len: int, plan: PlanOption) -> None:
        """One step of ``seq_len`` tokens; it compiles what ``plan`` needs and leaves gradients."""
        self._step(self._inputs(seq_len), plan)
        for capture in captures_of(self._compiled):
            if capture.options.plan is not self._present:  # the user's own
                continue
            self.notes = capture.notes or self.notes
            for graph in capture.graphs.values():
                head, self.dtype = graph.choice.planner.head, graph.choice.dtype
                parts = [*graph.blocks, *([head] if head else [])]
                for ids, part in zip(mark_ids(graph.program), parts, strict=True):
                    self.part_of.update(dict.fromkeys(ids, part))
                self.blocks, self.head = graph.blocks or self.blocks, head or self.head

    def memory(self, seq_len: int, plan: PlanOption) -> StepMemory:
        """What a step of ``seq_len`` tokens under ``plan`` holds beside gradients."""
        inputs = self._inputs(seq_len)
        with _memory_probe(self.device) as probe:
            watch = Watch(probe)
            self._step(inputs, plan, watch)
        left = {i: self.left_bytes(of, seq_len) for i, of in self.part_of.items()}
        return memory_of(watch, probe.read(), left)

    def left_bytes(self, part: BlockSpec | HeadSpec, seq_len: int) -> int:
        """What ``part`` leaves until the end of a step of ``seq_len`` tokens."""
        return left_bytes(part, self.workload(seq_len), self.sharded)

    def times(self, seq_len: int, plan: PlanOption) -> StepTimes:
        """Seconds of parts of a step of ``seq_len`` tokens under ``plan``; ranks start together."""
        inputs = self._inputs(seq_len)
        self.model.zero_grad(set_to_none=True)
        clock = Clock(self.device)
        watch = Watch(clock)
        if self.axis.size > 1:
            start_together = torch.ones(1, device=self.device)
            collectives.all_reduce(start_together, self.axis, collectives.PROFILE)
        self._step(inputs, plan, watch)
        return times_of(watch, clock.read())

    def workload(self, seq_len: int) -> Workload:
        """The planner's ``Workload`` of a step of ``seq_len`` tokens."""
        at_rest = self.parameters[0].dtype
        return Workload(
            self.batch,
            seq_len,
            self.dtype,
            self.training,
            num_ranks=self.axis.size,
            reduce_dtype=self.reduce_dtype,
            weight_dtype=at_rest if at_rest != self.dtype else None,
        )

    def free(self) -> None:
        """Let go of what a step left behind that found no memory."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _inputs(self, seq_len: int) -> dict[str, Any]:
        return {
            k: v.to(self.device) if isinstance(v, Tensor) else v
            for k, v in self.make_batch(self.batch, seq_len).items()
        }

    def point_of(self, block: BlockSpec, name: str) -> Point:
        """The point ``name`` for ``block``, or what is nearest to it and can compute the block: the
        first feasible strategy, no levers."""
        point = Point.parse(name)
        if point.strategy not in (*block.feasible(), REPLICATED):
            point = replace(point, strategy=block.feasible()[0])
        return replace(point, levers=()) if block.why_not(str(point)) else point

    def part(self, of: BlockSpec | HeadSpec | None, name: str) -> PartKey:
        """What is measured of ``of`` in a step under the point ``name``; None: of the rest."""
        if of is None:
            return REST_PART
        if isinstance(of, HeadSpec):
            return head_structure(of), HEAD, self.head_levers(name)
        point = self.point_of(of, name)
        if of.recompute and self.training:
            point = point.on_demand()
        return of.structure, of.kind, canonical_strategy(of.kind, str(point))

    def head_levers(self, name: str) -> str:
        """What the point ``name`` means for the head: its levers where the head can have them."""
        levers = "+".join(Point.parse(name).levers)
        return levers if self.head is not None and levers in self.head.points() else ""

    def _step(
        self, inputs: Mapping[str, Any], plan: PlanOption, watch: Watch | None = None
    ) -> None:
        self._present.plan = self._feasible(plan) if isinstance(plan, str) else plan
        mark = watch.mark if watch is not None else lambda at: None
        mark(START)
        with frames_by(partial(WatchedFrame, watch)) if watch is not None else nullcontext():
            out = self._compiled(**inputs)
        loss = _loss_of(out) if self.training else None
        mark(LOSS)
        if loss is not None:
            loss.backward()
        del out, loss
        mark(END)

    def _feasible(self, name: str) -> Plan | str:
        """The point ``name`` for all blocks, as near to it as each can be, and its levers for the
        head."""
        if name == AUTO:
            return name
        points = (self.point_of(b, name) for b in self.blocks)
        return Plan(tuple(map(_by_name, points)), self.head_levers(name))


def _by_name(point: Point) -> str:
    """``point`` as plans may say it: on one rank every strategy's name means the only one."""
    alone = point.strategy == REPLICATED
    return str(replace(point, strategy=ATTENTION_STRATEGIES[0]) if alone else point)


def static_bytes(model: torch.nn.Module, training: bool) -> int:
    """Bytes of ``model``'s weights, buffers and, in ``training``, gradients; on CUDA also of all
    else that this process holds."""
    parameters = list(model.parameters())
    here = [p for p in parameters if not lies_on_host(p)]
    sizes = [rows_here(p).untyped_storage().nbytes() for p in here]
    grads = [rows_here(p).nbytes for p in here if p.requires_grad]
    sizes += [b.untyped_storage().nbytes() for b in model.buffers()]
    held = sum(sizes) + sum(grads) * training
    device = used_on(parameters[0])
    return max(held, torch.cuda.memory_allocated(device)) if device.type == "cuda" else held


@contextmanager
def _memory_probe(device: torch.device) -> Iterator[DeviceMemory | HostAllocations]:
    gc.collect()
    watch = DeviceMemory(device) if device.type == "cuda" else HostAllocations()
    with collectives.settled(), watch as probe:
        yield probe


def peak_beyond(device: torch.device, step: Callable[[], object]) -> int:
    """The most bytes that a step holds at any moment beyond those held when it began.

    Args:
        device: that the step runs on.
        step: runs a compiled model, which has run before.
    """
    with _memory_probe(device) as probe:
        watch = Watch(probe)
        watch.mark(START)
        with frames_by(partial(WatchedFrame, watch)):
            step()
        watch.mark(END)
    return max(level.peak_bytes for level in probe.read()[1:])


def _loss_of(out: Any) -> Tensor:
    loss = getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "the model returned no loss: give make_batch, so that labels are in the batch, or "
            "measure with training=False"
        )
    return loss


def _random_tokens(model: torch.nn.Module) -> MakeBatch:
    """Batches for a language model: random tokens, with themselves as labels."""
    try:
        vocabulary = int(model.get_input_embeddings().num_embeddings)
    except AttributeError as e:
        raise ValueError(
            f"{type(model).__name__} does not tell its vocabulary: give make_batch, a function "
            "(batch, seq_len) -> keyword arguments of one call"
        ) from e

    def make(batch: int, seq_len: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seq_len)
        ids = torch.randint(vocabulary, (batch, seq_len), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make
