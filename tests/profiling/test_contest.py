"""What is measured first: what decides, as much as there is time for, and no more."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool
from test_measure import EAGER, make_tiny, tiny_batch

from paradyse import profile
from paradyse.planning.costs import Machine as Rates
from paradyse.planning.costs import TimeParts
from paradyse.planning.measured import CostModel
from paradyse.planning.prior import prior_cost
from paradyse.planning.profile_file import MEASURED, OVER_LIMIT, Header, Measurement, Profile
from paradyse.profiling.contest import REACH, SETTLED, Contest, Known, Turn, lost_s
from paradyse.profiling.steps import REST_PART, PartKey, Steps
from paradyse.strategies import canonical_strategy
from paradyse.types import ALONG_SEQUENCE, BlockSpec, HeadSpec, Workload

LENGTHS = tuple(128 * 2**i for i in range(8))
RATES = Rates(3e14, 2e12, 1e-5, 2e11, op_overhead_s=0.0)
ATTENTION = BlockSpec("a", "attention", 0, "a", hidden=1024, num_heads=16, num_kv_heads=16)
ATTENTION = replace(
    ATTENTION, head_dim=64, num_weight_elements=2**22, num_split_weight_elements=2**22
)
MLP = BlockSpec("m", "mlp", 0, "m", hidden=1024, intermediate=4096)
MLP = replace(MLP, num_weight_elements=2**23, num_split_weight_elements=2**23)
EXACT = TimeParts(1, 1, 1, 1, 1)
HEADER = Header({}, "a device", 4, "bfloat16", True, "inductor", asdict(RATES))
PARTS = TimeParts(0.15, 0.25, 0.4, 0.3, 0.5)
"""Standard deviations of what the machine's parts are off."""


class Machine(Steps):
    """Blocks that take what the prior says, each part of it off by a factor of its own.

    Args:
        off: of the parts; ``EXACT``: as the prior says.
        own: standard deviation of the logarithm of what each variant is off besides.
        noise: the same of every measurement.
    """

    def __init__(
        self, off: TimeParts = EXACT, seed: int = 0, own: float = 0.0, noise: float = 0.0
    ) -> None:
        self.blocks = (ATTENTION, MLP)
        self.training, self.head, self.off = True, None, off
        self.rng, self.noise = random.Random(seed), noise
        self.own = {
            name: random.Random(f"{name} {seed}").lognormvariate(0, own) for name in ALONG_SEQUENCE
        }
        self.seconds = 0.0
        """Spent on measuring."""
        self.known: dict[tuple[PartKey, int], Measurement] = {}

    def workload(self, seq_len: int) -> Workload:
        return Workload(1, seq_len, torch.bfloat16, True, 4)

    def part(self, of: BlockSpec | HeadSpec | None, name: str) -> PartKey:
        assert isinstance(of, BlockSpec)
        return of.structure, of.kind, canonical_strategy(of.kind, name)

    def block_s(self, block: BlockSpec, variant: str, seq_len: int) -> float:
        cost = prior_cost(block, variant, self.workload(seq_len), RATES, sharded=True)
        shares = np.array(cost.parts) / sum(cost.parts)
        return cost.time_s * float(shares @ np.array(self.off)) * self.own[variant]

    def step_s(self, name: str, seq_len: int) -> float:
        return sum(self.block_s(b, self.part(b, name)[2], seq_len) for b in self.blocks)

    def cost_model(self) -> CostModel:
        return CostModel(Profile(HEADER, tuple(self.known.values()), "p.jsonl", 0))

    def measure(self, turn: Turn) -> None:
        """Add what ``turn`` tells, and the time that it takes."""

        def note(part: PartKey, seconds: float = 0.0, outcome: str = MEASURED) -> None:
            found = Measurement(*part, 1, turn.seq_len, True, outcome, seconds / 3, seconds / 1.5)
            self.known.setdefault((part, turn.seq_len), found)

        note(REST_PART, 1e-3)
        for name in turn.names:
            self.seconds += timing_s(self.step_s(name, turn.seq_len))
            for b in self.blocks:
                part = self.part(b, name)
                disturbed = self.rng.lognormvariate(0, self.noise)
                note(part, self.block_s(b, part[2], turn.seq_len) * disturbed)

    def loss(self) -> float:
        """Share of time that is lost by choosing as the measurements say, over all lengths."""
        costs, lost = self.cost_model(), []
        for n in (round(LENGTHS[0] * 2 ** (i / 4)) for i in range(4 * len(LENGTHS) - 3)):
            taken_s = least_s = 0.0
            for b in self.blocks:
                true = {v: self.block_s(b, v, n) for _, _, v in (self.part(b, s) for s in NAMES)}
                said = {v: costs.cost(b, v, self.workload(n)).time_s for v in true}
                taken_s += true[min(said, key=said.__getitem__)]
                least_s += min(true.values())
            lost.append(taken_s / least_s - 1)
        return statistics.mean(lost)


