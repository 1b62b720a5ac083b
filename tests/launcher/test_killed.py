"""Killed at any moment, one rank or all, a run goes on from its newest checkpoint to the same curve, exactly.

What SIGKILL cannot show, a missing sync, is in tests/checkpoints/test_crash.py.
"""

import multiprocessing
import os
import random
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoints import examine, store
from checkpoints.files import LocalFiles
from tests.launcher.test_train import BASE, last_of_each_step, lines, place, tensors
from tests.spawn import Ranks, _command, _worker_environment

__all__ = ["place"]
WORLD = 2
DEADLINE_SECONDS = 60
FREQUENT = [*BASE[:-1], "checkpoint.every=2", "checkpoint.keep=3", "evaluate.every=4", "sample.max_tokens=0"]


def _life(rank: int, arguments: list[str], directory: str, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    finished = _command(rank, arguments, [], directory, port, WORLD)
    # Another rank's death ends this one in an error; what it says is of no use, its code is.
    os._exit(finished.code)


@dataclass
class Life:
    """The processes of one start of a run."""

    processes: list[Any]
    run: Path

    @property
    def records(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for(self, records: int) -> bool:
        """Until there are so many records; False when the run has ended before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.records < records:
            if not all(process.is_alive() for process in self.processes):
                return False
            assert time.monotonic() < deadline, "the run stands still"
            time.sleep(0.005)
        return True

    def codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(DEADLINE_SECONDS)
            assert not process.is_alive(), "a process outlives the others"
        return [process.exitcode for process in self.processes]


def start(arguments: list[str], place: Path, run: Path) -> Life:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _worker_environment():
        processes = [
            context.Process(target=_life, args=(rank, arguments, str(place), port), daemon=True)
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
    return Life(processes, run)


def newest(run: Path) -> int | None:
    """The newest complete step; every complete one must be sound, byte for byte."""
    files, root = LocalFiles(), run / "checkpoints"
    for one in examine.listing(files, root):
        if one.health != examine.UNFINISHED:
            assert [row for row in examine.verify(files, one.path) if row.state != "sound"] == [], one
    found, faults = store.scan(files, root)
    assert faults == []
    return found[0].manifest.step if found else None


def resumed_from(run: Path, since: int) -> int | None:
    """The step that the log names, after its first `since` characters."""
    said = re.findall(r"resumed from \S+, step (\d+)", (run / "logs" / "rank-0.log").read_text()[since:])
    return int(said[-1]) if said else None


def survive(kills: int, steps: int, place: Path, ranks: Ranks, seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    more = [f"train.steps={steps}", "hardware=cpu"]
    name = f"killed-{kills}"
    whole, run = place / "runs" / f"{name}-whole", place / "runs" / name
    assert [f.code for f in ranks.launch(WORLD, [*FREQUENT, *more, f"run.name={whole.name}"], place)] == [
        0,
        0,
    ]
    arguments = [*FREQUENT, *more, f"run.name={name}"]
    inside = 0
    for number in range(kills):
        log = run / "logs" / "rank-0.log"
        since = len(log.read_text()) if log.exists() else 0
        expected, before = newest(run), Life([], run).records
        life = start(arguments, place, run)
        # At the latest the third record comes after a save has begun; then any moment may be the last.
        assert life.wait_for(before + draw.randint(1, 4)), f"seed {seed}, kill {number}: ended too early"
        time.sleep(draw.uniform(0, 0.08))
        victims = life.processes if number % 2 else [draw.choice(life.processes)]
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        codes = life.codes()
        assert all(code in (-signal.SIGKILL, 1) for code in codes), f"seed {seed}, kill {number}: {codes}"
        assert resumed_from(run, since) == expected, f"seed {seed}, kill {number}"
        inside += any((run / "checkpoints").glob("*.writing"))
    print(f"{inside} of {kills} kills left a save half done")
    assert start(arguments, place, run).codes() == [0, 0]
    assert last_of_each_step(run) == last_of_each_step(whole), f"seed {seed}"
    last = f"checkpoints/step-{steps:08d}"
    assert tensors(run / last) == tensors(whole / last)
    attempts = [line["attempt"] for line in lines(run)]
    assert attempts == sorted(set(attempts))
    assert lines(run)[-1]["segment"] == kills
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("loss/train")] == list(range(1, steps + 1))


def seed() -> int:
    return int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(2**32))


def test_six_kills(place: Path, ranks: Ranks) -> None:
    survive(6, 40, place, ranks, seed())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(place: Path, ranks: Ranks) -> None:
    survive(50, 300, place, ranks, seed())
