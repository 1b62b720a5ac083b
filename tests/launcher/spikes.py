"""Curves for the tests of the monitor: real ones, and changes laid on them from a step on.

Judging is pure, so a change is tried from the history that the unchanged curve has just before it: what comes
before the change is the same, and is judged once for all draws.
"""

import functools
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.monitor import History, Kind, Monitor, Observation, Verdict, judge

CURVES = sorted((Path(__file__).parent / "curves").glob("*.csv.gz"))
SETTINGS = Monitor()
KEPT_EVERY = 16
Change = Callable[[int], float]  # steps since the onset -> nats added


@dataclass(frozen=True)
class Clean:
    """A curve, its verdicts and the histories before every 16th step. Step s is at index s - 1."""

    losses: np.ndarray
    verdicts: list[Verdict]
    histories: list[History]

    def steps(self, kind: Kind) -> list[int]:
        return [step for step, verdict in enumerate(self.verdicts, 1) if verdict.kind == kind]


@dataclass(frozen=True)
class Outcome:
    """Of one draw: steps from the onset to the first alarm and WARN, None without; the error of the onset."""

    alarm: int | None
    warn: int | None
    error: int


def losses(path: Path) -> np.ndarray:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, usecols=1)


def fold(values: Sequence[float] | np.ndarray, settings: Monitor = SETTINGS) -> Clean:
    history, verdicts, histories = History(), [], []
    for index, value in enumerate(values):
        if index % KEPT_EVERY == 0:
            histories.append(history)
        verdict = judge(history, Observation(index + 1, float(value)), settings)
        verdicts.append(verdict)
        history = verdict.history
    return Clean(np.asarray(values), verdicts, histories)


@functools.cache
def clean(path: Path) -> Clean:
    return fold(losses(path))


def tried(curve: Clean, onset: int, change: Change, horizon: int) -> Outcome:
    """The curve with a change from the step `onset` on, judged for `horizon` steps or until the alarm."""
    start = (onset - 1) // KEPT_EVERY
    history, warn = curve.histories[start], None
    for step in range(start * KEPT_EVERY + 1, min(onset + horizon, len(curve.losses) + 1)):
        added = change(step - onset) if step >= onset else 0.0
        verdict = judge(history, Observation(step, float(curve.losses[step - 1]) + added), SETTINGS)
        history = verdict.history
        if verdict.kind >= Kind.REWIND:
            assert verdict.onset is not None
            return Outcome(step - onset, warn, verdict.onset - onset)
        if verdict.kind == Kind.WARN and step >= onset and warn is None:
            warn = step - onset
    return Outcome(None, warn, 0)


def outcomes(curve: Clean, draws: int, change: Change, horizon: int, *, room: int = 200) -> list[Outcome]:
    """At random onsets, the same for every change."""
    onsets = np.random.default_rng(7).integers(600, len(curve.losses) - room, size=draws)
    return [tried(curve, int(onset), change, horizon) for onset in onsets]


def outliers(values: np.ndarray) -> list[int]:
    """Steps that exceed the median of the 128 before by 1.5 nats, the next two being back within 0.5."""
    found = []
    for index in range(128, len(values) - 2):
        middle = np.median(values[index - 128 : index])
        if values[index] > middle + 1.5 and max(values[index + 1], values[index + 2]) < middle + 0.5:
            found.append(index + 1)
    return found


def episodes(steps: Sequence[int]) -> int:
    """Episodes of WARN: each ends after 50 steps without one."""
    return sum(1 for n, step in enumerate(steps) if n == 0 or step - steps[n - 1] > 50)
