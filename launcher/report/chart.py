"""Curves as SVG. All of a chart is drawn here, so that a page reads without JavaScript; its script only adds
the values under the pointer, from the data in the page. Coordinates in CSS pixels of a WIDTH x HEIGHT box.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from launcher.picture import smoothed, span, ticks

WIDTH, HEIGHT = 560, 216
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 24
COLUMNS = WIDTH - LEFT - RIGHT
FEW = 60  # points that are drawn as points
MOST_MARKS = 400  # of a chart: beyond them the first ones
NAMES = 92  # the left margin of a heat map
MOST_CELLS = 240  # columns of a heat map


@dataclass(frozen=True)
class Curve:
    """Points in the order of time; y may be no number. faint: an undone stretch, drawn behind the rest."""

    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0  # of the page's palette
    smooth: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened. kind: warn | skip | rewind | restart | stop; y: None for a line from top to
    bottom."""

    kind: str
    x: float
    y: float | None
    words: str


@dataclass(frozen=True)
class Chart:
    """One metric over the steps. scale: from its unit to the one that is shown; whole: the axis shows the
    whole range, outliers and the beginning included."""

    title: str
    metric: str
    curves: list[Curve]
    marks: list[Mark] = field(default_factory=list)
    unit: str = ""
    scale: float = 1.0
    whole: bool = False
    reach: tuple[float, float] | None = None  # of the steps that the axis shows at least


