"""What chooses the plans of a program: its planner, the guard in front of it, and what is measured
while it runs.

Captures that compute the same share one ``Choice``: ranks may have captured a model at other calls
than the rest, and must all the same ask for plans, and agree on measurements, at the same calls.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from paradyse.config import AUTO, BLOCK_KINDS, STRATEGIES, Options
from paradyse.distributed.agreement import Agreement
from paradyse.distributed.axis import Axis, GroupMesh, device_of
from paradyse.distributed.facts import PLAN
from paradyse.distributed.failures import first_line
from paradyse.distributed.lanes import Overlap
from paradyse.distributed.session import Recent
from paradyse.passes.pipeline import gathered_notes
from paradyse.planning.alone import WHY_REPLICAS, WHY_SHARDED, Alone
from paradyse.planning.costs import Machine
from paradyse.planning.forms import leaves_open
from paradyse.planning.gathered_work import ShareWatch
from paradyse.planning.machine import agreed_capacity, describe_device, measure_machine
from paradyse.planning.measured import CostModel, load_cost_model
from paradyse.planning.planner import Planner
from paradyse.planning.profile_file import Header, present_versions
from paradyse.planning.splits import Splits, most_blocks
from paradyse.planning.units import dtype_name
from paradyse.profiling.online import Feedback
from paradyse.profiling.trials import Trials
from paradyse.runtime.describe import describe_masks
from paradyse.runtime.guard import Guard
from paradyse.runtime.program import Program
from paradyse.runtime.runs import Uses
from paradyse.types import (
    HEAD,
    LEVER_SETS,
    REPLICATED,
    SPLITS,
    BlockSpec,
    HeadSpec,
    Plan,
    Point,
    Workload,
)
from paradyse.weights.no_sync import bytes_kept
from paradyse.weights.optimizer_state import OptimizersSeen
from paradyse.weights.sharded_tensor import ShardedTensor

_POINTS = tuple(
    dict.fromkeys(
        str(Point(s, levers))
        for kind in BLOCK_KINDS
        for levers in LEVER_SETS[kind]
        for s in STRATEGIES
    )
)
_HEADS = (*("+".join(levers) for levers in LEVER_SETS[HEAD]), REPLICATED)
_SPLITS = ("", *SPLITS)
"""What plans may say of a block, of the head and of the split: ranks tell each other places in
these."""

log = logging.getLogger(__name__)

IN_GROUP = "a group computes its own sequences already"

_ALONE = Machine(
    1e14,
    1e12,
    0.0,
    1e12,
    host_bandwidth=2.5e10,
    source="round numbers: one rank is not measured",
)
"""Rates of a rank that is alone. It chooses by memory, and of levers that fit by operations and
bytes, whose ratio is a GPU's."""


