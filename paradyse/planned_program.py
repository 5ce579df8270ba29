"""A captured graph with what chooses its plans, and the programs that these may ask for."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from paradyse.choice import choice_of
from paradyse.config import Options
from paradyse.distributed.agreement import Agreement
from paradyse.distributed.axis import Axis
from paradyse.distributed.calls import Call
from paradyse.distributed.checksums import checksum
from paradyse.distributed.facts import (
    GATHERS,
    JOINED,
    NO_SYNC,
    OPTIMIZERS,
    PROFILE,
    PROGRAM,
    RANDOM_STATE,
    TRAINED,
    digest,
)
from paradyse.distributed.failures import OutOfMemoryError
from paradyse.distributed.session import Recent
from paradyse.passes.dump import write
from paradyse.planning.alone import OTHER_BLOCKS
from paradyse.planning.explain import plan_table
from paradyse.planning.splits import Described
from paradyse.runtime.call_weights import CallWeights
from paradyse.runtime.capture import (
    SizeSource,
    build_alone,
    build_split,
    find_sizes,
    fingerprint,
    sizes_of,
)
from paradyse.runtime.describe import computed_in, describe_blocks, describe_head
from paradyse.runtime.frame_maker import current_frames
from paradyse.runtime.joined import gradient_order
from paradyse.runtime.program import Program, StepConstants
from paradyse.strategies.base import WHOLE
from paradyse.torch_private import tree_leaves
from paradyse.types import BlockSpec, Plan, Workload
from paradyse.weights.no_sync import AT_ONCE, gradients_are

T = TypeVar("T")

log = logging.getLogger(__name__)

OTHER_MESSAGES = (
    "with replicas, of which each splits what suits it: gradients of some weights would come "
    "together at other places than along the sequence"
)


class Captured(Protocol):
    """What a ``PlannedProgram`` asks of the capture that it is of (``backend.Capture``)."""

    gm: fx.GraphModule
    """As Dynamo gave it."""
    is_weight: list[bool]
    """Per placeholder whether it is a parameter or a buffer."""
    options: Options
    axis: Axis
    replicas: Axis
    agreement: Agreement | None
    in_group: bool
    names: list[str]
    """Of the placeholders, for people."""
    weights: CallWeights
    others: Sequence[Any] | None
    """Inputs of other sizes, to tell numbers made of a size by (``build_program``)."""
    calls: Any
    """What reports the steps of the model; None: nobody asks."""

    def agree(
        self, args: Sequence[Any], facts: Mapping[str, Any], common: Mapping[str, Any]
    ) -> Call | None:
        """Compare a call with ``args``, and ``facts`` of it, with the other ranks' calls; of one
        that trains what is ``common`` with replicas' calls too."""

    def dumping(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which writes dumps on one rank: what it raises all ranks raise."""


class PlannedProgram:
    """A captured graph with the guard that chooses its plan; and its programs: the one that splits
    the sequence, made at once, and those for other plans, made when one is asked for.

    Args:
        program: that splits the sequence.
        capture: that it is of.
        inputs: that it was traced with.
    """

    def __init__(self, program: Program, capture: Captured, inputs: Sequence[Any]):
        self.program, self.capture = program, capture
        self._inputs, self._others = inputs, capture.others
        self.sizes = find_sizes(program)
        self._splits: dict[str, Program] = {}
        """``Plan.split`` -> the program that splits another dim."""
        self._blocks: dict[Program, tuple[BlockSpec, ...]] = {}
        """Of these."""
        self._sources: dict[Program, SizeSource] = {}
        """Of programs beside ``program``, where their sizes are read."""
        self.axis = capture.axis
        self.blocks = describe_blocks(program)
        weights = capture.weights.held()
        text = fingerprint(program)
        self.choice = choice_of(
            text,
            capture.options,
            self.axis,
            capture.agreement,
            self.blocks,
            weights,
            head=describe_head(program),
            num_replicas=capture.replicas.size,
            computed_in=computed_in(program),
        )
        self.choice.watch(program)
        trained = [w.requires_grad for w in weights]
        self._program_facts = {
            "how many outputs are asked for": len(tree_leaves(program.output)),
            "how many weights are trained": sum(w.requires_grad for w in weights),
            TRAINED: digest(trained),
            PROGRAM: zlib.crc32(text.encode()),
        }
        joined = gradient_order(program), trained
        self._common = {JOINED: digest(joined)} if capture.replicas.size > 1 else {}
        """What replicas must share as well."""
        self._constants: Recent[Any, StepConstants] = Recent()

    def __call__(self, args: Sequence[Any]) -> Any:
        sizes = sizes_of(self.sizes, args, self.axis)
        gradients = self._gradients()
        facts: Mapping[str, Any] = {}
        if self.capture.agreement is not None:
            args, facts = [_sendable(a) for a in args], self._facts(sizes, gradients)
        call = self.capture.agree(args, facts, self._common)
        workload = self._workload(sizes, gradients)
        if call is None:
            return self._run(args, sizes, self._plan(workload), workload)
        call.out_of_memory = partial(self.choice.ran_out, workload)
        schedule, device = self.program.schedule, self.program.device
        states = random_states(device) if schedule.is_random else []
        tried: list[Plan] = []

        def compute() -> Any:
            self.choice.settle()
            tried.append(self._plan(workload))
            return self._run(args, sizes, tried[-1], workload)

        try:
            return call.forward(compute)
        except OutOfMemoryError as e:
            may_retry = self.capture.options.retry_out_of_memory and not self.capture.in_group
            if not (may_retry and e.may_repeat):
                raise
            error = e.with_traceback(None)  # lets go of what was computed

        def compute_again() -> Any:
            self.choice.settle()
            safer = self._plan(workload)
            if safer in tried:
                raise error
            log.warning("%s. This forward is run again by the plan %s", error, safer.key)
            if states:
                _set_random_states(device, states)
            return self._run(args, sizes, safer, workload)

        return call.forward(compute_again)  # only where all ranks come here

    def _run(
        self, args: Sequence[Any], sizes: dict[str, int], plan: Plan, workload: Workload
    ) -> Any:
        # counted before anything may raise on one rank alone: ranks run blocks together alike
        together = self.choice.begin(plan)
        calls = self.capture.calls
        if calls is None:
            return self._compute(args, sizes, plan, workload, together)
        device, predict = self.program.device, partial(self.choice.predict, plan, workload)
        step = calls.begin(device, workload, plan, predict)
        if self.choice.trials is not None:
            self.choice.trials.began(step)
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
        program = self.program_for(plan)
        program.known_buffers.check(args)
        self.program.shown_keys.check(args, self.capture.names)  # whichever ran the call before
        constants = replace(self._make(program, args, sizes, plan), together=together)
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
        return (self.program, *self._splits.values(), *([] if alone is None else [alone]))

    @cached_property
    def alone(self) -> Program | None:
        """What computes the whole on every rank; None where that has other blocks."""
        at = self.capture
        built_of = at.gm, self._inputs, at.is_weight, at.options
        return build_alone(self.program, *built_of, self.axis, self._others)

    def program_for(self, plan: Plan) -> Program:
        """What computes ``plan``.

        Raises:
            ValueError: there is no such program.
        """
        if plan.alone:
            assert self.alone is not None
            return self.alone
        if plan.split and plan.split not in self._splits:
            if isinstance(why := self.describe(plan.split), str):
                raise ValueError(f"tokens of this graph are not split along {plan.split!r}: {why}")
        return self._splits[plan.split] if plan.split else self.program

    def describe(self, split: str) -> Described | str:
        """Blocks and head of the program that splits ``split``; or why there is none."""
        if split not in self._splits:
            at = self.capture
            built_of = at.gm, self._inputs, at.is_weight, at.options, self._others
            program, why = build_split(self.program, *built_of, split)
            if program is None:
                return why
            if at.replicas.size > 1 and gradient_order(program) != gradient_order(self.program):
                return OTHER_MESSAGES
            self._splits[split] = program
        program = self._splits[split]
        return self.blocks_of(program), describe_head(program)

    def blocks_of(self, program: Program) -> tuple[BlockSpec, ...]:
        """Those of ``program``, one of ``programs``, in the order of computation."""
        if program.ctx.at_rest and program not in self._blocks:
            self._blocks[program] = describe_blocks(program)
        return self._blocks.get(program, self.blocks)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Inside, plans may be asked for that need programs which are not there yet."""
        splits, before = self.choice.splits, self.choice.splits.describe
        splits.describe = self.describe
        try:
            yield
        finally:
            splits.describe = before

    def _plan(self, workload: Workload) -> Plan:
        """The guard's for ``workload``, which can be run."""
        with self.planning():
            plan = self.choice.guard(workload)
            if plan.alone and self.alone is None:
                log.warning("every rank cannot compute the whole: %s", OTHER_BLOCKS)
                self.choice.refuse_alone(OTHER_BLOCKS)
                plan = self.choice.guard(workload)
        return plan

    def _workload(self, sizes: Mapping[str, int], gradients: str) -> Workload:
        """What is planned for a call that leaves ``gradients`` so."""
        return self.choice.workload(
            batch=self.program.num_sequences(sizes),
            seq_len=sizes[WHOLE],
            training=torch.is_grad_enabled(),
            keeps_gradients=gradients != AT_ONCE,
            others=self.program.other_lengths(sizes),
        )

    def _gradients(self) -> str:
        """How the present call leaves gradients (``gradients_are``)."""
        if not torch.is_grad_enabled():
            return AT_ONCE
        return gradients_are(self.axis, self.capture.weights.held())

    def _make(
        self, program: Program, args: Sequence[Any], sizes: dict[str, int], plan: Plan
    ) -> StepConstants:
        own: Mapping[str, int] = sizes
        if program is not self.program:
            if program not in self._sources:
                self._sources[program] = find_sizes(program)
            own = sizes_of(self._sources[program], args, program.axis)
        key = (*own.values(), plan)
        found = self._constants.get(key)
        if found is None:
            found = program.constants_for(own, plan.strategies, plan.head)
            if self.capture.options.dump is not None:
                folder = Path(self.capture.options.dump)
                self.capture.dumping(lambda: self._dump_plan(folder, sizes, plan))
            self._constants[key] = found
        return found

    def _dump_plan(self, folder: Path, sizes: Mapping[str, int], plan: Plan) -> None:
        """The first rank writes the table of the plan for these sizes, beside the graphs."""
        if self.axis.rank:
            return
        name = f"plan_batch{sizes.get('B', 1)}_length{sizes[WHOLE]}.txt"
        blocks = self.blocks_of(self.program_for(plan))
        write(folder, name, plan_table(blocks, plan) + "\n")

    def _facts(self, sizes: Mapping[str, int], gradients: str) -> dict[str, Any]:
        schedule, profile = self.program.schedule, self.choice.cost_model
        device = self.program.device if schedule.draws else torch.device("cpu")
        return {
            "the sequence length": sizes[WHOLE],
            "the batch size": sizes.get("B", 1),
            "the lengths of other sequences": str(self.program.other_lengths(sizes)),
            **self._program_facts,
            NO_SYNC: gradients,
            OPTIMIZERS: self.choice.optimizers.count,
            RANDOM_STATE: checksum(random_states(device)) if schedule.is_random else 0,
            PROFILE: profile.profile.checksum if profile else 0,
        }


def _sendable(argument: Any) -> Any:
    """An ``argument`` of a call as messages need it. Weights stay the leaves that gradients of
    several calls are kept of; what is sent of them is made contiguous where it is sent."""
    if isinstance(argument, nn.Parameter) or not isinstance(argument, Tensor):
        return argument
    return argument.contiguous()


def random_states(device: torch.device) -> list[Tensor]:
    """Of the generators of random numbers of the host and of ``device``, on the host."""
    of_host = torch.get_rng_state()
    if device.type == "cpu":
        return [of_host]
    return [of_host, torch.get_device_module(device).get_rng_state(device)]


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the generators back to ``states``, as ``random_states`` gave them."""
    torch.set_rng_state(states[0])
    for of_device in states[1:]:
        torch.get_device_module(device).set_rng_state(of_device, device)
