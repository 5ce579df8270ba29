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
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import llama
from runner import Benchmark, benchmark, median

from paradyse.cli.commands.plan import dry_run_of
from paradyse.cli.models import read_config
from paradyse.planning.costs import Machine
from paradyse.planning.curves import (
    DEGREES,
    FOREST,
    MIN_POINTS,
    POLYNOMIAL,
    At,
    Curve,
    GrowthFactor,
    fit_forest,
    fit_polynomial,
)
from paradyse.planning.measured import REST, CostModel, prior_growths
from paradyse.planning.prior import prior_cost
from paradyse.planning.profile_file import MEASURED, Header, Measurement, Profile, read_profile
from paradyse.types import BlockSpec, Workload

PROFILES = {"flags": ["profiles"], "nargs": "*", "help": "files that `paradyse profile` wrote"}
MODEL: dict[str, Any] = {"action": "append", "default": [], "metavar": "CONFIG.json"}
MODEL["help"] = "of a profiled model, for the prior; once for each (default: no prior)"

HYBRID = "hybrid"
"""What is used (``curves.Curve``); beside it the published forms alone."""
ESTIMATORS = (HYBRID, FOREST, POLYNOMIAL)

Error = dict[str, Any]
"""Of one prediction: ``estimator``, ``where``, ``label`` (kind and variant), ``power`` (the length
lies between 2^power and its double), and the relative errors of ``time`` and ``memory``."""


def blocks_of(config: dict[str, Any], header: Header) -> dict[str, BlockSpec]:
    """By structure, the blocks of a model on the ranks of a profile."""
    run = dry_run_of(config, None, header.dtype, header.num_ranks, header.sharded)
    return {b.structure: b for b in run.blocks}


def splits(points: Sequence[At]) -> Iterator[tuple[str, list[At], list[At]]]:
    """What is kept and what is taken away, for each of the two questions."""
    lengths = sorted({s for _, s in points})
    short = {s for s in lengths if s <= lengths[-1] / 4}
    for where, kept in (("between", {*lengths[::2], lengths[-1]}), ("beyond", short)):
        fit = [p for p in points if p[1] in kept]
        ask = [p for p in points if p[1] not in kept]
        if len(fit) >= MIN_POINTS and ask:
            yield where, fit, ask


def errors_of(profile: Profile, blocks: Mapping[str, BlockSpec]) -> list[Error]:
    rows: dict[tuple[str, str, str, bool], dict[At, tuple[float, float, float]]] = {}
    for m in profile.measurements:
        if m.outcome == MEASURED:
            row = rows.setdefault((m.kind, m.structure, m.strategy, m.training), {})
            step_s = m.forward_s + m.backward_s
            row[m.batch, m.seq_len] = step_s, m.saved_bytes, m.workspace_bytes
    model, header, found = CostModel(profile), profile.header, []
    dtype = getattr(torch, header.dtype)
    for (kind, structure, strategy, training), measured in rows.items():
        growths: Sequence[GrowthFactor | None] = (None,) * 3
        if structure in blocks:
            like = partial(Workload, dtype=dtype, training=training, num_ranks=header.num_ranks)
            prior = partial(model.measurable, blocks[structure], strategy)
            growths = prior_growths(lambda at, like=like, of=prior: of(like(*at)))
        degrees = DEGREES[:1] if kind == REST else DEGREES
        label = f"{kind} {strategy}".strip()
        for (where, fit, ask), name in product(splits(sorted(measured)), ESTIMATORS):
            samples = zip(*(measured[p] for p in fit))
            curves = [
                estimator(dict(zip(fit, of)), name, growth, degrees)
                for of, growth in zip(samples, growths)
            ]
            for p in ask:
                step_s, *held = measured[p]
                said_s, *said = (curve(*p) for curve in curves)
                error: Error = {"estimator": name, "where": where, "label": label}
                error |= {"power": p[1].bit_length() - 1, "time": abs(said_s / step_s - 1)}
                error["memory"] = abs(sum(said) / sum(held) - 1) if sum(held) else 0.0
                found.append(error)
    return found


def estimator(
    measured: Mapping[At, float], name: str, growth: GrowthFactor | None, degrees: Sequence[int]
) -> Callable[[int, int], float]:
    """(Batch, length) to one quantity."""
    if name == HYBRID:
        curve = Curve(measured, growth, degrees)
        return lambda *at: curve(*at)[0]
    points, values = list(measured), [max(value, 1e-9) for value in measured.values()]
    if name == FOREST:
        return fit_forest(points, values)
    return fit_polynomial(points, values, None, degrees)


def select(errors: Sequence[Error], **equal: object) -> list[Error]:
    return [e for e in errors if all(e[k] == v for k, v in equal.items())]


