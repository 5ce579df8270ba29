"""Reports as tables: plain text, a console's of ``rich``, and in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

Rows = list[tuple[str, ...]]


class Shown:
    """A report with ``str()`` as plain text, which notebooks show as it is printed."""

    def _repr_html_(self) -> str:
        # A theme's own colours; lines of a table must not be wrapped.
        return f'<pre style="white-space: pre; overflow-x: auto">{escape(str(self))}</pre>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` below their ``header``: columns as wide as they need to be, no trailing blanks."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in lines)


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """``rows`` below their ``header`` and a ``title``, as a console of ``rich`` prints it."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, title=escape(title), title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
