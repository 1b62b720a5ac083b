"""Where the wall time of a run went. A pure function of its records.

A record is written when its attempt is over, its evaluation included (`time/wall`). From one record to the
next lie: what was done about the attempt before, its save and text, waiting for data, the attempt, its
evaluation. What of that is measured is taken by its name; the rest is what it is called below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.reading import STARTUP, Fate, Record, number

KINDS = {  # in the order in which they are shown
    "training": "training that counts",
    "rewound": "undone by rewinds",
    "restarted": "undone by restarts",
    "skipped": "attempts not applied",
    "responding": "going back, looking for causes",
    "checkpoints": "standing still for checkpoints",
    "evaluation": "held-out loss",
    "samples": "texts",
    "startup": "starting up",
    "down": "down between two starts",
    "other": "waiting for data, logging, the rest",
}
STEPS = {
    Fate.COUNTS: "training",
    Fate.SKIPPED: "skipped",
    Fate.REWOUND: "rewound",
    Fate.RESTARTED: "restarted",
}
NAMED = {
    "checkpoints": "time/checkpoint_stall_seconds",
    "evaluation": "time/evaluate_seconds",
    "samples": "time/sample_seconds",
}


@dataclass(frozen=True)
class Account:
    """Seconds by kind; they add up to `total`. whole: the records have the time of day, so that nothing is
    missing; otherwise only what lies inside of steps and what was measured by name is known."""

    seconds: dict[str, float]
    whole: bool

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The goodput: of the total, what went into training that counts."""
        return self.seconds["training"] / self.total if self.total > 0 else 0.0


def account(record: Record) -> Account:
    """The seconds of a run."""
    seconds = dict.fromkeys(KINDS, 0.0)
    whole = all(math.isfinite(number(line, "time/wall")) for line in record.lines)
    before: Mapping[str, Any] | None = None
    for line, fate in zip(record.lines, record.fates, strict=True):
        parts = measured(line, fate)
        if whole and before is not None:
            parts = filled(parts, number(line, "time/wall") - number(before, "time/wall"), line, before)
        for kind, spent in parts.items():
            seconds[kind] += spent
        before = line
    if whole:
        seconds["checkpoints"] += closing(record.lines, record.events)
    return Account(seconds, whole)


def filled(
    parts: Mapping[str, float], span: float, line: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, float]:
    """The parts of the time from one record to the next, made to add up to it.

    Costs are those of the slowest rank, the time is the main rank's: where they are more, they are scaled. A
    clock that was set back says nothing: what is measured counts.
    """
    known, found = sum(parts.values()), dict(parts)
    if span >= known:
        kind = rest_kind(line, before)
        found[kind] = found.get(kind, 0.0) + span - known
    elif span > 0:
        found = {kind: spent * span / known for kind, spent in parts.items()}
    return found


def measured(line: Mapping[str, Any], fate: Fate) -> dict[str, float]:
    """What a record itself says, by kind."""
    parts = {kind: number(line, name) for kind, name in NAMED.items()}
    before = parts["checkpoints"] if math.isfinite(parts["checkpoints"]) else 0.0
    parts["startup"] = number(line, STARTUP) - before  # the first copy in memory is made in that time
    parts[STEPS[fate]] = number(line, "time/step_seconds")
    return {kind: spent for kind, spent in parts.items() if math.isfinite(spent) and spent > 0}


def rest_kind(line: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What the time was that nothing measured, before the attempt of this line."""
    if STARTUP in line:
        return "down"
    return "responding" if before["monitor/verdict"] >= 2 else "other"


def closing(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> float:
    """From the last record to the last save that was completed after it."""
    last = number(lines[-1], "time/wall")
    saves = [number(event, "time") for event in events if event["event"] == "save"]
    return max([0.0, *(at - last for at in saves)])