NAMES = ALONG_SEQUENCE


def timing_s(step_s: float) -> float:
    return 8 * step_s


def contest(machine: Machine, names: tuple[str, ...] = NAMES) -> Contest:
    return Contest(machine, LENGTHS, names, timing_s)


def run(machine: Machine, seconds: float = math.inf) -> list[Turn]:
    """All turns of a contest of so many seconds."""
    found, of = [], contest(machine)
    while turn := of.next(machine.known, machine.cost_model(), seconds - machine.seconds):
        machine.measure(turn)
        found.append(turn)
    return found


def some_machine(seed: int) -> Machine:
    rng = random.Random(seed)
    off = TimeParts(*(rng.lognormvariate(0, 1.5 * sigma) for sigma in PARTS))
    return Machine(off, seed, own=0.1, noise=0.01)


def test_what_is_lost_by_not_knowing() -> None:
    """Against the mean over many draws."""
    times = {"a": 1.2, "b": 1.0, "c": 3.0}
    deviation = np.array([[0, 0.3, 0.5], [0.3, 0, 0.4], [0.5, 0.4, 0]])
    best, lost = lost_s(times, deviation)
    assert best == "b" and lost.keys() == {"a", "c"} and lost["c"] < 1e-3 < lost["a"]
    rng = np.random.default_rng(0)
    ratio = 1.2 * np.exp(0.3 * rng.standard_normal(400_000))
    assert lost["a"] == pytest.approx(np.maximum(0, 1 - ratio).mean(), rel=0.02)
    assert lost_s(times, 0 * deviation) == ("b", {"a": 0.0, "c": 0.0})


def test_few_measurements_tell_nearly_as_much_as_all() -> None:
    lost: dict[str, list[float]] = {"none": [], "some": [], "all": []}
    shares, pairs = [], len(LENGTHS) * len(NAMES)
    for seed in (0, 2, 3, 4):
        machine, whole = some_machine(seed), some_machine(seed)
        lost["none"].append(machine.loss())
        turns = run(machine)
        lost["some"].append(machine.loss())
        for n in LENGTHS:
            whole.measure(Turn(n, NAMES, 1.0))
        lost["all"].append(whole.loss())
        assert sum(len(t.names) for t in turns) < 0.75 * pairs
        shares.append(machine.seconds / whole.seconds)
    none, some, all_of = (statistics.mean(of) for of in lost.values())
    assert some < 0.3 * none and some < all_of + 2 * SETTLED
    assert statistics.mean(shares) < 0.5


def test_what_is_settled_is_not_measured() -> None:
    """Two strategies, of which one is far slower everywhere: only what any curve needs."""
    machine = Machine()
    machine.own["metp"] = 20.0
    found, of = [], contest(machine, ("megatron_ts", "metp"))
    while turn := of.next(machine.known, machine.cost_model(), math.inf):
        machine.measure(turn)
        found.append(turn)
    metp = [t.seq_len for t in found if "metp" in t.names]
    assert len(metp) <= 2 and {t.seq_len for t in found} >= {LENGTHS[0], LENGTHS[-1]}


