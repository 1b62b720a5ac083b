"""One signal followed step by step: lone outliers, lasting jumps, small lasting rises, slow drift.

A pure fold: `follow(track, step, value, limits)` gives a Reading with the next Track, and changes nothing.
Deviations are counted in spreads of the baseline; what lasts must also be of a size that matters (Limits), so
that a very quiet signal does not alarm about nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launcher.baseline import LAG, MEDIAN_ERROR, WINDOW, Baseline, baseline, median

LEAST = 4  # accepted values before there is a baseline
YOUNG = 64  # with fewer accepted values only what stands far above all recent ones counts
GROWN = 320  # from YOUNG to here a jump must be three times to once as large: early training is bumpy
REFIT_EVERY = 8  # accepted values between two baselines, and twice as many once the curve is flat
BLOCK, BLOCKS = 32, 128  # values of one entry of the long memory, and entries

LEAST_OUTLIER = 5.0  # spreads, for noise so wide that Limits.outlier is beyond Limits.lone
LOWEST = -3.0  # deviations below count no further
MOST_GAIN = 2.0  # of one value to a sum, so that no few values make an alarm
SHORTEST = 7  # values of a lasting jump; what is over sooner is a few bad batches
HELD = 64  # values since the sum left zero that are kept
BEFORE = 24  # values before the onset that a jump is measured against
SLOW_ALARM, SLOW_SPREADS = 5 / 3, 1.3  # the slow sum alarms later, and only of what exceeds so many spreads
WARN_SUM = 15.0
WARN_ALLOWANCE = 0.5  # below the alarm's: a slower sum that hears smaller rises
DRIFT_WARN_SPREADS, DRIFT_SPREADS = 1.0, 1.3  # a drift must also exceed so many spreads


class Limits(NamedTuple):
    """What counts, in the signal's unit or in spreads.

    Sizes: rise of a lasting jump; small, of a lasting rise to warn of; drift, of a slow one; lone, of one
    outlier where the noise is wide. In spreads: outlier, of a single value above the level; alarm, the sum of
    deviations beyond the allowance, reached by chance about every exp(1.6 x alarm) steps.
    """

    rise: float
    small: float
    drift: float
    lone: float
    outlier: float
    alarm: float


class Rise(NamedTuple):
    """Something that lasts: the step where it began and by how much the signal rose."""

    onset: int
    size: float


class Track(NamedTuple):
    """What is remembered of a signal: plain numbers, at most some 600 of them.

    values: the last accepted ones; total: the sum of deviations, and doubted the part of it that refused
    values gave, which the next ordinary value takes back; slow: the same with a smaller allowance; rising and
    slow_rising: attempts since each sum left zero; recent: (step, value, 1 if accepted) of the last attempts;
    blocks: (step, median) of every 32 accepted values.
    """

    values: tuple[float, ...] = ()
    accepted: int = 0
    fit: Baseline | None = None
    total: float = 0.0
    doubted: float = 0.0
    rising: int = 0
    slow: float = 0.0
    slow_rising: int = 0
    recent: tuple[tuple[int, float, int], ...] = ()
    blocks: tuple[tuple[int, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "values": list(self.values),
            "fit": None if self.fit is None else self.fit._asdict(),
            "recent": [list(entry) for entry in self.recent],
            "blocks": [list(entry) for entry in self.blocks],
        }

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> "Track":
        return Track(**plain)._replace(
            values=tuple(plain["values"]),
            fit=None if plain["fit"] is None else Baseline(**plain["fit"]),
            recent=tuple(tuple(entry) for entry in plain["recent"]),
            blocks=tuple(tuple(entry) for entry in plain["blocks"]),
        )


class Reading(NamedTuple):
    """What one value says: how many spreads above the level, and what lasts; None without."""

    track: Track
    deviation: float | None = None
    jump: Rise | None = None
    slow: Rise | None = None
    drift: Rise | None = None


def is_outlier(track: Track, value: float, limits: Limits) -> bool:
    """Whether a single value stands too far above the level to be accepted."""
    fit = track.fit
    if fit is None:
        highest = max(track.values, default=math.inf)
        return value > highest + limits.lone * (1 if len(track.values) == LEAST - 1 else 10)
    wide = max(LEAST_OUTLIER * fit.spread, limits.lone)
    bound = fit.level + max(min(limits.outlier * fit.spread, wide), limits.rise)
    if track.accepted < YOUNG:
        bound = max(bound, max(track.values[-16:]) + limits.lone)
    return value > bound


def follow(track: Track, step: int, value: float, limits: Limits, *, refused: bool = False) -> Reading:
    """Judge one finite value; the track of the Reading has taken it in, unless it is refused (an outlier)."""
    fit = track.fit
    if fit is None:
        return Reading(track if refused else accepted(track, step, value))
    deviation = (value - fit.level) / fit.spread
    track = summed(track, fit, limits, step, value, deviation, refused)
    jump = lasting_jump(track, fit, limits)
    if refused:
        return Reading(track, deviation, jump)
    track = accepted(track, step, value)
    return Reading(
        track,
        deviation,
        jump,
        small_rise(track, fit, limits) if track.slow >= WARN_SUM else None,
        slow_drift(track, fit, limits) if track.accepted % REFIT_EVERY == 0 else None,
    )


def summed(
    track: Track, fit: Baseline, limits: Limits, step: int, value: float, deviation: float, refused: bool
) -> Track:
    """Both sums of deviations with one more value; never below zero, and not so high that they stick."""
    deviation = max(deviation, LOWEST)
    gain = min(deviation - max(fit.allowance, 0.4 * limits.rise / fit.spread), MOST_GAIN)
    total, doubted = track.total, track.doubted
    if refused:
        doubted += gain
    elif gain < 0:
        total, doubted = max(0.0, total - doubted), 0.0
    total = min(max(0.0, total + gain), 2 * limits.alarm)
    slow = track.slow
    if not refused:
        give = max(fit.allowance - WARN_ALLOWANCE, 0.25 * limits.rise / fit.spread)
        slow = min(max(0.0, slow + min(deviation - give, MOST_GAIN)), 2 * WARN_SUM)
    return track._replace(
        total=total,
        doubted=doubted,
        rising=min(track.rising + 1, HELD) if total > 0 else 0,
        slow=slow,
        slow_rising=min(track.slow_rising + 1, HELD) if slow > 0 else 0,
        recent=(*track.recent, (step, value, 0 if refused else 1))[-HELD:],
    )


def accepted(track: Track, step: int, value: float) -> Track:
    """The track with a value in its window, its baseline and its long memory."""
    values = (*track.values, value)[-WINDOW:]
    count, fit, blocks = track.accepted + 1, track.fit, track.blocks
    every = 1 if count < YOUNG else REFIT_EVERY if count < GROWN else 2 * REFIT_EVERY
    if count >= LEAST and count % every == 0:
        fit = baseline(values)
    if count % BLOCK == 0:
        blocks = (*blocks, (step, median(np.asarray(values[-BLOCK:]))))[-BLOCKS:]
    return track._replace(values=values, accepted=count, fit=fit, blocks=blocks)


def lasting_jump(track: Track, fit: Baseline, limits: Limits) -> Rise | None:
    """The jump that a sum has found, when it is long and large enough.

    Its size compares the values since the onset, refused ones included, with the accepted ones just before.
    Where the noise is wide the slow sum is the faster one; what it finds must also stand out from the noise.
    """
    if track.total >= limits.alarm:
        found, least = track.recent[-track.rising :], 0.0
    elif track.slow >= SLOW_ALARM * limits.alarm:
        found, least = track.recent[-track.slow_rising :], SLOW_SPREADS * fit.spread
    else:
        return None
    since = found[change_point([value for _, value, _ in found], fit) :]
    if len(since) < SHORTEST:
        return None
    end = len(track.values) - sum(taken for _, _, taken in since[:-1])  # the newest is not in the window yet
    before = track.values[max(0, end - BEFORE) : end] or track.values[:1]
    size = median(np.asarray([value for _, value, _ in since])) - median(np.asarray(before))
    young = min(max((GROWN - track.accepted) / (GROWN - YOUNG), 0.0), 1.0)
    error = MEDIAN_ERROR * fit.spread * math.sqrt(1 / len(since) + 1 / len(before))
    least = max(least, 0.9 * limits.rise * (1 + 2 * young) + 0.5 * error)
    return Rise(since[0][0], size) if size >= least else None


def change_point(values: Sequence[float], fit: Baseline) -> int:
    """Where a rise to the median of the newest values began: the maximum likelihood of a shift."""
    shift = max((median(np.asarray(values[-9:])) - fit.level) / fit.spread, 1.0)
    best, best_at, total = -math.inf, 0, 0.0
    for index in range(len(values) - 1, -1, -1):
        deviation = (values[index] - fit.level) / fit.spread
        total += min(max(deviation, LOWEST), shift + MOST_GAIN) - shift / 2
        if total > best:
            best, best_at = total, index
    return best_at


def small_rise(track: Track, fit: Baseline, limits: Limits) -> Rise | None:
    size = median(np.asarray(track.values[-LAG:])) - fit.level
    return Rise(track.recent[-max(track.slow_rising, 1)][0], size) if size >= limits.small else None


def slow_drift(track: Track, fit: Baseline, limits: Limits) -> Rise | None:
    """The level now against the lowest of the long memory, from half of a whole drift on."""
    if len(track.blocks) < 4:
        return None
    levels = np.asarray([level for _, level in track.blocks])
    smooth = np.convolve(levels, np.full(4, 0.25), mode="valid")
    lowest = int(smooth.argmin())
    size = median(np.asarray(track.values[-2 * BLOCK :])) - float(smooth[lowest])
    if size < max(0.5 * limits.drift, DRIFT_WARN_SPREADS * fit.spread):
        return None
    # A block ends at its step: what follows the last low block belongs to the rise.
    low = [i for i in range(lowest, len(levels)) if levels[i] <= smooth[lowest] + 0.2 * size]
    return Rise(track.blocks[low[-1] if low else lowest][0] + 1, size)


def drift_size(fit: Baseline, limits: Limits) -> float:
    return max(limits.drift, DRIFT_SPREADS * fit.spread)


def restarted(track: Track, onset: int | None, keep: int = LAG) -> Track:
    """A track of the newest values alone, refused ones too: those since the onset, or the last `keep`."""
    back = 0
    while onset is not None and back < len(track.recent) and track.recent[-back - 1][0] >= onset:
        back += 1
    fresh = Track()
    for step, value, _ in track.recent[-(back or keep) :]:
        fresh = accepted(fresh, step, value)
    return fresh
