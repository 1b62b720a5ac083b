"""The rules of the monitor, one by one, on curves made by hand."""

import json
import math

import numpy as np
import pytest

from conf.typed import InvalidConfiguration, parse
from launcher.monitor import (
    EPISODE,
    History,
    Kind,
    Monitor,
    Observation,
    Verdict,
    carried_out,
    cooled,
    judge,
    trusted_step,
)
from tests.launcher.spikes import CURVES, clean, episodes, fold

SETTINGS = Monitor()


def falling(steps: int, deviation: float = 0.1, seed: int = 3) -> np.ndarray:
    at = np.arange(1, steps + 1)
    return 2.5 + 8 * at**-0.4 + deviation * np.random.default_rng(seed).normal(size=steps)


def after(values: np.ndarray, norms: np.ndarray | None = None) -> History:
    history = History()
    for step, value in enumerate(values, 1):
        norm = None if norms is None else float(norms[step - 1])
        history = judge(history, Observation(step, float(value), norm), SETTINGS).history
    return history


def said(
    history: History, observations: list[Observation], settings: Monitor = SETTINGS
) -> tuple[list[Verdict], History]:
    verdicts = []
    for observation in observations:
        verdicts.append(judge(history, observation, settings))
        history = verdicts[-1].history
    return verdicts, history


def kinds(verdicts: list[Verdict]) -> list[Kind]:
    return [verdict.kind for verdict in verdicts]


def test_one_bad_batch_is_skipped_and_nothing_else() -> None:
    history = after(falling(800))
    level = history.loss.fit.level if history.loss.fit else math.nan
    verdicts, _ = said(history, [Observation(801, level + 2.5), *(Observation(801, level) for _ in range(9))])
    assert kinds(verdicts) == [Kind.SKIP, *[Kind.OK] * 9]
    assert verdicts[0].reason.startswith("outlier: loss ") and verdicts[0].onset is None


def test_a_few_bad_batches_in_a_row_are_no_lasting_jump() -> None:
    history = after(falling(800))
    level = history.loss.fit.level if history.loss.fit else math.nan
    bad = [Observation(801, level + 3)] * 5
    verdicts, after_bad = said(history, [*bad, *[Observation(801, level)] * 60])
    assert kinds(verdicts) == [Kind.SKIP] * 5 + [Kind.OK] * 60
    ordinary, after_none = said(history, [Observation(801, level)] * 60)
    assert after_bad.loss.values == after_none.loss.values and after_bad.loss.fit == after_none.loss.fit
    assert kinds(ordinary) == [Kind.OK] * 60


