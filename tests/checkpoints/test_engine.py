"""The real engine, saved at one layout and resumed at another: the same state, and the same next update."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.config import Checkpoint
from checkpoints.manager import Manager
from megamodel.data.batch import Cursor
from parallel.engine import Engine
from tests.parallel.training import Case, build, join, logical_state, micro_batches
from tests.spawn import Ranks

HOPS = [
    {"tp": 2, "pp": 2, "dp": 2},
    {"tp": 1},
    {"tp": 4, "sequence": True},
    {"pp": 4},
    {"tp": 2, "pp": 2, "dp": 2},
]
CASES = {
    "250": Case(n_layers=5, dropout=0.1),
    "257 tied": Case(n_layers=5, vocabulary=257, tied=True),
    "bf16": Case(n_layers=5, vocabulary=257, precision="bf16"),
}


def update(engine: Engine, case: Case, step: int) -> tuple[float, float]:
    batches = micro_batches(case, step, engine.mesh.dp.rank)
    signals = engine.train_step(batches, lr=case.lr, tried=step).signals
    assert signals
    return signals.loss, signals.norm


def begin(case: Case, run_dir: str) -> dict[str, Any]:
    """Two updates, a save, and two more."""
    engine = build(case)
    for step in (1, 2):
        update(engine, case, step)
    saved = logical_state(engine)
    Manager(Path(run_dir), Checkpoint(background=False), engine.mesh).save(
        engine, Cursor(attempt=2, step=2), {}
    )
    return {
        "state": saved,
        "next": [update(engine, case, step) for step in (3, 4)],
        "end": logical_state(engine),
    }


def go_on(case: Case, source: str, target: str) -> dict[str, Any]:
    """Another process: restore, save again, two updates; then back in the same process, and once more."""
    engine = build(case)
    update(engine, case, 9)  # an engine that has lived; nothing of this may remain
    manager = Manager(Path(target), Checkpoint(background=False), engine.mesh)
    found = manager.restore(engine, source)
    assert found and found.cursor.step == 2
    restored = logical_state(engine)
    manager.save(engine, found.cursor, {})
    following = [update(engine, case, step) for step in (3, 4)]
    end = logical_state(engine)
    manager.restore(engine, target)
    again = [update(engine, case, step) for step in (3, 4)]
    return {"state": restored, "next": following, "end": end, "again": again}


def joined(results: list[dict[str, Any]], name: str) -> dict[tuple[str, str], np.ndarray]:
    return join([part for result in results for part in result[name]])


def equal(a: dict[tuple[str, str], np.ndarray], b: dict[tuple[str, str], np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("name", "hops"),
    [
        pytest.param("257 tied", HOPS, id="257 tied"),
        pytest.param("bf16", [HOPS[0], HOPS[1], HOPS[0]], id="bf16"),
        pytest.param("250", HOPS, id="250", marks=pytest.mark.slow),
        pytest.param("bf16", HOPS, id="bf16 all", marks=pytest.mark.slow),
    ],
)
def test_through_the_layouts(name: str, hops: list[dict[str, Any]], ranks: Ranks, tmp_path: Path) -> None:
    case = replace(CASES[name], **HOPS[0])
    first = ranks.run(case.world, begin, case, str(tmp_path / "0"))
    state, end = joined(first, "state"), joined(first, "end")
    assert {kind for _, kind in state} >= {"master", "exp_avg", "exp_avg_sq"}
    assert not equal(state, end)
    for number, hop in enumerate(hops[1:], 1):
        there = replace(CASES[name], **hop)
        results = ranks.run(
            there.world, go_on, there, str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        )
        assert equal(joined(results, "state"), state), hop
        same_layout = hop == HOPS[0]
        tolerance = 0.0 if same_layout else (1e-5 if case.precision == "fp32" else 2e-2)
        for result in results:
            np.testing.assert_allclose(result["next"], first[0]["next"], rtol=tolerance)
            assert result["again"] == result["next"], "back in the same process is not the same"
        assert equal(joined(results, "end"), end) or not same_layout


def with_a_zeroed_head(case: Case, source: str | None, target: str) -> float:
    """The loss on held-out batches, of a fresh engine whose head is zero or of one that is restored."""
    engine = build(case)
    manager = Manager(Path(target), Checkpoint(background=False), engine.mesh)
    if source:
        update(engine, case, 7)
        assert manager.restore(engine, source)
    else:
        for item in engine.state():
            if item.piece.name == "head.weight" and item.kind == "master":
                item.tensor.zero_()
        engine.load_done(0)
        manager.save(engine, Cursor(attempt=1, step=1), {})
    loss, count = engine.evaluate(micro_batches(case, 99, engine.mesh.dp.rank))
    return loss / count


def test_padding_of_the_vocabulary_is_never_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """With a zeroed head every token has probability 1 / 250 at every layout: a padded row would show."""
    source = str(tmp_path / "zero")
    for number, hop in enumerate(HOPS):
        case = replace(CASES["250"], **hop, dropout=0.0)
        target = source if not number else str(tmp_path / str(number))
        losses = ranks.run(case.world, with_a_zeroed_head, case, source if number else None, target)
        assert losses == pytest.approx([5.52146] * case.world, abs=1e-5), hop
