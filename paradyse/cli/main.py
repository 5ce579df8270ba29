"""The command ``paradyse``: its flags, and which module runs what.

Nothing of torch is imported before a command is chosen, so that ``--help`` is immediate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from paradyse.cli import launch
from paradyse.cli.corpus import CAP, MIN_TOKENS, STEPS
from paradyse.cli.links import parse_rate

INNER = ("inductor", "aot_eager", "eager")
DTYPES = ("float32", "float64", "bfloat16", "float16")

MOST_TOKENS, MOST = 10**9, 10**6
"""Of a length, and of anything else that is counted."""
MOST_SECONDS = 10**7
SEEDS = 2**63


def _whole(low: int, high: int = MOST, unit: str = "") -> Callable[[str], int]:
    """Parses a whole number of ``low`` to ``high``, of a ``unit`` in the singular."""

    def words(n: int) -> str:
        return f"{n} {unit}{'s' * (n > 1)}" if unit else str(n)

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; give at least {words(low)}")
        if value > high:
            raise argparse.ArgumentTypeError(f"{value} is too large; give at most {words(high)}")
        return value

    return parse


_tokens = _whole(1, MOST_TOKENS, "token")


LENGTHS = "N,N,...|FIRST:LAST:HOW-MANY|FILE"
"""How lengths are spelt, by every command."""


def _lengths(text: str) -> list[int]:
    """``128,256`` as it is; ``128:4096:6`` as so many lengths from the first to the last, each the
    same factor above the one before; anything else is a file of lengths."""
    if "," not in text and set(text) - set("-0123456789:"):
        try:
            found: list[int] = pkgutil.resolve_name("paradyse.cli.traces:read_lengths")(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"{e}, or {LENGTHS.rsplit('|', 1)[0]}") from None
        return found
    if ":" not in text:
        return [_tokens(part) for part in text.split(",")]
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: give {LENGTHS}")
    first, last, count = _tokens(parts[0]), _tokens(parts[1]), _whole(1)(parts[2])
    if count < 2 or last <= first:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the last must exceed the first, and two or more"
        )
    factor = (last / first) ** (1 / (count - 1))
    return sorted({round(first * factor**i) for i in range(count)})


def _parsed(parser: str, text: str | Sequence[str], *more: Any) -> Any:
    """``text`` by the ``parser`` of that name in ``config``, which is imported on demand."""
    try:
        return pkgutil.resolve_name(f"paradyse.config:{parser}")(text, "it", *more)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e).removeprefix("it: ")) from None


_strategy = partial(_parsed, "check_strategy")


def _strategies(text: str) -> list[str]:
    return [_parsed("check_strategy", part, False) for part in text.split(",")]


def _levers(text: str) -> tuple[str, ...]:
    found: tuple[str, ...] = _parsed("check_levers", text.split(",") if text != "none" else ())
    return found


def _lever_sets(text: str) -> tuple[str, ...]:
    """Levers apart by commas, those of one measurement joined by "+"."""
    return tuple("+".join(_levers(x.replace("+", ","))) for x in text.split(",") if text != "none")


def _flag(
    group: argparse._ActionsContainer,
    name: str,
    text: str,
    default: Any = None,
    type: Callable[[str], Any] = str,
    metavar: str | None = None,
    **more: Any,
) -> None:
    """Adds one flag, whose help says its default where the text does not."""
    if default is not None and "(default: " not in text:
        text += " (default: %(default)s)"
    group.add_argument(name, default=default, type=type, metavar=metavar, help=text, **more)


def _count(
    group: argparse._ActionsContainer,
    name: str,
    text: str,
    default: int | None = None,
    low: int = 1,
) -> None:
    """Adds a flag that is a whole number of at least ``low``."""
    _flag(group, name, text, default, _whole(low), "N")


def _switch(group: argparse._ActionsContainer, name: str, text: str) -> None:
    group.add_argument(name, action="store_true", help=text)


def _add_running(parser: argparse.ArgumentParser, on_paper: bool = False) -> None:
    group = parser.add_argument_group("where it runs")
    # On paper there are no ranks: None tells that none of these was given.
    ranks, timeout_s = (None, None) if on_paper else (launch.RANKS, launch.TIMEOUT_S)
    _count(group, "--ranks", f"local ranks to start (default: {launch.RANKS})", ranks)
    text = "auto: GPUs where there is one for every rank, else CPUs (default: %(default)s)"
    if on_paper:
        text += ". Or one that is not here: a100-80gb, ..., or a TOML or JSON file"
        _flag(group, "--device", text, "auto", metavar="NAME")
    else:
        _flag(group, "--device", text, "auto", choices=launch.DEVICES)
    usual = f"{launch.TIMEOUT_S:.0f}" if on_paper else "%(default).0f"
    text = f"give up after this many seconds (default: {usual})"
    _flag(group, "--timeout", text, timeout_s, _whole(1, MOST_SECONDS, "second"), "S")
    _switch(group, "--verbose", "let rank 0 write to standard error (with TORCH_LOGS, its logs)")


def _add_links(parser: argparse.ArgumentParser, usual: str = "") -> None:
    group = parser.add_argument_group(
        "links between CPU ranks, limited through network namespaces (iproute2; needs root)"
    )
    only = group.add_mutually_exclusive_group()
    text = "bits per second that each rank may send, such as 800mbit"
    _flag(only, "--link", text, type=_rate, metavar="RATE")
    text = "the ratio of arithmetic to links of a100-nvlink, h100-ib, ... "
    text += f"(default: {usual} where links can be limited)" if usual else "(default: no limit)"
    _flag(only, "--like", text, metavar="NAME")
    parser.set_defaults(usual=usual)
    text = "at rest 1/p on each rank, or whole"
    _flag(parser, "--weights", text, "sharded", choices=("sharded", "replicated"))


def _rate(text: str) -> float:
    try:
        return parse_rate(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _add_inner(parser: argparse.ArgumentParser, default: str) -> None:
    _flag(parser, "--inner", "compiler of the pieces", default, choices=INNER)


def _add_llama(parser: argparse.ArgumentParser, layers: int, wide: float = 8 / 3) -> None:
    group = parser.add_argument_group("the model, a HuggingFace Llama")
    _count(group, "--layers", "transformer layers", layers)
    _count(group, "--hidden", "width of the residual stream", 256, low=2)
    _count(group, "--heads", "default: hidden / 32")
    _count(group, "--kv-heads", "default: half the heads")
    _count(group, "--intermediate", f"width of the MLP (default: {wide:.3g} times hidden)")
    parser.set_defaults(wide=wide)


def _add_config(
    parser: argparse.ArgumentParser,
    dtype: str | None = "float32",
    otherwise: str = "",
    required: bool = True,
    more: str = "",
) -> None:
    text = "configuration of a HuggingFace model; weights are random" + more
    text += "" if required else " (default: a small Llama)"
    _flag(parser, "--model", text, metavar="CONFIG.json", required=required)
    _count(parser, "--layers", "fewer layers than the configuration says")
    _count(parser, "--batch", "sequences", 1)
    text = f"of weights (default: {dtype or otherwise})"
    _flag(parser, "--dtype", text, dtype, choices=DTYPES)


def _add_json(parser: argparse.ArgumentParser) -> None:
    text = "print one JSON object, and what people read to standard error"
    _switch(parser, "--json", text)


def _add_seed(parser: argparse._ActionsContainer) -> None:
    _flag(parser, "--seed", "of random numbers", 0, _whole(-SEEDS, SEEDS - 1), "N")


def _add_trace(
    parser: argparse._ActionsContainer, steps: int, what: str, may_be_given: bool = False
) -> None:
    """Adds what lengths are drawn by. Where they may be given instead, None tells that a flag was
    not."""
    text = f"{what} (default: {steps})"
    _count(parser, "--steps", text, None if may_be_given else steps)
    text, cap = f"longest sequence, in tokens (default: {CAP})", None if may_be_given else CAP
    _flag(parser, "--cap", text, cap, _whole(MIN_TOKENS, MOST_TOKENS, "token"), "N")
    _add_seed(parser)


def _add_strategies(parser: argparse.ArgumentParser, what: str, usual: str = "all") -> None:
    text = f"{what} (default: {usual})"
    _flag(parser, "--strategies", text, type=_strategies, metavar="NAME,NAME,...")


def _add_memory_limit(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"{what} (default: what it has)"
    _flag(parser, "--memory-limit", text, type=partial(_parsed, "parse_bytes"), metavar="BYTES")


def _demo(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser, 40, "training steps, one file each")
    text = "text files to train on (default: Python's standard library)"
    _flag(parser, "--text", text, metavar="FOLDER")
    _flag(parser, "--plan", "auto, or a strategy for all blocks", "auto", _strategy)
    _add_inner(parser, "inductor")
    text = "times each file is replayed under each strategy; 0 leaves the comparison out"
    _count(parser, "--rounds", text, 3, low=0)
    _count(parser, "--per-range", "files replayed of each range of lengths", 2)
    # A wide MLP: its weights' gradients are what short sequences pay for, as in larger models.
    _add_llama(parser, 2, wide=8)
    text = "write demo.html, demo.csv and, with paradyse[plot], demo.png here"
    _flag(parser, "--out", text, "paradyse-demo", metavar="FOLDER")
    _add_links(parser, usual="a100-nvlink")
    _add_running(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    text = "tokens a sequence (default: %(default)s, which divides by nothing)"
    _flag(parser, "--seq-len", text, 53, _tokens, "N")
    _add_seed(parser)
    _add_inner(parser, "aot_eager")
    _add_json(parser)
    _add_running(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    script = "; on paper also a Python file with make_model() and make_batch()"
    _add_config(parser, None, "float32; on paper bfloat16", more=script)
    text = "sequence lengths to plan for (default: 128,1024,8192; on paper 2048 and its doubles "
    text += "until nothing fits)"
    _flag(parser, "--lengths", text, type=_lengths, metavar=LENGTHS)
    _flag(parser, "--plan", "auto, or a strategy to be explained", "auto", _strategy)
    _add_memory_limit(parser, "what a rank may need, such as 80GiB")
    text = "levers against memory that auto may use, or none (default: all)"
    _flag(parser, "--levers", text, type=_levers, metavar="NAME,NAME,...")
    text = "at rest 1/N on each of N (the default of several, or with --offload), or whole"
    _flag(parser, "--weights", text, choices=("sharded", "replicated"))
    _add_json(parser)
    _add_running(parser, on_paper=True)
    text = "All plans split tokens along the sequence. A run may also split a batch by\n"
    text += "sequences (or by dsp), or compute it whole on every rank."
    title = "a cluster on paper: nothing runs, no rank is started"
    group = parser.add_argument_group(title, text)
    text = "devices of the cluster (default, of a --device that is not here: 8); with neither, "
    text += "ranks of this machine run"
    _count(group, "--gpus", text)
    text = "blocks compute in it under torch.autocast, and weights are float32"
    _flag(group, "--autocast", text, choices=("bfloat16", "float16"))
    text = "weights at rest, gradients and optimizer states on the host (default: the device)"
    _flag(group, "--offload", text, choices=("optimizer",))
    text = "plan batches of mixed lengths, in groups of different degree: a file of lengths, or a "
    text += "distribution (GitHubCode, GRCh38)"
    _flag(group, "--lengths-from", text, metavar="SOURCE")
    text = "how many batches, of --batch sequences, --lengths-from gives (default: 4)"
    _count(group, "--batches", text)
    text = "truncate the sequences of --lengths-from to so many tokens (default: never)"
    _flag(group, "--cut", text, type=_tokens, metavar="N")
    text = (
        "write plan.html and, with paradyse[plot], plan.png here, and ways.json of --lengths-from"
    )
    _flag(group, "--out", text, metavar="FOLDER")


def _profile(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, required=False)
    text = "sequence lengths to measure"
    _flag(parser, "--lengths", text, "128:2048:5", _lengths, LENGTHS)
    _add_strategies(parser, "what to measure")
    text = "levers measured too, each with every strategy, or several at once: NAME+NAME "
    text += "(default: none, predicted from shapes)"
    _flag(parser, "--levers", text, type=_lever_sets, metavar="NAME,NAME,...")
    _add_memory_limit(parser, "a strategy that needs more on a rank is measured no further")
    text = "time to measure in: what decides first, and no more than decides (default: measure all)"
    _count(parser, "--seconds", text)
    text = "timed steps of each strategy at each length, up to 5 times as many where they are short"
    _count(parser, "--repeats", text, 5)
    _switch(parser, "--sharded", "weights at rest 1/p on each rank (paradyse.shard)")
    _switch(parser, "--forward-only", "without gradients, as in evaluation")
    text = "one JSON line a measurement; what is there is kept and not measured again"
    _flag(parser, "--out", text, "profile.jsonl", metavar="FILE")
    _switch(parser, "--overwrite", "begin the file anew")
    _add_inner(parser, "inductor")
    _add_json(parser)
    _add_running(parser)
    parser.set_defaults(timeout=86400.0)


def _bench(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the trace of lengths; without a source, of the standard library's files"
    )
    source = group.add_mutually_exclusive_group()
    text = "the lengths themselves, in their order"
    _flag(source, "--lengths", text, type=_lengths, metavar=LENGTHS)
    text = "GitHubCode or GRCh38, --cap being their longest"
    _flag(source, "--distribution", text, metavar="NAME")
    _flag(source, "--text", "text files", metavar="FOLDER")
    text = "tokenizer.json for text (default: bytes are tokens)"
    _flag(group, "--tokenizer", text, metavar="FILE")
    _add_trace(group, STEPS, "lengths to draw", may_be_given=True)
    _add_strategies(parser, "what to compare auto with", usual="all but dsp")
    _count(parser, "--rounds", "runs of each length under each choice", 5)
    _flag(parser, "--csv", "write every run here", metavar="FILE")
    text = "write bench.csv, bench.html and, with paradyse[plot], bench.png here"
    _flag(parser, "--out", text, metavar="FOLDER")
    _add_inner(parser, "inductor")
    _add_json(parser)
    _add_llama(parser, 4)
    _add_links(parser)
    _add_running(parser)


COMMANDS: tuple[tuple[str, str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    (
        "demo",
        "train a Llama on real text over ranks, and compare its plans",
        "paradyse demo --ranks 2 --steps 40 --cap 4096",
        _demo,
    ),
    (
        "verify",
        "every strategy against one device, on your model: loss and every gradient",
        "paradyse verify --model config.json --ranks 2 --layers 2",
        _verify,
    ),
    (
        "profile",
        "measure a model's blocks under every strategy, which plans are then predicted from",
        "paradyse profile --ranks 2 --lengths 128:2048:5 --seconds 60 --out profile.jsonl",
        _profile,
    ),
    (
        "plan",
        "show the plan for each length, and why the other strategies lost",
        "paradyse plan --model config.json --gpus 8 --device a100-80gb --out plans",
        _plan,
    ),
    (
        "bench",
        "time and memory of a trace of lengths under auto and each static strategy",
        "paradyse bench --ranks 2 --distribution GRCh38 --steps 16 --cap 8192 --out bench",
        _bench,
    ),
    ("doctor", "check that everything needed is there", "paradyse doctor", _add_json),
)
"""Name, what it does, an example, its flags."""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Without passing over an output that takes nothing."""
        if message:
            (file or sys.stderr).write(message)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    names = "\n".join(f"  {example}" for _, _, example, _ in COMMANDS)
    parser = _Parser(
        prog="paradyse",
        description="Train transformers over ranks, the parallel strategy chosen by length.",
        epilog=f"examples:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from paradyse import __version__

    parser.add_argument("--version", action="version", version=f"paradyse {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text, example, add_flags in COMMANDS:
        add_flags(
            commands.add_parser(
                name,
                help=text,
                description=f"{text[0].upper()}{text[1:]}.",
                epilog=f"example:\n  {example}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


class _Ended(BaseException):
    """A signal asks this process to end."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, signals that end a process raise ``_Ended``, once, so that all is cleaned up."""

    def end(number: int, frame: Any) -> None:
        for s in before:
            signal.signal(s, signal.SIG_IGN)
        raise _Ended(number)

    # What ignores one (nohup), or is called by another program, keeps its own way.
    mine = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if mine else ()
    before = {s: h for s in numbers if (h := signal.getsignal(s)) is signal.SIG_DFL}
    try:
        for s in before:
            signal.signal(s, end)
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``.

    Returns:
        0: well, 1: something failed, 2: a flag is wrong, else 128 and the number of the signal that
        ended it: 130 Ctrl-C, 141 a reader of the output that is gone, 143 SIGTERM.
    """
    name = "paradyse"
    try:
        with _ended_by_signals():
            try:
                args = make_parser().parse_args(argv)
                name = f"paradyse {args.command}"
                return _run(args)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except (KeyboardInterrupt, _Ended) as e:
        number = signal.Signals(e.args[0] if e.args else signal.SIGINT)
        _tell(f"{name}: ended by {number.name}, and what it had started")
        return 128 + number
    except (ValueError, launch.RanksFailed) as e:
        _tell(f"{name}: {e}")
        return 2 if isinstance(e, ValueError) else 1
    except OSError as e:
        _drop_output()
        if isinstance(e, BrokenPipeError):  # as of head, which has read enough
            return 128 + signal.SIGPIPE
        _tell(f"{name}: {e.filename or 'the output'}: {e.strerror or e}")
        return 1


def _run(args: argparse.Namespace) -> int:
    name = args.command
    exit_code: int = pkgutil.resolve_name(f"paradyse.cli.commands.{name}:run_{name}")(args)
    return exit_code


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _drop_output() -> None:
    """What cannot be written is not tried again when the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
