"""Which tests `make test` leaves to `make test-all`: long_tests.txt, from how long each took.

    make test ARGS="--durations=0" > LOG; python tests/find_long.py LOG
    python tests/find_long.py LOG --seconds 1500      # of `make test`, all its workers together

Of each test function the parameters that are done soonest stay, and every test that a document
names (docs/seeded_faults.md, docs/workflows.md); then what is short, until the seconds are spent.
The rest is written down, one test a line, and conftest marks it as slow, beside what is so marked
in its own file. Tests that stand there already and did not run stay there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG = Path(__file__).with_name("long_tests.txt")
DOCUMENTS = ("docs/seeded_faults.md", "docs/workflows.md")

_LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+?::.+?)\s*$")
_NAMED = re.compile(r"tests/[\w/]+\.py::\w+(?:\[[^`]*?\])?")


def durations(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of each test, by its id, as pytest's ``--durations=0`` says in ``lines``."""
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if m := _LINE.match(line):
            found[m[2]] += float(m[1])
    return dict(found)


def function_of(test: str) -> str:
    """The id of ``test`` without its parameters."""
    return test.partition("[")[0]


def choose(seconds: Mapping[str, float], named: Iterable[str], limit: float) -> list[str]:
    """The tests that are long.

    Args:
        seconds: by the id of a test.
        named: ids of tests, or of test functions, that stay.
        limit: seconds of those that stay, unless what has to stay takes longer.
    """
    stay = {t for t in seconds if t in set(named)}
    by_function = defaultdict[str, list[str]](list)
    for test in seconds:
        by_function[function_of(test)].append(test)
    for function, tests in by_function.items():
        if function in set(named) or not stay.intersection(tests):
            stay.add(min(tests, key=seconds.__getitem__))
    left = limit - sum(seconds[t] for t in stay)
    for test in sorted(seconds.keys() - stay, key=lambda t: (seconds[t], t)):
        left -= seconds[test]
        if left < 0:
            break
        stay.add(test)
    return sorted(seconds.keys() - stay)


def check_long(long: set[str], collected: Sequence[str]) -> None:
    """Raises ValueError where what ``long`` lists of the files that were ``collected`` whole is not
    there, or is all that there is of a test function."""
    files = {test.partition("::")[0] for test in collected}
    mine = {test for test in long if test.partition("::")[0] in files}
    stay = {function_of(test) for test in collected if test not in long}
    wrong = [f"{test} is not there" for test in sorted(mine.difference(collected))]
    wrong += [f"{f} has no others" for f in sorted({*map(function_of, mine)} - stay)]
    if wrong:
        raise ValueError(f"{LONG.name}: {'; '.join(wrong)}: take such lines out")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="what pytest printed")
    parser.add_argument("--seconds", type=float, default=1500.0)
    args = parser.parse_args()
    seconds = durations(args.log.read_text(errors="replace").splitlines())
    if not seconds:
        sys.exit(f"{args.log} says nothing of how long tests took: run them with --durations=0")
    named = {m for d in DOCUMENTS for m in _NAMED.findall((ROOT / d).read_text())}
    found = choose(seconds, named, args.seconds)
    found = sorted({*found, *(set(LONG.read_text().splitlines()) - seconds.keys())})
    LONG.write_text("".join(f"{t}\n" for t in found))
    spent = sum(seconds.get(t, 0.0) for t in found)
    print(
        f"{len(seconds)} tests took {sum(seconds.values()):.0f} s; {len(found)} of them, "
        f"{spent:.0f} s, are in {LONG.relative_to(ROOT)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
