"""``dsp``, every other strategy and ``auto``, on models with attention over time and over space.

    python benchmarks/dsp.py                      # half an hour on two cores
    python benchmarks/dsp.py --like a100-nvlink   # slow links

A module of time and space in turn, and a TimeSformer of HuggingFace's, each of some sizes of both
dims and some batches. Time is split, so attention over space sends nothing and that over time is
what strategies differ in: ``dsp`` has it switch the split to space and back. ``metp`` is not among
them, as it refuses attention over a dim that is not split. With two sequences or more the batch can
be split in place of time (``batch``), where the graph allows it. What a pair of both sends is
counted on two and on four ranks; of more ranks the formulas are shown.
"""

import math
from argparse import Namespace
from copy import copy
from functools import partial
from typing import Any

import torch
import transformers
from contenders import AUTO, Contender, ours
from runner import Benchmark, benchmark, median, milliseconds, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

import paradyse
from paradyse.cli.launch import Rank
from paradyse.planning.explain import short_key
from paradyse.types import ALONG_SEQUENCE, BATCH, DSP, REPLICATED

ALONG_ONE = tuple(s for s in ALONG_SEQUENCE if s != "metp")
PLANS = (*ALONG_ONE, REPLICATED, DSP, BATCH)
OF_BATCH = {"attention": "megatron_cz", "mlp": "megatron_cz", "split": BATCH}
MODULE, TIMESFORMER = "time and space", "TimeSformer"
CHANNELS, CLASSES, PATCH = 3, 8, 4

MOST = 1.05
"""Goal: of the time of the best plan at each size."""

OPTIONS: dict[str, Any] = {"layers": 2, "hidden": 256, "shapes": ("16x64", "64x16", "8x144")}
OPTIONS |= {"models": (MODULE, TIMESFORMER), "batches": (1, 4), "learn_steps": 32, "runs": 5}
OPTIONS |= {"ranks": 2, "inner": "inductor"}
QUICK = {"layers": 1, "hidden": 64, "shapes": ("8x16",), "batches": (1, 2), "learn_steps": 1}
QUICK |= {"runs": 1, "inner": "eager"}


class SpaceTime(nn.Module):
    """Cells [B, T, S, C] and their labels [B, T, S] to a loss; heads of width 32."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(CHANNELS, hidden), nn.Linear(hidden, CLASSES)
        norm, wide = nn.LayerNorm, 4 * hidden

        def attention() -> nn.ModuleList:
            ends = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            return nn.ModuleList([norm(hidden), *ends])

        def mlp() -> nn.Sequential:
            ends = nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden)
            return nn.Sequential(norm(hidden), *ends)

        self.layers = nn.ModuleList(
            nn.ModuleList([attention(), attention(), mlp()]) for _ in range(layers)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.into(x)
        for time, space, mlp in self.layers:
            x = x + self.attend(*time, x.transpose(1, 2)).transpose(1, 2)
            x = x + self.attend(*space, x)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 2), labels.flatten())

    def attend(self, norm: nn.Module, qkv: nn.Module, proj: nn.Module, x: Tensor) -> Tensor:
        """Attention over dim 2 of ``x`` [B, O, N, D]."""
        b, o, n, d = x.shape
        heads = qkv(norm(x)).reshape(b * o, n, 3, d // 32, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(0))
        return proj(y.transpose(1, 2).reshape(b, o, n, d))


def timesformer(layers: int, hidden: int, time: int, space: int) -> nn.Module:
    """An unmodified TimeSformer for videos of ``time`` frames of ``space`` patches."""
    config = transformers.TimesformerConfig(
        image_size=PATCH * math.isqrt(space),
        patch_size=PATCH,
        num_frames=time,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return transformers.TimesformerForVideoClassification(config)


class Videos(Contender):
    """A model under one plan, and videos of one time and space: its lengths are batches.

    Args:
        model: a name of ``--models``.
        shape: as ``16x64``: time, space.
        plan: of the backend.
    """

    def __init__(self, model: str, shape: str, plan: str, args: Namespace) -> None:
        self.time, self.space = map(int, shape.split("x"))
        size = args.layers, args.hidden
        torch.manual_seed(0)
        if model == MODULE:
            made: nn.Module = SpaceTime(*size)
        else:
            made = timesformer(*size, self.time, self.space)
        given = OF_BATCH if plan == BATCH else plan
        super().__init__(made, ours(made, given, args.inner).run)

    def eager(self) -> Contender:
        """The model as it is."""
        other = copy(self)
        other.run = self.model
        return other

    def tokens(self, batch: int) -> Any:
        """The arguments of a call, equal on all ranks."""
        g = torch.Generator().manual_seed(batch)
        if isinstance(self.model, SpaceTime):
            shape = batch, self.time, self.space
            cells = torch.randn(*shape, CHANNELS, generator=g)
            return cells, torch.randint(CLASSES, shape, generator=g)
        side = PATCH * math.isqrt(self.space)
        videos = torch.randn(batch, self.time, CHANNELS, side, side, generator=g)
        return videos, torch.randint(CLASSES, (batch,), generator=g)

    def step(self, given: Any) -> Tensor:
        """The loss of a step."""
        self.model.zero_grad()
        out = self.run(*given)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        return loss.detach()


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Model and shape -> seconds by plan and batch, and what ``auto`` chose for each batch."""
    found = {}
    for model in args.models:
        for shape in args.shapes:
            contenders = {p: Videos(model, shape, p, args) for p in (*PLANS, AUTO)}
            if model != MODULE:  # TimeSformer cuts rows from all videos together
                del contenders[BATCH]
            for plan, contender in contenders.items():
                batches = [b for b in args.batches if b > 1 or plan != BATCH]
                contender.check(plan, contender.eager(), *batches)
                rank.report(f"{model}, {shape}: {plan} agrees with eager")
            auto = contenders[AUTO]
            for batch in args.batches * args.learn_steps:
                auto.loss(batch)
            steps = {p: c.time_s for p, c in contenders.items()}
            if BATCH in steps:
                steps[BATCH] = partial(of_several, contenders[BATCH])
            seconds = take_turns(steps, args.batches, range(-1, args.runs), rank.report)
            chosen = {}
            for batch in args.batches:
                auto.loss(batch)
                chosen[batch] = short_key(paradyse.stats(auto.run).last.plan.key)
            found[model, shape] = {"seconds": seconds, "chosen": chosen}
    return found


