"""How far predicted costs are off at lengths that were not profiled.

    python benchmarks/cost_error.py PROFILE.jsonl ... --model CONFIG.json ...
    python benchmarks/cost_error.py --quick    # of figures that nobody measured

Takes measurements away from a profile and predicts them from the others, with each estimator:

- between: every other length is taken away, the shortest and the longest stay;
- beyond: all but the lengths up to a quarter of the longest are taken away.

An error is |predicted - measured| / measured, of the time and of the memory (saved and workspace)
of one block structure under one strategy. The hybrid also looks at the analytic prior, for which
the blocks' widths must be known: those of the models given, found by their structure.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import llama
from runner import Benchmark, benchmark

from paradyse.cli.commands.plan import dry_run_of
from paradyse.cli.models import read_config
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.curves import (
    DEGREES,
    FOREST,
    MIN_POINTS,
    POLYNOMIAL,
    Curve,
    GrowthFactor,
    Point,
    fit_forest,
    fit_polynomial,
)
from paradyse.planning.measured import REST, CostModel, prior_growths
from paradyse.planning.prior import gradient_sum_s, prior_cost
from paradyse.planning.profile_file import MEASURED, Header, Measurement, Profile, read_profile
from paradyse.types import BlockSpec, Workload

PROFILES = {"flags": ["profiles"], "nargs": "*", "help": "files that `paradyse profile` wrote"}
MODEL: dict[str, Any] = {"action": "append", "default": [], "metavar": "CONFIG.json"}
MODEL["help"] = "of a profiled model, for the prior; once for each (default: no prior)"

Row = tuple[str, str, str, bool]
"""Kind, structure, variant, training."""

HYBRID = "hybrid"
"""What is used (``curves.Curve``); beside it the published forms alone."""
ESTIMATOR_NAMES = (HYBRID, FOREST, POLYNOMIAL)


Error = dict[str, Any]
"""Of one prediction: ``estimator``, ``where``, ``label`` (kind and variant), ``power`` (the length
lies between 2^power and its double), and the relative errors of ``time`` and ``memory``."""


def blocks_of(config: dict[str, Any], profile: Profile) -> dict[str, BlockSpec]:
    """By structure, the blocks of a model on the profile's ranks."""
    header = profile.header
    run = dry_run_of(config, None, header.dtype, header.num_ranks, header.sharded)
    return {b.structure: b for b in run.blocks}


def prior_of(
    profile: Profile, row: Row, blocks: Mapping[str, BlockSpec]
) -> Callable[[Point], BlockCost]:
    """The prior, of what is measured of a block: without the messages of its gradients."""
    _, structure, variant, training = row
    block, machine, header = blocks[structure], CostModel(profile).machine, profile.header

    def cost(at: Point) -> BlockCost:
        w = Workload(*at, getattr(torch, header.dtype), training, header.num_ranks)
        whole = prior_cost(block, variant, w, machine, header.sharded)
        sums_s = 0.0 if header.sharded else gradient_sum_s(block, variant, w, machine)
        return replace(whole, time_s=whole.time_s - sums_s)

    return cost


def splits(points: Mapping[Point, Measurement]) -> Iterator[tuple[str, list[Point], list[Point]]]:
    """What is kept and what is taken away, for each of the two questions."""
    lengths = sorted({s for _, s in points})
    short = {s for s in lengths if s <= lengths[-1] / 4}
    for where, kept in (("between", {*lengths[::2], lengths[-1]}), ("beyond", short)):
        fit = [p for p in points if p[1] in kept]
        ask = [p for p in points if p[1] not in kept]
        if len(fit) >= MIN_POINTS and ask:
            yield where, fit, ask


def errors_of(profile: Profile, blocks: Mapping[str, BlockSpec]) -> list[Error]:
    rows: dict[Row, dict[Point, Measurement]] = {}
    for m in profile.measurements:
        if m.outcome == MEASURED:
            row = m.kind, m.structure, m.strategy, m.training
            rows.setdefault(row, {})[m.batch, m.seq_len] = m
    found = []
    for row, measured in rows.items():
        known = row[1] in blocks
        growths = prior_growths(prior_of(profile, row, blocks)) if known else (None,) * 3
        degrees = DEGREES[:1] if row[0] == REST else DEGREES
        label = " ".join(filter(None, (row[0], row[2])))
        for (where, fit, ask), name in product(splits(measured), ESTIMATOR_NAMES):
            samples = [{p: quantities(measured[p])[i] for p in fit} for i in range(3)]
            curves = [estimator(of, name, g, degrees) for of, g in zip(samples, growths)]
            for p in ask:
                step_s, *held = quantities(measured[p])
                said_s, *said = (curve(*p) for curve in curves)
                off_bytes = abs(sum(said) / sum(held) - 1) if sum(held) else 0.0
                error = {"estimator": name, "where": where, "label": label}
                error |= {"power": p[1].bit_length() - 1, "time": abs(said_s / step_s - 1)}
                found.append(error | {"memory": off_bytes})
    return found


def estimator(
    measured: Mapping[Point, float], name: str, growth: GrowthFactor | None, degrees: Sequence[int]
) -> Callable[[int, int], float]:
    """(Batch, length) to one quantity."""
    if name == HYBRID:
        curve = Curve(measured, growth, degrees)
        return lambda *at: curve(*at)[0]
    points = sorted(measured)
    values = [max(measured[p], 1e-9) for p in points]
    if name == FOREST:
        return fit_forest(points, values)
    return fit_polynomial(points, values, None, degrees)


