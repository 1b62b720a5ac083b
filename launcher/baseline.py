"""What is ordinary for a signal: its level, spread and tail, from values that nobody doubted.

A baseline is read from a window of accepted values, oldest first, whose newest ones still wait: a rise that
has just begun must not look ordinary before it is judged.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LAG = 32  # newest accepted values that do not count yet
WINDOW = 256 + LAG
SPANS = (16, 32, 64, 128, 256)  # the level is the lowest upper bound that these give
NORMAL_MAD = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
RUNNING = 1.03  # normal noise less its running median of 9, made as wide as the noise
NORMAL_DECILE = 1.2816  # from its median to its 90 % quantile
MEDIAN_ERROR = 1.2533  # standard error of a median, in standard deviations / sqrt(n)
LEAST_ALLOWANCE = 1.0
TILT = 1.6  # the exponent that makes exp(TILT x (deviation - allowance)) average at most 1
CLIP = 3.0  # deviations beyond which a tail counts no further: such values are judged one by one


class Baseline(NamedTuple):
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
    Spread: the largest of three robust measures, of neighbouring differences, of the upper tail around a
    running median (neither sees a trend), and of neighbouring means of 8 (noise that comes in stretches).
    """
    window = np.asarray(values, dtype=np.float64)
    lag = min(LAG, len(window) // 8)
    window = window[: len(window) - lag][-SPANS[-1] :]
    differences = _mad(np.diff(window)) / math.sqrt(2)
    residuals = np.sort(_residuals(window))
    tail = residuals[int(0.9 * (len(residuals) - 1) + 0.5)] / NORMAL_DECILE
    least = max(1e-3 * abs(float(window[-1])), 1e-9)
    spread = max(differences, tail, _stretches(window, differences), least)
    spans = SPANS if len(window) < SPANS[-1] else SPANS[1:]  # the shortest only while the curve is steep
    parts = [window[-span:] for span in spans if span <= len(window)] or [window]
    level = min(median(part) + 1.5 * MEDIAN_ERROR * spread / math.sqrt(len(part)) for part in parts)
    weights = np.exp(TILT * np.clip(residuals / spread, -CLIP, CLIP))
    allowance = math.log(float(weights.mean())) / TILT
    return Baseline(float(level), float(spread), max(LEAST_ALLOWANCE, allowance))


def _residuals(window: np.ndarray) -> np.ndarray:
    """Values less the median of the 9 around each; a trend leaves none."""
    width = min(9, len(window) // 2 * 2 - 1)
    around = np.sort(np.lib.stride_tricks.sliding_window_view(window, width), axis=1)[:, width // 2]
    inner = window[width // 2 : width // 2 + len(around)]
    return (inner - around) * RUNNING


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
    middle = np.sort(blocks, axis=1)[:, 3:5].mean(axis=1, keepdims=True)
    means = np.minimum(np.maximum(blocks, middle - 3 * spread), middle + 3 * spread).mean(axis=1)
    return 0.8 * _mad(np.diff(means)) * math.sqrt(8 / 2)
