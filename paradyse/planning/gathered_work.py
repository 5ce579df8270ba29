"""What a program computes with all tokens on every rank, and what that costs at a length.

Operators without a rule for split tokens are computed on gathered ones, by every rank alike or for
a part of another dim. Blocks have costs that plans are chosen by; these have not, since no plan
changes them. They are counted here, by running their operators on tensors without memory at the
sizes that are asked for, and priced by the machine's rates as the analytic prior does: operations,
bytes read and written operator by operator (more than a compiled region moves), messages.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from paradyse.distributed.switch import rows_per_rank
from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.factors import Factor, size_of
from paradyse.graph.subgraph import has_gradient, is_tensor, run
from paradyse.passes.pipeline import gathered_notes
from paradyse.passes.split_steps import MixingStep, Step
from paradyse.planning.costs import Machine
from paradyse.planning.gathered import LARGE_SHARE, GatheredWork, with_shares
from paradyse.planning.planner import Planner
from paradyse.runtime.program import Program
from paradyse.strategies.base import SPLIT, WHOLE, bind_factors
from paradyse.strategies.groups.analyse import factors_of
from paradyse.strategies.work import ATTENTION_BACKWARD, count_visible_pairs
from paradyse.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    storage_key,
    tree_leaves,
)
from paradyse.types import Plan, Workload

log = logging.getLogger(__name__)

MATMUL_BACKWARD = 2
"""Matmuls of backward for each one of forward."""


@dataclass
class Amount:
    """Operations, bytes and messages of one rank."""

    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    """Read and written in its own memory, operator by operator."""
    num_ops: float = 0.0
    sent_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Per collective."""
    messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def send(self, collective: str, num_bytes: float) -> None:
        """Add a message of ``num_bytes``, sent by ``collective``."""
        self.sent_bytes[collective] += num_bytes
        self.messages[collective] += 1

    def time_s(self, machine: Machine) -> float:
        """Seconds on ``machine``, nothing of it hidden."""
        found = self.flops / machine.matmul_flops
        found += self.attention_flops / (machine.attention_flops or machine.matmul_flops)
        found += self.moved_bytes / machine.memory_bandwidth + self.num_ops * machine.op_overhead_s
        for name, num_messages in self.messages.items():
            found += machine.link(name).time_s(self.sent_bytes[name], num_messages)
        return found


def gathered_work(
    program: Program, workload: Workload, machine: Machine
) -> tuple[GatheredWork, ...]:
    """What ``program`` computes on gathered tokens at ``workload``, on ``machine``, the most
    expensive first; layers that read alike are one. Nothing on one rank."""
    if program.axis.size == 1:
        return ()
    counted = Count(program, workload)
    found: dict[tuple[str, ...], list[Amount | None]] = {}
    for step, notes in counted.steps:
        found.setdefault(notes, []).append(counted.amount(step))
    sums = []
    for notes, amounts in found.items():
        known = [a for a in amounts if a is not None]
        time_s = sum(a.time_s(machine) for a in known) if len(known) == len(amounts) else None
        sent = sum(int(sum(a.sent_bytes.values())) for a in known)
        sums.append(GatheredWork(notes, time_s, sent))
    return tuple(sorted(sums, key=lambda w: -(w.time_s or 0.0)))