def quantities(m: Measurement) -> tuple[float, float, float]:
    return m.forward_s + m.backward_s, m.saved_bytes, m.workspace_bytes


def select(errors: Sequence[Error], **equal: object) -> list[Error]:
    return [e for e in errors if all(e[k] == v for k, v in equal.items())]


def median_p90(errors: Sequence[Error], what: str) -> list[str]:
    """In percent."""
    if not errors:
        return ["-", "-"]
    values = 100 * np.quantile([e[what] for e in errors], (0.5, 0.9))
    return [f"{v:.1f} %" for v in values]


def known_law(config: dict[str, Any], noise: float = 0.03) -> Profile:
    """Measurements that were not made: the prior of a small machine, each off by some noise."""
    machine = Machine(9e10, 6e9, 1.5e-4, 1e9, attention_flops=5.5e10, op_overhead_s=3e-6)
    header = Header({}, "none", 2, "float32", True, "eager", asdict(machine))
    law, rng, rows = Profile(header, (), "a known law", 0), np.random.default_rng(0), []
    lengths = 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096
    strategies = "megatron_ts", "megatron_cz", "metp"
    for block, strategy, s in product(blocks_of(config, law).values(), strategies, lengths):
        c = prior_cost(block, strategy, Workload(1, s, torch.float32, True, 2), machine, True)
        step_s = c.time_s * math.exp(noise * rng.standard_normal())
        row = block.structure, block.kind, strategy, 1, s, True, MEASURED, step_s / 3, step_s / 1.5
        rows.append(Measurement(*row, c.saved_bytes, c.workspace_bytes))
    return replace(law, measurements=tuple(rows))


def report_on(
    bench: Benchmark, profile: Profile, name: str, blocks: Mapping[str, BlockSpec]
) -> None:
    """Tables and goals of one profile."""
    first = profile.header
    known = {m.structure for m in profile.measurements if m.kind != REST} <= blocks.keys()
    name = f"{name}, {first.num_ranks} ranks"
    bench.add(
        f"## {name}",
        "",
        f"{len(profile.measurements)} measurements on {first.device}, {first.num_ranks} ranks, "
        f"{first.dtype}, inner={first.inner}, "
        f"{'sharded' if first.sharded else 'whole'} weights; the hybrid "
        f"{'looks' if known else 'cannot look'} at the prior.",
    )
    errors = errors_of(profile, blocks)
    hybrid, rows, by_length = select(errors, estimator=HYBRID), [], []
    wheres = [w for w in ("between", "beyond") if select(hybrid, where=w)]
    for where in wheres:
        for n in sorted(ESTIMATOR_NAMES):
            of = select(errors, where=where, estimator=n)
            counted = [n, where, str(len(of))]
            rows.append([*counted, *median_p90(of, "time"), *median_p90(of, "memory")])
        for power in sorted({e["power"] for e in select(errors, where=where)}):
            of = select(hybrid, where=where, power=power)
            row = [f"{where}, {2**power} to {2 ** (power + 1) - 1}", str(len(of))]
            for n in ESTIMATOR_NAMES:
                row += median_p90(select(errors, where=where, power=power, estimator=n), "time")
            by_length.append(row + median_p90(of, "memory"))
    header = ["time median", "time p90", "memory median", "p90"]
    bench.table(["estimator", "where", "predictions", *header], rows)
    bench.add("", "The hybrid's time errors by strategy:")
    rows = []
    for label in sorted({e["label"] for e in hybrid}):
        of_each = [select(hybrid, where=w, label=label) for w in wheres]
        rows.append([label, *(median_p90(of, "time")[0] for of in of_each)])
    bench.table(["part", *(f"{w}, median" for w in wheres)], rows)
    bench.add("", "Errors by length, in tokens:")
    header = ["lengths", "predictions"]
    for what in (*(f"{n}, time" for n in ESTIMATOR_NAMES), f"{HYBRID}, memory"):
        header += [f"{what} median", "p90"]
    bench.table(header, by_length)
    bench.add("")
    for where in wheres:
        off = [100 * e["time"] for e in select(hybrid, where=where)]
        bench.at_most(f"{name}: median time error {where}, %", float(np.median(off)), 10)
        bench.at_most(f"{name}: 90th percentile {where}, %", float(np.quantile(off, 0.9)), 25)


@benchmark(profiles=PROFILES, model=MODEL)
def main(bench: Benchmark, args: Namespace) -> str:
    if not args.profiles and not args.quick:
        raise SystemExit("give the path of a profile, or --quick")
    if args.quick:
        config = llama(1, 256).config.to_dict()
        law = known_law(config)
        report_on(bench, law, "a known law", blocks_of(config, law))
    configs = [read_config(path) for path in args.model]
    for path in args.profiles:
        profile = read_profile(path)
        needed = {m.structure for m in profile.measurements if m.kind != REST}
        found = ((str(c["model_type"]), blocks_of(c, profile)) for c in configs)
        fitting = (of for of in found if needed <= of[1].keys())
        name, blocks = next(fitting, (Path(path).stem, {}))
        report_on(bench, profile, name, blocks)
    return "predictions only"