@dataclass(frozen=True)
class Axes:
    """From values to pixels; what lies outside the range of y is drawn at its edge."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / max(self.x1 - self.x0, 1e-12) * COLUMNS

    def y(self, value: float) -> float:
        share = (value - self.y0) / max(self.y1 - self.y0, 1e-300) if math.isfinite(value) else 1.0
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)


def axes_of(chart: Chart) -> Axes | None:
    """The ranges of a chart; None when nothing in it is a number."""
    counted = [curve for curve in chart.curves if not curve.faint] or chart.curves
    ys = np.asarray([y for curve in counted for y in curve.y], dtype=float) * chart.scale
    xs = [x for curve in chart.curves for x in curve.x]
    finite = ys[np.isfinite(ys)]
    if not len(finite):
        return None
    if chart.whole:
        low, high = float(finite.min()), float(finite.max())
        room = max(0.05 * (high - low), 1e-3 * abs(high), 1e-300)
        low, high = (low - room if low < 0 or low > 2 * room else 0.0), high + room
    else:
        ranges = [span(np.asarray(curve.y, dtype=float) * chart.scale) for curve in counted if curve.y]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    first, last = float(min([*xs, *(chart.reach or ())])), float(max([*xs, *(chart.reach or ())]))
    return Axes(first, last if last > first else first + 1.0, low, high)


def drawn(chart: Chart, key: str) -> str:
    """The chart as a figure; key: an identifier that no other chart of the page has."""
    axes = axes_of(chart)
    unit = f" <small>{escape(chart.unit)}</small>" if chart.unit else ""
    head = f"<figcaption>{escape(chart.title)}{unit}</figcaption>"
    if axes is None:
        return f'<figure class="chart">{head}<p class="empty">no value is a number</p></figure>'
    box = f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{COLUMNS}" height="{HEIGHT - TOP - BOTTOM}"/>'
    parts = [grid(axes), lines(chart.marks, axes), box]
    parts += [path(curve, axes, chart.scale) for curve in chart.curves if curve.faint]
    parts += [path(curve, axes, chart.scale) for curve in chart.curves if not curve.faint]
    parts += [points(chart, axes), f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>']
    data = (
        f'data-metric="{escape(chart.metric)}" data-scale="{chart.scale!r}" data-x0="{axes.x0!r}" '
        f'data-x1="{axes.x1!r}" data-left="{LEFT}" data-width="{COLUMNS}"'
    )
    return (
        f'<figure class="chart">{head}<svg id="{key}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}" {data}>{"".join(parts)}</svg></figure>'
    )


def grid(axes: Axes) -> str:
    """Lines at round values, with the values."""
    parts = []
    for value in ticks(axes.y0, axes.y1):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{short(value)}</text>')
    for value in ticks(axes.x0, axes.x1):
        if value == int(value):
            x = axes.x(value)
            text = f'<text class="tick mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}">{short(value)}</text>'
            parts.append(text)
    return "".join(parts)


def short(value: float) -> str:
    """A value beside an axis: 12k, 0.5, 3e-05."""
    if abs(value) < 1e-12:
        return "0"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and size > 1e3):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def path(curve: Curve, axes: Axes, scale: float) -> str:
    """The curve: raw values, and over them a running mean where it is to be smoothed."""
    x = np.asarray(curve.x, dtype=float)
    y = np.asarray(curve.y, dtype=float) * scale
    kind = "undone" if curve.faint else "raw" if curve.smooth and len(x) > FEW else "line"
    made = [f'<path class="{kind} c{curve.colour}" d="{steps(x, y, axes)}"/>']
    kept = np.isfinite(y)
    if kind == "raw" and kept.any():
        made.append(f'<path class="line c{curve.colour}" d="{steps(x[kept], smoothed(y[kept]), axes)}"/>')
    elif not curve.faint and len(x) <= FEW:
        dots = zip(x[kept], y[kept], strict=True)
        made += [
            f'<circle class="dot c{curve.colour}" cx="{axes.x(a):.1f}" cy="{axes.y(b):.1f}" r="2.2"/>'
            for a, b in dots
        ]
    return "".join(made)


def steps(x: np.ndarray, y: np.ndarray, axes: Axes) -> str:
    """A path through the points: of more than there are pixels the lowest and the highest of each column."""
    keep = np.isfinite(y)
    if len(x) > 3 * COLUMNS:
        columns = np.floor((x - axes.x0) / (axes.x1 - axes.x0) * COLUMNS).astype(int)
        kept: list[int] = []
        for group in np.split(np.arange(len(x)), np.flatnonzero(np.diff(columns)) + 1):
            known = group[keep[group]]
            if len(known):
                kept += sorted({int(known[y[known].argmin()]), int(known[y[known].argmax()])})
            else:
                kept.append(int(group[0]))  # leaves the gap
        x, y, keep = x[kept], y[kept], keep[kept]
    text, pen = [], "M"
    for a, b, known in zip(x, y, keep, strict=True):
        if known:
            text.append(f"{pen}{axes.x(float(a)):.1f} {axes.y(float(b)):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(text)


def lines(marks: Sequence[Mark], axes: Axes) -> str:
    """What happened to the run as a whole, behind the curves."""
    made = []
    for mark in [m for m in marks if m.y is None][:MOST_MARKS]:
        x = axes.x(mark.x)
        made.append(
            f'<line class="mark {mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(mark.words)}</title></line>"
        )
    return "".join(made)


def points(chart: Chart, axes: Axes) -> str:
    """What happened to single attempts; the most serious on top."""
    found = [mark for mark in chart.marks if mark.y is not None]
    found = sorted(found[:MOST_MARKS], key=lambda mark: mark.kind != "warn")
    made = []
    for mark in found:
        assert mark.y is not None
        x, y = axes.x(mark.x), axes.y(mark.y * chart.scale)
        made.append(
            f'<circle class="mark {mark.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(mark.words)}</title></circle>"
        )
    return "".join(made)


def heat(title: str, rows: Sequence[str], columns: Sequence[int], values: Sequence[Sequence[float]]) -> str:
    """A map of values[row][column], darker where larger, on a scale of logarithms over the whole map."""
    every = -(-len(columns) // MOST_CELLS) if columns else 1
    columns, values = columns[::every], [row[::every] for row in values]
    known = [math.log(v) for row in values for v in row if math.isfinite(v) and v > 0]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    wide, tall = (WIDTH - NAMES - RIGHT) / max(len(columns), 1), 14
    height = TOP + tall * len(rows) + BOTTOM
    parts = []
    for index, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = TOP + tall * index
        parts.append(f'<text class="tick end" x="{NAMES - 6}" y="{y + 11}">{escape(name[:14])}</text>')
        for column, value in enumerate(row):
            good = math.isfinite(value) and value > 0
            share = (math.log(value) - low) / max(high - low, 1e-9) if good else 0.0
            kind = "cell" if math.isfinite(value) else "cell bad"
            parts.append(
                f'<rect class="{kind}" x="{NAMES + column * wide:.2f}" y="{y}" width="{wide + 0.3:.2f}" '
                f'height="{tall - 1}" fill-opacity="{0.06 + 0.94 * share:.3f}"><title>{escape(name)}, step '
                f"{columns[column]}: {value:.6g}</title></rect>"
            )
    for at in sorted({0, len(columns) // 2, len(columns) - 1} & set(range(len(columns)))):
        x = NAMES + (at + 0.5) * wide
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{height - 8}">{columns[at]}</text>')
    lowest, highest = (f"{math.exp(low):.3g}", f"{math.exp(high):.3g}") if known else ("-", "-")
    caption = f"{escape(title)} <small>{lowest} to {highest}, logarithmic</small>"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
    return f'<figure class="chart"><figcaption>{caption}</figcaption>{svg}</figure>'