def median_p90(errors: Sequence[Error], what: str) -> list[str]:
    """In percent."""
    if not errors:
        return ["-", "-"]
    return [f"{100 * v:.1f} %" for v in np.quantile([e[what] for e in errors], (0.5, 0.9))]


def known_law(config: dict[str, Any], noise: float = 0.03) -> Profile:
    """Measurements that were not made: the prior of a small machine, each off by some noise."""
    machine = Machine(9e10, 6e9, 1.5e-4, 1e9, attention_flops=5.5e10, op_overhead_s=3e-6)
    header = Header({}, "none", 2, "float32", True, "eager", asdict(machine))
    rng, rows = np.random.default_rng(0), []
    lengths = 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096
    strategies = "megatron_ts", "megatron_cz", "metp"
    for block, strategy, s in product(blocks_of(config, header).values(), strategies, lengths):
        c = prior_cost(block, strategy, Workload(1, s, torch.float32, True, 2), machine, True)
        step_s = c.time_s * math.exp(noise * rng.standard_normal())
        row = block.structure, block.kind, strategy, 1, s, True, MEASURED, step_s / 3, step_s / 1.5
        rows.append(Measurement(*row, c.saved_bytes, c.workspace_bytes))
    return Profile(header, tuple(rows), "a known law", 0)


def report_on(
    bench: Benchmark, profile: Profile, name: str, blocks: Mapping[str, BlockSpec]
) -> None:
    """Tables and goals of one profile; without ``blocks`` there is no prior."""
    first = profile.header
    name = f"{name}, {first.num_ranks} ranks"
    bench.add(
        f"## {name}",
        "",
        f"{len(profile.measurements)} measurements on {first.device}, {first.num_ranks} ranks, "
        f"{first.dtype}, inner={first.inner}, {'sharded' if first.sharded else 'whole'} weights; "
        f"the hybrid {'looks' if blocks else 'cannot look'} at the prior.",
    )
    errors = errors_of(profile, blocks)
    hybrid = select(errors, estimator=HYBRID)
    wheres = sorted({e["where"] for e in hybrid})
    rows = []
    for where, n in product(wheres, sorted(ESTIMATORS)):
        of = select(errors, where=where, estimator=n)
        rows.append([n, where, str(len(of)), *median_p90(of, "time"), *median_p90(of, "memory")])
    header = ["time median", "time p90", "memory median", "p90"]
    bench.table(["estimator", "where", "predictions", *header], rows)
    rows = []
    for label in sorted({e["label"] for e in hybrid}):
        of_each = [select(hybrid, where=w, label=label) for w in wheres]
        rows.append([label, *(median_p90(of, "time")[0] for of in of_each)])
    header = ["part", *(f"{w}, median" for w in wheres)]
    bench.table(header, rows, "The hybrid's time errors by strategy:")
    rows = []
    for where, power in sorted({(e["where"], e["power"]) for e in hybrid}):
        of_each = [select(errors, where=where, power=power, estimator=n) for n in ESTIMATORS]
        row = [f"{where}, {2**power} to {2 ** (power + 1) - 1}", str(len(of_each[0]))]
        row += [cell for of in of_each for cell in median_p90(of, "time")]
        rows.append(row + median_p90(of_each[0], "memory"))
    header = ["lengths", "predictions"]
    for what in (*(f"{n}, time" for n in ESTIMATORS), f"{HYBRID}, memory"):
        header += [f"{what} median", "p90"]
    bench.table(header, rows, "Errors by length, in tokens:")
    bench.add("")
    for where in wheres:
        times = [100 * e["time"] for e in select(hybrid, where=where)]
        bench.at_most(f"{name}: median time error {where}, %", median(times), 10)
        bench.at_most(f"{name}: 90th percentile {where}, %", np.quantile(times, 0.9), 25)


@benchmark(profiles=PROFILES, model=MODEL)
def main(bench: Benchmark, args: Namespace) -> str:
    if not args.profiles and not args.quick:
        raise SystemExit("give the path of a profile, or --quick")
    if args.quick:
        config = llama(1, 256).config.to_dict()
        law = known_law(config)
        report_on(bench, law, "a known law", blocks_of(config, law.header))
    configs = [read_config(path) for path in args.model]
    for path in args.profiles:
        profile = read_profile(path)
        needed = {m.structure for m in profile.measurements if m.kind != REST}
        found = ((str(c["model_type"]), blocks_of(c, profile.header)) for c in configs)
        fitting = (of for of in found if needed <= of[1].keys())
        name, blocks = next(fitting, (Path(path).stem, {}))
        report_on(bench, profile, name, blocks)
    return "predictions only"
