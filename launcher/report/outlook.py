"""What the planner predicts for the configuration of a run, beside what was measured."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from conf.saved import read
from conf.schema import plain
from conf.typed import parse
from launcher.hardware import Hardware, Machine
from launcher.plan.calibrate import calibrated
from launcher.plan.command import Plan, PlannedSplit, made
from launcher.report.reading import Record, number

WARM = 10  # first updates that do not count for the speed
PRESETS = (  # (pattern in the name that torch reports, the file of conf/hardware that describes it)
    (r"\bA100\b", "a100"),
    (r"\bH100 80GB HBM3\b", "h100"),
    (r"\bH200$", "h200"),
    (r"(?<!G)\bB200\b", "b200"),
    (r"\bL40S\b", "l40s"),
    (r"\bMI300X\b", "mi300x"),
)
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"


@dataclass(frozen=True)
class Compared:
    """One quantity; None is unknown. measured: the median over updates, but the most of peak bytes."""

    name: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Outlook:
    """Plan against reality. machine: what was planned for; why: what is missing, where rows is empty."""

    rows: list[Compared]
    machine: str = ""
    layout: str = ""
    why: str = ""


def outlook(record: Record, *, calibrate: bool) -> Outlook:
    """The prediction for the configuration, device and number of processes of a run.

    calibrate: measure this machine's CPU for a second where a run was made on one.
    """
    processes = processes_of(record)
    if processes is None:
        return Outlook([], why="versions.json does not say on how many processes it ran")
    on_cpu = record.versions.get("device", "cpu") == "cpu"
    if on_cpu and not calibrate:
        return Outlook([], why="it ran on a CPU, and calibrate=false")
    try:
        machine = calibrated(processes) if on_cpu else machine_of(record)
        if machine is None:
            device = record.versions.get("device")
            return Outlook([], why=f"the planner has no figures for {device}; hardware=NAME at the run")
        tree = tree_of(record, machine, processes, on_cpu=on_cpu)
        best = made(tree).winner
    except ValueError as error:
        return Outlook([], why=f"the planner refuses it: {str(error).splitlines()[0]}")
    peak = max((number(line, "memory/peak_bytes") for line in record.applied), default=math.nan)
    rows = [
        Compared("tokens/s", best.tokens_per_second, middle(record, "speed/tokens_per_second")),
        Compared("seconds of a step", best.time.total, middle(record, "time/step_seconds")),
        Compared("model FLOPs utilisation", None if on_cpu else best.mfu, middle(record, "speed/mfu")),
        Compared(
            "peak bytes of a process",
            float(max(stage.total for stage in best.stages)),
            peak if math.isfinite(peak) else None,
        ),
    ]
    known = [row for row in rows if row.predicted is not None or row.measured is not None]
    return Outlook(known, machine=machine.name, layout=str(best.layout))


def processes_of(record: Record) -> int | None:
    """From versions.json, else as many as have written a log."""
    said = record.versions.get("processes")
    if isinstance(said, int) and said > 0:
        return said
    logs = list((record.path / "logs").glob("rank-*.log"))
    return len(logs) or None


def machine_of(record: Record) -> Machine | None:
    """The figures that the run was given, or those of its device where they are known."""
    given = record.settings.get("hardware", {}).get("machine")
    if given is not None:
        return parse(Machine, given)
    device = str(record.versions.get("device", ""))
    for pattern, preset in () if "MIG" in device else PRESETS:
        if re.search(pattern, device):
            return parse(Hardware, read(FOLDER / f"{preset}.yaml")).machine
    return None


def tree_of(record: Record, machine: Machine, processes: int, *, on_cpu: bool) -> Plan:
    """The planner's configuration, all given that the run had."""
    settings = record.settings
    parallel = settings.get("parallel", {})
    split = {field.name for field in dataclasses.fields(PlannedSplit)}
    same = ("model", "kernels", "data", "train", "optim", "checkpoint")
    values: dict[str, Any] = {name: settings[name] for name in same if name in settings}
    values["parallel"] = {k: v for k, v in parallel.items() if k in split}
    values["hardware"] = {"device": "cpu" if on_cpu else "cuda", "machine": plain(machine)}
    return parse(Plan, {**values, "gpus": processes})


def middle(record: Record, name: str) -> float | None:
    """The median over the updates that count, the first ones left out where there are more."""
    return median_of([number(line, name) for line in record.applied])


def median_of(values: Sequence[float]) -> float | None:
    known = [v for v in (values[WARM:] or values) if math.isfinite(v)]
    return median(known) if known else None
