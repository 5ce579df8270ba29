"""The first forty minutes with a GPU: every table that needs one, by priority, within the minutes.

    python benchmarks/gpu_day.py --out FOLDER --minutes 40
    python benchmarks/gpu_day.py --out FOLDER --rehearse   # tiny, on a CPU, to see that it runs

Any Python that has torch, triton and transformers will do: the package need not be installed and no
network is needed. Each part is a process of its own, which finds the package in this checkout, and
is ended when its minutes or those of the day are over. What it has measured by then stays: reports
are written after every case, and FOLDER/day.md joins what is there after every part. Started again
with the same FOLDER, parts that came to their end are passed over, others run again; the tables of
kernels and tiles that were found serve the parts behind them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TILES, SELECTION = "tiles.json", "selection.json"

FLASH_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""What may take the place of PyTorch's flash attention -> the module that PyTorch takes it from."""
GRACE_S = 10.0
"""A part that is told to end has so long to give back what it holds."""
LOG_LINES = 30
"""Of a part that failed, in the report."""
DONE, FAILED, ENDED = "done", "failed", "ended at its limit"


@dataclass(frozen=True)
class Part:
    """One process of the day."""

    name: str
    command: Sequence[str]
    """What Python is given."""
    minutes: float
    """At most; the next part begins earlier where it takes less."""
    env: dict[str, str] = field(default_factory=dict)


def gpu_tests() -> list[str]:
    """Files of tests that need a GPU, or run on one where there is one."""
    marks = ("mark.gpu", "import kernels", "kernel_device")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [f for f in files if any(mark in f.read_text() for mark in marks)]
    return [f.relative_to(ROOT).as_posix() for f in found if "interpreter" not in f.name]


def tests(rehearse: bool) -> Part:
    """The tests on the GPU; in the rehearsal one file of them, in Triton's interpreter."""
    files = ["tests/kernels/test_merge.py"] if rehearse else gpu_tests()
    command = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu or kernels", *files]
    if not rehearse and importlib.util.find_spec("xdist"):  # kernels compile on several cores
        command += ["-n", str(min(6, os.cpu_count() or 1))]
    if importlib.util.find_spec("pytest_timeout") is None:
        # its option is then unknown, which is an error by this project's settings
        command += ["-o", "addopts=", "-o", "filterwarnings="]
    interpreted = {"TRITON_INTERPRET": "1"} if rehearse else {}
    return Part("tests", command, 8, interpreted)


