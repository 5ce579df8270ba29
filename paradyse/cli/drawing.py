"""Charts drawn by Altair, which is optional: for pages, where they fit the width there is, and as
pictures of a fixed width."""

from __future__ import annotations

import importlib.util
import json
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paradyse.cli.charts import BLACK, ON_DARK, Bands, Chart, Page, colours_of, edges
from paradyse.cli.ticks import MANY, TOKENS, Ticks, apart, text_of, ticks_of

if TYPE_CHECKING:
    import altair as alt

NEEDED = ("altair", "vl_convert")
WIDTH, HEIGHT, BAND, LANE = 640, 300, 110, 26
"""Of a picture, of a chart, of bands, and of one band alone, in pixels."""
EXTENT, COLUMNS = 74, 5
"""Of the texts at the left, least, in pixels; names in a row of a picture's key."""
LETTER, LINE, LEADER = 6.4, 14, 12
"""Of a label: width of a letter, least distance of two, and from the line to it, in pixels."""
ROOM = 1.25
"""Above and below the values of a chart, as a ratio."""
LIMIT = "#c62828"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
ZOOM = "wheel![event.shiftKey]"


def can_draw() -> bool:
    """Whether what charts need is installed."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def look(dark: bool) -> dict[str, Any]:
    """Vega's configuration for a page that is ``dark`` or light."""
    ink, faint, paper = ("#e0e0e0", "#3d3d3d", "#161616") if dark else ("#222", "#e3e3e3", "#fff")
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": paper,
        "font": FONT,
        "axis": {**text, "gridColor": faint, "domainColor": ink, "tickColor": ink}
        | {"titleFontWeight": "normal", "titlePadding": 8},
        "legend": text | {"orient": "bottom", "title": None, "symbolType": "square"},
        "title": {"color": ink, "anchor": "start", "fontSize": 14},
        "text": {"color": ink, "fontSize": 12},
        "view": {"stroke": faint},
    }


def for_page(page: Page) -> list[dict[str, Any]]:
    """Vega-Lite of each chart of ``page``, then of its bands, as wide as where they are put."""
    fitting = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    padding = {"left": 0, "top": 6, "bottom": 2, "right": 2}
    return [of.properties(padding=padding, **fitting).to_dict() for of in _all(page, inside=True)]


def scripts() -> str:
    """What draws Vega-Lite in a browser, as JavaScript; it loads nothing."""
    import vl_convert

    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_version())
    return text.replace("</script", "<\\/script")


