"""The scaffolding of a page: one file that needs nothing beside it and reaches for nothing."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from launcher.report.reading import Record

HERE = Path(__file__).parent
MOST_ATTEMPTS = 50_000  # of a run whose every record stands in the page


def page(title: str, body: str, *, data: dict[str, Any] | None = None) -> str:
    """The document. body: HTML of its main part; data: what the curves are drawn from."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    embedded = (
        "" if data is None else f'<script type="application/json" id="data">{in_script(data)}</script>\n'
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<div id="tip"></div>\n{embedded}<script>\n{script}</script>\n</body>\n</html>\n'
    )


SWITCH = '<button id="theme" type="button">scheme: system</button>'


def in_script(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def columns(record: Record) -> dict[str, Any]:
    """The records of a run by metric, as metrics.jsonl has them: {name, attempts, fates, columns}.

    What a record does not have is null. fates: see `reading.Fate`. Of more than MOST_ATTEMPTS every k-th is
    kept, and all with a verdict, a held-out loss or a border beside them; attempts: of the run, all counted.
    """
    kept = kept_attempts(record)
    lines = [record.lines[index] for index in kept]
    names = dict.fromkeys(name for line in lines for name in line)
    return {
        "name": record.path.resolve().name,
        "attempts": len(record.lines),
        "fates": [int(record.fates[index]) for index in kept],
        "columns": {name: [line.get(name) for line in lines] for name in names},
    }


def kept_attempts(record: Record) -> list[int]:
    """The indices of the records that stand in the page."""
    count = len(record.lines)
    if count <= MOST_ATTEMPTS:
        return list(range(count))
    every = -(-count // MOST_ATTEMPTS)
    kept = {*range(0, count, every), count - 1}
    kept |= {i for border in record.borders for i in (border.index - 1, border.index)}
    kept |= {i for i, line in enumerate(record.lines) if line["monitor/verdict"] or "loss/eval" in line}
    return sorted(kept)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; numbers: columns that are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if i in numbers else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
    head = f"<thead><tr>{cells([escape(h) for h in heads], 'th')}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def folded(summary: str, content: str, *, is_open: bool = False) -> str:
    """What is shown when it is asked for. summary: text; content: HTML."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"
