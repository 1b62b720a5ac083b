"""The page of one run, from its verdict down to its every setting."""

import math
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from conf.schema import plain
from conf.typed import parse
from launcher.config import Config
from launcher.metrics import flattened
from launcher.progress import duration
from launcher.report.chart import heat
from launcher.report.curves import charts
from launcher.report.goodput import KINDS, Account
from launcher.report.happened import events_table, sentence
from launcher.report.outlook import Outlook
from launcher.report.page import SWITCH, columns, folded, page, table
from launcher.report.reading import Record, last_finite, number

COLOURS = {  # of the parts of the goodput, in the page's palette
    "training": "k2",
    "rewound": "k1",
    "restarted": "k4",
    "skipped": "k3",
    "responding": "k11",
    "checkpoints": "k7",
    "evaluation": "k0",
    "samples": "k6",
    "startup": "k5",
    "down": "k8",
    "other": "k9",
}
STATES = ("finished", "running", "stopped", "failed")
MOST_TEXTS = 12
KEY = (
    ("k0 thin", "raw"),
    ("k0", "running mean"),
    ("k0 thin dashed", "undone"),
    ("warn point", "unusual"),
    ("skip point", "not applied"),
    ("rewind", "rewind or stop"),
    ("restart dashed", "started again"),
)


def report_page(record: Record, account: Account, found: Outlook) -> str:
    """The whole page."""
    drawn, all_ = columns(record), len(record.lines)
    kept = len(drawn["fates"])
    thinned = "" if kept == all_ else f" Of {all_:,} attempts {kept:,} stand in this page."
    parts = [
        head(record, account),
        f"<h2>Curves</h2>{key()}{charts([record])}",
        f'<p class="note">By step. The pointer shows values as metrics.jsonl has them.{thinned}</p>',
        f"<h2>Where the time went</h2>{goodput(account)}",
        f"<h2>What happened</h2>{events_table(record)}",
        f"<h2>Plan against reality</h2>{plan_table(found)}",
        *layers(record),
        *texts(record),
        f"<h2>Configuration</h2>{configuration(record.settings)}",
        f"<h2>Machine and versions</h2>{versions(record.versions)}",
    ]
    return page(f"Run {drawn['name']}", "\n".join(parts), data={"runs": [drawn]})


def head(record: Record, account: Account) -> str:
    """The verdict: state, what happened in a sentence, the numbers that count."""
    state = str(record.status.get("state", "unknown"))
    badge = state if state in STATES else "running"
    last = record.applied[-1]
    tiles = [
        ("step", f"{last['step']:,}{of_steps(record.settings)}"),
        ("tokens", amount(number(last, "tokens/total"))),
        ("training loss", loss(last_finite(record.applied, "loss/train"))),
        ("held-out loss", loss(last_finite(record.applied, "loss/eval"))),
        ("wall time" if account.whole else "time inside steps", duration(account.total)),
        ("goodput" if account.whole else "of it counts", f"{account.share:.1%}"),
        ("processes", str(record.versions.get("processes", "?"))),
    ]
    made = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles
    )
    error = ""
    if state == "failed" and record.error:
        words = f"rank {record.error.get('rank', '?')}: {record.error.get('message', '')}"
        error = folded("the error", f"<pre>{escape(words)}</pre>", is_open=True)
    return (
        f"<header><h1>{escape(record.path.resolve().name)}</h1>"
        f'<span class="badge {badge}">{escape(state)}</span>{SWITCH}</header>\n'
        f'<p class="lead">{escape(sentence(record))}</p>{error}\n<div class="tiles">{made}</div>'
    )


