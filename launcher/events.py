"""events.jsonl: what the monitor does and why, on disk before it is done; the same as TensorBoard text."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from checkpoints.files import LocalFiles
from launcher.metrics import append_line, encoded
from launcher.recovery import Budget
from launcher.rundirectory import RunDirectory, naming
from megamodel.data.batch import Cursor

FILE = "events.jsonl"
BUDGET = {entry.name for entry in fields(Budget)}


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in order; an unfinished last line does not count.

    ValueError names a line that is no event, or lacks what its kind must have: what it told of a rewind would
    be forgotten.
    """
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        fault = _fault(record) if isinstance(record, dict) else "is no JSON object"
        if fault:
            raise ValueError(f"{file}, line {number} {fault}; repair it, or start in another run.dir")
        assert isinstance(record, dict)
        yield record


def _fault(record: dict[str, Any]) -> str:
    """What an event lacks for going on from it; empty when nothing."""
    kind = record.get("event")
    if kind == "fault" and not isinstance(record.get("fault"), dict):
        return "is a fault without its description"
    if kind not in ("rewind", "stop"):
        return ""
    skipped, budget = record.get("skipped", [0, 0]), record.get("budget")
    numbers = [record.get("attempt"), *(skipped if isinstance(skipped, list) else [None])]
    if kind == "rewind" or "snapshot_step" in record:
        numbers.append(record.get("snapshot_step"))
    if not all(isinstance(n, int) for n in numbers) or len(skipped) != 2:
        return f"is a {kind} without attempt, snapshot_step or skipped: [first, stop)"
    if budget is not None and (not isinstance(budget, dict) or set(budget) != BUDGET):
        return f"is a {kind} with a budget that is not {sorted(BUDGET)}"
    return ""


class Events:
    """Made on every rank; the main rank (0) writes, the others do nothing."""

    def __init__(self, directory: RunDirectory, *, rank: int) -> None:
        self._path = directory.path / FILE
        self._main = rank == 0
        self._board_at = str(directory.tensorboard / "events")
        self._board: SummaryWriter | None = None

    def write(self, event: str, cursor: Cursor, *, attempt: int, **facts: Any) -> None:
        """One event of the attempt, on disk when this returns. cursor: as it was before the attempt."""
        if not self._main:
            return
        known = {name: value for name, value in facts.items() if value is not None}
        record = {"time": time.time(), "attempt": attempt, "step": cursor.step + 1, "event": event, **known}
        line = json.dumps(encoded(record), allow_nan=False)
        with naming(self._path):
            new = not self._path.exists()
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                append_line(file, line)
                os.fsync(file)
            finally:
                os.close(file)
            if new:
                LocalFiles().sync_directory(self._path.parent)
        self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        if self._board is None:
            self._board = SummaryWriter(self._board_at, flush_secs=10)
        text = json.dumps(encoded(record), indent=1, ensure_ascii=False)
        self._board.add_text(str(record["event"]), f"```json\n{text}\n```", record["attempt"])
        self._board.flush()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
