"""Tables of batches of mixed lengths on paper: one degree for all groups, or groups of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paradyse.cli.charts import Chart, Line, Page, Table
from paradyse.cli.traces import DISTRIBUTIONS, find_distribution, read_lengths, sample_lengths
from paradyse.mixed.step_reports import MixedReport, reports_of
from paradyse.mixed.ways import StepPlan, Way
from paradyse.offline.groups import Comparison
from paradyse.planning.units import format_seconds

WORDS = 110
"""Letters of a plan in a table."""
MOST_GROUPS = 64
"""Of one batch, in a table."""


def draw_batches(
    source: str, batch: int, num_batches: int, cut: int | None = None
) -> list[list[int]]:
    """Lengths of the sequences of some batches, in tokens.

    Args:
        source: a file of lengths, taken in their order, or a distribution, by its name.
        batch: sequences of each.
        num_batches: at most; a file may have fewer.
        cut: tokens behind which sequences are cut off; None: they are whole.
    Raises:
        ValueError: there is neither such a file nor such a distribution, or the file has not enough
            lengths for one batch.
    """
    if Path(source).is_file():
        lengths = read_lengths(source)
        if len(lengths) < batch:
            raise ValueError(
                f"{source} has {len(lengths)} lengths, and a batch takes {batch}: give a smaller "
                "batch or more lengths"
            )
        num_batches = min(num_batches, len(lengths) // batch)
    else:
        try:
            name = find_distribution(source)
        except ValueError as e:
            raise ValueError(f"no file {source}, and {e}") from e
        # equal parts of the distribution over all batches, so that the rarest lengths are in some
        longest = DISTRIBUTIONS[name].edges[-1]
        lengths = sample_lengths(name, batch * num_batches, longest)
    if cut is not None:
        lengths = [min(n, cut) for n in lengths]
    return [lengths[k * batch : (k + 1) * batch] for k in range(num_batches)]


def tables_of_batches(
    batches: Sequence[Sequence[int]], ways: Sequence[Way], found: Comparison
) -> list[Table]:
    """Ways of groups, the time of a step by each choice of degrees, and the groups of each batch.

    Args:
        batches: lengths of their sequences, in tokens.
        ways: that groups could take.
        found: for ``batches``.
    """
    count = len(batches)

    def row(name: str, seconds: float) -> tuple[str, str, str]:
        return name, format_seconds(seconds / count), f"{found.best_s / seconds:.2f}"

    offered = [
        (str(way.degree), f"{way.max_tokens:,}", format_seconds(way.fixed_s)) for way in ways
    ]
    times = [row(f"degree {d} for all", s) for d, s in found.static_s.items()]
    times.append(row("for each batch its best degree", found.best_static_s))
    times.append(row("groups of different degree", found.groups_s))
    plans = [
        (f"{max(lengths):,}", f"{sum(lengths):,}", format_seconds(plan.time_s), shortened(plan))
        for lengths, plan in zip(batches, found.plans)
    ]
    return [
        ("what groups can do", ("degree", "most tokens", "fixed time"), offered),
        ("time of a step", ("degrees", "time", "speed-up over the best"), times),
        (
            "groups of each batch",
            ("longest", "tokens", "time", "number x degree; a micro-batch each"),
            plans,
        ),
        table_of_groups(batches[0], found.plans[0]),
    ]


def table_of_groups(lengths: Sequence[int], plan: StepPlan) -> Table:
    """Which sequences of the first batch go where, degree and time of their group.

    Args:
        lengths: of the batch, in tokens.
        plan: of it.
    """
    groups = list(reports_of(plan, (), lengths))
    report = MixedReport(tuple(groups[:MOST_GROUPS]), plan.time_s)
    _, header, rows = report.table()
    rows = [row[:-1] for row in rows]  # nothing was run
    title = "groups of the first batch"
    if len(groups) > MOST_GROUPS:
        title += f", {MOST_GROUPS} of {len(groups)}"
    return title, header[:-1], rows


def shortened(plan: StepPlan) -> str:
    """The groups of ``plan`` in words, few enough of them for a table."""
    text = plan.in_words()
    return text if len(text) <= WORDS else f"{text[: WORDS - 4]} ..."


def page_of_batches(title: str, batches: Sequence[Sequence[int]], found: Comparison) -> Page:
    """Under ``title`` the time of each of ``batches`` against its tokens, as ``found`` has it."""
    points = sorted((sum(b), p.time_s, True) for b, p in zip(batches, found.plans))
    lines = [Line("groups", tuple(points))]
    for degree, seconds in found.static_of_each.items():
        of = sorted((sum(b), s, True) for b, s in zip(batches, seconds))
        lines.append(Line(f"degree {degree}", tuple(of)))
    what = "Predicted time of a step by its tokens"
    chart = Chart(what, "s", tuple(lines), x_title="tokens of a batch")
    return Page(title, (chart,))
