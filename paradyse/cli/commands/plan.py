"""``paradyse plan``: the plan for each length, of ranks here or of machines that are not there."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from rich.console import Console

from paradyse.cli import launch
from paradyse.cli import models as integrations
from paradyse.cli.charts import Bands, Chart, Line, Page, Table
from paradyse.cli.json_output import show_json
from paradyse.cli.mixed import draw_batches, page_of_batches, tables_of_batches
from paradyse.cli.outputs import check_folder
from paradyse.cli.pages import write_charts
from paradyse.cli.replay import lever_shares, plan_shares
from paradyse.cli.screen import make_console, show_table
from paradyse.config import AUTO
from paradyse.mixed.ways_file import SHARDED, write_ways
from paradyse.offline.devices import Cluster, describe_cluster, machine_of, read_cluster
from paradyse.offline.dry_run import DryRun, dry_run
from paradyse.offline.groups import compare, ways_on_paper
from paradyse.offline.outlook import (
    MIXTURE,
    NO_LEVERS,
    Forecast,
    Outlook,
    look_ahead,
    notes_on,
    plan_in_words,
)
from paradyse.planning.costs import Machine
from paradyse.planning.units import format_bytes, format_count, format_seconds
from paradyse.types import ATTENTION_STRATEGIES, LEVERS, REPLICATED

DEVICE = "a100-80gb"
"""Where ``--gpus`` is given without ``--device``."""
TRACED_TOKENS = 512
"""Of the sequence that the model is traced with; its length is symbolic."""
BATCHES = 4
"""Where ``--batches`` is not given."""
MORE = "Shaded: more than a rank may use."
FIRST_LENGTH = 2048
"""Where ``--lengths`` is not given: this length, and doubled until nothing fits."""


def default_lengths(longest: int) -> list[int]:
    """Powers of two from ``FIRST_LENGTH`` up to one beyond ``longest``."""
    lengths = [FIRST_LENGTH]
    while lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


def dry_run_of(
    config: dict[str, object],
    layers: int | None,
    dtype: str,
    num_gpus: int,
    sharded: bool,
    on_host: bool = False,
    levers: Collection[str] = LEVERS,
    autocast: str | None = None,
) -> DryRun:
    """The model of a HuggingFace configuration, without its weights, on one of several ranks.

    Args:
        config: as ``models.read_config`` gives it; ``layers`` of it, None: all.
        dtype: of weights, by its name.
        num_gpus: ranks; ``sharded``: with 1/num_gpus of the weights on each.
        on_host: weights at rest, gradients and optimizer states lie on the host.
        levers: that plans may use.
        autocast: the dtype that ``torch.autocast`` casts to, by its name; None: it is off.
    Raises:
        ValueError: it is no causal language model, or nothing in its graph can be split.
    """
    with torch.device("meta"):
        model = integrations.make_model({**config, "use_cache": False}, layers, dtype=dtype)
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.int64)
    model.train()
    batch = {"input_ids": ids, "labels": ids}
    return dry_run(model, batch, num_gpus, sharded, on_host, levers, _named(autocast))


def dry_run_of_script(
    path: str,
    dtype: str,
    num_gpus: int,
    sharded: bool,
    on_host: bool = False,
    levers: Collection[str] = LEVERS,
    autocast: str | None = None,
) -> DryRun:
    """The model of a Python file, as ``dry_run_of`` has it of a configuration.

    Args:
        path: of the file, as ``models.read_script`` takes it.
        dtype, num_gpus, sharded, on_host, levers, autocast: as of ``dry_run_of``.
    Raises:
        ValueError: as ``models.read_script``; nothing in its graph can be split.
    """
    make_model, make_batch = integrations.read_script(path)
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        model, batch = make_model().to("meta", kind).train(), dict(make_batch())
    for name, x in batch.items():
        if isinstance(x, torch.Tensor):
            batch[name] = x.to("meta", kind if x.is_floating_point() else x.dtype)
    return dry_run(model, batch, num_gpus, sharded, on_host, levers, _named(autocast))


def _named(autocast: str | None) -> torch.dtype | None:
    return None if autocast is None else getattr(torch, autocast)


def dtypes_on_paper(dtype: str | None, autocast: str | None) -> tuple[str, torch.dtype]:
    """The dtype of weights, by its name, and the one that blocks compute in.

    Args:
        dtype, autocast: as ``--dtype`` and ``--autocast`` give them.
    Raises:
        ValueError: autocast would leave weights as they are, as all but those of float32.
    """
    weights = dtype or ("float32" if autocast else "bfloat16")
    if autocast and weights != "float32":
        raise ValueError(
            f"--autocast {autocast} casts weights of float32, and --dtype {weights} has none: "
            "leave one of them out"
        )
    return weights, getattr(torch, autocast or weights)


def run_plan(args: argparse.Namespace) -> int:
    """Shows the plan for each length that ``args`` give, and why it is that one.

    Raises:
        ValueError: also where flags for a cluster on paper are given without one, or flags for
            ranks of this machine with one.
    """
    on_paper = args.gpus or args.device not in launch.DEVICES
    if not integrations.is_script(args.model):
        integrations.require_transformers()
    elif not on_paper or args.lengths_from is not None or args.layers is not None:
        raise ValueError(
            f"--model {args.model}: a Python file is planned on paper, and as it is: give --gpus, "
            "and leave --lengths-from and --layers out; or give a HuggingFace config.json"
        )
    if args.lengths is not None:
        args.lengths = sorted(set(args.lengths))  # what is drawn goes from the shortest on
    if on_paper:
        _refuse_flags_of_ranks(args)
        if args.lengths_from is None:
            _plan_on_paper(args)
        else:
            _plan_batches_on_paper(args)
        return 0
    for flag in ("autocast", "out", "offload", "lengths_from", "batches", "cut"):
        if getattr(args, flag) is not None:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} is for a cluster on paper: give --gpus, or leave it out")
    args.ranks, args.timeout = args.ranks or launch.RANKS, args.timeout or launch.TIMEOUT_S
    _plan_here(args)
    return 0


def _refuse_flags_of_ranks(args: argparse.Namespace) -> None:
    for flag in ("ranks", "timeout", "verbose"):
        if getattr(args, flag):
            instead = f" and give --gpus {args.ranks}" if flag == "ranks" and not args.gpus else ""
            raise ValueError(
                f"--{flag} is for ranks of this machine, and on paper none is started: leave it "
                f"out{instead}"
            )


def _plan_here(args: argparse.Namespace) -> None:
    """Planned on ranks of this machine, from what it measures."""
    config = integrations.checked_config(args.model, args.layers)
    dtype, lengths = args.dtype or "float32", args.lengths or [128, 1024, 8192]
    weights = args.weights or (SHARDED if args.ranks > 1 else "replicated")
    arguments = {
        "make": partial(integrations.make_model, config, args.layers, dtype=dtype),
        "batch": args.batch,
        "lengths": lengths,
        "sharded": weights == SHARDED,
        "options": {
            "inner": "eager",
            "plan": args.plan,
            "memory_limit": args.memory_limit,
            "levers": args.levers,
        },
    }
    console = make_console(args.json)
    with console.status(f"planning on {args.ranks} ranks ..."):
        found = launch.run_as_asked(args, "paradyse.cli.rank_jobs:plan", arguments)[0]
    reports = [r for r in found if not isinstance(r, str)]
    too_long = {n: why for n, why in zip(lengths, found, strict=True) if isinstance(why, str)}
    if not reports:
        raise ValueError(too_long[min(lengths)])
    ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    setting = f"{Path(args.model).name} on {ranks} of this machine, weights {weights}"
    console.print(setting)
    for report in reports:
        console.print(report if console.is_terminal else str(report))
        console.print()
    for n, why in too_long.items():
        console.print(f"{n:,} tokens: {why}")
    notes = beyond_positions(config, max(lengths))
    _show_notes(console, notes)
    if args.json:
        told = {"plans": reports, "too_long": too_long, "notes": notes}
        show_json({"setting": setting, **told})


def _plan_on_paper(args: argparse.Namespace) -> None:
    """Strategy, time and memory against the length on a described cluster."""
    for flag in ("batches", "cut"):
        if getattr(args, flag) is not None:
            raise ValueError(f"--{flag} is of --lengths-from: give it too, or leave --{flag} out")
    if args.out:
        check_folder("--out", args.out)
    dtype, computed = dtypes_on_paper(args.dtype, args.autocast)
    name = DEVICE if args.device == "auto" else args.device
    cluster, num_gpus = read_cluster(name), args.gpus or 8
    predicted = ATTENTION_STRATEGIES if num_gpus > 1 else (REPLICATED,)
    if args.plan not in (AUTO, *predicted):
        raise ValueError(
            f"--plan {args.plan}: of {num_gpus} device{'s' * (num_gpus > 1)} on paper nothing else "
            f"is predicted than {', '.join(predicted)}; give one of these, or leave --plan out"
        )
    machine = machine_of(cluster, num_gpus, computed)
    on_host = args.offload == "optimizer"
    spread = num_gpus > 1 or on_host  # else there is nothing that weights lie apart on
    weights = args.weights or ("sharded" if spread else "replicated")
    if on_host and weights != "sharded":
        raise ValueError(
            "--offload optimizer shards the weights: give --weights sharded, or leave it out"
        )
    sharded = spread and weights == "sharded"
    console = make_console(args.json)
    with console.status(f"a dry run on {num_gpus} ranks ..."):
        levers = LEVERS if args.levers is None else args.levers
        how = (num_gpus, sharded, on_host, levers, args.autocast)
        if integrations.is_script(args.model):
            config: Mapping[str, object] = {}
            run = dry_run_of_script(args.model, dtype, *how)
        else:
            config = integrations.read_config(args.model)
            run = dry_run_of(dict(config), args.layers, dtype, *how)
        outlook = look_ahead(
            run,
            machine,
            args.lengths or default_lengths,
            computed,
            args.batch,
            memory_limit=args.memory_limit,
            sharded=sharded,
            levers=levers,
        )
    title = describe(outlook, args.model, cluster, num_gpus, weights)
    tables = tables_of(outlook, cluster, None if args.plan == AUTO else args.plan)
    console.print(title)
    for table in tables:
        show_table(console, *table)
    lengths = [f.seq_len for of in outlook.forecasts.values() for f in of]
    beyond = beyond_positions(config, max([*lengths, *outlook.longest.values()]))
    notes = [*notes_on(outlook), *beyond, *remarks(machine)]
    _show_notes(console, notes)
    if args.out:
        for line in write_charts(Path(args.out), "plan", page_of(title, outlook), tables):
            console.print(line)
    if args.json:
        known = ("limit_bytes", "batch", "dtype", "infeasible", "forecasts", "longest", "reaches")
        found = {name: getattr(outlook, name) for name in known}
        more = {"weight_dtype": getattr(torch, dtype), "notes": notes}
        show_json({"setting": title, **more, **found})


def _plan_batches_on_paper(args: argparse.Namespace) -> None:
    """Steps of batches of mixed lengths on a described cluster, in groups of ranks."""
    for flag, usual in (("lengths", None), ("offload", None), ("plan", AUTO)):
        if getattr(args, flag) != usual:
            raise ValueError(f"--{flag} does not go with --lengths-from: leave one of them out")
    if args.out:
        check_folder("--out", args.out)
    batches = draw_batches(args.lengths_from, args.batch, args.batches or BATCHES, args.cut)
    cluster = read_cluster(DEVICE if args.device == "auto" else args.device)
    dtype, computed = dtypes_on_paper(args.dtype, args.autocast)
    num_gpus = args.gpus or 8
    levers = LEVERS if args.levers is None else args.levers
    config, console = integrations.read_config(args.model), make_console(args.json)
    weights = args.weights or SHARDED

    @cache
    def run_of(degree: int) -> DryRun:
        how = (dtype, degree, weights == SHARDED, False, levers, args.autocast)
        return dry_run_of(config, args.layers, *how)

    with console.status(f"dry runs on 1 to {num_gpus} ranks ..."):
        how = (computed, args.memory_limit, levers)
        ways = ways_on_paper(run_of, cluster, num_gpus, *how, weights == SHARDED)
        found = compare(batches, ways, num_gpus)
    title = (
        f"{Path(args.model).name} on {num_gpus} devices, {len(batches)} batches of {args.batch} "
        f"sequences from {args.lengths_from}, {_in_words(computed, dtype)}, weights {weights}"
    )
    tables = tables_of_batches(batches, ways, found)
    console.print(title)
    for table in tables:
        show_table(console, *table)
    notes = remarks(machine_of(cluster, num_gpus, computed))
    _show_notes(console, notes)
    if args.out:
        page = page_of_batches(title, batches, found)
        for line in write_charts(Path(args.out), "plan", page, tables):
            console.print(line)
        write_ways(Path(args.out) / "ways.json", ways, weights)
        console.print(f"wrote {Path(args.out) / 'ways.json'}")
    if args.json:
        show_json({"setting": title, "batches": batches, "found": found, "notes": notes})


def _show_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}")


def describe(outlook: Outlook, model: str, cluster: Cluster, num_gpus: int, weights: str) -> str:
    """``outlook`` in a line: ``model``, ``num_gpus`` of ``cluster``, and how ``weights`` lie."""
    names = ", ".join(dict.fromkeys(d.name for d in cluster.devices))
    return (
        f"{Path(model).name}: {format_count(outlook.run.num_parameters)} parameters, "
        f"{len(outlook.run.blocks)} blocks, on {num_gpus} x {names}, batch {outlook.batch}, "
        f"{_in_words(outlook.dtype, outlook.run.weight_dtype)}, weights {weights}"
        + "".join(f"; {n} tokens beside each" for n in outlook.run.beside)
    )


def _in_words(computed: torch.dtype, at_rest: torch.dtype | str | None) -> str:
    """``bfloat16``, or ``bfloat16 by autocast of float32``."""
    dtype, of = (str(d or computed).removeprefix("torch.") for d in (computed, at_rest))
    return dtype if of == dtype else f"{dtype} by autocast of {of}"


def tables_of(outlook: Outlook, cluster: Cluster, explained: str | None = None) -> list[Table]:
    """Machine, plans by length, every strategy's time and memory, and the longest lengths.

    Args:
        outlook: what was predicted for devices of ``cluster``.
        explained: show this strategy alone beside the mixture; None: all.
    """
    tables: list[Table] = [("machine", ("part", "rates"), describe_cluster(cluster))]
    of = outlook.forecasts
    rows: list[tuple[str, ...]] = [
        (f"{f.seq_len:,}", format_seconds(f.time_s), format_bytes(f.peak_bytes),
         plan_in_words(outlook.run.blocks, f.plan))
        for f in of[MIXTURE]
    ]  # fmt: skip
    tables.append(("plan by length", ("tokens", "time", "memory", "strategies"), rows))
    names = [n for n in of if n != MIXTURE and explained in (None, n)]
    lengths = sorted({f.seq_len for n in (*names, MIXTURE) for f in of[n]})
    for title, cell in (("time of a step", _time), ("peak memory of a rank", _peak)):
        rows = []
        for n in lengths:
            found = [next((f for f in of[s] if f.seq_len == n), None) for s in [*names, MIXTURE]]
            rows.append((f"{n:,}", *map(cell, found)))
        tables.append((title, ("tokens", *names, MIXTURE), rows))
    longest = [
        (name, f"{tokens:,}" if tokens else "none fits")
        for name, tokens in outlook.longest.items()
        if name in names or name.startswith(MIXTURE)
    ]
    longest += [(name, f"infeasible: {why}") for name, why in outlook.infeasible.items()]
    tables.append(("longest trainable length", ("strategy", "tokens"), longest))
    return [*tables, *tables_of_the_longest(outlook)]


def tables_of_the_longest(outlook: Outlook) -> list[Table]:
    """Of ``outlook``: how far the mixture gets by which levers, and what a rank then holds."""
    may_use = ("may be used", format_bytes(outlook.limit_bytes))
    longest, on_host = outlook.reaches[MIXTURE].longest, outlook.run.on_host_bytes
    apart = []
    if on_host:
        apart = [
            ("weights, gradients, optimizer on the host", format_bytes(on_host)),
            ("may be used there", format_bytes(outlook.machine.host_capacity_bytes or math.inf)),
        ]
    if longest is None:
        static = ("weights, gradients, optimizer", format_bytes(outlook.run.static_bytes))
        return [("memory of a rank", ("what", "bytes"), [static, may_use, *apart])]
    rows = [
        (
            f"{f.seq_len:,}",
            name,
            format_seconds(f.time_s),
            plan_in_words(outlook.run.blocks, f.plan),
        )
        for name, reach in outlook.reaches.items()
        if (f := reach.longest) is not None
    ]
    held = [(what, format_bytes(n)) for what, n in longest.held]
    return [
        ("plans at the longest lengths", ("tokens", "levers", "time", "strategies"), rows),
        (
            f"memory of a rank at its peak, {longest.seq_len:,} tokens",
            ("what", "bytes"),
            [*held, ("in all", format_bytes(longest.peak_bytes)), may_use, *apart],
        ),
    ]


def _time(f: Forecast | None) -> str:
    return "-" if f is None else format_seconds(f.time_s) if f.fits else "does not fit"


def _peak(f: Forecast | None) -> str:
    return "-" if f is None else format_bytes(f.peak_bytes) + ("" if f.fits else " (too much)")


def remarks(machine: Machine) -> Sequence[str]:
    """What the numbers for ``machine`` are, and are not."""
    return (
        f"{machine.source}; nothing here was measured on it",
        "memory is seen in a dry run of the model's real graph, operator by operator; fused "
        "kernels need less, and attention is taken as a flash kernel",
        "times are forward and backward, without the optimizer's step",
    )


def beyond_positions(config: Mapping[str, object], longest: int) -> list[str]:
    """What is to be said where sequences of ``longest`` tokens have more than the positions that
    the model's ``config`` has."""
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(most := config.get(name), int) and 0 < most < longest:
            return [
                f"the model's configuration has {most:,} positions ({name}), and plans go up to "
                f"{longest:,} tokens: to train beyond {most:,} give it more"
            ]
    return []


