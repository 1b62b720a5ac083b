"""The command `compare`: runs side by side in one table, plot or page, and in which settings they differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from conf.typed import config, parse, setting
from launcher.curves import matching
from launcher.failure import DONE
from launcher.metrics import flattened
from launcher.picture import overlay, save_png
from launcher.report.command import save
from launcher.report.reading import Record, load
from launcher.report.several import compare_page
from launcher.tables import markdown, shown
from megamodel.accounting import cache_bytes, parameter_count
from megamodel.config import Model

LAST = 20  # updates that the training loss is averaged over
WARM = 10  # first updates that do not count for the speed
WIDTH = 200  # columns of the table in text
OWN = ("run.", "resume", "data.cache")  # of every run its own: no difference that explains anything


@config
class Compare:
    """Runs side by side."""

    runs: list[str] = setting(
        on_resume="free", help="directories of runs, or patterns: [runs/ablation-norm-*]"
    )
    plot: str | None = setting(None, on_resume="free", help="PNG to draw all training losses in")
    html: str | None = setting(None, on_resume="free", help="HTML page of the table and all curves")
    format: Literal["text", "markdown", "json"] = setting(
        "text", on_resume="free", help="text and markdown: a table; json: one object"
    )

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must name at least one directory: runs=[runs/a, runs/b]")


@dataclass(frozen=True)
class Row:
    """One run. settings: those in which the runs differ; losses in nats per token, the held-out one also less
    that of the first run. cache_bytes: of generating one text of the training's length, numbers of 16 bit."""

    run: str
    settings: dict[str, Any]
    parameters: int
    step: int
    tokens: int
    train_loss: float | None
    held_out_loss: float | None
    against_first: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    cache_bytes: int
    skips: int
    rewinds: int


def compare(tree: Compare) -> int:
    """Read the runs, print the table, draw the plot."""
    records = [load(path) for path in matching(tree.runs)]
    found = rows(records)
    if tree.plot is not None:
        draw(Path(tree.plot), records, found)
    if tree.html is not None:
        heads, body = cells(found)
        page = compare_page(records, heads, body, texts=1 + len(found[0].settings))
        save(Path(tree.html), page, key="html")
    if tree.format == "json":
        print(json.dumps({"runs": [asdict(row) for row in found]}))
    elif tree.format == "markdown":
        print(markdown(*cells(found)))
    else:
        shown(*cells(found), width=WIDTH)
    return DONE


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Paths whose values are not the same in all configurations; a missing one counts as another value."""
    flat = [flattened(each) for each in settings]
    paths = dict.fromkeys(path for each in flat for path in each)
    found = [
        path
        for path in paths
        if not path.startswith(OWN) and len({json.dumps(each.get(path, "-")) for each in flat}) > 1
    ]
    # What only one kind of a thing has says nothing beside the kind.
    kinds = tuple(path.removesuffix("kind") for path in found if path.endswith(".kind"))
    own = [path for path in found if path.startswith(kinds) and not all(path in each for each in flat)]
    return [path for path in found if path not in own]


def rows(records: Sequence[Record]) -> list[Row]:
    paths = differing([record.settings for record in records])
    found: list[Row] = []
    for record in records:
        flat, applied = flattened(record.settings), record.applied
        model = parse(Model, record.settings["model"])
        evaluated = [line["loss/eval"] for line in applied if isinstance(line.get("loss/eval"), float)]
        loss = evaluated[-1] if evaluated else None
        first = found[0].held_out_loss if found else loss
        losses = [line["loss/train"] for line in applied[-LAST:] if isinstance(line["loss/train"], float)]
        told = [line.get("speed/tokens_per_second") for line in applied[WARM:]]
        speeds = [speed for speed in told if isinstance(speed, int | float)]
        verdicts = [line["monitor/verdict"] for line in record.lines]
        found.append(
            Row(
                run=record.path.name,
                settings={path: flat.get(path, "-") for path in paths},
                parameters=parameter_count(model),
                step=applied[-1]["step"],
                tokens=applied[-1]["tokens/total"],
                train_loss=fmean(losses) if losses else None,
                held_out_loss=loss,
                against_first=None if loss is None or first is None else loss - first,
                tokens_per_second=median(speeds) if speeds else None,
                peak_bytes=max((line.get("memory/peak_bytes", 0) for line in applied), default=None),
                cache_bytes=cache_bytes(model, rows=1, length=flat["train.sequence_length"], number_bytes=2),
                skips=verdicts.count(2),
                rewinds=verdicts.count(3),
            )
        )
    return found


def cells(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a heading is as much of a path as tells it from the others.

    The size of the cache stands there where the runs differ in it.
    """
    paths = list(found[0].settings)
    heads = [
        "run",
        *shortened(paths),
        "parameters",
        "updates",
        "train loss",
        "held-out loss",
        "against first",
    ]
    with_cache = len({row.cache_bytes for row in found}) > 1
    heads += [*(["cache KiB"] if with_cache else []), "tokens/s", "skips", "rewinds"]
    body = [
        [
            row.run,
            *("null" if value is None else str(value) for value in row.settings.values()),
            f"{row.parameters:,}",
            f"{row.step:,}",
            number(row.train_loss, ".4f"),
            number(row.held_out_loss, ".4f"),
            number(row.against_first, "+.4f"),
            *([f"{row.cache_bytes / 1024:,.0f}"] if with_cache else []),
            number(row.tokens_per_second, ",.0f"),
            str(row.skips),
            str(row.rewinds),
        ]
        for row in found
    ]
    return heads, body


def shortened(paths: Sequence[str]) -> list[str]:
    """The last parts of dotted paths, as few as are needed."""
    parts = [path.split(".") for path in paths]
    count = 1
    while len({tuple(p[-count:]) for p in parts}) < len(parts):
        count += 1
    return [".".join(p[-count:]) for p in parts]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(path: Path, records: Sequence[Record], found: Sequence[Row]) -> None:
    """Training loss by step of all runs, each named by what it differs in."""
    curves = {}
    for record, row in zip(records, found, strict=True):
        values = ", ".join(str(value) for value in row.settings.values())
        points = [(line["step"], line["loss/train"]) for line in record.applied]
        points = [(step, loss) for step, loss in points if isinstance(loss, float)]
        curves[f"{row.run}  {values}"] = ([s for s, _ in points], [loss for _, loss in points])
    save_png(overlay(curves), path)
