"""How far predicted costs are off at lengths that were not profiled.

    .venv/bin/python benchmarks/cost_error.py PROFILE.jsonl ... --model CONFIG.json ...

Takes measurements away from a profile and predicts them from the others, with each estimator:

- between: every other length is taken away, the shortest and the longest stay;
- beyond: all but the lengths up to a quarter of the longest are taken away.

An error is |predicted - measured| / measured, of the time and of the memory (saved and workspace)
of one block structure under one strategy. The hybrid also looks at the analytic prior, for which
the blocks' widths must be known: those of the models given, found by their structure.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Goal, Report, llama, parser, table

from paradyse.cli.commands.plan import dry_run_of
from paradyse.cli.models import read_config
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.curves import DEGREES, ESTIMATOR_NAMES, HYBRID, MIN_POINTS, Curve, Point
from paradyse.planning.measured import REST, CostModel, prior_growths
from paradyse.planning.prior import gradient_sum_s, prior_cost
from paradyse.planning.profile_file import MEASURED, Measurement, Profile, Setting, read_profile
from paradyse.types import BlockSpec, Workload

Row = tuple[str, str, str, bool]
"""Kind, structure, variant, training."""
Errors = dict[tuple[str, str], list[tuple[float, float, str, int]]]


def blocks_of(config: dict[str, Any], profile: Profile) -> dict[str, BlockSpec]:
    """By structure, the blocks of a model on the profile's ranks."""
    setting = profile.setting
    run = dry_run_of(config, None, setting.dtype, setting.num_ranks, setting.sharded)
    return {b.structure: b for b in run.blocks}


def prior_of(
    profile: Profile, row: Row, blocks: Mapping[str, BlockSpec]
) -> Callable[[Point], BlockCost] | None:
    """The prior, of what is measured of a block: without the messages of its gradients."""
    _, structure, variant, training = row
    if structure not in blocks:
        return None
    block, machine, setting = blocks[structure], CostModel(profile).machine, profile.setting

    def cost(at: Point) -> BlockCost:
        w = Workload(*at, getattr(torch, setting.dtype), training, setting.num_ranks)
        whole = prior_cost(block, variant, w, machine, setting.sharded)
        sums_s = 0.0 if setting.sharded else gradient_sum_s(block, variant, w, machine)
        return replace(whole, time_s=whole.time_s - sums_s)

    return cost


def by_row(profile: Profile) -> dict[Row, dict[Point, Measurement]]:
    rows: dict[Row, dict[Point, Measurement]] = {}
    for m in profile.measurements:
        if m.outcome == MEASURED:
            key = m.kind, m.structure, m.strategy, m.training
            rows.setdefault(key, {})[m.batch, m.seq_len] = m
    return rows


def splits(points: Mapping[Point, Measurement]) -> Iterator[tuple[str, list[Point], list[Point]]]:
    """What is kept and what is taken away, for each of the two questions."""
    lengths = sorted({s for _, s in points})
    kept = {*lengths[::2], lengths[-1]}
    short = [s for s in lengths if s <= lengths[-1] / 4]
    for where, lengths_kept in (("between", kept), ("beyond", set(short))):
        fit = [p for p in points if p[1] in lengths_kept]
        ask = [p for p in points if p[1] not in lengths_kept]
        if len(fit) >= MIN_POINTS and ask:
            yield where, fit, ask


def errors_of(profile: Profile, blocks: Mapping[str, BlockSpec]) -> Errors:
    """(Estimator, where) to the relative errors of time and memory, the row's name, the length."""
    found: Errors = {}
    for row, measured in by_row(profile).items():
        prior = prior_of(profile, row, blocks)
        growths = prior_growths(prior) if prior else (None,) * 3
        degrees = DEGREES[:1] if row[0] == REST else DEGREES
        for where, fit, ask in splits(measured):
            for name in ESTIMATOR_NAMES:
                samples = {p: quantities(measured[p]) for p in fit}
                time_s, saved, workspace = (
                    Curve({p: q[i] for p, q in samples.items()}, name, growth, degrees)
                    for i, growth in enumerate(growths)
                )
                for p in ask:
                    step_s, *held = quantities(measured[p])
                    off_s = abs(time_s(*p)[0] / step_s - 1)
                    predicted = saved(*p)[0] + workspace(*p)[0]
                    off_bytes = abs(predicted / sum(held) - 1) if sum(held) else 0.0
                    label = " ".join(filter(None, (row[0], row[2])))
                    found.setdefault((name, where), []).append((off_s, off_bytes, label, p[1]))
    return found


