"""How far predicted costs are off at lengths that were not profiled.

    .venv/bin/python benchmarks/cost_error.py profile.jsonl --hidden 256

Takes measurements away from a profile and predicts them from the others, with each estimator:

- between: every other length is taken away, the shortest and the longest stay;
- beyond: all but the lengths up to a quarter of the longest are taken away.

An error is |predicted - measured| / measured, of the time and of the memory (saved and workspace)
of one block structure under one strategy. The hybrid also looks at the analytic prior, for which
the blocks' widths must be known: those of the Llama of ``benchmarks/common.py`` of a hidden size.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np
import torch
from common import Goal, Report, parser, table

from paradyse.cost import BlockCost, Machine, gradient_sum_s, prior_cost
from paradyse.cost_curves import DEGREES, ESTIMATOR_NAMES, HYBRID, MIN_POINTS, Curve, Point
from paradyse.cost_fit import REST, CostModel, prior_growths
from paradyse.profiles import MEASURED, Measurement, Profile, Setting, read_profile
from paradyse.types import BlockSpec, MaskSpec, Workload

Row = tuple[str, str, str, bool]
"""Kind, structure, variant, training."""


def llama_blocks(hidden: int, heads: int | None, kv_heads: int | None) -> dict[str, BlockSpec]:
    """By kind, the blocks of ``common.llama``."""
    heads = heads or hidden // 32
    kv_heads = kv_heads or heads // 2
    width, d = -(-hidden * 8 // 3 // 8) * 8, hidden // heads
    weights = {"attention": 2 * hidden * d * (heads + kv_heads), "mlp": 3 * hidden * width}
    shapes = {
        "attention": {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": d},
        "mlp": {"intermediate": width},
    }
    return {
        kind: BlockSpec(
            kind,
            kind,
            0,
            kind,
            hidden=hidden,
            num_weight_elements=n,
            num_split_weight_elements=n,
            mask=MaskSpec(right=0) if kind == "attention" else None,
            **shapes[kind],
        )
        for kind, n in weights.items()
    }


def prior_of(
    profile: Profile, row: Row, blocks: Mapping[str, BlockSpec]
) -> Callable[[Point], BlockCost] | None:
    """The prior, of what is measured of a block: without the messages of its gradients."""
    kind, _, variant, training = row
    if kind not in blocks:
        return None
    block, machine, setting = blocks[kind], CostModel(profile).machine, profile.setting

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


def errors_of(
    profile: Profile, blocks: Mapping[str, BlockSpec]
) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    """(Estimator, where) to the relative errors of time and memory, and the row's name."""
    found: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
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
                    found.setdefault((name, where), []).append((off_s, off_bytes, label))
    return found


def quantities(m: Measurement) -> tuple[float, float, float]:
    return m.forward_s + m.backward_s, m.saved_bytes, m.workspace_bytes


def known_law(noise: float = 0.03) -> Profile:
    """Measurements that were not made: the prior of a small machine, each off by some noise."""
    machine = Machine(9e10, 6e9, 1.5e-4, 1e9, attention_flops=5.5e10, op_overhead_s=3e-6)
    setting = Setting({}, "none", 2, "float32", True, "eager", asdict(machine))
    rng, rows = np.random.default_rng(0), []
    for kind, block in llama_blocks(256, None, None).items():
        for strategy in ("megatron_ts", "megatron_cz", "metp"):
            for s in (128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096):
                c = prior_cost(
                    block, strategy, Workload(1, s, torch.float32, True, 2), machine, True
                )
                step_s = c.time_s * math.exp(noise * rng.standard_normal())
                times = step_s / 3, step_s / 1.5
                held = c.saved_bytes, c.workspace_bytes
                rows.append(Measurement(kind, kind, strategy, 1, s, True, MEASURED, *times, *held))
    return Profile(setting, tuple(rows), "a known law", 0)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main(args: argparse.Namespace) -> int:
    if args.profile is None and not args.quick:
        raise SystemExit("give the path of a profile, or --quick")
    profile = known_law() if args.profile is None else read_profile(args.profile)
    hidden = 256 if args.profile is None else args.hidden
    blocks = llama_blocks(hidden, args.heads, args.kv_heads) if hidden else {}
    setting = profile.setting
    report = Report("cost_error", args)
    report.add(
        f"{len(profile.measurements)} measurements on {setting.device}, {setting.num_ranks} ranks, "
        f"{setting.dtype}, inner={setting.inner}, "
        f"{'sharded' if setting.sharded else 'whole'} weights.",
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
    for (name, where), errors in sorted(found.items(), key=lambda x: (x[0][1], x[0][0])):
        cells = [str(len(errors))]
        for i in (0, 1):
            values = [e[i] for e in errors]
            cells += [percent(statistics.median(values)), percent(float(np.quantile(values, 0.9)))]
        rows.append((name, where, *cells))
    report.add(*table(header, rows), "", "## The hybrid's time errors by strategy", "")
    labels = sorted({e[2] for errors in found.values() for e in errors})
    wheres = [w for w in ("between", "beyond") if (HYBRID, w) in found]
    medians = []
    for label in labels:
        of = [[e[0] for e in found[HYBRID, w] if e[2] == label] for w in wheres]
        medians.append((label, *(percent(statistics.median(x)) if x else "-" for x in of)))
    report.add(*table(("part", *(f"{w}, median" for w in wheres)), medians))
    for where in wheres:
        values = [e[0] for e in found[HYBRID, where]]
        report.goals += [
            Goal(f"median time error {where}, %", 100 * statistics.median(values), 10, False),
            Goal(f"90th percentile {where}, %", 100 * float(np.quantile(values, 0.9)), 25, False),
        ]
    return report.finish("predictions only")


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.add_argument("profile", nargs="?", help="file that `paradyse profile` wrote")
    flags.add_argument("--hidden", type=int, help="of the profiled Llama (default: no prior)")
    flags.add_argument("--heads", type=int, help="default: hidden / 32")
    flags.add_argument("--kv-heads", type=int, help="default: half the heads")
    raise SystemExit(main(flags.parse_args()))
