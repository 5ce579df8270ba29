"""Exposed waits, by strategy: the time in which a rank does nothing but wait for a message.

    with torch.profiler.profile() as profile:
        model(**batch).loss.backward()
    profile.export_chrome_trace("trace.json")         # opens in Perfetto (https://ui.perfetto.dev)
    for wait in exposed_waits("trace.json"):
        print(wait)

A message that is there when it is asked for is not waited for. So what stays is what computation
has not hidden, and these sums fall where more of a message is under way beside it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paradyse.distributed.lanes import PURPOSES
from paradyse.distributed.regions import WAIT
from paradyse.types import ATTENTION_STRATEGIES, Point

LEAST_S = 1e-4
"""A wait below this is that of asking whether a message is there."""


@dataclass(frozen=True)
class ExposedWait:
    """Waits for the messages of one kind and purpose that blocks under one strategy sent."""

    strategy: str
    """With the levers of the block; "" for messages of no block, such as ranks' agreement."""
    collective: str
    """As ``paradyse.stats`` names it."""
    purpose: str
    """Of its lane (``distributed/lanes.py``): "weights", "gradients"; "" for all other messages."""
    count: int
    """Of waits that were exposed, above ``LEAST_S``."""
    seconds: float
    """Of all waits."""

    def __str__(self) -> str:
        of = self.strategy or "no block"
        what = f"{self.collective} of {self.purpose}" if self.purpose else self.collective
        return f"{of}: {self.count} waits for {what}, {self.seconds * 1e3:.1f} ms"


def exposed_waits(trace: str | Path) -> list[ExposedWait]:
    """What the rank that wrote ``trace`` waited for, in the order of strategies, collectives and
    purposes.

    Args:
        trace: a file of ``torch.profiler.profile.export_chrome_trace``, packed by gzip if its name
            ends so.
    Raises:
        ValueError: the file is no such trace; or the device waits for messages instead of the host,
            as with NCCL, so that no region tells of it.
    """
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in _events(Path(trace)):
        name = str(event.get("name", ""))
        if event.get("cat") == "kernel" and "nccl" in name.lower():
            raise ValueError(
                f"{trace}: NCCL carried messages, for which the device waits and not the host, so "
                "no region of the host tells of it. Look at the rows of the device's streams"
            )
        words = name.split()
        if event.get("cat") != "user_annotation" or words[:1] != [WAIT] or len(words) < 2:
            continue
        strategy = words[-1] if Point.parse(words[-1]).strategy in ATTENTION_STRATEGIES else ""
        purpose = next((p for p in PURPOSES if words[2:3] == [p]), "")
        found[strategy, words[1], purpose].append(float(event["dur"]) * 1e-6)
    return [
        ExposedWait(*key, sum(s > LEAST_S for s in seconds), sum(seconds))
        for key, seconds in sorted(found.items())
    ]


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        packed = path.read_bytes()
        read = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)
        events: list[dict[str, Any]] = read["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is no trace of torch.profiler ({type(e).__name__}: {e}): write one by "
            "profile.export_chrome_trace(path)"
        ) from e
    return events