class Choice:
    """Chooses the plans of one program.

    Args:
        options: of the backend.
        axis: the sequence axis.
        agreement: of its ranks; None on one rank.
        blocks: of the program.
        weights: of the model, as they lie on this rank.
        head: of the program; None: it has none that could be computed otherwise.
        num_replicas: size of the data-parallel axis.
        computed_in: dtype of what its blocks compute; None: it has none.
    """

    def __init__(
        self,
        options: Options,
        axis: Axis,
        agreement: Agreement | None,
        blocks: Sequence[BlockSpec],
        weights: Sequence[torch.nn.Parameter],
        head: HeadSpec | None,
        num_replicas: int,
        computed_in: torch.dtype | None,
    ) -> None:
        self.options, self.axis, self.agreement = options, axis, agreement
        self.blocks = tuple(blocks)
        shards = [w for w in weights if isinstance(w, ShardedTensor)]
        self.sharded = bool(shards)
        at_rest = weights[0].dtype if weights else torch.float32
        self.dtype = computed_in or at_rest
        self.cost_model = self._cost_model()
        self._rates: Machine | None = None
        self._known_rates: set[torch.dtype] = set()
        """Dtypes whose rates plans were compared by."""
        self._is_measuring = False
        """Rates are being measured, or could not be."""
        self.optimizers = OptimizersSeen(weights)
        static = self.optimizers.static_bytes()
        self._on_host = self.optimizers.static_bytes(on_host=True)
        """Bytes of the host that weights take, with all that belongs to them."""
        self._held_by_all: int | None = None
        """How many optimizers had stepped when ranks told each other what they hold."""
        self.planner = Planner(
            options,
            self.blocks,
            num_ranks=axis.size,
            machine=self._machine,
            static_bytes=static,
            idle_bytes=self.optimizers.idle_bytes(),
            sharded=self.sharded,
            cost_model=self.cost_model,
            head=head,
            kept_bytes=bytes_kept(weights, axis),
        )
        limited = options.memory_limit is not None or options.host_memory is not None
        if limited and self.blocks and not (callable(options.plan) or self.planner.chooses):
            log.warning(
                "options 'memory_limit' and 'host_memory' bind what \"auto\" chooses: the plan "
                "that option 'plan' names runs whatever it needs"
            )
        in_group = isinstance(options.mesh, GroupMesh)
        self.splits = Splits(self.planner, IN_GROUP if in_group else "")
        refused = WHY_SHARDED if self.sharded else WHY_REPLICAS if num_replicas > 1 else ""
        self.alone = Alone(self.splits, refused)
        reduce_dtype = shards[0].reduce_dtype if shards else None
        self._like = Workload(
            batch=0,
            seq_len=0,
            dtype=self.dtype,
            training=True,
            num_ranks=axis.size,
            mask=describe_masks(self.blocks),
            reduce_dtype=reduce_dtype,
            weight_dtype=at_rest if at_rest != self.dtype else None,
        )
        self.guard = Guard(self._plan, not callable(options.plan))
        self.uses = Uses()
        self._num_dropped = 0
        """Of the calls that ranks have dropped, those after which it was settled."""
        self.feedback: Feedback | None = None
        self.trials: Trials | None = None
        may_choose = self.planner.chooses or callable(options.plan)
        if self.blocks and may_choose and not in_group:
            stepped = register_optimizer_step_post_hook(partial(_stepped, weakref.ref(self)))
            weakref.finalize(self, stepped.remove)
        if axis.size > 1 and self.blocks and self.planner.chooses and not in_group:
            # a group's times have the waits for others
            self.feedback = Feedback(self.splits, self.guard.forget)
            # one replica's step has the waits for others
            if agreement is not None and options.plan == AUTO and num_replicas == 1:
                self.trials = trials = Trials(
                    self.alone, agreement.first_says, self.guard.forget, self.uses.often
                )
                self.guard.instead = self.trials.turn
                self.feedback.pauses = lambda: trials.under_way

    def workload(
        self,
        batch: int,
        seq_len: int,
        training: bool,
        keeps_gradients: bool = False,
        others: tuple[tuple[int, int], ...] = (),
    ) -> Workload:
        """``batch`` sequences of ``seq_len`` tokens, beside ``others``; ``training``: with
        gradients, which are as ``keeps_gradients`` says."""
        return replace(
            self._like,
            batch=batch,
            seq_len=seq_len,
            training=training,
            keeps_gradients=keeps_gradients,
            others=others,
        )

    def watch(self, program: Program) -> None:
        """Warn of what ``program``, for which plans are chosen here, does beside its blocks."""
        chooses = self.planner.chooses and self.axis.size > 1
        if chooses and gathered_notes(program.ctx):
            self.guard.planned = ShareWatch(program, self.planner)

    def _cost_model(self) -> CostModel | None:
        """Of the profile that the options name."""
        if self.options.cost_model is None or not self.blocks:
            return None
        present = Header(
            versions=present_versions(),
            device=describe_device(device_of(self.axis.group)),
            num_ranks=self.axis.size,
            dtype=dtype_name(self.dtype),
            sharded=self.sharded,
            inner=self.options.inner,
            machine={},
        )
        return load_cost_model(self.options.cost_model, self.blocks, present)

    def _machine(self, dtype: torch.dtype) -> Machine:
        """The rates, and of the host the memory that weights leave there."""
        self._is_measuring = True
        machine = self._measured(dtype)
        self._is_measuring = False
        self._known_rates.add(dtype)
        if not self._on_host or machine.host_capacity_bytes is None:
            return machine
        return replace(machine, host_capacity_bytes=machine.host_capacity_bytes - self._on_host)

    def _measured(self, dtype: torch.dtype) -> Machine:
        """Rates as measured with the profile, else now, and of one rank not at all; the memory is
        always what is there."""
        if self.axis.size > 1 and self.cost_model is None:
            return measure_machine(self.axis, dtype)
        if self._rates is None:
            rates = _ALONE if self.cost_model is None else self.cost_model.machine
            capacity_bytes, host_bytes = agreed_capacity(self.axis)
            rates = replace(rates, capacity_bytes=capacity_bytes, host_capacity_bytes=host_bytes)
            on_cpu = device_of(self.axis.group).type == "cpu"
            self._rates = replace(rates, host_bandwidth=None) if on_cpu else rates
            self.axis.session.of(Overlap).hidden = rates.overlap
        return self._rates

    def _plan(self, workload: Workload) -> Plan:
        """The planner's choice as the first rank makes it: arithmetic differs in the last bits."""
        if self.agreement is None or not self.blocks:
            return self.splits.plan(workload)
        self._hold_most(self.agreement)
        form = self.planner.form(workload)
        if callable(self.options.plan):
            together = self.agreement.all_replicas_call  # each asks the function at every call
            if not leaves_open(form):
                plan = self.alone.settle(self.splits.plan_for(form, workload), workload)
                self.agreement.compare("makes a plan", {PLAN: plan.key}, together)
                return plan
            self.agreement.compare("makes a plan", {PLAN: str(form)}, together)
        self._is_measuring = False
        mine, error = [-1] * (2 + most_blocks(len(self.blocks))), None
        try:
            chosen = self.alone.settle(self.splits.plan_for(form, workload), workload)
            of_all = _HEADS.index(chosen.head), _SPLITS.index(chosen.split)
            said = [*of_all, *map(_POINTS.index, chosen.strategies)]
            mine[: len(said)] = said
        except Exception as e:  # the others wait for this rank's word
            if self._is_measuring:  # but while rates are measured, for its messages
                raise
            error = e
            if not isinstance(e, ValueError):
                log.warning("this rank has no plan of its own (%s)", first_line(e))
        head, split, *points = told = self.agreement.first_says(mine)
        if head < 0:
            raise error or ValueError("the first rank of the group found no plan: see its error")
        strategies = tuple(_POINTS[i] for i in points if i >= 0)
        plan = Plan(strategies, _HEADS[head], _SPLITS[split])
        if told != mine and not plan.alone:
            self.splits.settle(form, workload, plan)
        return plan

    def _hold_most(self, agreement: Agreement) -> None:
        """Count with the bytes of the rank that holds most, as a few rows cannot be shared out
        evenly. A message where an optimizer has stepped since the last, as then all ranks' have."""
        if self._held_by_all == self.optimizers.count:
            return
        sides = (self.optimizers.static_bytes(on_host) for on_host in (False, True))
        mine = [*sides, self.optimizers.idle_bytes()]
        static, self._on_host, idle = agreement.most_of("says what it holds", mine)
        self._held_by_all = self.optimizers.count
        self.splits.hold(static, idle)

    def settle(self) -> None:
        """Before the plan of a call is chosen: where ranks have dropped a call that some of them
        may have counted, and others not, all count anew. Every rank comes here at the same call.

        Raises:
            ValueError, DroppedCallError: ranks are not at the same call.
        """
        if self.agreement is None or self._num_dropped == self.agreement.num_dropped:
            return
        if self.feedback is not None:
            self.feedback.restart(self.agreement.first_has)
        if self.trials is not None:
            self.trials.restart()
        self.uses.forget()
        self.guard.forget()
        self._held_by_all = None
        self._num_dropped = self.agreement.num_dropped

    def begin(self, plan: Plan) -> bool:
        """A call by ``plan`` begins; whether its blocks run together."""
        together = self.uses.add(plan)
        if self.trials is not None and self.trials.under_way:
            return self.trials.together
        return together

    def predict(self, plan: Plan, workload: Workload) -> tuple[float, int] | None:
        """Seconds and peak bytes of ``plan`` for ``workload`` as the planner compared them; None
        where nothing was, as asking for rates that are not known yet would send messages."""
        is_known = workload.dtype in self._known_rates
        return self.splits.predict(plan, workload) if is_known else None

    def ran_out(self, workload: Workload) -> None:
        """A rank ran out of memory at ``workload``: from now on its plan is the smallest."""
        if self.planner.chooses or callable(self.options.plan):
            self.splits.ran_out(workload)
            self.alone.ran_out(workload)
            if self.trials is not None:
                self.trials.ran_out()
            self.guard.forget()

    def refuse_alone(self, why: str) -> None:
        """The program cannot be computed whole on every rank: ``why``, as all find out."""
        self.alone.refused = why
        self.guard.forget()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped: from now on plans count with what it holds."""
        if self.optimizers.add(optimizer):
            self._on_host = self.optimizers.static_bytes(on_host=True)
            self.splits.hold(self.optimizers.static_bytes(), self.optimizers.idle_bytes())
            self.guard.forget()


def _stepped(
    choice: weakref.ref[Choice], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> None:
    """A hook of all optimizers."""
    known = choice()
    if known is not None:
        known.stepped(optimizer)


class _Choices:
    """Those of one axis."""

    def __init__(self) -> None:
        self.of_weight = WeakTensorKeyDictionary()
        """The first weight of a model -> its choices, by what they choose for."""
        self.without_weights: Recent[Any, Choice] = Recent()


def _content_of(profile: str | None) -> int:
    """Equal for files with equal content: a profile may have been measured anew."""
    try:
        return zlib.crc32(Path(profile).read_bytes()) if profile else 0
    except OSError:  # whoever reads it says so
        return 0


def choice_of(
    program: str,
    options: Options,
    axis: Axis,
    agreement: Agreement | None,
    blocks: Sequence[BlockSpec],
    weights: Sequence[torch.nn.Parameter],
    head: HeadSpec | None,
    num_replicas: int,
    computed_in: torch.dtype | None,
) -> Choice:
    """The ``Choice`` of all captures of one model with equal arguments.

    Args:
        program: its fingerprint.
        options, axis, agreement, blocks, weights, head, num_replicas, computed_in: as of
            ``Choice``.
    """
    form = tuple((tuple(w.shape), w.dtype, w.requires_grad, type(w)) for w in weights)
    choices = axis.session.of(_Choices)
    known = choices.without_weights
    if weights:
        known = choices.of_weight.setdefault(weights[0], Recent())
    key = program, form, str(options), _content_of(options.cost_model)
    if key not in known:
        known[key] = Choice(
            options, axis, agreement, blocks, weights, head, num_replicas, computed_in
        )
    return known[key]
