"""The picture of an outlook."""

from __future__ import annotations

import math

from paradyse.cli.charts import Bands, Chart, Line, Page
from paradyse.offline.outlook import MIXTURE, Outlook
from paradyse.types import ATTENTION_STRATEGIES


def page_of(title: str, outlook: Outlook) -> Page:
    return Page(title, charts_of(outlook), bands_of(outlook))


def charts_of(outlook: Outlook) -> tuple[Chart, Chart]:
    """Time and memory of every strategy and of the mixture."""
    gib = 2.0**30
    times, peaks = [], []
    for name, forecasts in outlook.forecasts.items():
        times.append(Line(name, tuple((f.seq_len, f.time_s, f.fits) for f in forecasts)))
        peaks.append(Line(name, tuple((f.seq_len, f.peak_bytes / gib, f.fits) for f in forecasts)))
    limit = None if math.isinf(outlook.limit_bytes) else outlook.limit_bytes / gib
    return (
        Chart("Predicted time of a step (dashed: does not fit)", "s", tuple(times)),
        Chart("Predicted peak memory of a rank", "GiB", tuple(peaks), limit),
    )


def bands_of(outlook: Outlook) -> list[Bands]:
    """What the mixture takes, for each kind of block."""
    found = []
    for kind in dict.fromkeys(b.kind for b in outlook.run.blocks):
        at = [i for i, b in enumerate(outlook.run.blocks) if b.kind == kind]
        shares = []
        for f in outlook.forecasts[MIXTURE]:
            names = [f.plan[i] for i in at]
            shares.append({n: names.count(n) / len(at) for n in ATTENTION_STRATEGIES if n in names})
        lengths = tuple(f.seq_len for f in outlook.forecasts[MIXTURE])
        found.append(Bands(f"Strategies of {kind} blocks in the mixture", lengths, tuple(shares)))
    return found
