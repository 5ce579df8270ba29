"""The command line among other programs: gone readers, full disks, signals, foreign modules."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch import SETTING, _gone

from paradyse.cli import main as cli
from paradyse.cli.commands import doctor
from paradyse.cli.commands.doctor import Finding
from paradyse.cli.launch import Rank, run_ranks
from paradyse.cli.outputs import write_whole

COMMAND = [sys.executable, "-m", "paradyse.cli.main"]


@pytest.fixture
def gone_reader() -> Iterator[io.TextIOWrapper]:
    """Where nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stream:
        yield stream


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: Finding("python", "3"),))


def test_a_reader_that_has_read_enough_is_no_failure(gone_reader: io.TextIOWrapper) -> None:
    done = subprocess.run(
        [*COMMAND, "--help"], stdout=gone_reader, stderr=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_table_that_nobody_reads_ends_the_command(
    gone_reader: io.TextIOWrapper,
    quick_doctor: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", gone_reader)
    assert cli.main(["doctor"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_an_output_that_is_full_is_told() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    text = "paradyse: the output: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (1, text)


def test_a_table_that_finds_no_room_is_told(
    quick_doctor: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["doctor"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == "paradyse doctor: the output: No space left on device\n"


def test_results_that_find_no_room_leave_the_former_ones(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    write_whole(page, b"first")
    (tmp_path / "plan.html.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{page}'"):
        write_whole(page, b"second")
    assert page.read_bytes() == b"first"
    write_whole(page, b"third")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("plan.html", b"third")]


def sleep_as(rank: Rank, file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(1000)


WAITING = """
import signal
import sys

# as a terminal starts it, wherever the tests run: nohup ignores these
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from paradyse.cli import launch, main
from paradyse.cli.commands import doctor

setting = launch.Setting(env={"PYTHONPATH": sys.argv[1]})
run = lambda: launch.run_ranks("test_streams:sleep_as", 1, {"file": sys.argv[2]}, setting)
doctor.CHECKS = (run,)
sys.exit(main.main(["doctor"]))
"""


@pytest.mark.broad
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGHUP, signal.SIGINT)),
    ],
)
def test_a_signal_ends_the_ranks_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    temporary, file = tmp_path / "tmp", tmp_path / "pid"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(Path(__file__).parent), str(file)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [p.name.startswith("paradyse-ranks-") for p in temporary.iterdir()] == [True]
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    name = signal.Signals(number).name
    assert error.decode() == f"paradyse doctor: ended by {name}, and what it had started\n"
    assert process.returncode == 128 + number
    assert not list(temporary.iterdir())
    assert _gone(int(file.read_text()))


def test_signals_are_handled_as_before_afterwards() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    ends = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # other tests' libraries handle it
    try:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, ends or signal.SIG_DFL)


def imported_from(rank: Rank, names: list[str]) -> list[str]:
    """Where this rank, and a process that it starts, have modules from."""
    code = f"import {', '.join(names)}, sys; print(*(sys.modules[n].__file__ for n in {names}))"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return [str(sys.modules[n].__file__) for n in names] + child.stdout.split()


@pytest.mark.broad
def test_ranks_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["json", "tempfile", "typing"]
    for name in (*names, "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the current folder')")
    (found,) = run_ranks("test_streams:imported_from", 1, {"names": names}, SETTING)
    assert len(found) == 2 * len(names)
    assert not [file for file in found if Path(file).is_relative_to(tmp_path)]


def mountable() -> bool:
    """Whether this process may mount a disk, for itself and its children alone."""
    unshare = shutil.which("unshare")
    tried = unshare and subprocess.run([unshare, "--mount", "true"], stderr=subprocess.DEVNULL)
    return bool(tried) and tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not mountable(), reason="mounting a small disk takes the rights of root")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("size=16k", "cannot be written (No space left on device); name another place"),
        ("ro", "cannot be written (Read-only file system); name another place"),
    ],
)
@pytest.mark.parametrize(
    "line", ["profile --out {}/p.jsonl", "bench --out {}/charts", "bench --csv {}/t.csv"]
)
def test_disks_that_take_nothing(line: str, options: str, text: str, tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", script, "bash", *COMMAND]
    done = subprocess.run(
        [*command, *line.format(tmp_path).split()], stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 2
    assert text in done.stderr and len(done.stderr.splitlines()) == 1