def by_length(found: Errors) -> list[str]:
    """Lines of a table: errors of time of every estimator in each range of lengths, and the
    hybrid's of memory. Ranges double."""
    cells: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = {}
    for (name, where), errors in found.items():
        for off_s, off_bytes, _, seq_len in errors:
            at = cells.setdefault((where, seq_len.bit_length() - 1), {})
            at.setdefault(name, []).append((off_s, off_bytes))
    rows = []
    for (where, power), of in sorted(cells.items(), key=lambda x: (x[0][0] != "between", x[0][1])):
        row = [f"{where}, {2**power} to {2 ** (power + 1) - 1}", str(len(of[HYBRID]))]
        for values in [
            *([e[0] for e in of[n]] for n in ESTIMATOR_NAMES),
            [e[1] for e in of[HYBRID]],
        ]:
            row += [percent(statistics.median(values)), percent(float(np.quantile(values, 0.9)))]
        rows.append(row)
    header = ["lengths", "predictions"]
    for what in (*(f"{n}, time" for n in ESTIMATOR_NAMES), f"{HYBRID}, memory"):
        header += [f"{what} median", "p90"]
    return table(header, rows)


def quantities(m: Measurement) -> tuple[float, float, float]:
    return m.forward_s + m.backward_s, m.saved_bytes, m.workspace_bytes


def known_law(config: dict[str, Any], noise: float = 0.03) -> Profile:
    """Measurements that were not made: the prior of a small machine, each off by some noise."""
    machine = Machine(9e10, 6e9, 1.5e-4, 1e9, attention_flops=5.5e10, op_overhead_s=3e-6)
    setting = Setting({}, "none", 2, "float32", True, "eager", asdict(machine))
    rng, rows = np.random.default_rng(0), []
    for structure, block in blocks_of(config, Profile(setting, (), "a known law", 0)).items():
        for strategy in ("megatron_ts", "megatron_cz", "metp"):
            for s in (128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096):
                c = prior_cost(
                    block, strategy, Workload(1, s, torch.float32, True, 2), machine, True
                )
                step_s = c.time_s * math.exp(noise * rng.standard_normal())
                times = step_s / 3, step_s / 1.5
                held = c.saved_bytes, c.workspace_bytes
                at = structure, block.kind, strategy, 1, s, True, MEASURED
                rows.append(Measurement(*at, *times, *held))
    return Profile(setting, tuple(rows), "a known law", 0)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def report_on(report: Report, profile: Profile, name: str, blocks: Mapping[str, BlockSpec]) -> None:
    """Tables and goals of one profile."""
    setting = profile.setting
    known = {m.structure for m in profile.measurements if m.kind != REST} <= blocks.keys()
    report.add(
        f"## {name}, {setting.num_ranks} ranks",
        "",
        f"{len(profile.measurements)} measurements on {setting.device}, {setting.num_ranks} ranks, "
        f"{setting.dtype}, inner={setting.inner}, "
        f"{'sharded' if setting.sharded else 'whole'} weights; the hybrid "
        f"{'looks' if known else 'cannot look'} at the prior.",
        "",
    )
    found = errors_of(profile, blocks)
    header = (
        "estimator",
        "where",
        "predictions",
        "time median",
        "time p90",
        "memory median",
        "p90",
    )
    rows = []
    for (estimator, where), errors in sorted(found.items(), key=lambda x: (x[0][1], x[0][0])):
        cells = [str(len(errors))]
        for i in (0, 1):
            values = [e[i] for e in errors]
            cells += [percent(statistics.median(values)), percent(float(np.quantile(values, 0.9)))]
        rows.append((estimator, where, *cells))
    report.add(*table(header, rows), "", "The hybrid's time errors by strategy:", "")
    labels = sorted({e[2] for errors in found.values() for e in errors})
    wheres = [w for w in ("between", "beyond") if (HYBRID, w) in found]
    medians = []
    for label in labels:
        of = [[e[0] for e in found[HYBRID, w] if e[2] == label] for w in wheres]
        medians.append((label, *(percent(statistics.median(x)) if x else "-" for x in of)))
    report.add(*table(("part", *(f"{w}, median" for w in wheres)), medians), "")
    report.add("Errors by length, in tokens:", "", *by_length(found), "")
    for where in wheres:
        values = [e[0] for e in found[HYBRID, where]]
        median, p90 = statistics.median(values), float(np.quantile(values, 0.9))
        of = f"{name}, {setting.num_ranks} ranks"
        report.goals += [
            Goal(f"{of}: median time error {where}, %", 100 * median, 10, False),
            Goal(f"{of}: 90th percentile {where}, %", 100 * p90, 25, False),
        ]


def main(args: argparse.Namespace) -> int:
    if not args.profiles and not args.quick:
        raise SystemExit("give the path of a profile, or --quick")
    report = Report("cost_error", args)
    if args.quick:
        config = llama(1, 256).config.to_dict()
        law = known_law(config)
        report_on(report, law, "a known law", blocks_of(config, law))
    configs = [read_config(path) for path in args.model]
    for path in args.profiles:
        profile = read_profile(path)
        needed = {m.structure for m in profile.measurements if m.kind != REST}
        name, blocks = Path(path).stem, {}
        for config in configs:
            found = blocks_of(config, profile)
            if needed <= found.keys():
                name, blocks = str(config["model_type"]), found
                break
        report_on(report, profile, name, blocks)
    return report.finish("predictions only")


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.add_argument("profiles", nargs="*", help="files that `paradyse profile` wrote")
    flags.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="CONFIG.json",
        help="of a profiled model, for the prior; once for each (default: no prior)",
    )
    raise SystemExit(main(flags.parse_args()))