def sizes_at(program: Program, workload: Workload) -> dict[str, int]:
    """The sizes of a call of ``program`` with ``workload``, by the letters of its first scope."""
    scope = program.scope
    letter_of = {f: letter for letter, f in scope.beside.items()}
    sizes = {letter: f.size for letter, f in scope.beside.items()} | {WHOLE: scope.seq.size}
    if scope.batch is not None:
        each = max(1, program.num_sequences(sizes) // scope.batch.size)
        sizes[letter_of[scope.batch]] = max(1, workload.batch // each)
    own = (workload.batch, workload.seq_len)
    beside = [*list(program.ctx.seqs)[1:], *program.unsplit]
    for at, f in enumerate(beside):
        batch, length = workload.others[at] if workload.others else own
        if f in letter_of:
            sizes[letter_of[f]] = length
        its_batch = program.ctx.seqs.get(f)
        if its_batch is not None and its_batch is not scope.batch and its_batch in letter_of:
            sizes[letter_of[its_batch]] = batch
    return sizes | {WHOLE: workload.seq_len, SPLIT: program.axis.layout(workload.seq_len).local_len}


class _Told(set[tuple[str, ...]]):
    """Notes that were warned of on an axis: a model has several graphs, or one for each length."""


class ShareWatch:
    """Warns of what is computed on gathered tokens and takes a large share of a step.

    Args:
        program: that runs; let go of with its capture.
        planner: of its blocks; it chooses, so that the machine is measured.
    """

    def __init__(self, program: Program, planner: Planner) -> None:
        self.program, self.planner = weakref.ref(program), planner
        self._most_tokens = 0
        self._told = program.axis.session.of(_Told)

    def __call__(self, workload: Workload, plan: Plan) -> None:
        """Warn of the work at ``workload`` under ``plan``, once of each; looked at anew when there
        are twice as many tokens."""
        tokens, program = workload.batch * workload.seq_len, self.program()
        if tokens < 2 * self._most_tokens or plan.alone or plan.split or program is None:
            return
        self._most_tokens, planner = tokens, self.planner
        found = gathered_work(program, workload, planner.machine(workload.dtype))
        step_s, _ = planner.predict(plan, workload)
        for work, share in with_shares(found, step_s, planner.cost_model is not None):
            if share > LARGE_SHARE and work.notes not in self._told:
                self._told.add(work.notes)
                log.warning("%s (at %s tokens)", work.line(share), workload.lengths)


class Count:
    """Counts the steps of ``program`` that are computed on gathered tokens, at ``workload``."""

    def __init__(self, program: Program, workload: Workload) -> None:
        self.program, self.back = program, workload.training
        self.p = program.axis.size
        self.sizes = sizes_at(program, workload)
        self._sent: set[tuple[fx.Node, str]] = set()
        """Messages that a step before has booked, whose result is kept."""

    @cached_property
    def steps(self) -> list[tuple[Step, tuple[str, ...]]]:
        """Each such step, and the notes on its operators."""
        notes, found = gathered_notes(self.program.ctx), []
        for step in self.program.steps:
            said = dict.fromkeys(notes[n] for n in step.piece.nodes if n in notes)
            if said and step.index < 0:
                found.append((step, tuple(said)))
        return found

    def amount(self, step: Step) -> Amount | None:
        """What ``step`` costs; None where it cannot be run at these sizes."""
        found = Amount()
        try:
            whole = self._sizes_of(step, WHOLE)
            if isinstance(step, MixingStep):
                self._switch(step, found)
                whole[step.over] = rows_per_rank(size_of((step.over,), whole), self.p)
            else:
                self._repeat(step, found)
            self._run(step, whole, found)
        except Exception:  # whatever an operator makes of sizes that do not go together
            log.debug("%s at %s", step.piece.name, self.sizes, exc_info=True)
            return None
        return found

    def _sizes_of(self, step: Step, layout: str) -> dict[Factor, Any]:
        scope = self.program.scope_of(step)
        return bind_factors(scope, layout, self.program.sizes_in(scope, self.sizes))

    def _run(self, step: Step, sizes: Mapping[Factor, Any], found: Amount) -> None:
        """Add what the operators of ``step`` do at ``sizes``, forward and backward."""
        piece, names = step.piece, self.program.scope.names

        def empty(node: fx.Node) -> Any:
            val = node.meta["val"]
            if not is_tensor(node):
                return val
            shape = [int(size_of(d, sizes)) for d in names.of(node)]
            return torch.empty(shape, dtype=val.dtype, device=val.device)

        with disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
            values = [empty(n) for n in piece.inputs]
            with torch.no_grad(), _Counter() as counter:
                run(piece, values, names, sizes)
        again = self.back and any(map(has_gradient, piece.nodes))
        found.flops = counter.flops * (1 + MATMUL_BACKWARD * again)
        found.attention_flops = counter.attention_flops * (1 + ATTENTION_BACKWARD * again)
        found.moved_bytes = counter.moved_bytes * (1 + MATMUL_BACKWARD * again)
        found.num_ops = counter.num_ops * (1 + again)

    def _repeat(self, step: Step, found: Amount) -> None:
        """Add the messages of ``step``, which every rank computes alike: it gathers what it reads;
        of what others read of it on split tokens the gradient is gathered."""
        ctx = self.program.ctx
        for node in filter(self._is_split, step.piece.inputs):
            if node in ctx.partial:
                num_bytes = self._bytes(node, step, WHOLE) * 2 * (self.p - 1) // self.p
                self._send(found, "all_reduce", node, num_bytes)
            else:
                self._send(found, "all_gather", node, self._local(node) * (self.p - 1))
        for node in filter(has_gradient, step.piece.outputs if self.back else ()):
            for reader in self._split_readers(node):
                mine = factors_of(self.program.scope, node)
                along = next((f for f in (reader.seq, reader.keys) if f in mine), None)
                if along is None:
                    num_bytes = self._bytes(node, reader, WHOLE) * 2 * (self.p - 1) // self.p
                    self._send(found, "all_reduce", node, num_bytes)
                else:
                    local = self._bytes(node, reader, SPLIT)
                    self._send(found, "all_gather", node, local * (self.p - 1))

    def _switch(self, step: MixingStep, found: Amount) -> None:
        """Add the messages of ``step``: the split goes to another dim and back."""
        variant = self.program.variant(step, "")
        switched = [n for n, at in zip(variant.inputs, variant.layouts, strict=True) if at == SPLIT]
        for node in (*switched, *step.piece.outputs):
            sizes = self._sizes_of(step, SPLIT)
            sizes[step.over] = rows_per_rank(size_of((step.over,), sizes), self.p)
            for _ in range(1 + (self.back and has_gradient(node))):
                found.send("all_to_all", self._nbytes(node, sizes) * (self.p - 1))
        for node, at in zip(variant.inputs, variant.layouts, strict=True):
            if at == WHOLE and self._is_split(node):
                num_bytes = self._local(node) * (self.p - 1)
                self._send(found, "all_gather", node, num_bytes)
                if self.back and has_gradient(node):
                    self._send(found, "reduce_scatter", node, num_bytes)

    def _send(self, found: Amount, collective: str, node: fx.Node, num_bytes: int) -> None:
        """Add a message with ``node``, or its gradient, unless it was sent before."""
        if (node, collective) not in self._sent:
            self._sent.add((node, collective))
            found.send(collective, num_bytes)

    def _is_split(self, node: fx.Node) -> bool:
        return node.op != "placeholder" and node in self.program.ctx.split and is_tensor(node)

    def _split_readers(self, node: fx.Node) -> Iterator[Step]:
        return (s for s in self.program.steps if s.split and node in s.piece.inputs)

    def _local(self, node: fx.Node) -> int:
        """Bytes of the rank's part of the split value of ``node``."""
        scope = self.program.scope_along(self.program.ctx.split[node])
        sizes = bind_factors(scope, SPLIT, self.program.sizes_in(scope, self.sizes))
        return self._nbytes(node, sizes)

    def _bytes(self, node: fx.Node, step: Step, layout: str) -> int:
        return self._nbytes(node, self._sizes_of(step, layout))

    def _nbytes(self, node: fx.Node, sizes: Mapping[Factor, Any]) -> int:
        shape = [int(size_of(d, sizes)) for d in self.program.scope.names.of(node)]
        return math.prod(shape) * int(node.meta["val"].itemsize)


class _Counter(TorchDispatchMode):
    """Counts what operators do that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.attention_flops = self.moved_bytes = self.num_ops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, made = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (args, out))
        if {storage_key(x) for x in read}.issuperset(storage_key(x) for x in made):
            return out  # views: nothing moves
        self.num_ops += 1
        self.moved_bytes += sum(x.numel() * x.itemsize for x in (*read, *made))
        if func is ATTENTION:
            self.attention_flops += _attention_flops(AttentionCall(*args, **kwargs))
        elif count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **kwargs, out_val=out)
        return out


def _attention_flops(call: AttentionCall) -> float:
    (batch, heads, num_queries, width), num_keys = call.q.shape, call.k.shape[2]
    pairs = num_queries * num_keys
    if num_queries == num_keys:
        pairs = count_visible_pairs(call.mask_spec, num_queries)
    return 2.0 * batch * heads * pairs * (width + call.v.shape[3])
