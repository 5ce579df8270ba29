"""What ranks keep and send, for families of other shapes than a decoder's: encoder-decoders,
images, experts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_table import FAMILIES
from harness import RankPool
from plans import blocks_of, choose
from small_models import Row, batch_of, make
from torch import Tensor

import paradyse
from paradyse.planning.costs import Machine
from paradyse.planning.prior import prior_cost
from paradyse.types import ATTENTION_STRATEGIES, EXPERTS, BlockSpec, Workload

MACHINE = Machine(3e14, 2e12, 1e-5, 2e11)
"""Bytes do not depend on it."""
APART = ("megatron_ts", "metp")
"""Strategies by which experts may be computed where their weights lie."""
LONG: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "t5": (512, ("num_layers", "num_decoder_layers"), {}),
    "vit": (8, ("num_hidden_layers",), {"image_size": 64, "patch_size": 4}),
    "mixtral": (512, ("num_hidden_layers",), {"max_position_embeddings": 512}),
    "whisper": (
        64,
        ("encoder_layers", "decoder_layers"),
        {"max_source_positions": 256, "max_target_positions": 128},
    ),
}
"""Family -> a length at which what every rank keeps weighs little, the fields that say how many
layers there are, and what of its configuration allows the length."""


def sent(family: str) -> tuple[list[tuple[str, str, int, int]], list[tuple[str, str, int, int]]]:
    """Of a training step under each strategy (block, strategy, bytes that it sent, bytes that the
    planner reckons with): of blocks whose messages are known beforehand, and of experts apart,
    whose messages depend on what the router says."""
    torch._dynamo.reset()
    row = FAMILIES[family]
    model = make(row)
    paradyse.shard(model)
    workloads: list[Workload] = []
    current: list[Any] = ["colossal_z"]

    def plan(workload: Workload) -> Any:
        workloads.append(workload)
        return current[0]

    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    batch = batch_of(row, model, 16)

    def counted() -> Counter[str]:
        before = Counter(paradyse.stats(compiled).bytes_per_block)
        compiled(**batch).loss.backward()
        return Counter(paradyse.stats(compiled).bytes_per_block) - before

    counted()
    blocks = blocks_of(compiled)
    known, routed = [], []
    for name in ATTENTION_STRATEGIES:
        current[0] = choose(name, blocks)
        got = counted()
        stacks: set[int] = set()
        for block, strategy in zip(blocks, current[0].strategies, strict=True):
            workload = workloads[-1].of(block)
            cost = prior_cost(block, strategy, workload, MACHINE, sharded=True)
            sums = 0
            first = block.kind == "attention" and block.sequence not in stacks
            if family == "t5" and first:
                stacks.add(block.sequence)
                sums = _sums_of_bias(block, workload)
            into = routed if block.kind == EXPERTS and name in APART else known
            into.append((block.name, strategy, got[block.name], cost.comm_bytes + sums))
    return known, routed


def _sums_of_bias(block: BlockSpec, workload: Workload) -> int:
    """What a sum of the gradient of a bias by distance sends, [heads, 2 S], of which each rank has
    its queries' or its heads' part: once for all layers of a stack, which share it, by the first.
    The planner takes it for nothing beside the values of tokens."""
    p = workload.num_ranks
    return 2 * block.num_heads * 2 * workload.seq_len * 4 * (p - 1) // p


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc"),
    [
        ("mixtral", 2),
        *(
            pytest.param(f, n, marks=pytest.mark.slow)
            for f, n in itertools.product(LONG, (2, 4))
            if (f, n) != ("mixtral", 2)
        ),
    ],
)
def test_a_step_sends_what_its_strategies_say(
    family: str, nproc: int, ranks: Callable[[int], RankPool]
) -> None:
    for known, routed in ranks(nproc).run(sent, family, timeout_s=300):
        assert known and [r for r in known if r[2] != r[3]] == []
        assert bool(routed) == (family == "mixtral")
        for row in routed:  # at most, all rows go to other ranks
            assert 0 < row[2] < row[3] * nproc / (nproc - 1), row


def kept(family: str) -> int:
    """Bytes that autograd keeps on this rank of two more layers, weights aside."""
    few, many = (_kept(family, layers) for layers in (2, 4))
    return many - few


def _kept(family: str, layers: int) -> int:
    torch._dynamo.reset()
    length, fields, config = LONG[family]
    row = FAMILIES[family]
    row = Row(row.cls, {**row.config, **config, **dict.fromkeys(fields, layers)}, row.batch)
    model = make(row)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    options = {"plan": "megatron_cz", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = batch_of(row, model, length)
    compiled(**batch)
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        if type(x) is Tensor:  # a first call with hooks is traced once more, with fakes
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = compiled(**batch).loss
    total = sum(s.nbytes() for at, s in storages.items() if at not in weights)
    loss.backward()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("family", LONG)
@pytest.mark.parametrize("nproc", [2, 4])
def test_what_layers_keep_is_shared_by_the_ranks(
    family: str, nproc: int, pool1: RankPool, ranks: Callable[[int], RankPool]
) -> None:
    (whole,) = pool1.run(kept, family, timeout_s=200)
    assert whole > 0
    for own in ranks(nproc).run(kept, family, timeout_s=200):
        assert own < 1.15 * whole / nproc, (own, whole)