def of_several(contender: Videos, batch: int) -> float:
    """Seconds of a step; of one video, which has no batch to split, not a number."""
    return contender.time_s(batch) if batch > 1 else math.nan


def count(rank: Rank, args: Namespace) -> dict[str, float]:
    """Plan -> bytes that a rank sends of values in forward, of the bytes of a value [B, T, S, h],
    for attention over time and over space."""
    found, (batch, time, space, hidden) = {}, (2, 16, 16, 128)
    args = Namespace(layers=1, hidden=hidden, inner="eager")
    for plan in (DSP, "ulysses_z"):
        videos, sent = Videos(MODULE, f"{time}x{space}", plan, args), []
        for _ in range(2):
            videos.loss(batch)
            sent.append(paradyse.stats(videos.run).bytes_per_collective["all_to_all"])
        # backward sends what forward does
        found[plan] = (sent[1] - sent[0]) / 2 / (batch * time * space * hidden * 4)
    return found


def show_times(bench: Benchmark, found: dict[str, Any]) -> None:
    """A table for each model, and the goal of ``auto``."""
    for model in bench.args.models:
        rows, autos, bests = [], 0.0, 0.0
        for (other, shape), of in found.items():
            for batch in bench.args.batches if other == model else ():
                known = of["seconds"].get
                none = {batch: [math.nan]}
                times = {p: median(known(p, none)[batch]) for p in (*PLANS, AUTO)}
                along_one = min(times[p] for p in ALONG_ONE)
                best = min(t for p, t in times.items() if p != AUTO and t == t)
                autos, bests = autos + times[AUTO], bests + best
                ratios = times[DSP] / along_one, times[AUTO] / best
                cells = ["" if t != t else milliseconds(t) for t in times.values()]
                cells += [f"{r:.2f}" for r in ratios]
                rows.append([f"{shape}, batch {batch}", *cells, of["chosen"][batch]])
        ratios_of = "dsp / best of one dim", "auto / best"
        header = ["time x space", *PLANS, AUTO, *ratios_of, "auto chose"]
        bench.table(header, rows, f"## {model}")
        if not bench.args.quick:
            what = f"{model}: `auto` over the best plan of each size, all sizes"
            bench.at_most(what, autos / bests, MOST)


def show_bytes(bench: Benchmark, counted: dict[int, dict[str, float]]) -> None:
    """What is sent, of the bytes M of a value, and the goal of ``dsp``."""
    rows = []
    for n in (*counted, 8, 64):
        sent = [f"{counted[n][p]:.4f}" if n in counted else "" for p in (DSP, "ulysses_z")]
        formula = [f"{k / n * (n - 1) / n:.4f}" for k in (2, 4)]
        rows.append([str(n), sent[0], formula[0], sent[1], formula[1]])
    title = "## Sent by a rank for a pair of attentions, forward, in values M"
    header = ["ranks N", "dsp, counted", "2 M/N", "ulysses_z, counted", "4 M/N"]
    bench.table(header, rows, title)
    bench.add("", "The formulas are less what stays on the rank, 1/N of each message.")
    for n, of in counted.items():
        bench.at_most(f"{n} ranks: bytes of `dsp` over `ulysses_z`", of[DSP] / of["ulysses_z"], 0.5)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    found, counted, ranks = bench.on_ranks(measure), {}, args.ranks
    for args.ranks in (2, 4):
        counted[args.ranks] = bench.on_ranks(count)
    args.ranks = ranks
    bench.add(
        f"Models of {args.layers} layers, hidden {args.hidden}, {bench.ranks}, weights whole; "
        f"milliseconds a step, medians of {args.runs} interleaved runs, the slower rank. `auto` "
        f"has no profile, and {args.learn_steps} steps of each size behind it."
    )
    show_times(bench, found)
    show_bytes(bench, counted)
