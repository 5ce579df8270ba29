"""The command ``paradyse``: its flags, and which module runs what.

Nothing of torch is imported before a command is chosen, so that ``--help`` is immediate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

MIN_CAP = 16
INNER = ("inductor", "aot_eager", "eager")
DTYPES = ("float32", "float64", "bfloat16")
HERE = ("auto", "cpu", "cuda")
"""Devices of this machine."""


def _at_least(low: int, unit: str = "") -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; give at least {low}{unit}")
        return value

    return parse


def _lengths(text: str) -> list[int]:
    parse = _at_least(1, " token")
    return [parse(part) for part in text.split(",")]


def _length_grid(text: str) -> list[int]:
    """``128,256`` as it is, ``128:4096:6`` as so many lengths from the first to the last, each the
    same factor above the one before."""
    if ":" not in text:
        return _lengths(text)
    parse, parts = _at_least(1, " token"), text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: give FIRST:LAST:HOW MANY, or N,N,...")
    first, last, count = map(parse, parts)
    if count < 2 or last <= first:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the last must exceed the first, and two or more"
        )
    factor = (last / first) ** (1 / (count - 1))
    return sorted({round(first * factor**i) for i in range(count)})


def _seconds(text: str) -> float:
    return float(_at_least(1, " second")(text))


def _strategy(text: str, auto: bool = True) -> str:
    from paradyse.config import check_strategy

    try:
        return check_strategy(text, "it", auto)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e).removeprefix("it: ")) from None


def _strategies(text: str) -> list[str]:
    return [_strategy(part, auto=False) for part in text.split(",")]


def _bytes(text: str) -> int:
    from paradyse.config import parse_bytes

    try:
        return parse_bytes(text, "it")
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e).removeprefix("it: ")) from None


def _add_running(parser: argparse.ArgumentParser, ranks: int = 2, on_paper: bool = False) -> None:
    group = parser.add_argument_group("where it runs")
    group.add_argument(
        "--ranks",
        type=_at_least(1),
        default=ranks,
        metavar="N",
        help="local ranks to start (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        choices=HERE if not on_paper else None,
        default="auto",
        metavar=None if not on_paper else "NAME",
        help="auto: GPUs where there is one for every rank, else CPUs (default: %(default)s)"
        + (". Or one that is not here: a100-80gb, ..., or a TOML or JSON file" if on_paper else ""),
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="give up after this many seconds (default: %(default).0f)",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="let rank 0 write its own output (with TORCH_LOGS, its logs)",
    )


def _add_inner(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--inner",
        choices=INNER,
        default=default,
        help="compiler of the pieces (default: %(default)s)",
    )


def _add_llama(
    parser: argparse.ArgumentParser, layers: int, hidden: int, wide: float = 8 / 3
) -> None:
    group = parser.add_argument_group("the model, a HuggingFace Llama")
    group.add_argument(
        "--layers", type=_at_least(1), default=layers, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--hidden",
        type=_at_least(2),
        default=hidden,
        metavar="N",
        help="width of the residual stream (default: %(default)s)",
    )
    group.add_argument("--heads", type=_at_least(1), metavar="N", help="default: hidden / 32")
    group.add_argument("--kv-heads", type=_at_least(1), metavar="N", help="default: half the heads")
    group.add_argument(
        "--intermediate",
        type=_at_least(1),
        metavar="N",
        help=f"width of the MLP (default: {wide:.3g} times hidden)",
    )
    parser.set_defaults(wide=wide)


def _add_config(
    parser: argparse.ArgumentParser,
    dtype: str | None = "float32",
    otherwise: str = "",
    required: bool = True,
) -> None:
    parser.add_argument(
        "--model",
        required=required,
        metavar="CONFIG.json",
        help="configuration of a HuggingFace model; weights are random"
        + ("" if required else " (default: a small Llama)"),
    )
    parser.add_argument(
        "--layers", type=_at_least(1), metavar="N", help="fewer layers than the configuration says"
    )
    parser.add_argument(
        "--batch",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=dtype, help=f"of weights (default: {dtype or otherwise})"
    )


def _add_trace(parser: argparse._ActionsContainer, steps: int, what: str) -> None:
    parser.add_argument(
        "--steps",
        type=_at_least(1),
        default=steps,
        metavar="N",
        help=f"{what} (default: %(default)s)",
    )
    parser.add_argument(
        "--cap",
        type=_at_least(MIN_CAP, " tokens"),
        default=4096,
        metavar="N",
        help="longest sequence, in tokens (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _demo(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser, 40, "training steps, one file each")
    parser.add_argument(
        "--text",
        metavar="FOLDER",
        help="text files to train on (default: Python's standard library)",
    )
    parser.add_argument(
        "--plan",
        type=_strategy,
        default="auto",
        help="auto, or a strategy for all blocks (default: %(default)s)",
    )
    _add_inner(parser, "inductor")
    parser.add_argument(
        "--rounds",
        type=_at_least(0),
        default=3,
        metavar="N",
        help="times each file is replayed under each strategy; 0 leaves the "
        "comparison out (default: %(default)s)",
    )
    parser.add_argument(
        "--per-range",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="files replayed of each range of lengths (default: %(default)s)",
    )
    # A wide MLP: its weights' gradients are what short sequences pay for, as in larger models.
    _add_llama(parser, 2, 256, wide=8)
    _add_running(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--seq-len",
        type=_at_least(1),
        default=53,
        metavar="N",
        help="tokens a sequence (default: %(default)s, which divides by nothing)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    _add_inner(parser, "aot_eager")
    _add_running(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, None, "float32; on paper bfloat16")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help="sequence lengths to plan for (default: 128,1024,8192; on paper 2048 and its doubles "
        "until nothing fits)",
    )
    parser.add_argument(
        "--plan",
        type=_strategy,
        default="auto",
        help="auto, or a strategy to be explained (default: %(default)s)",
    )
    parser.add_argument(
        "--memory-limit",
        type=_bytes,
        metavar="BYTES",
        help="what a rank may need, such as 80GiB (default: what it has)",
    )
    _add_running(parser, on_paper=True)
    group = parser.add_argument_group("a cluster on paper: nothing runs, no rank is started")
    group.add_argument(
        "--gpus", type=_at_least(2), metavar="N", help="devices of the cluster (default: 8)"
    )
    group.add_argument(
        "--weights",
        choices=("sharded", "replicated"),
        default="sharded",
        help="at rest 1/N on each device, or whole (default: %(default)s)",
    )
    group.add_argument(
        "--out", metavar="FOLDER", help="write plan.html, and plan.png with matplotlib, here"
    )


def _add_strategies(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--strategies",
        type=_strategies,
        metavar="NAME,NAME,...",
        help=f"{what} (default: all)",
    )


def _profile(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, required=False)
    parser.add_argument(
        "--lengths",
        type=_length_grid,
        default=[128, 256, 512, 1024, 2048],
        metavar="N,N,... or FIRST:LAST:HOW-MANY",
        help="sequence lengths to measure (default: 128:2048:5)",
    )
    _add_strategies(parser, "what to measure")
    parser.add_argument(
        "--memory-limit",
        type=_bytes,
        metavar="BYTES",
        help="a strategy that needs more on a rank is measured no further (default: what it has)",
    )
    parser.add_argument(
        "--repeats",
        type=_at_least(1),
        default=5,
        metavar="N",
        help="timed steps of each strategy at each length, up to 5 times as many where they are "
        "short (default: %(default)s)",
    )
    parser.add_argument(
        "--sharded", action="store_true", help="weights at rest 1/p on each rank (paradyse.shard)"
    )
    parser.add_argument(
        "--forward-only", action="store_true", help="without gradients, as in evaluation"
    )
    parser.add_argument(
        "--out",
        default="profile.jsonl",
        metavar="FILE",
        help="one JSON line a measurement; what is there is kept and not measured again "
        "(default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="begin the file anew")
    _add_inner(parser, "inductor")
    _add_running(parser)
    parser.set_defaults(timeout=86400.0)


def _bench(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the trace of lengths; without a source, of the standard library's files"
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths", type=_lengths, metavar="N,N,...", help="the lengths themselves"
    )
    source.add_argument("--lengths-file", metavar="FILE", help="a file of them, as many as it has")
    source.add_argument(
        "--distribution", metavar="NAME", help="GitHubCode or GRCh38, --cap being their longest"
    )
    source.add_argument("--text", metavar="FOLDER", help="text files")
    group.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json for text (default: bytes are tokens)"
    )
    _add_trace(group, 12, "lengths to draw")
    _add_strategies(parser, "what to compare auto with")
    parser.add_argument(
        "--rounds",
        type=_at_least(1),
        default=5,
        metavar="N",
        help="runs of each length under each choice (default: %(default)s)",
    )
    parser.add_argument("--csv", metavar="FILE", help="write every run here")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="write bench.csv, bench.html and, with matplotlib, bench.png here",
    )
    _add_inner(parser, "inductor")
    _add_llama(parser, 4, 256)
    _add_running(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    """It has no flags."""


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
        "paradyse profile --ranks 2 --lengths 128:2048:5 --out profile.jsonl",
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
    ("doctor", "check that everything needed is there", "paradyse doctor", _doctor),
)
"""Name, what it does, an example, its flags."""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    names = "\n".join(f"  {example}" for _, _, example, _ in COMMANDS)
    parser = argparse.ArgumentParser(
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


def _run(args: argparse.Namespace) -> int:
    run: Callable[[Any], int]
    if args.command == "demo":
        from paradyse.cli.commands import demo

        run = demo.run_demo
    elif args.command == "bench":
        from paradyse.cli.commands import bench

        run = bench.run_bench
    elif args.command == "doctor":
        from paradyse.cli.commands import doctor

        run = doctor.run_doctor
    elif args.command == "profile":
        from paradyse.cli.commands import profile

        run = profile.run_profile
    elif args.command == "plan" and (args.gpus or args.device not in HERE):
        from paradyse.cli.commands import plan

        run = plan.run_plan_on_paper
    else:
        from paradyse.cli.commands import on_ranks

        run = {
            "verify": on_ranks.run_verify,
            "plan": on_ranks.run_plan,
        }[args.command]
    return run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0: well, 1: something failed, 2: a flag is wrong, 130: Ctrl-C."""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("interrupted; the ranks have been ended", file=sys.stderr)
        return 130
    except ValueError as e:
        print(f"paradyse {args.command}: {e}", file=sys.stderr)
        return 2
    except RuntimeError as e:
        from paradyse.cli.launch import RanksFailed

        if not isinstance(e, RanksFailed):
            raise
        print(f"paradyse {args.command}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
