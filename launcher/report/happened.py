"""What happened to a run, in one sentence and as the rows of a table."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from launcher.report.chart import Mark
from launcher.report.page import folded, table
from launcher.report.reading import Fate, Record, number

QUIET = ("save", "resume")  # what is told elsewhere
MOST_ROWS = 300
MOST_SOURCES = 12
KNOWN = {  # keys of events that have a place of their own
    *("time", "attempt", "step", "event", "verdict", "reason", "signals", "sources", "worst"),
    *("snapshot_step", "snapshot", "skipped", "onset", "alarm", "lr_before", "lr_after", "budget_left"),
}


def sentence(record: Record) -> str:
    """What a reader should know first; plain text."""
    last, events = record.applied[-1], Counter(event["event"] for event in record.events)
    state = record.status.get("state", "unknown")
    words = {
        "finished": f"Finished at step {last['step']}.",
        "running": f"Running, or ended without a word, at step {last['step']}.",
        "stopped": f"Stopped at step {last['step']}{reason_of(record)}; the same command goes on.",
        "failed": f"Failed at step {last['step']}{reason_of(record)}.",
    }.get(state, f"At step {last['step']}; its status.json says nothing.")
    told = []
    skipped = sum(fate == Fate.SKIPPED for fate in record.fates)
    if skipped:
        told.append(f"{counted(skipped, 'attempt was', 'attempts were')} not applied")
    for event in record.events:
        if event["event"] == "rewind" and events["rewind"] <= 3:
            back = f"it went back from step {event['step']} to {event['snapshot_step']}"
            told.append(f"{back} ({event.get('reason', '')})")
    if events["rewind"] > 3:
        told.append(f"it went back {events['rewind']} times")
    restarts = sum(border.is_restart for border in record.borders)
    if restarts:
        lost = sum(fate == Fate.RESTARTED for fate in record.fates)
        again = f", and made {counted(lost, 'update', 'updates')} again" if lost else ""
        told.append(f"it was started again {counted(restarts, 'time', 'times')}{again}")
    causes = Counter(event.get("cause") for event in record.events if event["event"] == "diagnosis")
    if causes["hardware"]:
        told.append(f"hardware was found at fault {counted(causes['hardware'], 'time', 'times')}")
    warned = sum(line["monitor/verdict"] == 1 for line in record.lines)
    if warned:
        told.append(f"{counted(warned, 'attempt', 'attempts')} looked unusual")
    if not told:
        return f"{words} Nothing unusual happened."
    return f"{words} {told[0][0].upper()}{'; '.join(told)[1:]}."


def reason_of(record: Record) -> str:
    reason = str(record.status.get("reason", ""))
    return f": {reason.splitlines()[0][:300]}" if reason else ""


def counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def marks(record: Record, metric: str) -> list[Mark]:
    """What is drawn on a curve of the run: verdicts at their values, rewinds, restarts and the stop as lines.

    Only the curve of the loss gets the single attempts.
    """
    reasons = {(event["attempt"], event["event"]): event for event in record.events if "attempt" in event}
    found = []
    for index, line in enumerate(record.lines):
        kind = {1: "warn", 2: "skip", 3: "rewind", 4: "stop"}.get(line["monitor/verdict"])
        if kind is None:
            continue
        event = reasons.get((line["attempt"], kind), {})
        words = f"{kind} at step {line['step']}, attempt {line['attempt']}: {event.get('reason', '')}"
        if kind in ("rewind", "stop"):
            back = event.get("snapshot_step")
            found.append(Mark(kind, line["step"], None, f"{words}; back to step {back}" if back else words))
        elif metric == "loss/train":
            found.append(Mark(kind, line["step"], number(record.lines[index], metric), words))
    for border in record.borders:
        if border.is_restart:
            step = record.lines[border.index]["step"]
            found.append(Mark("restart", step, None, f"started again, from step {step - 1}"))
    return found


def events_table(record: Record) -> str:
    """The events, with their evidence folded; HTML."""
    events = [event for event in record.events if event["event"] not in QUIET]
    saves = sum(event["event"] == "save" for event in record.events)
    note = f'<p class="note">{counted(saves, "save was", "saves were")} completed.</p>'
    if not events:
        return f"<p>No event of the monitor.</p>{note}"
    if len(events) > MOST_ROWS:
        half = MOST_ROWS // 2
        note += f'<p class="note">{len(events) - 2 * half:,} events between are in events.jsonl only.</p>'
        events = [*events[:half], *events[-half:]]
    heads = ["attempt", "step", "event", "why", "what was done", "evidence"]
    return table(heads, [row(event) for event in events], numbers=(0, 1)) + note


def row(event: Mapping[str, Any]) -> list[str]:
    kind = str(event["event"])
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(event.get("time", 0))))
    return [
        escape(str(event.get("attempt", ""))),
        escape(str(event.get("step", ""))),
        f'<b class="{escape(kind)}" title="{when}">{escape(kind)}</b>',
        escape(str(event.get("reason", ""))),
        "<br>".join(escape(line) for line in done(event)),
        evidence(event),
    ]


def done(event: Mapping[str, Any]) -> list[str]:
    """What came of it, a line each."""
    said = []
    if event.get("onset") is not None:
        said.append(f"began at step {event['onset']}")
    if event.get("alarm") is not None:
        said.append(f"alarm at step {event['alarm']}")
    if event.get("snapshot_step") is not None:
        where = f" ({event['snapshot']})" if event.get("snapshot") else ""
        said.append(f"back to step {event['snapshot_step']}{where}")
    skipped = event.get("skipped")
    if isinstance(skipped, list) and len(skipped) == 2:
        said.append(f"samples {skipped[0]} to {skipped[1] - 1} are left out")
    if event.get("lr_after") is not None:
        said.append(f"learning rate {short(event.get('lr_before'))} → {short(event['lr_after'])}")
    if event.get("budget_left") is not None:
        said.append(f"rewinds left: {event['budget_left']}")
    return said


def evidence(event: Mapping[str, Any]) -> str:
    """Signals, sources, texts and whatever else the event has."""
    parts = []
    signals = event.get("signals")
    if isinstance(signals, dict):
        said = ", ".join(f"{name} {short(value)}" for name, value in signals.items())
        parts.append(folded("signals", f"<p>{escape(said)}</p>"))
    sources = event.get("sources")
    if isinstance(sources, list) and sources:
        parts.append(folded(f"sources ({len(sources)})", listed_sources(sources)))
    worst = event.get("worst")
    if isinstance(worst, list) and worst:
        texts = "".join(
            f"<p>sample {escape(str(w.get('sample')))}, loss {escape(short(w.get('loss')))}</p>"
            f"<pre>{escape(str(w.get('text')))}</pre>"
            for w in worst
        )
        parts.append(folded("worst texts", texts))
    more = {name: value for name, value in event.items() if name not in KNOWN}
    if more:
        parts.append(folded("more", f"<pre>{escape(json.dumps(more, indent=1, ensure_ascii=False))}</pre>"))
    return "".join(parts)


def listed_sources(sources: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{s.get('path')}, record {s.get('record')}, bytes {s.get('byte_start')} to {s.get('byte_stop')}"
        for s in sources[:MOST_SOURCES]
    ]
    if len(sources) > MOST_SOURCES:
        lines.append(f"and {len(sources) - MOST_SOURCES} more, in events.jsonl")
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
