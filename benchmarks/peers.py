"""Every static strategy and ``auto`` against PyTorch's own parallel training.

    python benchmarks/peers.py            # half an hour on two cores, most of it compilation
    python benchmarks/peers.py --sharded --like a100-nvlink   # weights 1/p, slow links

Llama of 4 layers, hidden 256, 8 heads, 4 KV heads (or, by --family, a GPT-2 or a BERT of such
sizes, whose heads have their own keys), float32; a trace of 16 lengths from 128 to
4,096, all of them multiples of 32 because PyTorch's contenders ask for that. What is compared is
the time of the whole trace: the sum over the lengths of the medians. ``auto`` has no profile, and
has run --settle steps of the trace before, as it learns at the beginning of a training; what it
loses to the best strategy of each length is a goal of ours. PyTorch's
tensor parallel has its weights sharded either way; its ring and Ulysses have them whole, or with
--sharded by FSDP2. "kernels alone" is the Llama's matrix multiplications and attention, of a rank's
share, with nothing around them.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

from contenders import AUTO, Contender, at_rest, llama, other_family, ours, plans_of
from counterparts import ContextParallel, TensorParallel
from kernels_alone import KernelsAlone
from runner import Benchmark, benchmark, lines_of, median, milliseconds, take_turns
from torch.distributed.device_mesh import init_device_mesh

from paradyse.cli.charts import Chart, Page
from paradyse.cli.launch import Rank
from paradyse.types import ALONG_SEQUENCE

# Many short, few long, as text has them; 17,312 tokens.
TRACE = (512, 128, 1024, 192, 3072, 256, 160, 640, 1536, 384, 4096, 320, 896, 768, 2048, 1280)
TENSOR, RING, ULYSSES = "torch tensor parallel", "torch ring", "torch ulysses"
COMPILED = " compiled"
KERNELS = "kernels alone"
COUNTERPARTS = {TENSOR: "megatron_ts"}
COUNTERPARTS |= {RING + how: "megatron_cz" for how in ("", COMPILED)}
COUNTERPARTS |= {ULYSSES + how: "ulysses_z" for how in ("", COMPILED)}
"""Of PyTorch's, ours; the other two have none."""


def at_least_0(text: str) -> int:
    """The number of steps in ``text``.

    Raises:
        ArgumentTypeError: it is negative.
    """
    if (number := int(text)) < 0:
        raise ArgumentTypeError(f"{number} steps: there can be none (0) or more")
    return number


