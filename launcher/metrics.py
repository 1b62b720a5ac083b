"""The numbers of a run: metrics.jsonl, one object an attempt, and TensorBoard under the same names.

The file is the record: append-only strict JSON, by attempt. TensorBoard is the picture: applied updates only.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from launcher.rundirectory import RunDirectory

WINDOW_BYTES = 1 << 16
BOOKKEEPING = ("step", "attempt", "segment")  # no curves of their own


def encoded(value: Any) -> Any:
    """A value as strict JSON has it: non-finite numbers are the strings NaN, Infinity and -Infinity."""
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)  # numpy's and torch's scalars included
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def decoded(value: Any) -> float:
    """The number behind a value of a record."""
    return float(value)  # float reads NaN, Infinity and -Infinity


def repair(path: Path) -> dict[str, Any] | None:
    """Cut off what a killed process left unfinished at the end; the last whole record, or None.

    A line is whole when it ends in a newline and is a JSON object.
    """
    if not path.exists():
        return None
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        window = WINDOW_BYTES
        while True:
            start = max(0, size - window)
            file.seek(start)
            end, record = last_record(file.read(size - start), whole_start=start == 0)
            if record is not None or start == 0:
                break
            window *= 2
        if start + end < size:
            file.truncate(start + end)
            os.fsync(file.fileno())
    return record


def last_record(content: bytes, *, whole_start: bool) -> tuple[int, dict[str, Any] | None]:
    """(where it ends, record) of the last whole line; whole_start: the content begins with a whole line."""
    end = content.rfind(b"\n") + 1
    while end > 0:
        start = content.rfind(b"\n", 0, end - 1) + 1
        if start == 0 and not whole_start:
            return 0, None
        try:
            record = json.loads(content[start:end])
        except ValueError:
            record = None
        if isinstance(record, dict):
            return end, record
        end = start
    return 0, None


@dataclass
class Position:
    """Where the numbering of records stands: `attempt` is the last one used."""

    attempt: int = 0
    segment: int = 0


def go_on(directory: RunDirectory, *, attempt: int = 0, segment: int = 0, resumed: bool = False) -> Position:
    """The numbering after a start: from the larger of the checkpoint's and the last whole line's.

    attempt, segment: the checkpoint's (resumed=True), or zero. Unfinished last lines are cut off first. The
    segment rises by one when anything was there before.
    """
    found = [repair(path) for path in (directory.metrics_file, directory.path / "events.jsonl")]
    records = [record for record in found if record is not None]
    attempt = max([attempt, *(int(record.get("attempt", 0)) for record in records)])
    segment = max([segment, *(int(record.get("segment", 0)) for record in records)])
    return Position(attempt, segment + 1 if records or resumed else 0)


class MetricsWriter:
    """Writes both; made by the main rank alone.

    step: updates applied so far (0, or what was restored); position: from `go_on`; config: the configuration
    as YAML; hyper: dotted path -> value, for TensorBoard's table of hyper-parameters.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        position: Position,
        step: int = 0,
        config: str = "",
        hyper: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._position = position
        directory.path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        first = not directory.tensorboard.exists() or not any(directory.tensorboard.iterdir())
        self._board = self._open_board(None if first else step + 1)
        if config:
            self._board.add_text("config", f"```yaml\n{config}\n```", step)
        if hyper:
            self._add_hyper(hyper, step, table=first)

    @property
    def attempt(self) -> int:
        return self._position.attempt

    @property
    def segment(self) -> int:
        return self._position.segment

    def write(self, record: Mapping[str, Any], *, step: int, applied: bool) -> dict[str, Any]:
        """One attempt. step: the update it tried, counted from 1; applied: whether the update was made.

        record: metric name -> number; None is unknown and left out. Returns the object as written.
        """
        self._position.attempt += 1
        known = {name: value for name, value in record.items() if value is not None}
        heading = {"step": step, "attempt": self.attempt, "segment": self.segment}
        line = {**heading, **encoded(known)}
        self._append(json.dumps(line, allow_nan=False))
        if applied:
            for name, value in known.items():
                if name not in BOOKKEEPING and not isinstance(value, str | bool | list | tuple | Mapping):
                    self._board.add_scalar(name, float(value), step)
        return line

    def text(self, name: str, text: str, *, step: int) -> None:
        """Words into TensorBoard, such as a sample of the model's."""
        self._board.add_text(name, text, step)

    def rewind(self, step: int) -> None:
        """The state of update `step` was restored: a new segment; curves beyond it are dropped."""
        self._position.segment += 1
        self._board.close()
        self._board = self._open_board(step + 1)

    def flush(self) -> None:
        """Everything to disk."""
        os.fsync(self._file)
        self._board.flush()

    def close(self) -> None:
        self._board.close()
        os.close(self._file)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_board(self, purge_step: int | None) -> SummaryWriter:
        return SummaryWriter(str(self._directory.tensorboard), purge_step=purge_step, flush_secs=10)

    def _append(self, line: str) -> None:
        """One write for one line, so that a killed process leaves at most the last one unfinished."""
        rest = memoryview(line.encode() + b"\n")
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _add_hyper(self, hyper: Mapping[str, Any], step: int, *, table: bool) -> None:
        rows = [f"| {name} | {value} |" for name, value in hyper.items()]
        self._board.add_text("hyper-parameters", "\n".join(["| key | value |", "|---|---|", *rows]), step)
        if not table:
            return
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in hyper.items()}
        writer = self._board.file_writer
        assert writer is not None
        for summary in hparams(plain, {}):
            writer.add_summary(summary)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path: what a table of hyper-parameters shows."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            result.update(flattened(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
