"""Analytic prior: time and memory of one block under each strategy, from its shapes and the
machine.

time = operations / rate + bytes / bandwidth + latency per message + overhead per operator, forward
and, when training, backward. What a strategy does is counted beside its code
(``paradyse.strategies.work``).

Throughout, ``machine`` has the rates of a rank, ``block`` the widths and numbers of elements of a
block, ``workload`` batch, length, dtype and number of ranks, and ``point`` is a strategy with its
levers, as text. ``sharded``: weights at rest are 1/p on each rank (ZeRO-3: gathered in forward and
backward, gradients reduce-scattered); else whole on every rank: gradients all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradyse.distributed.axis import TokenLayout
from paradyse.planning.costs import BlockCost, Machine, TimeParts, gradient_bytes
from paradyse.strategies import count_work, strategy_named
from paradyse.strategies.groups.heads import deal_in_turns
from paradyse.strategies.lever_work import count_head
from paradyse.strategies.work import Work
from paradyse.types import HEAD, REPLICATED, BlockSpec, HeadSpec, Point, Workload

FORWARD_SHARE = 1 / 3
"""Of a block's time: backward has two matmuls for each one of forward."""


def seconds(work: Work, machine: Machine) -> float:
    """Predicted time of ``work`` on ``machine``. A ring's messages hide behind attention, and so do
    heads in turns; those of weights hide behind all else that neighbouring blocks compute, which is
    taken to be as much as this one does, and copies to the host and back behind the block."""
    parts = time_parts(work, machine)
    behind_attention_s = min(parts.ring_s, parts.attention_s)
    computed_s = parts.compute_s + parts.attention_s
    hidden_s = behind_attention_s + min(parts.weights_s, computed_s - behind_attention_s)
    block_s = sum(parts) - machine.overlap * hidden_s
    return block_s + _copies_s(work, machine, block_s)


def time_parts(work: Work, machine: Machine) -> TimeParts:
    """What ``work`` on ``machine`` takes, part by part; of messages that it waits for, without what
    its own linears hide, of others whole."""
    attention_s = work.attention_flops / (machine.attention_flops or machine.matmul_flops)
    compute_s = work.flops / machine.matmul_flops + work.moved_bytes / machine.memory_bandwidth
    compute_s += work.num_ops * machine.op_overhead_s
    ring_s = exchange_s = weights_s = 0.0
    for name, count in work.messages.items():
        link, (num_bytes, messages) = machine.link(name), work.ahead.get(name, (0.0, 0.0))
        weights_s += link.time_s(num_bytes, messages)
        wait_s = link.time_s(work.sent_bytes[name] - num_bytes, count - messages)
        if name == "ring_exchange":
            ring_s += wait_s
        else:
            exchange_s += wait_s
    for name, num_bytes, messages, flops in work.behind:
        hidden_s = min(machine.link(name).time_s(num_bytes, messages), flops / machine.matmul_flops)
        exchange_s -= machine.overlap * hidden_s
    more_s, behind_s = _in_turns_s(work, machine, attention_s)
    exchange_s, ring_s = exchange_s + more_s - behind_s, ring_s + behind_s
    return TimeParts(compute_s, attention_s, ring_s, exchange_s, weights_s)


def _in_turns_s(work: Work, machine: Machine, attention_s: float) -> tuple[float, float]:
    """What the messages of an exchange in turns take more than those of one turn, and how much of
    them is under way while attention, of ``attention_s`` in all, is computed."""
    if (exchange := work.exchange) is None:
        return 0.0, 0.0
    on_host = machine.host_bandwidth is None
    _, turns = deal_in_turns(work.slots, exchange.each_bytes, on_host)
    link = machine.link("all_to_all")
    time_s = link.time_s(exchange.num_bytes, exchange.messages * turns)
    at_once_s = link.time_s(exchange.num_bytes, exchange.messages)
    return time_s - at_once_s, (1 - 1 / turns) * min(time_s, attention_s)