def is_installed(module: str) -> bool:
    """Whether ``module``, which may be in a package, can be found; that package is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def parts(out: Path, rehearse: bool) -> Iterator[Part]:
    """Those of the day, the most important first."""

    def script(name: str, part: str, minutes: float, *options: str, **env: str) -> Part:
        quick = ["--quick"] * (rehearse and part != "right")
        # a slow kernel is a finding; a wrong one is a failure
        lenient = ["--report-only"] * (part not in ("right", "ranks"))
        given = [str(HERE / f"{name}.py"), *quick, *lenient, "--out", str(out / part)]
        return Part(part, [*given, *options], minutes, env)

    tiles, selection = (str(out / name) for name in (TILES, SELECTION))
    # FlexAttention is compiled anew for each of thirty cases, and is not ours to check
    yield script("attention_gpu", "right", 5, "--check", "--without", "flex_attention")
    yield tests(rehearse)
    # before there are tables of this day: with the kernels and tiles that people get
    steps = ["--rounds", "1", "--seconds", "30", "--profile"]
    together = ["64"] if rehearse else ["2048", "32768", "512", "8192"]
    yield script("one_device", "llama", 8, "--lengths", *together, "--side-by-side", *steps)
    interpreted = {"TRITON_INTERPRET": "1"} if rehearse else {}
    yield script("tile_sweep", "tiles", 6, "--minutes", "5", "--write-table", tiles, **interpreted)
    documents = "--masks", "documents", "--minutes", "3"
    yield script(
        "tile_sweep", "tiles-documents", 4, *documents, "--write-table", tiles, **interpreted
    )
    lengths = [] if rehearse else ["--lengths", "1024", "4096", "16384", "32768"]
    plain = ["--masks", "causal", "full", "window", *lengths]
    masked = ["--masks", "documents", "padding", *lengths]
    yield script("attention_gpu", "plain", 4, *plain, "--write-table", selection)
    for flash, module in FLASH_MODULES.items():
        if not rehearse and is_installed(module):
            given = "--flash", flash, "--write-table", selection
            yield script("attention_gpu", f"plain-{flash}", 4, *plain, *given)
    yield script("attention_gpu", "plain-gqa", 4, *plain, "--group", "2" if rehearse else "4")
    yield script("attention_gpu", "masked", 5, *masked)
    yield script("verified", "ranks", 6)
    if not rehearse:
        # a step of inductor, with its dense mask, takes a minute there
        alone = ["--backends", "paradyse"]
        yield script("one_device", "llama-131072", 5, "--lengths", "131072", *alone, *steps)
    yield script("longest_device", "longest", 8)
    yield script("attention_gpu", "masked-gqa", 5, *masked, "--group", "2" if rehearse else "4")


class Day:
    """Parts that are run, and what became of them.

    Args:
        out: the folder of all results.
        minutes: until when parts run.
        book: name of the file that says what became of them.
    """

    def __init__(self, out: Path, minutes: float, book: str = "day.json") -> None:
        self.out, self.end = out, time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.book = out / book
        self.fates: dict[str, str] = {}
        if self.book.exists():
            self.fates = json.loads(self.book.read_text())

    def environment(self, part: Part) -> dict[str, str]:
        """Variables of its process: the checkout is found, and Dynamo knows the backend, as if the
        package were installed."""
        installed = self.out / "registered"
        info = installed / "paradyse-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paradyse\nVersion: 0\n")
        points = "[torch_dynamo_backends]\nparadyse = paradyse.backend:paradyse\n"
        (info / "entry_points.txt").write_text(points)
        path = [str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            # the model comes from a configuration; nothing is to be looked for on a network
            "HF_HUB_OFFLINE": "1",
        }
        for variable, name in (("PARADYSE_TILES", TILES), ("PARADYSE_KERNELS", SELECTION)):
            if (self.out / name).exists():
                env[variable] = str(self.out / name)
        return env | part.env

    def run(self, part: Part) -> None:
        """Run ``part``, unless it is done or no time is left."""
        left = self.end - time.monotonic()
        if self.fates.get(part.name, "").startswith(DONE) or left <= 0:
            return
        limit, begin = min(left, 60 * part.minutes), time.monotonic()
        say(f"{part.name}: {' '.join(part.command)}")
        with open(self.out / f"{part.name}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=ROOT,
                env=self.environment(part),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it is ended with all that it started
            )
            try:
                code = process.wait(limit)
                fate = DONE if code == 0 else f"{FAILED}, exit status {code}"
            except subprocess.TimeoutExpired:
                fate = ENDED
            finally:
                end_all(process)
        self.fates[part.name] = f"{fate} after {time.monotonic() - begin:.0f} s"
        self.book.write_text(json.dumps(self.fates, indent=1) + "\n")
        say(f"{part.name}: {self.fates[part.name]}")

    def write(self, all_parts: Sequence[Part]) -> None:
        """The report of the day, as far as it is."""
        lines = ["# gpu_day", ""]
        for part in all_parts:
            lines.append(f"- {part.name}: {self.fates.get(part.name, 'not run')}")
        for part in all_parts:
            reports = sorted((self.out / part.name).glob("*.md"))
            log = self.out / f"{part.name}.log"
            failed = part.name in self.fates and not self.fates[part.name].startswith(DONE)
            if part.name == "tests" and log.exists():
                lines += ["", "# tests", "", *tail(log, 5)]
            for report in reports:
                lines += ["", f"<!-- {part.name} -->", "", *report.read_text().splitlines()]
            if failed and log.exists():
                lines += ["", f"The end of {log.name}:", "", *tail(log, LOG_LINES)]
        (self.out / "day.md").write_text("\n".join(lines) + "\n")


def tail(log: Path, count: int) -> list[str]:
    """The last lines of ``log``, as a block of code."""
    return ["```", *log.read_text(errors="replace").splitlines()[-count:], "```"]


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End what is left of ``process`` and of those that it started: first by asking."""
    for kind, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=40.0, help="of the whole day")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    args = parser.parse_args()
    out = args.out.resolve()
    missing = [m for m in ("torch", "triton", "transformers") if not importlib.util.find_spec(m)]
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}: choose a Python that has")
    planned = list(parts(out, args.rehearse))
    unknown = set(args.only or ()) - {part.name for part in planned}
    if unknown:
        names = ", ".join(part.name for part in planned)
        sys.exit(f"--only {' '.join(sorted(unknown))}: no such part; there are {names}")
    if not args.rehearse and not has_gpu():
        sys.exit("PyTorch sees no CUDA device; --rehearse runs to its end on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # with its part
    day = Day(out, args.minutes, "rehearsal.json" if args.rehearse else "day.json")
    for part in planned:
        if args.only is None or part.name in args.only:
            day.run(part)
        day.write(planned)
    say(f"{out / 'day.md'}")
    run = [day.fates.get(p.name, "") for p in planned if not args.only or p.name in args.only]
    return int(not all(fate.startswith(DONE) for fate in run))


if __name__ == "__main__":
    sys.exit(main())
