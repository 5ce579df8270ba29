"""One process: backend="paradyse" against torch.compile(inductor), seconds a training step.

    python benchmarks/one_process.py     # 40 minutes: a long step takes inductor half a minute
    python benchmarks/one_process.py --only window documents padding short   # a part of it

All cases are HuggingFace models in training with use_cache=False, float32, all cores:

- short: a Llama of 12 layers, hidden 512, 512 tokens. Nothing to win: what ParaDySe costs.
- long: a Llama of 2 layers, hidden 256, 16,384 tokens. HuggingFace hands SDPA a dense [1, 1, S, S]
  mask as soon as the model is traced; inductor computes with it, ParaDySe recovers that it is
  causal.
- window: a Mistral of that size, whose tokens see 1,024 others.
- documents: 16 of them, packed, told by position_ids.
- padding: on the left, by half.
- by hand: as long, but inductor has a model whose attention is told that it is causal and gets no
  mask, by an attention function of its own. ParaDySe has the model as it comes.

Of a window, documents and padding attention is timed by itself too, against the share of plain
causal attention's time that its visible pairs have.

Both contenders live in one process. Peak memory is the resident peak (VmHWM, so Linux only) of a
process of its own for each contender after one step, libraries included.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attention_cases
import torch
import torch.nn.functional as F
from contenders import BACKENDS, Contender, llama
from runner import Benchmark, alone, benchmark, log, median, seconds_of, take_turns
from torch import Tensor
from transformers import AttentionInterface

from paradyse.cli.models import make_model
from paradyse.cli.rank_jobs import peak_bytes

PLAIN, BY_HAND = "causal", "by hand"
NUM_DOCUMENTS = 16
PADDED = 0.5


def causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: it makes no mask for one that it does not
    know."""
    how = {"is_causal": True, "enable_gqa": True, "scale": options["scaling"]}
    out = F.scaled_dot_product_attention(query, key, value, **how)
    return out.transpose(1, 2).contiguous(), None


