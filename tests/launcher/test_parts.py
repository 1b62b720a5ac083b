"""A run made in parts: in new processes, on one rank and on eight, the samples and the curve are the same."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launcher.test_failing_rank import environment
from tests.launcher.test_train import BASE, last_of_each_step, lines, place, tensors
from tests.spawn import Ranks

__all__ = ["place"]
EIGHT = ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]


def until(rank: int, stop: int, log: str, *command: Any) -> Any:
    """The command line, which ends after update `stop`; what each data rank is fed goes into a file."""
    import launcher.run
    from launcher import train
    from tests.spawn import _command

    loop, record = launcher.run.loop, train._record

    def shorter(run: Any, cursor: Any) -> Any:
        return loop(dataclasses.replace(run, plan=dataclasses.replace(run.plan, steps=stop)), cursor)

    def noted(run: Any, cursor: Any, fed: Any, *more: Any, **named: Any) -> Any:
        own = [int(n) for batch in fed.batches for n in batch.samples]
        line = {"step": cursor.step + 1, "all": list(fed.samples), "own": own, "dp": run.engine.mesh.dp.rank}
        with open(f"{log}-{rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        return record(run, cursor, fed, *more, **named)

    launcher.run.loop, train._record = shorter, noted
    try:
        return _command(rank, *command)
    finally:
        launcher.run.loop, train._record = loop, record


def fed(log: Path) -> dict[int, list[dict[str, Any]]]:
    """What all ranks noted, by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in log.parent.glob(f"{log.name}-*"):
        for line in file.read_text().splitlines():
            noted = json.loads(line)
            steps.setdefault(noted["step"], []).append(noted)
    return steps


def test_from_one_rank_to_eight_and_back(place: Path, ranks: Ranks, tmp_path: Path) -> None:
    def part(name: str, world: int, stop: int, layout: list[str]) -> None:
        arguments = [*BASE[:-1], f"run.name={name}", "checkpoint.every=0", *layout]
        log = str(tmp_path / name)
        for finished in ranks.bare(world, until, stop, log, arguments, [], str(place)):
            assert finished.code == 0, finished.stderr

    part("whole", 1, 12, [])
    part("parts", 1, 4, [])
    part("parts", 8, 8, EIGHT)
    part("parts", 1, 12, [])
    whole, parts = fed(tmp_path / "whole"), fed(tmp_path / "parts")
    assert sorted(whole) == sorted(parts) == list(range(1, 13))
    for step, (one,) in whole.items():
        assert one["all"] == one["own"] == list(range(4 * step - 4, 4 * step))
        assert all(noted["all"] == one["all"] for noted in parts[step])
        shares = {noted["dp"]: noted["own"] for noted in parts[step]}
        assert len(parts[step]) == (8 if 5 <= step <= 8 else 1)
        assert all(noted["own"] == shares[noted["dp"]] for noted in parts[step]), "ranks of one share differ"
        assert sorted(n for share in shares.values() for n in share) == one["all"]
    ours = last_of_each_step(place / "runs" / "parts")
    theirs = last_of_each_step(place / "runs" / "whole")
    for step in range(1, 13):
        assert ours[step]["loss/train"] == pytest.approx(theirs[step]["loss/train"], rel=1e-5)
        assert ours[step]["tokens/total"] == theirs[step]["tokens/total"]
        assert ours[step]["lr"] == theirs[step]["lr"]
    assert {s: v for s, v in ours.items() if s <= 4} == {s: v for s, v in theirs.items() if s <= 4}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_twenty_steps_are_ten_and_a_new_process_and_ten(
    workers: int, place: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The new process is really one: an interpreter that has never seen the run."""
    more = [
        "train.steps=20",
        "checkpoint.every=10",
        "evaluate.every=5",
        f"data.workers={workers}",
        f"data.cache={tmp_path}/cache",
    ]
    arguments = [*BASE[:-1], *more, "hardware=cpu", "hardware.threads=1"]
    names = [f"straight-{workers}", f"parts-{workers}"]
    (finished,) = ranks.launch(1, [*arguments, f"run.name={names[0]}"], place)
    assert finished.code == 0, finished.stderr
    log = str(tmp_path / "fed")
    (finished,) = ranks.bare(1, until, 10, log, [*arguments, f"run.name={names[1]}"], [], str(place))
    assert finished.code == 0, finished.stderr
    command = [sys.executable, "-m", "launcher", *arguments, f"run.name={names[1]}"]
    ended = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    straight, parts = (place / "runs" / name for name in names)
    assert last_of_each_step(parts) == last_of_each_step(straight)
    assert [line["segment"] for line in lines(parts)] == [0] * 10 + [1] * 10
    last = "checkpoints/step-00000020"
    assert tensors(parts / last) == tensors(straight / last)
    events = EventAccumulator(str(parts / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss/train", "lr", "norm/grad"):
        shown = events.Scalars(name)
        assert [event.step for event in shown] == list(range(1, 21))
        assert [event.wall_time for event in shown] == sorted(event.wall_time for event in shown)


def test_what_saving_costs_is_in_the_metrics(place: Path, ranks: Ranks) -> None:
    """The stall stands in the record after the save, the write in the first record after its end."""
    arguments = [*BASE[:-1], "run.name=costs", "checkpoint.every=2", "checkpoint.snapshot_every=3"]
    results = ranks.launch(2, [*arguments, "checkpoint.snapshots=1"], place)
    assert [result.code for result in results] == [0, 0]
    found = lines(place / "runs" / "costs")
    stalls = {line["step"] for line in found if "time/checkpoint_stall_seconds" in line}
    assert stalls == {1, 3, 4, 5, 7, 9, 10, 11}  # after saves at 2, 4, .. and snapshots at 0, 3, 6, ..
    assert all(line.get("time/checkpoint_stall_seconds", 1) > 0 for line in found)
    writes = [line["step"] for line in found if "time/checkpoint_write_seconds" in line]
    assert 4 <= len(writes) <= 5 and writes[0] >= 3
    said = results[0].stdout
    assert said.count("saved ") == 6 and "MiB/s" in said
    assert "of host memory on the main process, for a save in the background and 1 snapshots" in said