def levers_chart(outlook: Outlook) -> Chart:
    """Memory against the length by the levers that plans may use, of ``outlook``."""
    lines = []
    for name, reach in outlook.reaches.items():
        points = tuple((n, b / 2.0**30, b <= outlook.limit_bytes) for n, b in reach.least)
        if name in (MIXTURE, NO_LEVERS):
            lines.append(Line("no levers" if name == NO_LEVERS else "all levers", points))
        elif len(reach.levers) == 1:
            lines.append(Line(reach.levers[0], points))
    limit = None if math.isinf(outlook.limit_bytes) else outlook.limit_bytes / 2.0**30
    return Chart("Least memory of a rank, by lever", "GiB", tuple(lines), limit, note=MORE)


def page_of(title: str, outlook: Outlook) -> Page:
    """Time and memory of every strategy in ``outlook``, and what the mixture takes for each kind of
    block, under ``title``."""
    gib = 2.0**30
    times, peaks = [], []
    for name, forecasts in outlook.forecasts.items():
        times.append(Line(name, tuple((f.seq_len, f.time_s, f.fits) for f in forecasts)))
        peaks.append(Line(name, tuple((f.seq_len, f.peak_bytes / gib, f.fits) for f in forecasts)))
    limit = None if math.isinf(outlook.limit_bytes) else outlook.limit_bytes / gib
    longest = outlook.longest[MIXTURE]
    fits = "Dashed: that strategy alone does not fit. Shaded: no plan does."
    charts = (
        Chart("Predicted time of a step", "s", tuple(times), fits_to=longest, note=fits),
        Chart("Predicted peak memory of a rank", "GiB", tuple(peaks), limit, note=MORE),
        levers_chart(outlook),
    )
    kinds = [b.kind for b in outlook.run.blocks]
    found = outlook.forecasts[MIXTURE]
    keys, lengths = [f.plan.key for f in found], tuple(f.seq_len for f in found)
    bands = []
    for what, shares_of in (("Strategies", plan_shares), ("Levers", lever_shares)):
        shares = [shares_of(key, kinds) for key in keys]
        for kind in dict.fromkeys(k for s in shares for k in s if any(of[k] for of in shares)):
            of_kind = tuple(s[kind] for s in shares)
            name = f"{what} of {kind} blocks in the mixture"
            bands.append(Bands(name, lengths, of_kind, of_one_whole=shares_of is plan_shares))
    return Page(title, charts, bands)
