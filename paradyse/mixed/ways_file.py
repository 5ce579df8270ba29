"""Ways of groups in a file: planned where there is time, and read where a model trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paradyse.mixed.ways import Way

SHARDED, WHOLE = "sharded", "replicated"
"""How weights lie at rest."""


def write_ways(path: Path, ways: Sequence[Way], weights: str) -> None:
    """Write ``ways`` to ``path``, as JSON, in the place of what is there once all is written.

    Args:
        weights: how they lie at rest: ``SHARDED`` or ``WHOLE``.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    text = json.dumps({"weights": weights, "ways": [asdict(w) for w in ways]}, indent=1)
    unfinished.write_text(text)
    unfinished.replace(path)


def read_ways(path: str | Path) -> tuple[list[Way], str]:
    """The ways that ``write_ways`` wrote to ``path``, and how weights lie at rest with them.

    Raises:
        ValueError: there is no such file, or something else is in it.
    """
    file = Path(path)
    try:
        found = json.loads(file.read_text())
        weights, ways = found["weights"], [_way(w) for w in found["ways"]]
        if weights not in (SHARDED, WHOLE):
            raise ValueError(f"weights are {str(weights)[:20]!r}")
    except OSError as e:
        raise ValueError(f"{file} cannot be read: {e.strerror}; give a file of ways") from e
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise ValueError(
            f"{file} has no ways of groups ({type(e).__name__}: {e}); `paradyse plan "
            "--lengths-from ... --out FOLDER` writes ways.json"
        ) from e
    return ways, weights


def check_weights(planned: str, present: str) -> None:
    """
    Args:
        planned: how weights are to lie at rest by a file of ways; "": anyhow.
        present: how they lie.
    Raises:
        ValueError: otherwise.
    """
    if planned not in ("", present):
        raise ValueError(
            f"the ways of groups are planned with weights {planned}, and here they are {present}: "
            f"plan with --weights {present}"
        )


def _way(given: Any) -> Way:
    """A way from what JSON has of it.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(given, dict) or set(given) != {f.name for f in fields(Way)}:
        raise ValueError(f"not a way: {str(given)[:60]}")
    whole = (given["degree"], given["max_tokens"], *given["lengths"])
    if not all(type(n) is int for n in whole) or not isinstance(given["name"], str):
        raise ValueError(f"not a way: {str(given)[:60]}")
    times = [float(t) for t in given["times_s"]]
    return Way(**{**given, "lengths": tuple(given["lengths"]), "times_s": tuple(times)})
