"""What a run has left, read back: its configuration, every attempt and what became of it, events, texts."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from conf.saved import read
from launcher.events import FILE, records
from launcher.rundirectory import RunDirectory

STARTUP = "time/startup_seconds"  # in the first record of each process


class Fate(IntEnum):
    """What became of an attempt."""

    COUNTS = 0
    SKIPPED = 1  # its update was not applied
    REWOUND = 2  # applied, and undone by a rewind
    RESTARTED = 3  # applied, and undone by a restart from an earlier state


@dataclass(frozen=True)
class Border:
    """Where a segment begins: at the record with this index, after a rewind or a restart."""

    index: int
    is_restart: bool


@dataclass(frozen=True)
class Record:
    """What a run has left."""

    path: Path
    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def borders(self) -> list[Border]:
        """Where segments begin, but for the first one."""
        rewound = {event.get("attempt") for event in self.events if event["event"] in ("rewind", "stop")}
        found = []
        for index in range(1, len(self.lines)):
            before, line = self.lines[index - 1], self.lines[index]
            if line["segment"] > before["segment"] or STARTUP in line:
                restart = STARTUP in line or before["attempt"] not in rewound
                found.append(Border(index, restart))
        return found

    @cached_property
    def fates(self) -> list[Fate]:
        """Of each line. For a step the last record with verdict 0 or 1 counts; a new segment undoes what is
        beyond where it begins."""
        restarts = {border.index for border in self.borders if border.is_restart}
        fates: list[Fate] = []
        last: dict[int, int] = {}
        segment = 0
        for index, line in enumerate(self.lines):
            undone: list[int] = []
            if line["segment"] > segment:  # a rewind or a resume: what was beyond it is undone
                segment = line["segment"]
                undone = [step for step in last if step >= line["step"]]
            lost = Fate.RESTARTED if index in restarts else Fate.REWOUND
            for step in undone:
                fates[last.pop(step)] = lost
            fates.append(Fate.SKIPPED)
            if line["monitor/verdict"] < 2:
                if line["step"] in last:
                    fates[last[line["step"]]] = lost
                last[line["step"]] = index
                fates[index] = Fate.COUNTS
        return fates

    @cached_property
    def applied(self) -> list[dict[str, Any]]:
        """The line that counts of each step, in order."""
        kept = [line for line, fate in zip(self.lines, self.fates, strict=True) if fate == Fate.COUNTS]
        return sorted(kept, key=lambda line: line["step"])


def load(path: Path) -> Record:
    """ValueError when it is not the directory of a run that has trained."""
    directory = RunDirectory(path)
    if not directory.config_file.exists() or not directory.metrics_file.exists():
        raise ValueError(f"{path} is not the directory of a run: it has no config.yaml or no metrics.jsonl")
    settings = read(directory.config_file)
    for section in ("run", "model", "train", "parallel", "data", "optim", "monitor"):
        if not isinstance(settings.get(section, {}), dict):
            raise ValueError(f"{directory.config_file}: {section} is no section of settings; repair the file")
    status = directory.status()
    record = Record(
        path,
        settings,
        list(whole_lines(directory.metrics_file, whole=("step", "attempt", "segment", "monitor/verdict"))),
        events=[timed(event) for event in records(path / FILE)],
        layers=[line for line in usable(directory.layers_file) if _is_layers(line)],
        samples=[line for line in usable(directory.samples_file) if isinstance(line.get("text"), str)],
        status=status if isinstance(status, dict) else {},
        versions=_versions(_object(path / "versions.json")),
        error=_object(directory.error_file),
    )
    if not record.applied:
        raise ValueError(f"{path} has no update on record; leave it out")
    return record


def whole_lines(file: Path, whole: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, none where there is no file; a run that goes on may be writing
    its last line, which does not count. ValueError names a line that is no strict JSON object, or in which
    one of the names in `whole` is no whole number."""
    for number, found in _lines(file):
        if found is None:
            raise ValueError(f"{file}, line {number} is no object of strict JSON; repair the file")
        wrong = [name for name in whole if type(found.get(name)) is not int]
        if wrong:
            value = found.get(wrong[0])
            raise ValueError(
                f"{file}, line {number}: {wrong[0]} is {value!r}, no whole number; repair the file"
            )
        yield found


def usable(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that a report can do without: lines that are none are left out, as are those
    without a step."""
    return (found for _, found in _lines(file) if found is not None and type(found.get("step")) is int)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and object of each whole line; None where it holds none."""
    if not file.exists():
        return
    content = file.read_bytes()
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            found = json.loads(line, parse_constant=_refuse)
        except ValueError:
            found = None
        yield number, found if isinstance(found, dict) else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def timed(event: dict[str, Any]) -> dict[str, Any]:
    """The event, without a time that is none."""
    is_time = isinstance(event.get("time"), int | float | str) and math.isfinite(number(event, "time"))
    return event if is_time else {name: value for name, value in event.items() if name != "time"}


def _is_layers(line: Mapping[str, Any]) -> bool:
    """Names of layers, and lists of values where there are any."""
    lists = [line.get(name, []) for name in ("layers", "gradient_norm", "weight_norm")]
    return "layers" in line and all(isinstance(values, list) for values in lists)


def _versions(found: dict[str, Any]) -> dict[str, Any]:
    """Without what is not of its kind."""
    sections = ("git", "packages")
    return {name: v for name, v in found.items() if name not in sections or isinstance(v, dict)}


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def number(line: Mapping[str, Any], name: str) -> float:
    """A metric as a number: NaN where it is unknown; the strings NaN, Infinity and -Infinity are read."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan


def last_finite(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The newest value of a metric that is a number."""
    values = (number(line, name) for line in reversed(lines))
    return next((value for value in values if math.isfinite(value)), None)
