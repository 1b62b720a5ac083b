"""The monitor: one verdict for each attempt at an update, from the signals alone. Pure; plain JSON to keep.

`judge(history, observation, settings)` gives a Verdict with the history after it; nothing is changed in
place. On a REWIND that history starts anew at the level reached, which is right where nothing is rewound (an
old log, `monitor=observe`); who does rewind goes on from the snapshot's history, passed through `cooled`.
"""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np

from conf.typed import config, setting
from launcher.baseline import LAG, median
from launcher.track import Limits, Reading, Rise, Track, drift_size, follow, is_outlier, restarted

EPISODE = 50  # attempts without WARN that end an episode
REPEAT = 40  # attempts between two WARN of one episode
MOST_SKIPPED = 50  # attempts in a row without an update, after which a run gives up
MOST_MARGIN = 1000
NEWS = 2000  # attempts for which the same level is not reported again
RECENT = 16  # attempts in which non-finite ones count together
FIRST = 32  # values that say where a run started
UNIT, WIDEST = 3.0, 15.0  # losses from .. to which sizes are nats; outside they go with the loss
LONE = 1.4  # nats: one batch as far above the rest is an outlier however wide the noise is
NORM_FACTOR = math.log(10)  # a gradient norm lasts or stands alone from ten times the level on


class Kind(IntEnum):
    """As the metrics have it (monitor/verdict)."""

    OK = 0
    WARN = 1
    SKIP = 2
    REWIND = 3
    STOP = 4


