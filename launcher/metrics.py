"""The numbers of a run: metrics.jsonl, one object an attempt, and TensorBoard under the same names.

The file is the record: append-only strict JSON, by attempt. TensorBoard is the picture: applied updates only.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from conf.saved import to_yaml
from launcher.progress import Progress
from launcher.rundirectory import RunDirectory, naming
from launcher.sinks import Delivery

WINDOW_BYTES = 1 << 16
CLOCK_SECONDS = 2  # a clock that is further behind is not waited for
NO_CURVES = ("time/wall",)  # TensorBoard has the time of each point already
# TensorBoard's page of custom scalars: group -> chart -> names; a name is a regular expression.
LAYOUT = {
    "loss": {
        "training and held out": ["Multiline", ["^loss/train$", "^loss/eval$"]],
        "held out, by source": ["Multiline", ["^loss/eval/.*"]],
        "beside the cross-entropy": ["Multiline", ["^loss/z$", "^loss/balance$", "^loss/router_z$"]],
    },
    "stability": {
        "gradient norm": ["Multiline", ["^norm/grad$"]],
        "learning rate": ["Multiline", ["^lr$"]],
        "logits": ["Multiline", ["^logit/max$", "^logit/max_log_z$"]],
    },
    "speed": {
        "tokens per second": ["Multiline", ["^speed/tokens_per_second$"]],
        "model FLOPs utilisation": ["Multiline", ["^speed/mfu$"]],
        "seconds": ["Multiline", ["^time/step_seconds$", "^time/evaluate_seconds$"]],
        "seconds of checkpoints": ["Multiline", ["^time/checkpoint_.*"]],
    },
    "memory": {"peak bytes": ["Multiline", ["^memory/peak_bytes$"]]},
    "monitor": {
        "verdict": ["Multiline", ["^monitor/verdict$"]],
        "rewinds": ["Multiline", ["^monitor/rewinds$"]],
        "samples left out": ["Multiline", ["^monitor/skipped_samples$"]],
    },
}


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


def repair(path: Path) -> dict[str, Any] | None:
    """Cut off what a killed process left unfinished at the end; the last whole record, or None.

    A line is whole when it ends in a newline and is a JSON object.
    """
    if not path.exists():
        return None
    end, record = _tail(path)
    if end < path.stat().st_size:
        with open(path, "r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return record


def last_whole(path: Path) -> dict[str, Any] | None:
    """The last whole record, or None; the file stays as it is."""
    return _tail(path)[1] if path.exists() else None


def _tail(path: Path) -> tuple[int, dict[str, Any] | None]:
    """(offset where the last whole line ends, its record), read from the end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        window = WINDOW_BYTES
        while True:
            start = max(0, size - window)
            file.seek(start)
            end, record = last_record(file.read(size - start), whole_start=start == 0)
            if record is not None or start == 0:
                return start + end, record
            window *= 2


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


def append_line(file: int, line: str) -> None:
    """One write for one line, so that a killed process leaves at most the last one unfinished.

    file: a descriptor, opened for appending.
    """
    rest = memoryview(line.encode() + b"\n")
    while rest:
        rest = rest[os.write(file, rest) :]


@dataclass(frozen=True)
class Position:
    """Where the numbering of records stands: `attempt` is the last one used."""

    attempt: int = 0
    segment: int = 0


def go_on(
    directory: RunDirectory,
    *,
    attempt: int = 0,
    segment: int = 0,
    resumed: bool = False,
    look: Callable[[Path], dict[str, Any] | None] = repair,
) -> Position:
    """The numbering after a start: from the larger of the checkpoint's and the last whole line's.

    attempt, segment: the checkpoint's (resumed=True), or zero. The segment rises by one when anything was
    there before. look: `repair`, which cuts off an unfinished last line, or `last_whole`, which does not.
    """
    found = [look(path) for path in (directory.metrics_file, directory.path / "events.jsonl")]
    records = [record for record in found if record is not None]
    attempt = max([attempt, *(int(record.get("attempt", 0)) for record in records)])
    segment = max([segment, *(int(record.get("segment", 0)) for record in records)])
    return Position(attempt, segment + 1 if records or resumed else 0)


