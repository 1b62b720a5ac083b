"""What is ordinary for a signal: its level, spread and tail, from values that nobody doubted.

A baseline is read from a window of accepted values, oldest first, whose newest ones still wait: a rise that
has just begun must not look ordinary before it is judged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAG = 32  # newest accepted values that do not count yet
WINDOW = 256 + LAG
SPANS = (32, 64, 128, 256)  # the level is the lowest upper bound that these give
NORMAL_MAD = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
NORMAL_DECILE = 1.2816  # from its median to its 90 % quantile
MEDIAN_ERROR = 1.2533  # standard error of a median, in standard deviations / sqrt(n)
LEAST_ALLOWANCE = 1.0
TILT = 1.6  # the exponent that makes exp(TILT x (deviation - allowance)) average at most 1
CLIP = 3.0  # deviations beyond which a tail counts no further: such values are judged one by one


@dataclass(frozen=True)
class Baseline:
    """level: an upper bound of the median now; spread: one ordinary deviation; allowance: how many of them
    a sum of deviations must give away at each value, so that heavy tails do not add up to a rise."""

    level: float
    spread: float
    allowance: float


def baseline(values: Sequence[float]) -> Baseline:
    """Of a window of 4 values or more.

    Level: a long span has little noise but lags behind a falling curve, a short one the other way round.
    Each span gives median + 1.5 standard errors, and the lowest of these bounds holds: a fall is followed
    fast, a rise slowly, without extrapolating a curve that is about to bend.
    Spread: the largest of three robust measures, of neighbouring differences (blind to trends), of the upper
    tail, and of neighbouring means of 8 (noise that comes in stretches).
    """
    window = np.asarray(values, dtype=np.float64)
    lag = min(LAG, len(window) // 4)
    window = window[: len(window) - lag][-SPANS[-1] :]
    differences = _mad(np.diff(window)) / math.sqrt(2)
    recent = np.sort(window[-SPANS[-2] :])
    centre = _middle(recent)
    tail = (recent[int(0.9 * (len(recent) - 1) + 0.5)] - centre) / NORMAL_DECILE
    spread = max(differences, tail, _stretches(window, differences), 1e-3 * abs(centre), 1e-9)
    bounds = []
    for span in SPANS:
        part = window[-span:]
        bounds.append(median(part) + 1.5 * MEDIAN_ERROR * spread / math.sqrt(len(part)))
        if len(part) < span:
            break
    level = min(bounds)
    # Around the middle of each half, so that a fall within the window is no spread.
    deviations = np.concatenate([half - median(half) for half in np.array_split(window, 2)]) / spread
    weights = np.exp(TILT * np.clip(deviations, -CLIP, CLIP))
    return Baseline(float(level), float(spread), max(LEAST_ALLOWANCE, math.log(float(weights.mean())) / TILT))


def median(values: np.ndarray) -> float:
    return _middle(np.sort(values))


def _middle(ordered: np.ndarray) -> float:
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _mad(values: np.ndarray) -> float:
    return NORMAL_MAD * median(np.abs(values - median(values)))


def _stretches(window: np.ndarray, spread: float) -> float:
    """The spread of one value that means of 8 neighbours imply, less what is within its own error."""
    if len(window) < 128:
        return 0.0
    blocks = window[len(window) % 8 :].reshape(-1, 8)
    middle = np.median(blocks, axis=1, keepdims=True)
    means = np.clip(blocks, middle - 3 * spread, middle + 3 * spread).mean(axis=1)
    return 0.8 * _mad(np.diff(means)) * math.sqrt(8 / 2)