def _copies_s(work: Work, machine: Machine, block_s: float) -> float:
    """Seconds beyond ``block_s`` in which copies to the host, and back, are waited for."""
    bandwidth = machine.host_bandwidth or machine.memory_bandwidth
    shares = FORWARD_SHARE, 1 - FORWARD_SHARE
    passes = zip(work.copied_bytes, work.waited_bytes, shares, strict=True)
    return sum(
        waited / bandwidth + max(0.0, (copied - waited) / bandwidth - share * block_s)
        for copied, waited, share in passes
    )


def prior_cost(
    block: BlockSpec, point: str, workload: Workload, machine: Machine, sharded: bool = False
) -> BlockCost:
    """Predicted cost of ``block`` under ``point`` on one of ``workload.num_ranks`` ranks.

    Feasibility is not looked at. Training adds the backward pass and gradients.

    Raises:
        ValueError: the strategy is unknown.
    """
    work = count_work(block, point, workload, sharded, machine.repeatable)
    return _cost(work, machine, left_bytes(block, workload, sharded))


def head_cost(
    head: HeadSpec, levers: str, workload: Workload, machine: Machine, sharded: bool = False
) -> BlockCost:
    """Predicted cost of ``head``, loss included, with the ``levers`` that ``Plan.head`` has."""
    work = count_head(head, levers, workload, sharded, machine.repeatable)
    return _cost(work, machine, left_bytes(head, workload, sharded))


def left_bytes(part: BlockSpec | HeadSpec, workload: Workload, sharded: bool) -> int:
    """Bytes that ``part`` leaves until the end of a step: gradients of whole weights; a head whose
    logits are returned also its input, the rank's tokens, of which they may be made as long as the
    caller has the outputs. Whole logits, in its place, are more, and are not counted: while there
    are their gradients too a step needs more yet.

    Args:
        part: a block, or a head.
    """
    if isinstance(part, BlockSpec):
        return gradient_bytes(part, workload, sharded)
    gradients = gradient_bytes(weight_of(part), workload, sharded)
    return gradients + part.hidden * _bytes_of_width(workload) * part.returned


def made_again(blocks: Sequence[BlockSpec], workload: Workload) -> list[int]:
    """Per block of ``blocks`` the bytes of its input, where the attention right before it may make
    that again, else 0."""

    return [b.hidden * _bytes_of_width(workload.of(b)) if b.follows else 0 for b in blocks]


def _bytes_of_width(workload: Workload) -> int:
    """Bytes that each element of a token's width takes in the residual stream on a rank when
    training; else 0."""
    local_len = TokenLayout(workload.num_ranks, workload.seq_len).local_len
    wide = max(workload.dtype.itemsize, workload.weight_itemsize)
    return workload.batch * local_len * wide * workload.training


def head_sum_s(head: HeadSpec, levers: str, workload: Workload, machine: Machine) -> float:
    """Seconds in which the ranks' gradients of the whole weight of ``head`` are brought together
    where it has these ``levers``, at the end of the backward of the model."""
    work = Work(weight_of(head), workload)
    work.fetch_weights("whole", False, machine.repeatable and levers == REPLICATED)
    return seconds(work, machine)


def weight_of(head: HeadSpec) -> BlockSpec:
    """The weight of ``head``, as of a block that has no other."""
    return BlockSpec(HEAD, HEAD, 0, "", num_weight_elements=head.hidden * head.vocabulary)


def _cost(work: Work, machine: Machine, left_bytes: int) -> BlockCost:
    return BlockCost(
        time_s=seconds(work, machine),
        saved_bytes=int(work.saved_bytes) if work.back else 0,
        workspace_bytes=int(work.workspace_bytes),
        comm_bytes=int(sum(work.sent_bytes.values())),
        left_bytes=left_bytes,
        host_bytes=int(work.host_bytes),
        ahead_bytes=int(work.ahead_bytes),
        parts=time_parts(work, machine),
    )


def gradient_sum_s(block: BlockSpec, point: str, workload: Workload, machine: Machine) -> float:
    """Seconds in which the ranks' gradients of whole weights are brought together under ``point``,
    predicted.

    They are at the end of the backward of the model, so in no block's measured time.
    """
    work, strategy = Work(block, workload), strategy_named(Point.parse(point).strategy)
    compared = machine.repeatable and strategy.name == REPLICATED
    work.fetch_weights(strategy.weights, False, compared)
    return seconds(work, machine)