def test_values_that_are_no_losses_change_nothing_afterwards() -> None:
    """Inserted as attempts of their own, into a real curve with a jump at its end."""
    values = clean(CURVES[2]).losses[:2000].copy()
    values[1900:] += 0.6
    plain = fold(values)
    history, verdicts = History(), []
    for step, value in enumerate(values, 1):
        if step % 97 == 0:
            bad = [math.nan, math.inf, 1e30, -math.inf][step // 97 % 4]
            verdict = judge(history, Observation(step, bad), SETTINGS)
            assert verdict.kind == Kind.SKIP
            history = verdict.history
        verdicts.append(judge(history, Observation(step, float(value)), SETTINGS))
        history = verdicts[-1].history
    assert [(v.kind, v.onset) for v in verdicts] == [(v.kind, v.onset) for v in plain.verdicts]
    assert history.loss.values == plain.verdicts[-1].history.loss.values
    assert plain.steps(Kind.REWIND) == [1907]


@pytest.mark.parametrize(
    "bad",
    [
        Observation(301, math.nan),
        Observation(301, math.inf),
        Observation(301, 3.0, non_finite=True),
        Observation(301, 3.0, math.nan),
        Observation(301, 3.0, -1.0),
        Observation(301, None, non_finite=True),
    ],
)
def test_non_finite_is_skipped_at_once_and_rewound_when_repeated(bad: Observation) -> None:
    history = after(falling(300))
    verdicts, _ = said(history, [bad, Observation(301, 3.3), bad, Observation(302, 3.3), bad])
    assert kinds(verdicts) == [Kind.SKIP, Kind.OK, Kind.SKIP, Kind.OK, Kind.REWIND]
    assert verdicts[-1].onset == 301 and verdicts[-1].reason.startswith("non_finite: 3 of the last 16")


def test_non_finite_far_apart_is_never_rewound() -> None:
    bad, good = Observation(301, math.nan), Observation(301, 3.3)
    verdicts, _ = said(after(falling(300)), [bad, *[good] * 8] * 10)
    assert kinds(verdicts).count(Kind.SKIP) == 10 and Kind.REWIND not in kinds(verdicts)


def test_the_first_steps() -> None:
    """A finite outlier in the fifth step, and one of the gradient norm alone."""
    start = [Observation(step, 7.6 - 0.1 * step, 2.0) for step in range(1, 5)]
    _, history = said(History(), start)
    assert judge(history, Observation(5, 700.0, 2.0), SETTINGS).kind == Kind.SKIP
    verdict = judge(history, Observation(5, 7.1, 100.0), SETTINGS)
    assert verdict.kind == Kind.SKIP and verdict.reason.startswith("outlier: norm 100")
    assert judge(history, Observation(5, 7.1, 6.0), SETTINGS).kind == Kind.OK
    assert judge(History(), Observation(1, math.nan), SETTINGS).kind == Kind.SKIP


def test_a_norm_that_explodes_and_stays_is_rewound() -> None:
    draw = np.random.default_rng(5)
    norms = np.exp(0.3 * draw.normal(size=900)) / 2
    history = after(falling(900), norms)
    level = float(np.median(history.loss.values[-32:]))
    verdicts, _ = said(history, [Observation(901, level, 20.0) for _ in range(12)])
    found = kinds(verdicts)
    assert found[:6] == [Kind.SKIP] * 6 and found[6] == Kind.REWIND
    assert verdicts[6].reason.startswith("jump: norm x ") and verdicts[6].onset == 901
    verdicts, _ = said(history, [Observation(901 + n, level, 1.9 * norms[n]) for n in range(100)])
    assert set(kinds(verdicts)) == {Kind.OK}


def test_slow_drift_warns_first_and_rewinds_at_its_stated_size() -> None:
    values = np.concatenate([falling(2000), falling(3200)[2000:] + np.linspace(0, 1, 1200)])
    curve = fold(values)
    (alarm, *_) = curve.steps(Kind.REWIND)
    (warned, *_) = curve.steps(Kind.WARN)
    assert 2000 < warned < alarm
    # The size in nats lies between the stated one and what is added while the level is being measured.
    added = (alarm - 2000) / 1200
    assert SETTINGS.drift <= added <= SETTINGS.drift + 0.15
    verdict = curve.verdicts[alarm - 1]
    assert verdict.reason.startswith("drift: loss +0.4")
    assert verdict.onset is not None and 1900 < verdict.onset < 2200


def test_what_was_told_is_not_told_again() -> None:
    values = falling(4000)
    values[2000:] += 0.2
    curve = fold(values)
    warned = curve.steps(Kind.WARN)
    assert curve.steps(Kind.REWIND) == [] and 2000 < warned[0] < 2060
    assert episodes(warned) == 1
    assert max(np.diff(warned)) <= EPISODE  # an episode goes on as long as what it tells of


def test_never_learned_is_told_once_by_that_name() -> None:
    draw = np.random.default_rng(9)
    curve = fold(10.8 + 0.05 * draw.normal(size=3000))
    (step,) = curve.steps(Kind.WARN)
    assert step == SETTINGS.learn_steps
    assert curve.verdicts[step - 1].reason.startswith("never_learned: ")
    assert fold(falling(1000)).steps(Kind.WARN) == []


def test_after_a_rewind_of_an_old_log_the_new_level_is_ordinary() -> None:
    values = falling(2600)
    values[1500:] += 2.0
    values[2000] += 2.5
    curve = fold(values)
    assert curve.steps(Kind.REWIND) == [1507]
    assert [step for step in curve.steps(Kind.SKIP) if step > 1507] == [2001]


def test_cool_down_delays_a_rewind_but_no_skip() -> None:
    history = after(falling(1000))
    level = history.loss.fit.level if history.loss.fit else math.nan
    jump = [Observation(1001, level + 4.0)] * 40
    assert kinds(said(history, jump)[0]).index(Kind.REWIND) == 6
    found = kinds(said(cooled(history, SETTINGS), jump)[0])
    assert found.index(Kind.REWIND) == SETTINGS.cooldown_steps
    assert set(found[: SETTINGS.cooldown_steps]) == {Kind.SKIP}
    repeated = [Observation(1001, math.nan)] * 3
    assert kinds(said(cooled(history, SETTINGS), repeated)[0]) == [Kind.SKIP, Kind.SKIP, Kind.REWIND]


def test_a_history_goes_through_json_at_any_moment_and_stays_small() -> None:
    values = falling(3000)
    values[2500:] += 0.5
    values[[700, 1400, 1401]] = 9.0, math.nan, math.inf
    norms = np.exp(0.3 * np.random.default_rng(5).normal(size=3000))
    straight, kept = History(), History()
    for step, (value, norm) in enumerate(zip(values, norms, strict=True), 1):
        observation = Observation(step, float(value), float(norm))
        first, second = judge(straight, observation, SETTINGS), judge(kept, observation, SETTINGS)
        assert first == second
        straight = first.history
        text = json.dumps(second.history.as_json(), allow_nan=False)
        kept = History.from_json(json.loads(text)) if step % 7 == 0 else second.history
        assert len(text) < 40_000


def test_judging_changes_nothing() -> None:
    history = after(falling(500))
    before = history.as_json()
    observation = Observation(501, 9.0, 1.0)
    assert judge(history, observation, SETTINGS) == judge(history, observation, SETTINGS)
    assert history.as_json() == before


def test_what_is_trusted_lies_before_everything_suspected() -> None:
    history = after(falling(500))
    assert trusted_step(history) <= 500 - 32
    level = history.loss.values[-1]
    _, suspicious = said(history, [Observation(501 + n, level + 0.45) for n in range(4)])
    assert trusted_step(suspicious) <= min(500, 504 - 32)
    assert trusted_step(History()) == 0


@pytest.mark.parametrize(
    ("action", "done"),
    [
        ("none", (0, 0, 0, 0, 0)),
        ("observe", (0, 1, 1, 1, 1)),
        ("skip", (0, 1, 2, 2, 2)),
        ("rewind", (0, 1, 2, 3, 4)),
    ],
)
def test_what_is_carried_out(action: str, done: tuple[int, ...]) -> None:
    settings = parse(Monitor, {"action": action})
    assert tuple(carried_out(kind, settings) for kind in Kind) == done


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rise", 0),
        ("lr_factor", 0),
        ("lr_factor", 1.5),
        ("margin_steps", -1),
        ("non_finite", 17),
        ("budget_rewinds", -1),
        ("action", "off"),
    ],
)
def test_settings_that_make_no_sense(key: str, value: object) -> None:
    with pytest.raises(InvalidConfiguration, match=key):
        parse(Monitor, {key: value})
