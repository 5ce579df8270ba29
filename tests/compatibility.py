"""Which families of models are exact, and what of them is split: docs/compatibility.md.

    python tests/compatibility.py                         # every family that the table lacks
    python tests/compatibility.py --only t5 vit --again   # these, also if they are in the table
    python tests/compatibility.py --seconds 400           # begin no family after this time
    python tests/compatibility.py --all-strategies        # each strategy, and auto
    python tests/compatibility.py --inner inductor --limit 600 \\
        --out docs/compatibility_inductor.md              # compiled blocks
    python tests/compatibility.py --device cuda --ranks 2 \\
        --out FILE                                        # ranks that share a GPU, over gloo
    python tests/compatibility.py --settings              # of what the table has: 1 to 4 ranks, ..

Each family is a small model with random weights (``family_table.py``). Two ranks train it at three
lengths, under the plan ``auto`` or under each strategy, and one process trains it in eager mode.
Loss and gradients have to be equal. The ranks have limited time for a family: one that crashes or
hangs is a row of the table. So is one that eager mode cannot train, which is not tried. The table
is written after each family; families that stand there are not tried again. With ``--settings``
those that are exact are trained on one to four ranks, with weights whole and sharded, without
padding, padded and packed, where the family has such masks.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import family_settings
from family_run import examine, short
from family_settings import LAYOUTS, MASKS, RANKS
from family_table import FAMILIES
from harness import RankError, RankFailure, RankPool
from plans import PLANS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
NUM_RANKS = 2

TITLE = """# Compatibility

Written by `make compatibility ARGS=--all-strategies` (`tests/compatibility.py`): a small model of
each family, with random weights, on two ranks, against one process in eager mode. What computes the
blocks is `inner="eager"`; [another table](compatibility_inductor.md) has what inductor compiles.

"""

COMPILED_TITLE = """# Compatibility under `inner="{inner}"`

Written by `tests/compatibility.py --inner {inner} --out THIS`: as the [table of \
families](compatibility.md), but what computes the blocks is compiled by {inner}, under the plan \
`auto` alone.

"""

GPU_TITLE = """# Compatibility on a GPU

Written by `tests/compatibility.py --device cuda --out THIS`: as the [table of \
families](compatibility.md), but on {ranks} rank(s) that share one {gpu} and talk over gloo.

"""

HEAD = """| column | meaning |
|---|---|
| exact | the plans under which loss and gradients are equal at three lengths, "all strategies": \
each of them, two mixtures, and what `auto` chooses; else what is off |
| blocks | those that have strategies, by kind; "none": tokens are split, and nothing is a block; \
"whole": every rank computes all of it |
| layers | of all stacks of the model |
| programs | graphs after the first, second and third length |
| settings | on one to four ranks, with weights whole and sharded: the masks under which loss and \
gradients are equal at three lengths, under four of the plans each; empty: not tried |
| notes | what is computed on gathered tensors or whole, and why |