OPTIONS = {"layers": 4, "hidden": 256, "trace": TRACE, "runs": 5, "ranks": 2, "inner": "inductor"}
OPTIONS |= {
    "settle": {"type": at_least_0, "default": 200, "help": "steps that auto learns from, before"}
}
OPTIONS |= {"only": {"nargs": "*", "default": (), "help": "names of contenders"}}
OPTIONS |= {"family": {"choices": ("gpt2", "bert"), "help": "in place of a Llama"}}
OPTIONS |= {"sharded": {"action": "store_true", "help": "weights 1/p on each rank"}}
QUICK = {"layers": 2, "hidden": 64, "trace": (64, 128, 96), "inner": "eager", "settle": 3}


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Seconds of every step, and the plans of ``auto``."""
    mesh = init_device_mesh("cpu", (rank.size,))
    make: dict[str, Callable[[Any], Contender]] = {}
    if args.family:
        model = partial(other_family, args.family, args.layers, args.hidden, heads=8)
    else:
        model = partial(llama, args.layers, args.hidden, heads=8, kv_heads=4)
        make[TENSOR] = partial(TensorParallel, mesh=mesh)
    for name, attention in {RING: "ring", ULYSSES: "ulysses"}.items():
        other = partial(ContextParallel, mesh=mesh, attention=attention, sharded=args.sharded)
        make |= {name + COMPILED * c: partial(other, compiled=c) for c in (False, True)}

    def own(plan: str) -> Callable[[Any], Contender]:
        return lambda model: ours(at_rest(model, args.sharded), plan=plan, inner=args.inner)

    make |= {s: own(s) for s in (*ALONG_SEQUENCE, AUTO)}
    contenders = {n: of(model()) for n, of in make.items() if not args.only or n in args.only}
    reference = Contender(model())
    for name, contender in contenders.items():
        contender.check(name, reference, *args.trace)
        rank.report(f"{name} agrees with eager at all lengths")
    for n in islice(cycle(args.trace), args.settle if AUTO in contenders else 0):
        contenders[AUTO].time_s(n)
    steps: dict[str, Callable[[int], float]] = {n: c.time_s for n, c in contenders.items()}
    if not args.family and (not args.only or KERNELS in args.only):
        steps[KERNELS] = KernelsAlone(model()).time_s
    seconds = take_turns(steps, args.trace, range(-1, args.runs), rank.report)
    plans = plans_of(contenders[AUTO].run) if AUTO in contenders else {}
    return {"seconds": seconds, "plans": plans}


def page_of(title: str, times: Mapping[str, Mapping[int, float]]) -> Page:
    """The picture: strategies beside ``auto``, and PyTorch's contenders beside it."""
    ours = {c: of for c, of in times.items() if c not in COUNTERPARTS}
    theirs = {c: times[c] for c in (AUTO, *COUNTERPARTS) if c in times}
    titles = {"strategies, and auto": ours, "PyTorch's own, and auto": theirs}
    charts = [Chart(f"Time of a step: {t}", "s", lines_of(of)) for t, of in titles.items()]
    return Page(title, charts)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    result = bench.on_ranks(measure)
    names, lengths = list(result["seconds"]), sorted(args.trace)
    times = {c: {n: median(of[n]) for n in lengths} for c, of in result["seconds"].items()}
    total = {c: sum(of.values()) for c, of in times.items()}
    title = (
        f"{args.family or 'Llama'} of {args.layers} layers, hidden {args.hidden}, 8 heads, "
        f"{8 if args.family else 4} KV heads, {bench.ranks}, "
        f"weights {'1/p on each rank' if args.sharded else 'whole on every rank'}"
    )
    bench.add(
        f"{title}.",
        f"Milliseconds a step, medians of {args.runs} interleaved runs, the slower rank.",
    )
    if AUTO in names:
        bench.add(f"`auto` has run {args.settle} steps of the trace before.")
    rows = [[str(n), *(milliseconds(times[c][n]) for c in names)] for n in lengths]
    rows.append(["whole trace", *(milliseconds(total[c]) for c in names)])
    bench.table(["tokens", *names], rows)
    bench.picture(page_of(title, times))
    for other, one in COUNTERPARTS.items():
        if {one, other} <= total.keys():
            bench.at_least(f"`{one}` over {other}, the trace", total[other] / total[one], 1.0)
    if AUTO in total:
        chosen = [[str(n), result["plans"].get(n, "")] for n in lengths]
        bench.table(["tokens", "blocks by strategy"], chosen, "## What auto chose")
        ratios = [[c, f"{total[c] / total[AUTO]:.2f}"] for c in names if c != AUTO]
        title = "## auto against each contender, the trace"
        bench.table(["contender", "its time over auto's"], ratios, title)
        if statics := [s for s in ALONG_SEQUENCE if s in total]:
            best = min(statics, key=total.__getitem__)
            oracle = sum(min(times[s][n] for s in statics) for n in lengths)
            bench.add(
                "",
                f"The best strategy over the trace, {best}, takes {total[best] / oracle:.2f} times "
                "as long as the best one of each length would.",
            )
            what = "`auto` over the best strategy of each length, the trace"
            bench.at_most(what, total[AUTO] / oracle, 1.03)
        if rivals := [c for c in COUNTERPARTS if c in total]:
            best = min(rivals, key=total.__getitem__)
            what = f"`auto` over the fastest of PyTorch's ({best}), the trace"
            bench.at_least(what, total[best] / total[AUTO], 1.5 if args.link or args.like else 1.2)
            if KERNELS in total:
                times_as_long = f"{total[best] / total[KERNELS]:.2f} times as long"
                bench.add("", f"{best} takes {times_as_long} as the kernels alone.")
