"""Curves of old runs: (step, loss, gradient norm) from CSV, metrics.jsonl (both also .gz) or TensorBoard."""

import csv
import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from launcher.monitor import Observation

LOSSES = ("loss/train", "loss", "train_loss", "train/loss", "training_loss")
NORMS = ("norm/grad", "grad_norm", "gradient_norm", "train/grad_norm")
STEPS = ("step", "iteration", "iter")
UNKNOWN = ("", "null", "none")


def matching(patterns: Sequence[str]) -> list[Path]:
    """Files and directories that the patterns name, each once, in order; ValueError where one finds none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        here = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not here:
            raise ValueError(f"{pattern}: there is no such file or directory; give files=[LOG, ...]")
        found.update(dict.fromkeys(map(Path, here)))
    return list(found)


def observations(path: Path) -> Iterator[Observation]:
    """The attempts of one log, in its order; ValueError names what cannot be read, with its line."""
    if path.is_dir():
        record = path / "metrics.jsonl"
        return from_jsonl(record) if record.exists() else from_tensorboard(path)
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        return from_csv(path)
    if name.endswith((".jsonl", ".json")):
        return from_jsonl(path)
    if "tfevents" in name:
        return from_tensorboard(path)
    raise ValueError(
        f"{path}: not a log; a CSV (step,loss,grad_norm), metrics.jsonl, either as .gz too, or a TensorBoard "
        "directory can be replayed"
    )


def opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def from_csv(path: Path) -> Iterator[Observation]:
    """A header that names step and loss, then one line for each attempt; an empty cell is unknown."""
    with opened(path) as file:
        rows = csv.reader(file)
        header = [name.strip().lower() for name in next(rows, [])]
        columns = {
            "step": position(header, STEPS),
            "loss": position(header, LOSSES),
            "norm": position(header, NORMS),
        }
        if columns["step"] is None or columns["loss"] is None:
            raise ValueError(
                f"{path}: the first line must be step,loss[,grad_norm]; it is {','.join(header)}"
            )
        for row in rows:
            if row:
                cells = {
                    name: row[at] if at is not None and at < len(row) else "" for name, at in columns.items()
                }
                yield observation(cells["step"], cells["loss"], cells["norm"], f"{path}:{rows.line_num}")


def position(header: Sequence[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def from_jsonl(path: Path) -> Iterator[Observation]:
    """One object for each attempt; those without a loss are none, an unfinished last line is left out."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{where}: not a JSON object") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not a JSON object")
            step, loss, norm = (first(record, names) for names in (STEPS, LOSSES, NORMS))
            if step is not None and loss is not None:
                yield observation(step, loss, norm, where)


def first(record: dict[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if name in record), None)


def from_tensorboard(path: Path) -> Iterator[Observation]:
    """The scalars of a directory or file of events; the first known name of each signal counts."""
    if path.is_dir() and not any(path.glob("*tfevents*")):
        raise ValueError(f"{path}: neither metrics.jsonl nor TensorBoard events are in this directory")
    # Costs a second, and only this kind of log needs it.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0}, purge_orphaned_data=True).Reload()
    tags = events.Tags()[SCALARS]
    loss = next((name for name in LOSSES if name in tags), None)
    if loss is None:
        raise ValueError(f"{path}: no scalar is called {', '.join(LOSSES)}; there are {', '.join(tags)}")
    norm = next((name for name in NORMS if name in tags), None)
    norms = {event.step: event.value for event in events.Scalars(norm)} if norm else {}
    for event in events.Scalars(loss):
        yield Observation(event.step, event.value, norms.get(event.step))


def observation(step: Any, loss: Any, norm: Any, where: str) -> Observation:
    """One attempt from text or numbers; NaN and Infinity are values, an empty one is unknown."""
    values = [number(value, where) for value in (step, loss, norm)]
    count = values[0]
    if count is None or not count.is_integer():  # NaN and infinity are no integers either
        raise ValueError(f"{where}: {step!r} is no step, which is a whole number")
    return Observation(int(count), values[1], values[2])


def number(value: Any, where: str) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in UNKNOWN):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: {value!r} is not a number") from None
