"""A PNG of loss curves with the verdicts on them, drawn with Pillow, which TensorBoard brings along."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from launcher.monitor import Kind, Observation, Verdict

WIDTH, HEIGHT = 1100, 300  # pixels of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 28  # of its margins
MOST_PANELS = 200
INK, FAINT, GRID, CURVE, RANGE = "#222222", "#777777", "#e4e4e4", "#3b6ea8", "#b9cde4"
LINES = ("#3b6ea8", "#c5221f", "#2e8b57", "#e8710a", "#7b4fa6", "#8c6d31", "#d63384", "#17a2b8")
LINES += ("#000000", "#9aa0a6", "#a3c644", "#f4a6c0")
COLOURS = {Kind.WARN: "#d9a400", Kind.SKIP: "#e8710a", Kind.REWIND: "#c5221f", Kind.STOP: "#000000"}


def save_png(image: Image.Image, path: Path) -> None:
    """What the setting `plot` asks for; ValueError when it cannot be written."""
    try:
        image.save(path, format="PNG", optimize=True)
    except OSError as error:
        raise ValueError(f"plot={path} cannot be written: {error}") from None


@dataclass
class Panel:
    """One curve. marks: (step, loss, kind, onset) of every verdict but OK."""

    title: str
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    marks: list[tuple[int, float, Kind, int | None]] = field(default_factory=list)

    def add(self, observation: Observation, verdict: Verdict) -> None:
        loss = math.nan if observation.loss is None else observation.loss
        self.steps.append(observation.step)
        self.losses.append(loss)
        if verdict.kind != Kind.OK:
            self.marks.append((observation.step, loss, verdict.kind, verdict.onset))


class Picture:
    """Panels below each other, in as many columns as a picture of moderate height needs."""

    def __init__(self) -> None:
        self.panels: list[Panel] = []

    def panel(self, title: str) -> Panel:
        if len(self.panels) >= MOST_PANELS:
            raise ValueError(f"plot draws at most {MOST_PANELS} logs; give fewer files or leave plot out")
        self.panels.append(Panel(title))
        return self.panels[-1]

    def save(self, path: Path) -> None:
        """Write the PNG; ValueError when there is no such folder or nothing to draw."""
        if not any(panel.steps for panel in self.panels):
            raise ValueError(f"{path}: no curve to draw")
        save_png(self.image(), path)

    def image(self) -> Image.Image:
        """All panels that have anything to show."""
        panels = [panel for panel in self.panels if panel.steps]
        columns = max(1, math.ceil(math.sqrt(len(panels) / 8)))
        rows = math.ceil(len(panels) / columns)
        image = Image.new("RGB", (columns * WIDTH, rows * HEIGHT), "white")
        draw = ImageDraw.Draw(image)
        for index, panel in enumerate(panels):
            draw_panel(draw, panel, index % columns * WIDTH, index // columns * HEIGHT)
        return image


@dataclass(frozen=True)
class Axes:
    """From values to pixels; what lies outside the range of y is drawn at its edge."""

    x0: int
    y0: int
    steps: tuple[float, float]
    losses: tuple[float, float]
    height: int = HEIGHT

    def x(self, step: float) -> float:
        low, high = self.steps
        return self.x0 + LEFT + (step - low) / max(high - low, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        low, high = self.losses
        share = (loss - low) / (high - low) if math.isfinite(loss) else 1.0
        return self.y0 + self.height - BOTTOM - min(max(share, 0.0), 1.0) * (self.height - TOP - BOTTOM)


def draw_panel(draw: ImageDraw.ImageDraw, panel: Panel, x0: int, y0: int) -> None:
    steps, losses = np.asarray(panel.steps), np.asarray(panel.losses)
    axes = Axes(x0, y0, (float(steps.min()), float(steps.max())), span(losses))
    draw_grid(draw, axes)
    for step, _, kind, onset in panel.marks:  # behind the curve
        if kind in (Kind.REWIND, Kind.STOP):
            left = axes.x(step if onset is None else max(onset, steps.min()))
            right = max(axes.x(step), left + 1)
            draw.rectangle((left, y0 + TOP, right, y0 + HEIGHT - BOTTOM), fill="#f6d5d3")
    draw_curve(draw, axes, steps, losses)
    for step, loss, kind, _ in panel.marks:
        draw_mark(draw, axes, step, loss, kind)
    draw_title(draw, panel, x0, y0)


def span(losses: np.ndarray) -> tuple[float, float]:
    """A range that shows the curve: neither the first steps nor a few outliers set it."""
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return 0.0, 1.0
    later = finite[len(finite) // 50 :]
    low, high = float(np.quantile(later, 0.001)), float(np.quantile(later, 0.998))
    room = max(0.06 * (high - low), 1e-3 * abs(high), 1e-6)
    return low - room, high + 3 * room


def draw_grid(draw: ImageDraw.ImageDraw, axes: Axes) -> None:
    font = ImageFont.load_default(12)
    bottom, right = axes.y0 + axes.height - BOTTOM, axes.x0 + WIDTH - RIGHT
    for value in ticks(*axes.losses):
        y = axes.y(value)
        draw.line((axes.x0 + LEFT, y, right, y), fill=GRID)
        draw.text((axes.x0 + LEFT - 6, y), f"{value:.6g}", fill=FAINT, font=font, anchor="rm")
    for value in ticks(*axes.steps):
        x = axes.x(value)
        draw.line((x, axes.y0 + TOP, x, bottom), fill=GRID)
        draw.text((x, bottom + 5), f"{value:.6g}", fill=FAINT, font=font, anchor="ma")
    draw.rectangle((axes.x0 + LEFT, axes.y0 + TOP, right, bottom), outline=FAINT)


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round values within a range."""
    raw = max(high - low, 1e-12) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw_curve(draw: ImageDraw.ImageDraw, axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    """For each column of pixels the range of its values, and a line through their medians."""
    kept = np.isfinite(losses)
    columns = np.asarray([round(axes.x(float(step))) for step in steps[kept]])
    order = np.argsort(columns, kind="stable")  # steps repeat in a log with rewinds
    found, starts = np.unique(columns[order], return_index=True)
    points = []
    for column, values in zip(found, np.split(losses[kept][order], starts[1:]), strict=False):
        x = float(column)
        draw.line((x, axes.y(float(values.min())), x, axes.y(float(values.max()))), fill=RANGE)
        points.append((x, axes.y(float(np.median(values)))))
    if len(points) > 1:
        draw.line(points, fill=CURVE, width=1)


def draw_mark(draw: ImageDraw.ImageDraw, axes: Axes, step: int, loss: float, kind: Kind) -> None:
    x, y, colour = axes.x(step), axes.y(loss), COLOURS[kind]
    if kind in (Kind.REWIND, Kind.STOP):
        draw.line((x, axes.y0 + TOP, x, axes.y0 + HEIGHT - BOTTOM), fill=colour, width=2)
    elif kind == Kind.WARN:
        draw.polygon(((x, y - 6), (x - 5, y + 4), (x + 5, y + 4)), fill=colour)
    else:
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)


