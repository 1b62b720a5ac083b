"""The monitor on real curves, on changes laid on them, and on families of noise that it was not made from.

The bounds were given beforehand. The quick form draws 20 onsets for each change and curve, the slow one 100.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from launcher.monitor import Kind
from tests.launcher.spikes import CURVES, Outcome, clean, episodes, fold, outcomes, outliers

DRAWS = [20, pytest.param(100, marks=pytest.mark.slow)]
each_curve = pytest.mark.parametrize("path", CURVES, ids=lambda path: path.name.split(".")[0])


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


def alarmed(found: list[Outcome]) -> list[int]:
    return [outcome.alarm for outcome in found if outcome.alarm is not None]


def test_the_definitions_of_the_tests_themselves() -> None:
    flat = np.full(200, 3.0)
    flat[150], flat[160:163] = 4.6, 4.6
    assert outliers(flat) == [151, 163]  # the last of several counts, being followed by two that are back
    assert episodes([]) == 0 and episodes([10, 60, 110, 161]) == 2
    assert len(CURVES) == 4


@each_curve
def test_real_curves_never_alarm(path: Path) -> None:
    curve = clean(path)
    assert curve.steps(Kind.REWIND) == curve.steps(Kind.STOP) == []
    late = [step for step in curve.steps(Kind.SKIP) if step > 500]
    assert len(late) <= 0.0035 * (len(curve.losses) - 500)
    assert episodes(curve.steps(Kind.WARN)) <= len(curve.losses) / 2000


def test_real_curves_together_skip_little_but_the_outliers() -> None:
    curves = [clean(path) for path in CURVES]
    skipped = [{step for step in curve.steps(Kind.SKIP) if step > 500} for curve in curves]
    assert sum(map(len, skipped)) <= 0.0025 * sum(len(curve.losses) - 500 for curve in curves)
    lone = [{step for step in outliers(curve.losses) if step > 500} for curve in curves]
    assert sum(map(len, lone)) > 40
    caught = sum(len(a & b) for a, b in zip(skipped, lone, strict=True))
    assert caught >= 0.97 * sum(map(len, lone))


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("size", [0.5, 1.0, 3.0])
@each_curve
def test_a_lasting_jump_is_rewound_at_once(path: Path, size: float, draws: int) -> None:
    found = outcomes(clean(path), draws, lambda since: size, 100)
    delays = alarmed(found)
    assert len(delays) == draws
    assert min(delays) >= 0 and float(np.median(delays)) <= 8 and max(delays) <= 24
    assert share([abs(outcome.error) <= 4 for outcome in found]) >= 0.9


@pytest.mark.parametrize("draws", DRAWS)
@each_curve
def test_a_small_jump_that_stays_is_noticed(path: Path, draws: int) -> None:
    found = outcomes(clean(path), draws, lambda since: 0.25, 101)
    assert share([outcome.alarm is not None or outcome.warn is not None for outcome in found]) >= 0.9


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("steps", [200, 500])
@each_curve
def test_a_bump_that_decays_is_rewound(path: Path, steps: int, draws: int) -> None:
    line = outcomes(clean(path), draws, lambda since: 0.7 * max(0.0, 1 - since / steps), steps)
    assert len(alarmed(line)) == draws
    decay = outcomes(clean(path), draws, lambda since: 0.7 * math.exp(-3 * since / steps), steps)
    assert len(alarmed(decay)) == draws


@pytest.mark.parametrize("draws", [8, pytest.param(100, marks=pytest.mark.slow)])
@each_curve
def test_a_ramp_is_rewound_before_it_is_over(path: Path, draws: int) -> None:
    found = outcomes(clean(path), draws, lambda since: since / 500, 500, room=510)
    assert len(alarmed(found)) == draws
    warned = [outcome.warn is not None and outcome.warn < (outcome.alarm or 0) for outcome in found]
    assert share(warned) >= 0.9  # first told, then done


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", [11.0, 4.0])
def test_wide_normal_noise_on_a_falling_curve(start: float, steps: int) -> None:
    at = np.arange(1, steps + 1)
    level = 2.5 + (start - 2.5) * at**-0.4
    curve = fold(level * (1 + 0.1 * np.random.default_rng(11).normal(size=steps)))
    assert curve.steps(Kind.REWIND) == []
    assert len(curve.steps(Kind.WARN)) <= 3
    assert len(curve.steps(Kind.SKIP)) <= 1e-4 * steps


def noise(name: str, steps: int) -> np.ndarray:
    """Of variance about 1."""
    draw = np.random.default_rng(23)
    if name == "laplace":
        return draw.laplace(size=steps) / math.sqrt(2)
    if name == "student":  # with 3 degrees of freedom
        return draw.standard_t(3, size=steps) / math.sqrt(3)
    if name == "skewed":
        return (np.exp(0.6 * draw.normal(size=steps)) - math.exp(0.18)) / 0.79
    if name == "two kinds":  # of text, one of three batches harder
        return 0.5 * draw.normal(size=steps) + 1.8 * (draw.random(steps) < 0.3)
    white = draw.normal(size=steps + 1)
    return (white[1:] + 0.35 * white[:-1]) / 1.06  # neighbours alike


@pytest.mark.parametrize("every", [1, 20])
@pytest.mark.parametrize("deviation", [0.01, 0.1, 0.25])
@pytest.mark.parametrize("name", ["laplace", "student", "skewed", "two kinds", "alike"])
def test_other_noise_is_normal_and_a_jump_in_it_is_not(name: str, deviation: float, every: int) -> None:
    """Also where only every 20th step was logged; the jump is of a nat, or of four deviations."""
    at = np.arange(1, 3001) * every
    values = 2.5 + 8 * at**-0.35 + deviation * noise(name, 3000)
    curve = fold(values)
    assert curve.steps(Kind.REWIND) == []
    assert len([step for step in curve.steps(Kind.SKIP) if step > 500]) <= 0.005 * 2500
    found = outcomes(curve, 10, lambda since: max(0.6, 4 * deviation), 60)
    delays = alarmed(found)
    assert len(delays) == 10 and max(delays) <= 24
    assert share([abs(outcome.error) <= 4 for outcome in found]) >= 0.9


def test_a_loss_of_another_unit_is_judged_alike() -> None:
    """Below a loss of 3 all sizes go with the level; a power of two changes no rounding."""
    curve = clean(CURVES[0]).losses[8000:11000].copy()
    curve[2000:] += 1.0
    half, eighth = fold(curve / 2), fold(curve / 8)
    assert half.steps(Kind.REWIND) == [2007]
    assert [v.kind for v in half.verdicts] == [v.kind for v in eighth.verdicts]


def test_early_training_is_neither_alarming_nor_blind() -> None:
    """From the 80th step on of the steepest part; before it only what is far above everything."""
    for path in CURVES:
        steep = clean(path).losses[:400]
        for onset in (80, 150, 300):
            jumped = steep.copy()
            jumped[onset - 1 :] += 1.0
            (first, *_) = fold(jumped).steps(Kind.REWIND)
            assert onset <= first <= onset + 24
        exploded = steep[:60].copy()
        exploded[29:] += 6.0
        (first, *_) = fold(exploded).steps(Kind.REWIND)
        assert 30 <= first <= 54
