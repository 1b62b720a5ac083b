"""The page of several runs: what they differ in, and their curves over each other."""

from collections.abc import Sequence
from html import escape
from typing import Any

from launcher.report.curves import PALETTE, charts
from launcher.report.page import SWITCH, columns, page, table
from launcher.report.reading import Record

NOTE = (
    "By step, of the attempts that count; thin: the values, thick: their running mean. The pointer shows "
    "values as metrics.jsonl has them."
)


def compare_page(
    records: Sequence[Record], heads: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int
) -> str:
    """heads, rows: the table of `compare`, as text, a row for each run; texts: its first columns that are no
    numbers."""
    body = [
        [f'<i class="k{index % PALETTE}">&#9632;</i> {escape(cells[0])}', *map(escape, cells[1:])]
        for index, cells in enumerate(rows)
    ]
    drawn = [columns(record) for record in records]
    thinned = [run["name"] for run in drawn if len(run["fates"]) < run["attempts"]]
    note = f" Not every attempt of {', '.join(thinned)} stands in this page." if thinned else ""
    parts = [
        f"<header><h1>{len(records)} runs</h1>{SWITCH}</header>",
        '<p class="lead">The settings in which they differ, and what came of it.</p>',
        table(heads, body, numbers=range(texts, len(heads))),
        f"<h2>Curves</h2>{charts(records)}",
        f'<p class="note">{NOTE}{escape(note)}</p>',
    ]
    data: dict[str, Any] = {"runs": distinct(drawn)}
    return page(f"{len(records)} runs", "\n".join(parts), data=data)


def distinct(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the same name are numbered."""
    seen: dict[str, int] = {}
    found = []
    for run in runs:
        name = run["name"]
        seen[name] = seen.get(name, 0) + 1
        found.append(run if seen[name] == 1 else {**run, "name": f"{name} ({seen[name]})"})
    return found