"""


@dataclass(frozen=True)
class Result:
    """A row of the table, as text."""

    family: str
    model: str
    exact: str
    blocks: str
    layers: str
    programs: str
    settings: str
    notes: str

    @classmethod
    def parse(cls, line: str) -> Result | None:
        """The row that ``line`` of the document is; None for any other line."""
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        is_row = len(cells) == len(fields(cls)) and cells[0] in FAMILIES
        return cls(*cells) if is_row else None

    @property
    def is_all_blocks(self) -> bool:
        """Whether each layer has an attention and an MLP, or experts, that are blocks."""
        found = re.findall(r"(\d+) (\w+)", self.blocks)
        number = {kind: int(n) for n, kind in found}
        ways = number.get("attention", 0), number.get("mlp", 0) + number.get("experts", 0)
        return self.layers.isdigit() and min(ways) >= int(self.layers) > 0

    def line(self) -> str:
        cells = (str(getattr(self, f.name)).replace("|", "/") for f in fields(self))
        cells = (cell.replace("][*]", "]\\[*]") for cell in cells)  # else Markdown sees a link
        return "| " + " | ".join(" ".join(c.split()) for c in cells) + " |"


def try_family(
    pool: RankPool,
    name: str,
    plans: Sequence[str],
    timeout_s: float,
    inner: str = "eager",
    device: str = "cpu",
) -> Result:
    """The row of ``name``; that of a crash where ranks raise, die or do not come back."""
    row = FAMILIES[name]
    try:
        found = pool.run(examine, row, list(plans), inner, device, timeout_s=timeout_s)[0]
    except RankFailure as e:
        problem = f"**crash**: {crash(e)}"
        found = {"exact": problem, "blocks": "", "layers": "", "programs": "", "notes": ""}
    return Result(family=name, model=row.cls, settings="", **found)


Pools = dict[int, RankPool]


@contextmanager
def pools_of(numbers: Sequence[int]) -> Iterator[Pools]:
    """A pool for each number of ranks."""
    pools = {p: RankPool(p) for p in numbers}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def try_settings(pools: Pools, name: str, timeout_s: float) -> str:
    """The cell ``settings`` of ``name``: its masks, or what is off in which setting."""
    masks, off = dict.fromkeys(MASKS), dict[str, str]()
    for p, pool in pools.items():
        for layout in LAYOUTS:
            where = f"{p} ranks, {layout}"
            try:
                sharded = layout == "sharded"
                found = pool.run(
                    family_settings.compare, FAMILIES[name], sharded, timeout_s=timeout_s
                )
            except RankFailure as e:
                off[where] = crash(e)
                continue
            masks = {m: None for m in masks if all(m in f["masks"] for f in found)}
            for f in found:
                off |= {f"{where}, {what}": f"{error:.0e}" for what, error in f["off"].items()}
    wrong = "; ".join(f"{where}: {what}" for where, what in off.items())
    return f"**no**: {wrong}" if off else ", ".join(masks)


def crash(failure: RankFailure) -> str:
    """One line of why ranks failed."""
    if failure.timed_out:
        return "no result in time"
    errors: list[RankError] = list(failure.errors.values())
    if not errors:
        return "a rank died"
    lines = [x.strip() for x in errors[0].text.splitlines() if x.strip()]
    wrapped = len(lines) > 1 and lines[0].endswith("raised:")  # by Dynamo
    said = lines[wrapped] if lines else ""
    return f"{errors[0].type_name}: {short(said)}"


def read(document: Path) -> dict[str, Result]:
    """Rows by family; none where there is no document yet."""
    lines = document.read_text().splitlines() if document.exists() else []
    rows = (Result.parse(line) for line in lines)
    return {r.family: r for r in rows if r is not None}


def title_of(inner: str, device: str, num_ranks: int) -> str:
    """What a document says of how its rows came to be."""
    if device == "cuda":
        import torch

        return GPU_TITLE.format(ranks=num_ranks, gpu=torch.cuda.get_device_name())
    return TITLE if inner == "eager" else COMPILED_TITLE.format(inner=inner)


def write(document: Path, rows: Iterable[Result], title: str = TITLE) -> None:
    """All of ``rows``, in the order of the table of families, with how many are exact."""
    by_name = {r.family: r for r in rows}
    ordered = [by_name[name] for name in FAMILIES if name in by_name]
    tried = [r for r in ordered if not r.exact.startswith("**not tried")]
    exact = [r for r in tried if not r.exact.startswith("**")]
    whole, blocks = sum(r.blocks == "whole" for r in exact), sum(r.is_all_blocks for r in exact)
    summary = (
        f"{len(tried)} of {len(FAMILIES)} families tried: {len(exact)} exact, of which {blocks} "
        "have a block for each layer's attention and for its MLP or experts, and "
        f"{whole} are computed whole on every rank.\n\n"
    )
    names = [f.name for f in fields(Result)]
    table = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    text = title + HEAD + summary + "\n".join([*table, *(r.line() for r in ordered)]) + "\n"
    document.write_text(text)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY")
    parser.add_argument("--again", action="store_true", help="also those that are in the table")
    parser.add_argument("--all-strategies", action="store_true")
    parser.add_argument("--settings", action="store_true", help="numbers of ranks, masks, shards")
    parser.add_argument(
        "--inner", default="eager", help='what compiles the blocks ("eager": nothing does)'
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one family (90)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all ranks")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, help=f"({NUM_RANKS})")
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the document")
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    if args.settings and args.device != "cpu":
        parser.error(f"--settings are tried on CPUs alone: leave --device {args.device} out")
    if args.settings:
        return with_settings(args)
    start, rows = time.monotonic(), read(args.out)
    plans = PLANS if args.all_strategies else ("auto",)
    failed = 0
    with RankPool(args.ranks) as pool:
        for name in args.only or FAMILIES:
            if name in rows and not args.again:
                continue
            if time.monotonic() - start > args.seconds:
                break
            began = time.monotonic()
            row = try_family(pool, name, plans, args.limit, args.inner, args.device)
            settings = rows[name].settings if name in rows else ""
            rows[name] = replace(row, settings=settings)  # of a command of its own
            failed += rows[name].exact.startswith("**")
            print(f"{time.monotonic() - began:5.1f} s {rows[name].line()}", flush=True)
            write(args.out, rows.values(), title_of(args.inner, args.device, args.ranks))
    return 1 if failed else 0


def with_settings(args: argparse.Namespace) -> int:
    """Try the settings of the families that the table calls exact, and write them into it."""
    start, rows = time.monotonic(), read(args.out)
    failed = 0
    with pools_of(RANKS) as pools:
        for name in args.only or FAMILIES:
            row = rows.get(name)
            if row is None or row.exact.startswith("**") or (row.settings and not args.again):
                continue
            if time.monotonic() - start > args.seconds:
                break
            began = time.monotonic()
            rows[name] = replace(row, settings=try_settings(pools, name, args.limit))
            failed += rows[name].settings.startswith("**")
            print(f"{time.monotonic() - began:5.1f} s {name}: {rows[name].settings}", flush=True)
            write(args.out, rows.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
