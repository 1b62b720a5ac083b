"""Going back in the process: the state of an earlier step, samples that are never fed, a new segment."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoints.choose import Rewind
from checkpoints.manager import Manager, Rewound
from launcher.events import records
from launcher.metrics import MetricsWriter
from launcher.rundirectory import RunDirectory
from megamodel.data.batch import Cursor
from parallel.engine import Engine

Range = tuple[int, int]  # [start, stop) of sample numbers


@dataclass(frozen=True)
class Rewinder:
    """What a rewind touches. past: the rewinds of this run so far; extra: what goes into checkpoints."""

    engine: Engine
    checkpoints: Manager
    metrics: MetricsWriter
    directory: RunDirectory
    extra: dict[str, Any]
    past: list[Rewind] = field(default_factory=list)

    def rewind(
        self,
        cursor: Cursor,
        to: int,
        skip: Range | None,
        *,
        announce: Callable[[Rewound], None] = lambda rewound: None,
    ) -> Cursor:
        """Back to the newest state of at most `to` updates; `skip` is never fed again. The new cursor.

        Collective, never from inside a step. Step, sample and tokens go back, attempts go on, skipped ranges
        are united. announce: called on every rank before anything changes, with what is gone back to: there
        rank 0 writes its record and syncs it. `extra` becomes that of the earlier state, but for the segment.
        ValueError when there is nothing to go back to.
        """
        rewound = self.checkpoints.rewind(self.engine, to, rewinds=self.past, announce=announce)
        self.past.append(Rewind(cursor.attempt, rewound.cursor.step))
        self.metrics.rewind(rewound.cursor.step)
        self.directory.step = rewound.cursor.step
        self.extra.clear()
        self.extra.update(rewound.extra | {"segment": self.metrics.segment})
        ranges = [*rewound.cursor.skipped, *cursor.skipped, *([skip] if skip else [])]
        return replace(rewound.cursor, attempt=cursor.attempt, skipped=united(ranges))


def united(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted and disjoint; ranges that overlap or touch become one."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


@dataclass(frozen=True)
class Recorded:
    """A rewind as events.jsonl tells of it. budget: what it left of recovery.Budget, as plain JSON."""

    attempt: int
    snapshot_step: int
    skipped: tuple[int, ...]  # start and stop, or nothing
    budget: dict[str, Any] | None = None


def recorded(events: Path) -> list[Recorded]:
    """The rewinds that were decided in a run, in order; an unfinished last line does not count.

    Where the monitor gave up counts too: what was saved since the last good state is not gone on from.
    """
    return [
        Recorded(
            int(record["attempt"]),
            int(record["snapshot_step"]),
            tuple(int(n) for n in record.get("skipped") or ()),
            record.get("budget"),
        )
        for record in records(events)
        if record.get("event") in ("rewind", "stop") and record.get("snapshot_step") is not None
    ]


def applied_again(cursor: Cursor, records: Iterable[Recorded]) -> tuple[Cursor, dict[str, Any] | None]:
    """After the rewinds that were decided later than a checkpoint was written: the cursor, and the budget.

    The budget is None where the checkpoint's own holds.
    """
    later = [record for record in records if record.attempt > cursor.attempt]
    ranges = [(r.skipped[0], r.skipped[1]) for r in later if r.skipped]
    if ranges:
        cursor = replace(cursor, skipped=united([*cursor.skipped, *ranges]))
    return cursor, next((r.budget for r in reversed(later) if r.budget), None)