@config
class Monitor:
    """What is done about loss spikes. Sizes are in nats; below a loss of 3 they shrink with it."""

    action: Literal["none", "observe", "skip", "rewind"] = setting(
        "rewind",
        on_resume="free",
        help="none: no verdicts; observe: record them; skip: leave out bad updates; rewind: also go back",
    )
    budget_rewinds: int = setting(10, on_resume="free", help="rewinds of a run; one more stops it")
    margin_steps: int = setting(
        4, on_resume="free", help="steps skipped before the onset and after the alarm; a relapse doubles them"
    )
    cooldown_steps: int = setting(
        16, on_resume="free", help="attempts after a rewind in which only non-finite values rewind again"
    )
    lr_factor: float = setting(
        0.5, on_resume="free", help="of the learning rate, at each rewind that is a relapse"
    )
    lr_steps: int = setting(
        200, on_resume="free", help="updates with the lowered rate; an alarm within them is a relapse"
    )
    fingerprint_every: int = setting(
        0, on_resume="free", help="steps between fingerprints of the gradients; 0 = only in a diagnosis"
    )
    diagnose_attempts: int = setting(
        200,
        on_resume="free",
        help="the most attempts computed twice again to find the cause of a rewind; 0 = no diagnosis",
    )
    rise: float = setting(0.3, on_resume="free", help="a lasting jump of the loss of about this much rewinds")
    drift: float = setting(
        0.4, on_resume="free", help="a slow rise above the lowest level: half warns, all of it rewinds"
    )
    outlier: float = setting(
        9.0, on_resume="free", help="robust standard deviations above the level from which a batch is skipped"
    )
    alarm: float = setting(
        9.0, on_resume="free", help="threshold of the sum of deviations; lower is faster and less sure"
    )
    non_finite: int = setting(
        3, on_resume="free", help=f"non-finite attempts out of {RECENT} that rewind; fewer are skipped"
    )
    learn_steps: int = setting(
        500, on_resume="free", help="updates after which a loss that never fell is reported; 0 = never"
    )

    def __post_init__(self) -> None:
        counts = ("budget_rewinds", "margin_steps", "lr_steps", "fingerprint_every", "diagnose_attempts")
        if not 0 <= self.cooldown_steps < MOST_SKIPPED:
            raise ValueError(
                f"monitor.cooldown_steps ({self.cooldown_steps}) must be 0 to {MOST_SKIPPED - 1}: a run "
                f"gives up after {MOST_SKIPPED} attempts in a row without an update"
            )
        for name in counts:
            if getattr(self, name) < 0:
                raise ValueError(f"monitor.{name} ({getattr(self, name)}) must be 0 or more")
        if self.margin_steps > MOST_MARGIN:
            raise ValueError(
                f"monitor.margin_steps ({self.margin_steps}) must be at most {MOST_MARGIN}; 4 is usual"
            )
        for name in ("rise", "drift", "outlier", "alarm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"monitor.{name} ({getattr(self, name)}) must be above 0")
        if not 0 < self.lr_factor <= 1:
            raise ValueError(
                f"monitor.lr_factor ({self.lr_factor}) must be above 0 and at most 1; 1 keeps it"
            )
        if not 1 <= self.non_finite <= RECENT or self.learn_steps < 0:
            raise ValueError(
                f"monitor.non_finite ({self.non_finite}) must be 1 to {RECENT} and monitor.learn_steps "
                f"({self.learn_steps}) 0 or more"
            )


class Observation(NamedTuple):
    """The signals of one attempt, equal on all ranks. step: the update it tries, counted from 1."""

    step: int
    loss: float | None
    norm: float | None = None
    non_finite: bool = False


class History(NamedTuple):
    """All that judging remembers; bounded. norm: of the logarithm of the gradient norm.

    attempts: judged so far; non_finite: (attempt, step) of the recent ones; first: where the loss started;
    told, told_at: level and attempt of the last WARN; cool_until: the attempt up to which no jump rewinds.
    """

    loss: Track = Track()
    norm: Track = Track()
    attempts: int = 0
    step: int = 0
    non_finite: tuple[tuple[int, int], ...] = ()
    first: float | None = None
    learned: bool = False
    told: float | None = None
    told_at: int = 0
    cool_until: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` gives the same history bit for bit."""
        return self._asdict() | {
            "loss": self.loss.as_json(),
            "norm": self.norm.as_json(),
            "non_finite": [list(entry) for entry in self.non_finite],
        }

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> "History":
        return History(**plain)._replace(
            loss=Track.from_json(plain["loss"]),
            norm=Track.from_json(plain["norm"]),
            non_finite=tuple(tuple(entry) for entry in plain["non_finite"]),
        )


class Verdict(NamedTuple):
    """reason: `name: values`, empty for OK; onset: the first step of what lasts; history: the next one."""

    kind: Kind
    history: History
    reason: str = ""
    onset: int | None = None


def carried_out(kind: Kind, settings: Monitor) -> Kind:
    """What of a verdict is done under `monitor.action`; the verdict itself is recorded whatever it says."""
    most = {"none": Kind.OK, "observe": Kind.WARN, "skip": Kind.SKIP, "rewind": Kind.STOP}
    return min(kind, most[settings.action])


def judge(history: History, observation: Observation, settings: Monitor) -> Verdict:
    """The verdict on one attempt. Deterministic: the same on every rank and after any interruption."""
    now = {"attempts": history.attempts + 1, "step": observation.step}
    loss, norm = observation.loss, observation.norm
    if observation.non_finite or not _finite(loss) or not _finite(norm) or (norm is not None and norm < 0):
        return _non_finite(history._replace(**now), observation, settings)
    seen = {"loss": loss, "norm": None if norm is None else math.log(max(norm, 1e-12))}
    limits = {"loss": loss_limits(history, settings), "norm": norm_limits(settings)}
    values = {name: value for name, value in seen.items() if value is not None}
    outliers = [n for n, value in values.items() if is_outlier(getattr(history, n), value, limits[n])]
    readings: dict[str, Reading] = {}
    for name, value in values.items():
        if not outliers or name in outliers:  # a batch refused for one signal says nothing about another
            track = getattr(history, name)
            readings[name] = follow(track, observation.step, value, limits[name], refused=bool(outliers))
    history = history._replace(**now, **{name: reading.track for name, reading in readings.items()})
    lasting = _lasting(history, readings, limits)
    if lasting is not None and history.attempts > history.cool_until:
        name, rise, what = lasting
        return Verdict(Kind.REWIND, _anew(history, name, rise, settings), _told(what, name, rise), rise.onset)
    if outliers:
        return Verdict(Kind.SKIP, history, _outlier(outliers[0], observation, readings))
    return _warn(history, readings, settings)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def loss_limits(history: History, settings: Monitor) -> Limits:
    """In nats for a cross-entropy of 3 and more; for smaller losses in proportion to the level."""
    track = history.loss
    level = abs(track.fit.level if track.fit else track.values[-1] if track.values else math.inf)
    share = min(1.0, level / UNIT)
    rise, drift = settings.rise * share, settings.drift * share
    lone = LONE * share if level < WIDEST else LONE * level / UNIT
    return Limits(rise, 0.3 * rise, drift, lone, settings.outlier, settings.alarm)


def norm_limits(settings: Monitor) -> Limits:
    """Of the logarithm: a factor of 10 counts as a rise or an outlier, one of 3 is worth a warning."""
    return Limits(NORM_FACTOR, math.log(3), math.inf, NORM_FACTOR, settings.outlier, settings.alarm)


def _non_finite(history: History, observation: Observation, settings: Monitor) -> Verdict:
    recent = [entry for entry in history.non_finite if entry[0] > history.attempts - RECENT]
    recent.append((history.attempts, observation.step))
    if len(recent) < settings.non_finite:
        history = history._replace(non_finite=tuple(recent))
        return Verdict(Kind.SKIP, history, "non_finite: the loss or a gradient is not finite")
    reason = f"non_finite: {len(recent)} of the last {RECENT} attempts"
    history = cooled(history._replace(non_finite=()), settings)
    return Verdict(Kind.REWIND, history, reason, recent[0][1])


def _lasting(
    history: History, readings: Mapping[str, Reading], limits: Mapping[str, Limits]
) -> tuple[str, Rise, str] | None:
    """(signal, rise, name) of what calls for a rewind."""
    for name, reading in readings.items():
        if reading.jump:
            return name, reading.jump, "jump"
        fit = reading.track.fit
        if reading.drift and fit and reading.drift.size >= drift_size(fit, limits[name]):
            return name, reading.drift, "drift"
    return None


def _anew(history: History, name: str, rise: Rise, settings: Monitor) -> History:
    """The history at the level that the signal `name` has risen to."""
    other = {"loss": "norm", "norm": "loss"}[name]
    tracks = {
        name: restarted(getattr(history, name), rise.onset),
        other: restarted(getattr(history, other), None, keep=8),
    }
    return cooled(history._replace(told=None, **tracks), settings)


def cooled(history: History, settings: Monitor) -> History:
    """For the first attempts after a rewind: what lasts does not rewind again at once, it is only skipped.

    After a rewind, history is the one of the snapshot.
    """
    return history._replace(cool_until=history.attempts + settings.cooldown_steps)


def _told(what: str, name: str, rise: Rise) -> str:
    size = f"+{rise.size:.3g}" if name == "loss" else f"x {math.exp(rise.size):.3g}"
    return f"{what}: {name} {size}"


def _outlier(name: str, observation: Observation, readings: Mapping[str, Reading]) -> str:
    value, deviation = getattr(observation, name), readings[name].deviation
    far = "" if deviation is None else f", {deviation:.1f} deviations above the level"
    return f"outlier: {name} {value:.4g}{far}"


def _warn(history: History, readings: Mapping[str, Reading], settings: Monitor) -> Verdict:
    """OK, or WARN with news: an episode repeats itself, a level that was reported is not reported again."""
    history, stuck = _learning(history, settings)
    if stuck:
        return Verdict(Kind.WARN, history, stuck)
    for name, reading in readings.items():
        for what, rise in (("drift", reading.drift), ("rise", reading.slow)):
            if rise is None:
                continue
            level = median(np.asarray(reading.track.values[-LAG:]))
            since = history.attempts - history.told_at
            known = history.told is not None and since < NEWS
            if known and (since < REPEAT or (since > EPISODE and level <= _news(history, settings))):
                return Verdict(Kind.OK, history)
            history = history._replace(told=level, told_at=history.attempts)
            return Verdict(Kind.WARN, history, _told(what, name, rise), rise.onset)
    return Verdict(Kind.OK, history)


def _news(history: History, settings: Monitor) -> float:
    assert history.told is not None
    return history.told + 0.3 * loss_limits(history, settings).rise


def _learning(history: History, settings: Monitor) -> tuple[History, str]:
    """Whether the loss has fallen since the start; the warning that it has not, once."""
    track = history.loss
    if history.learned or not settings.learn_steps or track.accepted < FIRST or track.fit is None:
        return history, ""
    if history.first is None:
        return history._replace(first=median(np.asarray(track.values[:FIRST]))), ""
    if track.accepted < max(settings.learn_steps, 3 * FIRST):
        return history, ""
    history = history._replace(learned=True)
    level = median(np.asarray(track.values[-2 * FIRST :]))
    assert history.first is not None
    if history.first - level >= max(0.02 * abs(history.first), 0.6 * track.fit.spread):
        return history, ""
    return (
        history,
        f"never_learned: loss {level:.4g} after {track.accepted} updates, {history.first:.4g} before",
    )


def trusted_step(history: History) -> int:
    """The newest step whose state is beyond the detector's delay and not part of anything suspected."""
    tracks = [track for track in (history.loss, history.norm) if track.rising]
    rising = [track.recent[-track.rising][0] - 1 for track in tracks]
    recent = [step - 1 for _, step in history.non_finite[:1]]
    return max(0, min([history.step - LAG, *rising, *recent]))
