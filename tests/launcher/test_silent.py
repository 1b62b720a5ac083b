"""Eight processes, and one of them is killed, stopped, or raises: all end soon, non-zero, and name it."""

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_train import BASE, place
from tests.spawn import _command, _worker_environment

__all__ = ["place"]
WORLD = 8
DEADLINE_SECONDS = 100
LAYOUT = ["parallel.tp=2", "parallel.pp=2", "train.global_batch=4", "train.micro_batch=1"]
LONG = [*BASE[:-1], *LAYOUT, "hardware=cpu", "train.steps=100000", "schedule=constant", "checkpoint.every=0"]
LONG += ["evaluate.batches=0", "heartbeat.timeout_seconds=5", "heartbeat.every_seconds=1"]
LONG += ["run.timeout_seconds=600"]


def life(rank: int, victim: int, arguments: list[str], directory: str, port: int, world: int) -> None:
    """One process of a run; the victim raises or hangs after its third step if the run's name asks for it."""
    import torch

    from launcher import train

    torch.set_num_threads(1)
    how = next(a for a in arguments if a.startswith("run.name=silent-")).split("-")[1]
    if rank == victim and how in ("raises", "hangs"):
        original, calls = train._record, []

        def hang() -> None:
            while True:
                signal.pause()

        def record(*args: Any, **named: Any) -> Any:
            calls.append(None)
            if len(calls) == 3:
                if how == "hangs":
                    hang()
                raise RuntimeError("planted")
            return original(*args, **named)

        train._record = record
    finished = _command(rank, arguments, [], directory, port, world)
    Path(directory, f"said-{rank}.txt").write_text(finished.stdout + finished.stderr)
    os._exit(finished.code)


def start(victim: int, arguments: list[str], directory: Path, world: int) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _worker_environment():
        processes = [
            context.Process(
                target=life, args=(rank, victim, arguments, str(directory), port, world), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
    return processes


def wait_for_records(run: Path, count: int, processes: list[Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    file = run / "metrics.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= count):
        assert all(process.is_alive() for process in processes), "a process has ended before"
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.05)


def ending(how: str, victim: int, directory: Path, world: int) -> tuple[list[int], dict[str, Any], Path]:
    """Start, strike, and wait: exit codes, error.json, the run's directory."""
    run = directory / "runs" / f"silent-{how}-{victim}-{world}"
    processes = start(victim, [*LONG, f"run.name={run.name}"], directory, world)
    try:
        if how in ("killed", "stopped"):
            wait_for_records(run, 3, processes)
            os.kill(processes[victim].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        for process in processes:
            process.join(DEADLINE_SECONDS)
            assert not process.is_alive(), "a process outlives the others"
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes], json.loads((run / "error.json").read_text()), run


@pytest.mark.parametrize(
    ("how", "victim"), [("killed", 5), ("stopped", 3), pytest.param("raises", 6, marks=pytest.mark.slow)]
)
def test_one_of_eight(how: str, victim: int, place: Path) -> None:
    codes, error, run = ending(how, victim, place, WORLD)
    own = {"killed": -signal.SIGKILL, "stopped": -signal.SIGKILL, "raises": 1}[how]
    assert codes == [own if rank == victim else 1 for rank in range(WORLD)], error
    kinds = {"killed": "RankKilled", "stopped": "RankSilent", "raises": "RuntimeError"}
    assert (error["rank"], error["type"]) == (victim, kinds[how]), error
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", error["message"])
    others = [rank for rank in range(WORLD) if rank != victim]
    if how == "stopped":
        assert "its last sign was at step " in error["message"]
        for rank in others:
            text = (run / "logs" / f"stacks-rank-{rank}.txt").read_text()
            assert "thread MainThread" in text and "in train_step" in text
        said = "".join((run / "logs" / f"rank-{rank}.log").read_text() for rank in others)
        assert said.count("(state T) is killed") == 1


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_stopped(place: Path) -> None:
    """Nobody can be asked any more; each finds it by itself."""
    codes, error, run = ending("stopped", 0, place, 4)
    assert codes == [-signal.SIGKILL, 1, 1, 1], error
    assert (error["rank"], error["type"]) == (0, "RankSilent"), error
    assert json.loads((run / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_killed(place: Path) -> None:
    codes, error, _ = ending("killed", 0, place, 4)
    assert codes == [-signal.SIGKILL, 1, 1, 1], error
    assert (error["rank"], error["type"]) == (0, "RankKilled"), error


@pytest.mark.slow
def test_a_rank_whose_main_thread_hangs_is_named(place: Path) -> None:
    """It gives signs of life all the time; the others wait in a collective."""
    codes, error, run = ending("hangs", 2, place, 4)
    assert codes == [1, 1, 1, 1], error
    assert (error["rank"], error["type"]) == (2, "RankStuck"), error
    assert error["message"].endswith("; the others wait for it"), error
    assert "in hang" in (run / "logs" / "stacks-rank-2.txt").read_text()