def test_longer_lengths_are_come_to_step_by_step() -> None:
    turns = run(some_machine(0))
    longest = LENGTHS[0]
    for turn in turns:
        assert turn.seq_len <= REACH * longest
        longest = max(longest, turn.seq_len)
    assert longest == LENGTHS[-1]


def test_no_more_than_the_seconds_that_are_left() -> None:
    everything = some_machine(1)
    run(everything)
    for share in (0.1, 0.5):
        machine = some_machine(1)
        turns = run(machine, share * everything.seconds)
        assert turns and machine.seconds <= share * everything.seconds * 1.05


def test_what_compiles_counts() -> None:
    """Strategies that have run are measured where one that has not would take too long."""
    machine = some_machine(0)
    of = contest(machine)
    first = of.next(machine.known, machine.cost_model(), math.inf)
    assert first is not None
    machine.measure(first)
    of.note_first(*first.names, 1000.0)
    turn = of.next(machine.known, machine.cost_model(), 500.0)
    while turn is not None:
        assert turn.names == first.names
        machine.measure(turn)
        turn = of.next(machine.known, machine.cost_model(), 500.0)


def test_what_was_over_the_limit_is_not_measured_at_longer_lengths() -> None:
    machine = some_machine(0)

    def add(outcome: str, names: tuple[str, ...], seq_len: int) -> Known:
        for name in names:
            for b in machine.blocks:
                part = machine.part(b, name)
                machine.known[part, seq_len] = Measurement(*part, 1, seq_len, True, outcome)
        return machine.known

    machine.measure(Turn(LENGTHS[0], ("megatron_ts",), 1.0))
    add(OVER_LIMIT, ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z"), LENGTHS[1])
    turns = run(machine)
    assert {s for t in turns if t.seq_len >= LENGTHS[1] for s in t.names} <= {"metp"}
    add(OVER_LIMIT, NAMES, LENGTHS[0])
    assert contest(machine).next(machine.known, machine.cost_model(), math.inf) is None


def measure_what_decides(path: str, seconds: int) -> dict[str, Any]:
    """A profile, the same once more, and losses of a model that is planned by it."""
    lengths = (8, 16, 32, 64)
    given: dict[str, Any] = {"options": EAGER, "make_batch": tiny_batch, "repeats": 1}
    seen: list[Any] = []
    found = profile(make_tiny(), path, lengths, seconds=seconds, progress=seen.append, **given)
    tiny = make_tiny()
    auto = torch.compile(tiny, backend="paradyse", options={**EAGER, "cost_model": path})
    losses = [(auto(**tiny_batch(1, n)).item(), tiny(**tiny_batch(1, n)).item()) for n in (8, 50)]
    return {"profile": found, "losses": losses, "seen": [(p.done, p.total) for p in seen]}


@pytest.mark.broad
def test_a_profile_of_a_minute(pool2: RankPool, tmp_path: Path) -> None:
    results = pool2.run(measure_what_decides, str(tmp_path / "p.jsonl"), 4, timeout_s=200)
    (first, second), found = results, results[0]["profile"]
    assert second["profile"] == found and not second["seen"]
    done = [d for d, _ in first["seen"]]
    assert (
        done == sorted(done)
        and first["seen"][-1] == (4, 4)
        and {t for _, t in first["seen"]} == {4}
    )
    measured = [m for m in found.measurements if m.kind == "attention"]
    assert 1 <= len(measured) < 4 * len(ALONG_SEQUENCE)
    assert len({(m.strategy, m.seq_len) for m in measured}) == len(measured)
    for losses in (first["losses"], second["losses"]):
        for auto, eager in losses:
            assert auto == pytest.approx(eager, rel=1e-5)
    with pytest.raises(ValueError, match="seconds 0: give a whole number of at least 1"):
        profile(make_tiny(), tmp_path / "q", (8,), seconds=0)