class MetricsWriter:
    """Made on every rank; the main rank (0) writes both and shows the progress, the others only count.

    config: the plain values of the settled configuration; steps: updates of the run; step, attempt, segment:
    the checkpoint's when the run is resumed; log_every: steps between plain progress lines; sinks: further
    places for the numbers, used on the main rank.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: Mapping[str, Any],
        *,
        rank: int,
        steps: int,
        step: int = 0,
        attempt: int = 0,
        segment: int = 0,
        resumed: bool = False,
        log_every: int = 10,
        stream: TextIO | None = None,
        sinks: Sequence[Delivery] = (),
    ) -> None:
        look = repair if rank == 0 else last_whole
        start = go_on(directory, attempt=attempt, segment=segment, resumed=resumed, look=look)
        self.attempt, self.segment = start.attempt, start.segment
        self._main = _Main(directory, config, step, steps, log_every, stream) if rank == 0 else None
        self._sinks = sinks

    def write(self, record: Mapping[str, Any], *, applied: bool) -> dict[str, Any]:
        """One attempt; the object as written.

        record: metric name -> number, None is unknown and left out; `step` is the update it tried, counted
        from 1; `attempt` is counted here when it is not given. applied: whether the update was made.
        """
        self.attempt = int(record.get("attempt", self.attempt + 1))
        heading = {"step": int(record["step"]), "attempt": self.attempt, "segment": self.segment}
        known = {k: v for k, v in record.items() if v is not None and k not in heading}
        line = {**heading, **encoded(known)}
        if self._main is not None:
            self._main.write(line, known, applied=applied)
            numbers = {name: float(value) for name, value in {**heading, **known}.items() if is_number(value)}
            for sink in self._sinks:
                sink.put(numbers)
        return line

    def note(self, text: str) -> None:
        """A line for the reader that stays above the progress."""
        if self._main is not None:
            self._main.progress.note(text)

    def text(self, name: str, text: str, *, step: int) -> None:
        """Words into TensorBoard, such as a sample of the model's."""
        if self._main is not None:
            self._main.board.add_text(name, text, step)

    def rewind(self, step: int) -> None:
        """The state after update `step` was restored: a new segment; curves beyond it are dropped."""
        self.segment += 1
        if self._main is not None:
            self._main.reopen(step + 1)

    def flush(self) -> None:
        """Everything to disk."""
        if self._main is not None:
            self._main.flush()

    def close(self) -> None:
        if self._main is not None:
            self._main.close()
            self._main = None
            for sink in self._sinks:
                sink.close(failed=sys.exc_info()[0] is not None)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Main:
    """The files and the terminal of the main rank."""

    def __init__(
        self,
        directory: RunDirectory,
        config: Mapping[str, Any],
        step: int,
        steps: int,
        log_every: int,
        stream: TextIO | None,
    ) -> None:
        self._directory = directory
        directory.path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        first = not directory.tensorboard.exists() or not any(directory.tensorboard.iterdir())
        self.board = self._open_board(None if first else step + 1)
        self._add_config(config, step, table=first)
        log = directory.log_file(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(steps=steps, step=step, every=log_every, file=log, stream=stream)
        self.progress.start()
        self._warn_of_clock()

    def write(self, line: Mapping[str, Any], known: Mapping[str, Any], *, applied: bool) -> None:
        self._append(json.dumps(line, allow_nan=False))
        if not applied:
            return
        for name, value in known.items():
            if is_number(value) and name not in NO_CURVES:
                self.board.add_scalar(name, float(value), line["step"])
        self.progress.update(
            line["step"],
            seconds=float(known.get("time/step_seconds", 0.0)),
            loss=known.get("loss/train"),
            lr=known.get("lr"),
            norm=known.get("norm/grad"),
            tokens_per_second=known.get("speed/tokens_per_second"),
            mfu=known.get("speed/mfu"),
        )
        if "loss/eval" in known:
            self.progress.note(f"step {line['step']}  held-out loss {float(known['loss/eval']):.4f}")

    def reopen(self, purge_step: int) -> None:
        self.board.close()
        self.board = self._open_board(purge_step)
        self._warn_of_clock()

    def flush(self) -> None:
        with naming(self._directory.metrics_file):
            os.fsync(self._file)
        self.board.flush()

    def close(self) -> None:
        self.progress.stop()
        self.board.close()
        os.close(self._file)

    def _open_board(self, purge_step: int | None) -> SummaryWriter:
        self._behind = wait_for_clock(self._directory.tensorboard)
        return SummaryWriter(str(self._directory.tensorboard), purge_step=purge_step, flush_secs=10)

    def _warn_of_clock(self) -> None:
        if self._behind > 0:
            self.progress.note(
                f"this machine's clock is {self._behind} s behind the newest file in "
                f"{self._directory.tensorboard}: TensorBoard may show points that were undone; metrics.jsonl "
                "is right"
            )

    def _append(self, line: str) -> None:
        with naming(self._directory.metrics_file):
            append_line(self._file, line)

    def _add_config(self, config: Mapping[str, Any], step: int, *, table: bool) -> None:
        """The configuration as text and as TensorBoard's own table of hyper-parameters."""
        hyper = flattened(config)
        rows = [f"| {name} | {value} |" for name, value in hyper.items()]
        self.board.add_text("hyper-parameters", "\n".join(["| key | value |", "|---|---|", *rows]), step)
        self.board.add_text("config", f"```yaml\n{to_yaml(config)}\n```", step)
        if not table:
            return
        self.board.add_custom_scalars(LAYOUT)
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in hyper.items()}
        writer = self.board.file_writer
        assert writer is not None
        for summary in hparams(plain, {}):
            writer.add_summary(summary)


def wait_for_clock(directory: Path) -> int:
    """Wait until a file that is opened now is the last by name; the seconds that the clock is still behind.

    TensorBoard reads a directory's files in the order of their names, and the name begins with the second in
    which the file was opened (events.out.tfevents.<second>.<host>.<process>.<count>, the count unpadded). A
    file that says "drop what is beyond step n" must come after those that hold it. What was opened earlier
    than this second is never waited for; a clock behind by more than CLOCK_SECONDS is not either.
    """
    names = (path.name.split(".") for path in directory.glob("events.out.tfevents.*"))
    newest = max((int(name[3]) for name in names if len(name) > 3 and name[3].isdigit()), default=-1)
    now = time.time()
    if now < newest + 1 <= now + CLOCK_SECONDS:
        time.sleep(newest + 1 - now)
        now = newest + 1
    return max(0, newest + 1 - int(now))


def is_number(value: Any) -> bool:
    """Whether a value of a record is a point of a curve; numpy's and torch's scalars are."""
    return not isinstance(value, str | bool | list | tuple | Mapping)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path: what a table of hyper-parameters shows."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            result.update(flattened(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