def draw_title(draw: ImageDraw.ImageDraw, panel: Panel, x0: int, y0: int) -> None:
    """The name of the log and, as a legend, how often each verdict was given."""
    draw.text((x0 + LEFT, y0 + 17), panel.title[-90:], fill=INK, font=ImageFont.load_default(14), anchor="lm")
    x = x0 + WIDTH - RIGHT
    for kind in (Kind.REWIND, Kind.SKIP, Kind.WARN):
        count = sum(mark[2] == kind for mark in panel.marks)
        text, font = f"{count} {kind.name}", ImageFont.load_default(13)
        draw.text((x, y0 + 17), text, fill=COLOURS[kind], font=font, anchor="rm")
        x -= int(draw.textlength(text, font=font)) + 18


def smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean over a fortieth of the curve; shorter at its ends. Few points stay as they are."""
    half = len(values) // 80
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def overlay(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Image.Image:
    """Smoothed curves over each other in one panel, with their names below."""
    font, line = ImageFont.load_default(14), 20
    height = 2 * HEIGHT
    image = Image.new("RGB", (WIDTH, height + line * len(curves) + BOTTOM), "white")
    draw = ImageDraw.Draw(image)
    drawn = {
        name: (np.asarray(steps), smoothed(np.asarray(losses)))
        for name, (steps, losses) in curves.items()
        if losses
    }
    steps = np.concatenate([steps for steps, _ in drawn.values()])
    # The first tenth of a run falls too far to leave room for the rest.
    low = min(float(losses.min()) for _, losses in drawn.values())
    high = max(float(losses[len(losses) // 10 :].max()) for _, losses in drawn.values())
    room = max(0.05 * (high - low), 1e-6)
    axes = Axes(0, 0, (float(steps.min()), float(steps.max())), (low - room, high + room), height)
    draw_grid(draw, axes)
    for number, (name, (own, losses)) in enumerate(drawn.items()):
        colour = LINES[number % len(LINES)]
        points = [(axes.x(float(s)), axes.y(float(v))) for s, v in zip(own, losses, strict=True)]
        draw.line(points, fill=colour, width=2)
        y = height + line * number + line // 2
        draw.line((LEFT, y, LEFT + 30, y), fill=colour, width=4)
        draw.text((LEFT + 40, y), name, fill=INK, font=font, anchor="lm")
    return image