def of_steps(settings: Mapping[str, Any]) -> str:
    steps = settings.get("train", {}).get("steps")
    return f" / {steps:,}" if isinstance(steps, int) else ""


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def amount(value: float) -> str:
    """1234567 -> 1.23M."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{value / size:.3g}{unit}" for size, unit in units if value >= size), f"{value:.0f}")


def key() -> str:
    """What lines and points mean."""
    made = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in KEY)
    return f'<div class="key">{made}</div>'


def goodput(account: Account) -> str:
    """A bar of the shares and the seconds below."""
    total = account.total
    if total <= 0:
        return "<p>No time is on record.</p>"
    spent = {kind: seconds for kind, seconds in account.seconds.items() if seconds > 0}
    bar = "".join(
        f'<div class="{COLOURS[kind]}" style="width:{100 * seconds / total:.3f}%" '
        f'title="{escape(KINDS[kind])}: {seconds / total:.2%}"></div>'
        for kind, seconds in spent.items()
    )
    rows = [
        [
            f'<i class="{COLOURS[kind]}">&#9632;</i> {escape(KINDS[kind])}',
            duration(seconds) if seconds >= 60 else f"{seconds:.2f} s",
            f"{seconds / total:.2%}",
        ]
        for kind, seconds in spent.items()
    ]
    note = (
        "From the beginning of the first start to the last record or save, as the main process saw it; what "
        "a killed process did after its last record counts as down."
        if account.whole
        else "The records have no time of day: what lies between the steps is not known."
    )
    shown = table(["", "time", "share"], rows, numbers=(1, 2))
    return f'<div class="bar">{bar}</div>{shown}<p class="note">{note}</p>'


def plan_table(found: Outlook) -> str:
    if not found.rows:
        return f"<p>No prediction: {escape(found.why)}.</p>"
    rows = []
    for row in found.rows:
        ratio = row.measured / row.predicted if row.measured is not None and row.predicted else None
        cells = [figure(row.name, row.predicted), figure(row.name, row.measured)]
        rows.append([escape(row.name), *cells, "-" if ratio is None else f"{ratio:.2f}"])
    note = (
        f"For {escape(found.machine)}, {escape(found.layout)}. Measured: the median of the updates after the "
        "first ten, and the most memory of a process, which on a CPU is all that is resident, Python and its "
        "libraries included. How it is predicted: docs/planner.md."
    )
    if "measured" in found.machine:
        note += " The CPU was measured when this page was made, not while the run went on."
    return table(["", "predicted", "measured", "measured / predicted"], rows, numbers=(1, 2, 3)) + (
        f'<p class="note">{note}</p>'
    )


def figure(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if "bytes" in name:
        return f"{value / 2**30:.2f} GiB"
    if "utilisation" in name:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def layers(record: Record) -> list[str]:
    """Maps of the norms by layer, of the attempts that are recorded; the last one of each step."""
    lines = list({line["step"]: line for line in record.layers}.values())
    lines.sort(key=lambda line: line["step"])
    if not lines:
        return []
    names, steps = lines[-1]["layers"], [line["step"] for line in lines]
    maps = []
    for title, key in (("Gradient norm by layer", "gradient_norm"), ("Weight norm by layer", "weight_norm")):
        found = [dict(zip(line["layers"], line.get(key, []), strict=False)) for line in lines]
        maps.append(heat(title, names, steps, [[number(f, name) for f in found] for name in names]))
    return [f'<h2>Layers</h2><div class="charts">{"".join(maps)}</div>']


def texts(record: Record) -> list[str]:
    """What the model wrote, the newest first."""
    if not record.samples:
        return []
    made = []
    for sample in reversed(record.samples[-MOST_TEXTS:]):
        prompt = f", going on from {sample['prompt']!r}" if sample.get("prompt") else ""
        title = f"after step {sample['step']}{prompt}"
        made.append(folded(title, f"<pre>{escape(str(sample['text']))}</pre>", is_open=not made))
    more = len(record.samples) - len(made)
    note = f'<p class="note">{more} earlier ones are in samples.jsonl.</p>' if more > 0 else ""
    return [f'<h2>What it wrote</h2><div class="panel">{"".join(made)}</div>{note}']


def configuration(settings: Mapping[str, Any]) -> str:
    """What differs from the defaults, then all."""
    flat = flattened(settings)
    defaults = flattened(plain(parse(Config, {})))
    changed = [name for name, value in flat.items() if name not in defaults or defaults[name] != value]
    rows = [
        [f'<span class="path">{escape(n)}</span>', cell(flat[n]), cell(defaults[n]) if n in defaults else ""]
        for n in changed
    ]
    every = [[f'<span class="path">{escape(name)}</span>', cell(value)] for name, value in flat.items()]
    shown = folded(
        f"what differs from the defaults ({len(changed)})",
        table(["key", "value", "default"], rows),
        is_open=len(changed) <= 40,
    )
    all_ = folded(f"every value ({len(flat)})", table(["key", "value"], every))
    return f'<div class="panel">{shown}{all_}</div>'


def cell(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f'<span class="path">{escape(text)}</span>'


def versions(facts: Mapping[str, Any]) -> str:
    """versions.json, of the last start."""
    if not facts:
        return "<p>versions.json is not there.</p>"
    git = facts.get("git") or {}
    changes = " with changes that are not committed" if git.get("changes") else ""
    command = " ".join(str(word) for word in facts.get("command", []))
    rows = {
        "device": facts.get("device"),
        "processes": facts.get("processes"),
        "platform": facts.get("platform"),
        "Python": facts.get("python"),
        **facts.get("packages", {}),
        "source": f"{git['commit']}{changes}" if git.get("commit") else None,
        "last start": facts.get("time"),
        "command": command,
    }
    shown = [[escape(str(k)), cell(v)] for k, v in rows.items() if v is not None]
    made = f"page made {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}"
    return f'{table([], shown)}<p class="note">{made}</p>'