def _version() -> str:
    """Of Vega-Lite, which Altair writes and vl-convert reads."""
    import altair as alt

    return "v" + "_".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def on_dark(spec: Any) -> Any:
    """``spec`` in the colours of a dark page."""
    if isinstance(spec, dict):
        return {key: on_dark(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [on_dark(value) for value in spec]
    return ON_DARK.get(spec, spec) if isinstance(spec, str) else spec


def png_of(page: Page) -> bytes:
    """``page`` as one picture on white."""
    import altair as alt

    figures = [drawn.properties(width=WIDTH) for drawn in _all(page)]
    both = alt.vconcat(*figures, spacing=28).resolve_scale(color="independent")
    both = both.properties(title=textwrap.wrap(page.title, 100), padding=12)
    return bytes(_converted("png", both, scale=1.5))


def svg_of(chart: Chart) -> str:
    """``chart`` as a picture by itself, on white."""
    drawn, *_ = _all(Page(chart.title, [chart]))
    return str(_converted("svg", drawn.properties(width=WIDTH, padding=12)))


def _converted(kind: str, drawn: Any, **more: Any) -> Any:
    import vl_convert

    convert = getattr(vl_convert, f"vegalite_to_{kind}")
    return convert(drawn.to_dict(), vl_version=_version(), config=look(dark=False), **more)


def _all(page: Page, *, inside: bool = False) -> list[Any]:
    """Charts and bands of ``page``, ``inside`` one that has their titles and keys itself."""
    import altair as alt

    texts = [line.name for c in page.charts for line in c.lines]
    texts += [_limit_text(c) for c in page.charts]
    room = math.ceil(LETTER * max(map(len, texts), default=0)) + LEADER + 4
    # of equal width wherever their labels end, so that lengths stand below one another
    spacer = alt.Chart(alt.Data(values=[{}])).mark_rule(opacity=0, clip=False)
    spacer = spacer.encode(x=alt.value("width"), x2=_right(room), y=alt.value(0))
    span, charts, bands = page.lengths(), page.drawn_charts(), page.drawn_bands()
    drawn = [_chart(c, span, zoom=inside) for c in charts]
    drawn += [_bands(b, span, key=not inside) for b in bands]
    drawn = [alt.layer(d, spacer).properties(height=d.height) for d in drawn]
    if inside:
        return drawn
    titles = [c.title for c in charts] + [b.title for b in bands]
    return [d.properties(title=title) for d, title in zip(drawn, titles, strict=True)]


def _axis(ticks: Ticks, **more: Any) -> alt.Axis:
    """With the texts of ``ticks``; those that find no room are left out, every other one first."""
    import altair as alt

    values = [t for t, _ in ticks]
    label = f"{json.dumps([text for _, text in ticks])}[indexof({values}, datum.value)]"
    return alt.Axis(
        values=values, labelExpr=label, labelOverlap="parity", labelSeparation=6, **more
    )


def _tokens(span: Sequence[float], title: str) -> alt.X:
    """The axis of lengths, the same for all that stand below one another."""
    import altair as alt

    ends = edges(span)
    scale = alt.Scale(type="log", domain=[ends[0], ends[-1]], nice=False)
    axis = _axis(ticks_of(TOKENS, ends[0], ends[-1], MANY), tickCount=MANY)
    return alt.X("tokens:Q", scale=scale, axis=axis, title=title)


def _limit_text(chart: Chart) -> str:
    return f"limit {text_of(chart.unit, chart.limit)}" if chart.limit else ""


def _chart(chart: Chart, span: Sequence[float], zoom: bool) -> alt.LayerChart:
    import altair as alt

    values = [v for line in chart.lines for _, v, _ in line.points]
    values += [chart.limit] if chart.limit else []
    low, high = min(values) / ROOM, max(values) * ROOM
    names = [line.name for line in chart.lines if line.points]
    colours = colours_of(names)
    x = _tokens(span, chart.x_title)
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=_axis(ticks_of(chart.unit, low, high), minExtent=EXTENT),
        title=None,
    )
    colour = alt.Color("name:N", scale=alt.Scale(domain=names, range=colours), legend=None)
    rows = [
        {"name": line.name, "tokens": n, "value": v, "part": ("fits", "does not fit")[i]}
        | {"length": f"{n:,.0f}", "text": text_of(chart.unit, v)}
        | {"wide": 3 if of == BLACK else 1.6}
        for line, of in zip((x for x in chart.lines if x.points), colours, strict=True)
        for i, part in enumerate(line.parts())
        for n, v, _ in part
    ]
    of = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=colour)
    dash = alt.Scale(domain=["fits", "does not fit"], range=[[1, 0], [4, 4]])
    tell = [
        alt.Tooltip("name:N", title="of"),
        alt.Tooltip("length:N", title="tokens"),
        alt.Tooltip("text:N", title="value"),
        alt.Tooltip("part:N", title="memory"),
    ]
    lines = of.mark_line(clip=True).encode(
        strokeDash=alt.StrokeDash("part:N", scale=dash, legend=None),
        strokeWidth=alt.StrokeWidth("wide:Q", scale=None),
    )
    if zoom:
        bound = alt.selection_interval(bind="scales", encodings=["x"], zoom=ZOOM)
        lines = lines.add_params(bound)
    dots = of.mark_circle(size=34, opacity=1, clip=True).encode(tooltip=tell)
    layers = [*_shades(chart, high, edges(span)[-1], x, y), lines, dots]
    layers += [*_marks(chart, x, y), *_labels(chart, names, colours, low, high, y)]
    return alt.layer(*layers).properties(height=HEIGHT)