class Case(NamedTuple):
    """A model, a length, and which pairs of tokens see each other."""

    layers: int
    hidden: int
    seq_len: int
    mask: str = PLAIN
    """A name in ``attention_cases.MASKS``."""
    window: int = 1024
    by_hand: bool = False
    """Inductor's model has no dense mask."""

    def __str__(self) -> str:
        sizes = f"{self.layers} layers, hidden {self.hidden}, {self.seq_len:,} tokens"
        words = {"window": f", a window of {self.window:,}", "padding": ", half of them padding"}
        words["documents"] = f", {NUM_DOCUMENTS} documents"
        sizes += ", no mask for inductor" * self.by_hand
        return sizes + words.get(self.mask, "")

    def model(self) -> Any:
        """A Llama, or with a window the Mistral of the same sizes."""
        model = llama(self.layers, self.hidden)
        if self.mask != "window":
            return model
        given = model.config.to_dict()
        names = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"
        names += "num_attention_heads", "num_key_value_heads", "max_position_embeddings"
        config = {n: given[n] for n in names}
        config |= {"model_type": "mistral", "sliding_window": self.window, "use_cache": False}
        return make_model(config)

    def attention(self, mask: str) -> attention_cases.Case:
        """The attention of one layer, under ``mask``."""
        heads = self.hidden // 32
        sizes = 1, heads, heads // 2, self.window, NUM_DOCUMENTS, PADDED
        return attention_cases.Case(mask, self.seq_len, 32, torch.float32, "cpu", *sizes)

    def contender(self, backend: str) -> Contender:
        """The model compiled by ``backend``, which is given the mask as a user gives it."""
        model = self.model()
        if self.by_hand and backend == "inductor":
            AttentionInterface.register(BY_HAND, causal_attention)
            model.set_attn_implementation(BY_HAND)
        return Contender(model, self._given(torch.compile(model, backend=backend)))

    def _given(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` with what says which pairs see each other."""
        at, attention = torch.arange(self.seq_len), self.attention(self.mask)

        def call(input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
            if self.mask == "documents":
                ids = attention.documents
                starts = torch.searchsorted(ids, ids)  # the first token of each one's document
                options["position_ids"] = (at - starts)[None]
            elif self.mask == "padding":
                real = (at >= attention.num_padded)[None]
                options["attention_mask"], labels = real.long(), labels.masked_fill(~real, -100)
            return run(input_ids=input_ids, labels=labels, **options)

        return call


LONG = Case(2, 256, 16384)
CASES = {"short": Case(12, 512, 512), "long": LONG}
CASES |= {mask: LONG._replace(mask=mask) for mask in ("window", "documents", "padding")}
CASES[BY_HAND] = LONG._replace(by_hand=True)
OPTIONS: dict[str, Any] = {"long_runs": 3, "short_runs": 21, "attention_runs": 7}
OPTIONS["only"] = {"choices": tuple(CASES), "nargs": "*", "default": tuple(CASES)}
OPTIONS["no_memory"] = {"action": "store_true"}
SMALL = Case(2, 64, 1024, window=64)
QUICK = {n: SMALL._replace(mask=c.mask, by_hand=c.by_hand) for n, c in CASES.items()}
QUICK["short"] = Case(3, 64, 128)


def measure(case: Case, runs: int) -> list[float]:
    """The median step of each backend, in seconds."""
    contenders = {b: case.contender(b) for b in BACKENDS}
    contenders["paradyse"].check("paradyse", contenders["inductor"], case.seq_len)
    steps = {name: c.time_s for name, c in contenders.items()}
    seconds = take_turns(steps, [case.seq_len], range(runs), partial(log, case))
    return [median(seconds[b][case.seq_len]) for b in BACKENDS]


def over_its_share(case: Case, runs: int) -> float:
    """Seconds of attention, forward and backward, over those of plain causal attention times the
    share of its pairs that are visible."""
    cases = {mask: case.attention(mask) for mask in (PLAIN, case.mask)}
    steps: dict[str, Callable[[int], float]] = {}
    for mask, attention in cases.items():
        both = attention_cases.ours(attention).steps(attention.inputs())
        steps[mask] = lambda n, both=both: sum(map(seconds_of, both))
    taken = take_turns(steps, [case.seq_len], range(-1, runs))
    seconds = {mask: median(of[case.seq_len]) for mask, of in taken.items()}
    share = cases[case.mask].num_pairs / cases[PLAIN].num_pairs
    return seconds[case.mask] / (seconds[PLAIN] * share)


def peak_gib(case: Case, backend: str) -> float:
    """GiB resident at most in this process after one step."""
    case.contender(backend).loss(case.seq_len)
    return peak_bytes("cpu") / 2**30


@benchmark({"short_runs": 5, "long_runs": 1}, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.add(
        f"Training step in one process, medians of interleaved runs: {args.short_runs} of the "
        f"short case, {args.long_runs} of the long ones, {args.attention_runs} of attention by "
        "itself."
    )
    rows = []
    for name, case in (QUICK if args.quick else CASES).items():
        if name not in args.only:
            continue
        runs = args.short_runs if name == "short" else args.long_runs
        theirs, ours = measure(case, runs)
        peaks = ["" if args.no_memory else f"{alone(peak_gib, case, b):.2f}" for b in BACKENDS]
        row = [str(case), f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}", *peaks, ""]
        if name == "short":
            bench.at_most("short, paradyse's time over inductor's", ours / theirs, 1.03)
        elif case.by_hand:
            bench.at_most("paradyse's time over inductor's without a mask", ours / theirs, 1.05)
        else:
            bench.at_least(f"{name}, inductor's time over paradyse's", theirs / ours, 4)
        if case.mask != PLAIN:
            over = over_its_share(case, args.attention_runs)
            row[-1] = f"{over:.2f}"
            what = f"{name}, attention's time over its pairs' share of causal attention's"
            bench.at_most(what, over, 1.3)
        rows.append(row)
    header = ["model", "inductor, s", "paradyse, s", "ratio"]
    header += ["inductor peak, GiB", "paradyse peak, GiB", "attention over its share"]
    bench.table(header, rows)
    return f"one process of {torch.get_num_threads()} threads"
