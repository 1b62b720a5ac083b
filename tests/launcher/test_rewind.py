"""A rewind inside a running process equals a run that was never fed what it skips, bit for bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoints.choose import Rewind
from launcher.recovery import Budget
from launcher.rewind import Recorded, applied_again, recorded, united
from launcher.train import Outcome, Run
from launcher.train import train as loop
from megamodel.data.batch import Cursor
from tests.launcher.test_train import BASE, cut_back, last_of_each_step, lines, place, tensors
from tests.spawn import Ranks

__all__ = ["place"]
BUDGET = Budget(used=2).as_json()
SKIP = (24, 32)  # the samples of steps 7 and 8
RING = ["checkpoint.snapshot_every=3", "checkpoint.snapshots=2"]


def straight(run: Run, cursor: Cursor) -> Outcome:
    """Never fed the samples."""
    return loop(run, dataclasses.replace(cursor, skipped=(SKIP,)))


def rewinding(run: Run, cursor: Cursor, to: int) -> Outcome:
    """Nine steps with the samples, back to `to`, and on without them."""
    before = loop(dataclasses.replace(run, plan=dataclasses.replace(run.plan, steps=9)), cursor).cursor
    assert before.sample == 36 and before.attempt == 9
    told = []
    state = [part.tensor.clone() for part in run.engine.state()]

    def announce(rewound: Any) -> None:
        told.append((rewound.cursor.step, rewound.source))
        now = [part.tensor for part in run.engine.state()]
        assert all((a == b).all() for a, b in zip(state, now, strict=True)), "changed before it was announced"

    cursor = run.responder.rewinder.rewind(before, to, SKIP, announce=announce)
    source = "memory" if to >= 6 else str(run.checkpoints.directory / "step-00000004")
    assert told == [(cursor.step, source)]
    assert (cursor.attempt, cursor.skipped) == (9, (SKIP,))
    assert run.responder.rewinder.past == [Rewind(9, cursor.step)]
    return loop(run, cursor)


def driven(rank: int, drive: str, to: int, *command: Any) -> Any:
    """The command line with another loop."""
    import launcher.run
    from tests.spawn import _command

    chosen = {"straight": straight, "rewinding": lambda run, cursor: rewinding(run, cursor, to)}[drive]
    launcher.run.loop, original = chosen, launcher.run.loop
    try:
        return _command(rank, *command)
    finally:
        launcher.run.loop = original


def drive(ranks: Ranks, place: Path, name: str, kind: str, to: int, more: list[str], world: int) -> Path:
    arguments = [*BASE[:-1], f"run.name={name}", "checkpoint.every=4", *RING, *more]
    for finished in ranks.bare(world, driven, kind, to, arguments, [], str(place)):
        assert finished.code == 0, finished.stderr
    return place / "runs" / name


@pytest.mark.parametrize(
    ("name", "to", "world", "more"),
    [
        ("ring", 7, 1, []),
        ("file", 5, 1, []),
        ("bf16-pp", 6, 2, ["parallel.pp=2", "train.precision=bf16"]),
        ("dp", 6, 2, []),
    ],
)
def test_rewound_and_skipped_equals_never_fed(
    name: str, to: int, world: int, more: list[str], place: Path, ranks: Ranks
) -> None:
    never = drive(ranks, place, f"never-{name}", "straight", 0, more, world)
    rewound = drive(ranks, place, f"rewound-{name}", "rewinding", to, more, world)
    assert last_of_each_step(rewound) == last_of_each_step(never)
    for step in (8, 12):
        names = (rewound / f"checkpoints/step-{step:08d}", never / f"checkpoints/step-{step:08d}")
        assert tensors(names[0]) == tensors(names[1])
        cursors = [json.loads((path / "manifest.json").read_text())["cursor"] for path in names]
        for cursor in cursors:
            cursor.pop("attempt")
        assert cursors[0] == cursors[1]
    back = 4 if to < 6 else 6
    found = lines(rewound)
    assert [line["segment"] for line in found] == [0] * 9 + [1] * (12 - back)
    assert [line["attempt"] for line in found] == list(range(1, 9 + 12 - back + 1))
    events = EventAccumulator(str(rewound / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("loss/train")] == list(range(1, 13))


def test_killed_after_its_record_a_rewind_is_done_at_the_next_start(place: Path, ranks: Ranks) -> None:
    """What was saved between snapshot and alarm is condemned, and the skipped samples stay skipped."""
    never = drive(ranks, place, "never-killed", "straight", 0, [], 1)
    arguments = [*BASE[:-1], "run.name=killed", "checkpoint.every=4", *RING]
    (finished,) = ranks.launch(1, arguments, place)
    assert finished.code == 0, finished.stderr
    target = place / "runs" / "rewound-killed"
    cut_back(place / "runs" / "killed", target, 8)
    record = {"event": "rewind", "attempt": 9, "snapshot_step": 4, "skipped": SKIP}
    (target / "events.jsonl").write_text(json.dumps(record) + "\n")
    (finished,) = ranks.launch(1, [*arguments, "run.name=rewound-killed"], place)
    assert finished.code == 0, finished.stderr
    assert "step-00000004, step 4" in finished.stderr
    assert last_of_each_step(target) == last_of_each_step(never)
    assert tensors(target / "checkpoints/step-00000012") == tensors(never / "checkpoints/step-00000012")


def test_ranges_are_united() -> None:
    assert united([(8, 12), (0, 4), (4, 6), (11, 20), (30, 30)]) == ((0, 6), (8, 20))
    assert united([]) == ()


def test_rewinds_are_read_and_applied_again(tmp_path: Path) -> None:
    """Those of attempts after the checkpoint's; what was written before is in the checkpoint."""
    file = tmp_path / "events.jsonl"
    assert recorded(file) == []
    records = [
        {"event": "warn", "attempt": 3},
        {"event": "rewind", "attempt": 9, "snapshot_step": 6, "skipped": [24, 32]},
        {"event": "rewind", "attempt": 20, "snapshot_step": 10, "skipped": [60, 68], "budget": BUDGET},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    file.write_text(text + '{"event": "rewind", "attempt": 30, "snapshot_step": 1, "skip')
    found = recorded(file)
    assert found == [Recorded(9, 6, (24, 32)), Recorded(20, 10, (60, 68), BUDGET)]
    cursor = Cursor(attempt=12, step=8, sample=40, skipped=((24, 32),))
    again, budget = applied_again(cursor, found)
    assert again.skipped == ((24, 32), (60, 68)) and budget == BUDGET
    late = dataclasses.replace(cursor, attempt=20)
    assert applied_again(late, found) == (late, None)