def _shades(chart: Chart, high: float, end: float, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """What does not fit: above the limit, or beyond the longest length that does."""
    import altair as alt

    shade = {"color": LIMIT, "opacity": 0.1, "clip": True}
    layers = []
    if chart.limit:
        of = alt.Chart(alt.Data(values=[{"value": chart.limit, "top": high}]))
        layers.append(of.mark_rect(**shade).encode(y=y, y2="top:Q"))
        layers.append(of.mark_rule(color=LIMIT, clip=True).encode(y=y))
    if chart.fits_to is not None and chart.fits_to < end:
        of = alt.Chart(alt.Data(values=[{"tokens": max(chart.fits_to, 1), "end": end}]))
        layers.append(of.mark_rect(**shade).encode(x=x, x2="end:Q"))
    return layers


def _marks(chart: Chart, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    import altair as alt

    if not chart.marks:
        return []
    rows = [{"tokens": n, "value": v, "text": text} for n, v, text in chart.marks]
    of = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    return [
        of.mark_point(size=90, color=BLACK, clip=True),
        of.mark_text(dy=-12, clip=False).encode(text="text:N"),
    ]


def _labels(
    chart: Chart,
    names: Sequence[str],
    colours: Sequence[str],
    low: float,
    high: float,
    y: alt.Y,
) -> list[alt.Chart]:
    """Names at the right, each where its line ends, or as near as the others leave it room."""
    import altair as alt

    ends = [line.points[-1][1] for line in chart.lines if line.points]
    texts, of = [*names], [*colours]
    if chart.limit:
        texts, of, ends = [*texts, _limit_text(chart)], [*of, LIMIT], [*ends, chart.limit]
    decades = math.log(high / low)
    wanted = [HEIGHT * (1 - math.log(v / low) / decades) for v in ends]
    places = apart(wanted, LINE, LINE / 2, HEIGHT - LINE / 2)
    rows = [
        {"value": v, "at": low * math.exp(decades * (1 - place / HEIGHT)), "text": text}
        for v, place, text in zip(ends, places, texts, strict=True)
    ]
    # one layer for each leader: its colour is a value, as the limit is no line of the scale
    leaders = [
        alt.Chart(alt.Data(values=[row]))
        .mark_rule(color=colour, strokeWidth=2, clip=False)
        .encode(y=y, y2="at:Q", x=alt.value("width"), x2=_right(LEADER))
        for row, colour in zip(rows, of, strict=True)
    ]
    place = y.copy()
    place.shorthand = "at:Q"
    words = alt.Chart(alt.Data(values=rows)).mark_text(align="left", baseline="middle", clip=False)
    return [*leaders, words.encode(y=place, x=_right(LEADER + 4), text="text:N")]


def _right(pixels: int) -> Any:
    """So far beyond the right end."""
    import altair as alt

    return alt.value(alt.ExprRef(f"width + {pixels}"))


def _bands(bands: Bands, span: Sequence[float], key: bool) -> alt.Chart:
    """Shares of one whole on top of each other; such as are of no whole in a lane each."""
    import altair as alt

    ends, names = edges(bands.lengths), bands.names()
    rows = []
    for i, (n, shares) in enumerate(zip(bands.lengths, bands.shares, strict=True)):
        top = 0.0
        for name in (x for x in names if shares.get(x)):
            row = {"name": name, "tokens": ends[i], "end": ends[i + 1], "length": f"{n:,}"}
            row |= {"low": top, "high": top + shares[name], "share": shares[name]}
            rows.append(row | {"text": f"{shares[name]:.0%}"})
            top += shares[name]
    scale = alt.Scale(domain=names, range=colours_of(names))
    tell = [
        alt.Tooltip("name:N", title="of"),
        alt.Tooltip("length:N", title="tokens"),
        alt.Tooltip("text:N", title="blocks"),
    ]
    of = alt.Chart(alt.Data(values=rows)).mark_rect(clip=True)
    of = of.encode(x=_tokens(span, "tokens in a sequence"), x2="end:Q", tooltip=tell)
    if bands.of_one_whole:
        halves: Ticks = [(k / 2, f"{k / 2:.0%}") for k in range(3)]
        whole = alt.Scale(domain=[0, 1], nice=False)
        y = alt.Y("low:Q", scale=whole, axis=_axis(halves, minExtent=EXTENT), title=None)
        legend = alt.Legend(columns=COLUMNS) if key else None
        colour = alt.Color("name:N", scale=scale, legend=legend)
        return of.encode(y=y, y2="high:Q", color=colour).properties(height=BAND)
    share = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None)
    lane = alt.Y("name:N", sort=names, axis=alt.Axis(minExtent=EXTENT), title=None)
    colour = alt.Color("name:N", scale=scale, legend=None)
    return of.encode(y=lane, color=colour, opacity=share).properties(height=LANE * len(names))
