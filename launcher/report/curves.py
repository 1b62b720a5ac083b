"""Which metrics of one run or of several are drawn, and how."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.report.chart import Chart, Curve, Mark, drawn
from launcher.report.happened import marks
from launcher.report.reading import Fate, Record, number

PALETTE = 12  # colours of page.css
MOST_SOURCES = 8  # held-out losses by source that get a chart


@dataclass(frozen=True)
class Metric:
    """undone: also what was undone is drawn, faint."""

    name: str
    title: str
    unit: str = ""
    scale: float = 1.0
    smooth: bool = False
    whole: bool = False
    undone: bool = False


METRICS = (
    Metric("loss/train", "Training loss", "nats per token", smooth=True, undone=True),
    Metric("loss/eval", "Held-out loss", "nats per token"),
    Metric("norm/grad", "Gradient norm", "before clipping", smooth=True, undone=True),
    Metric("lr", "Learning rate", whole=True),
    Metric("speed/tokens_per_second", "Tokens per second", smooth=True),
    Metric("speed/mfu", "Model FLOPs utilisation", "%", scale=100.0, smooth=True),
    Metric("time/step_seconds", "Time of a step", "seconds", smooth=True),
    Metric("memory/peak_bytes", "Peak memory", "GiB, the fullest process so far", scale=2.0**-30, whole=True),
    Metric("loss/z", "Z-loss", "weighted", smooth=True),
    Metric("loss/balance", "Balance loss of experts", "weighted", smooth=True),
    Metric("loss/router_z", "Router's z-loss", "weighted", smooth=True),
    Metric("logit/max", "Largest logit", smooth=True),
    Metric("logit/max_log_z", "Largest log Z", smooth=True),
)


def charts(records: Sequence[Record]) -> str:
    """All that the runs have, as figures. One run is drawn with its marks and with what was undone."""
    made = []
    for key, metric in enumerate([*METRICS, *by_source(records)]):
        chart = chart_of(metric, records)
        if chart is not None:
            made.append(drawn(chart, f"chart-{key}"))
    return f'<div class="charts">{"".join(made)}</div>'


def by_source(records: Sequence[Record]) -> list[Metric]:
    """The held-out loss of each source of a mixture."""
    names = dict.fromkeys(
        name
        for record in records
        for line in record.applied
        for name in line
        if name.startswith("loss/eval/")
    )
    return [
        Metric(name, f"Held-out loss of {name.removeprefix('loss/eval/')}", "nats per token")
        for name in list(names)[:MOST_SOURCES]
    ]


def chart_of(metric: Metric, records: Sequence[Record]) -> Chart | None:
    """None where no run has it."""
    curves: list[Curve] = []
    for colour, record in enumerate(records):
        lines = [line for line in record.applied if metric.name in line]
        if not lines:
            continue
        x, y = [line["step"] for line in lines], [number(line, metric.name) for line in lines]
        curves.append(Curve(x, y, colour=colour % PALETTE, smooth=metric.smooth))
    if not curves:
        return None
    happened: list[Mark] = []
    if len(records) == 1:
        happened = marks(records[0], metric.name)
        curves += undone(records[0], metric.name) if metric.undone else []
    # All charts of a page have the same steps below them.
    reach = min(r.applied[0]["step"] for r in records), max(r.applied[-1]["step"] for r in records)
    return Chart(metric.title, metric.name, curves, happened, metric.unit, metric.scale, metric.whole, reach)


def undone(record: Record, name: str) -> list[Curve]:
    """Stretches of attempts that were applied and do not count."""
    found: list[Curve] = []
    segment = None
    x: list[float] = []
    y: list[float] = []
    for line, fate in zip(record.lines, record.fates, strict=True):
        if fate not in (Fate.REWOUND, Fate.RESTARTED) or name not in line:
            continue
        if line["segment"] != segment:
            segment, x, y = line["segment"], [], []
            found.append(Curve(x, y, faint=True))
        x.append(line["step"])
        y.append(number(line, name))
    return found
