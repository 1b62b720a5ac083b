"""Asked to stop, a run saves, says so and ends well; the same command goes on from there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import stopping
from launcher.stopping import TIME_LIMIT, StopRequest, reason, stop_signals
from tests.launcher.test_failing_rank import DEADLINE_SECONDS, environment
from tests.launcher.test_train import BASE, last_of_each_step, place, tensors
from tests.spawn import Ranks

__all__ = ["place"]
LONG = [*BASE[:-1], "train.steps=100000", "schedule=constant", "evaluate.batches=0", "checkpoint.every=0"]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def test_the_first_signal_counts_and_a_second_interrupt_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    request = StopRequest()
    assert request.asked() == 0
    request(signal.SIGTERM, None)
    request(signal.SIGUSR1, None)
    assert (request.asked(), reason(request.asked())) == (signal.SIGTERM, "SIGTERM")
    request = StopRequest()
    request(signal.SIGINT, None)
    now[0] += 0.1
    request(signal.SIGINT, None)  # the same press, passed on by a launcher
    request(signal.SIGTERM, None)
    now[0] += 1
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_the_time_limit_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    request = StopRequest(deadline=110.0)
    assert request.asked() == 0
    now[0] = 110.0
    assert (request.asked(), reason(request.asked())) == (TIME_LIMIT, "time limit")
    request = StopRequest(deadline=110.0)
    request(signal.SIGUSR1, None)
    assert reason(request.asked()) == "SIGUSR1"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in stopping.STOP_SIGNALS]
    with stop_signals() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.asked() == signal.SIGUSR1
    assert [signal.getsignal(number) for number in stopping.STOP_SIGNALS] == before


def signalled(rank: int, number: int, times: int, *command: Any) -> Any:
    """The command line; the last rank signals itself when it has tried its fifth step."""
    from launcher import train
    from tests.spawn import _command

    original = train._record
    world_size = command[-1]

    def record(run: Any, cursor: Any, *more: Any, **named: Any) -> Any:
        if cursor.step == 4 and rank == world_size - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(0.6 if times > 1 else 0)  # longer than one press takes
        return original(run, cursor, *more, **named)

    train._record = record
    try:
        return _command(rank, *command)
    finally:
        train._record = original


@pytest.mark.parametrize(
    ("number", "world"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1), (signal.SIGINT, 1)], ids=str
)
def test_a_signal_on_one_rank_stops_all_and_the_curve_goes_on(
    number: signal.Signals, world: int, place: Path, ranks: Ranks
) -> None:
    """Asked in step 5, which is not a step that is saved by itself; all ranks know with step 6."""
    name = f"{number.name}-{world}"
    whole = [*BASE[:-1], f"run.name=whole-{name}"]
    assert [f.code for f in ranks.launch(world, whole, place)] == [0] * world
    arguments = [*BASE[:-1], f"run.name={name}"]
    results = ranks.bare(world, signalled, number, 1, arguments, [], str(place))
    assert [result.code for result in results] == [0] * world, results[0].stderr
    run = place / "runs" / name
    assert status(run) == {"state": "stopped", "reason": number.name, "step": 6}
    assert "the same command goes on" in results[0].stdout
    assert (run / "checkpoints" / "latest").read_text() == "step-00000006\n"
    assert [f.code for f in ranks.launch(world, arguments, place)] == [0] * world
    assert status(run)["state"] == "finished"
    assert last_of_each_step(run) == last_of_each_step(place / "runs" / f"whole-{name}")
    last = "checkpoints/step-00000012"
    assert tensors(run / last) == tensors(place / "runs" / f"whole-{name}" / last)


def signalled_at(rank: int, place: str, number: int, *command: Any) -> Any:
    """The command line; the last rank signals itself when it comes to a function of launcher.run."""
    from launcher import run
    from tests.spawn import _command

    original = getattr(run, place)

    def reached(*values: Any, **named: Any) -> Any:
        if rank == command[-1] - 1:
            os.kill(os.getpid(), number)
        return original(*values, **named)

    setattr(run, place, reached)
    try:
        return _command(rank, *command)
    finally:
        setattr(run, place, original)


@pytest.mark.parametrize(
    ("where", "number", "world", "state"),
    [
        ("check_installed", signal.SIGTERM, 1, "stopped"),  # before the processes meet
        ("prepare_unless", signal.SIGUSR1, 1, "stopped"),
        ("wait_for_main", signal.SIGUSR1, 2, "stopped"),
        ("build_engine", signal.SIGUSR1, 1, "stopped"),
        ("_introduce", signal.SIGTERM, 2, "stopped"),
        ("_tell", signal.SIGUSR1, 1, "finished"),  # after the loop
    ],
)
def test_a_signal_outside_the_loop_is_a_request_too(
    where: str, number: signal.Signals, world: int, state: str, place: Path, ranks: Ranks
) -> None:
    name = f"outside-{where}"
    arguments = [*BASE[:-1], f"run.name={name}", f"data.cache={name}"]
    results = ranks.bare(world, signalled_at, where, number, arguments, [], str(place))
    assert [result.code for result in results] == [0] * world, results[0].stderr
    run = place / "runs" / name
    if state == "finished":
        assert status(run) == {"state": "finished", "reason": "", "step": 12}
        return
    assert status(run) == {"state": "stopped", "reason": number.name, "step": 0}
    assert not (run / "checkpoints").exists() and not list((place / name).glob("building-*"))
    assert [f.code for f in ranks.launch(world, arguments, place)] == [0] * world
    assert status(run)["state"] == "finished"


def test_a_request_within_a_request_is_the_same_and_its_time_limit_its_own() -> None:
    with stop_signals() as outer:
        with stop_signals(deadline=0.0) as inner:
            assert (inner.asked(), inner.signalled) == (TIME_LIMIT, 0)
        assert outer.asked() == 0
        with stop_signals() as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert inner.asked() == inner.signalled == signal.SIGUSR1
            assert inner.ends_at_once(1) and not inner.ends_at_once(2)
        assert outer.signalled == signal.SIGUSR1


def test_two_interrupts_stop_at_once(place: Path, ranks: Ranks) -> None:
    arguments = [*BASE[:-1], "run.name=twice", "checkpoint.every=0"]
    (finished,) = ranks.bare(1, signalled, signal.SIGINT, 2, arguments, [], str(place))
    assert finished.code == 1
    run = place / "runs" / "twice"
    assert status(run)["state"] == "stopped" and not (run / "checkpoints").exists()
    assert finished.stderr.splitlines()[-1] == "error: KeyboardInterrupt: interrupted"


def test_a_time_limit_saves_and_stops(place: Path, ranks: Ranks) -> None:
    arguments = [*LONG, "run.name=limited", "run.time_limit_seconds=1"]
    results = ranks.launch(2, arguments, place)
    assert [result.code for result in results] == [0, 0], results[0].stderr
    run = place / "runs" / "limited"
    found = status(run)
    assert (found["state"], found["reason"]) == ("stopped", "time limit") and found["step"] > 0
    assert (run / "checkpoints" / f"step-{found['step']:08d}" / "manifest.json").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)], ids=str
)
def test_under_torchrun_the_workers_end_well(number: signal.Signals, place: Path, tmp_path: Path) -> None:
    """The agent passes the signal on and waits; the workers' codes are 0, its own stays 1."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "60"]
    name = f"torchrun-{number.name}"
    process = subprocess.Popen(
        [*torchrun, "-m", "tests.launcher.coded", str(tmp_path), *LONG, f"run.name={name}", "hardware=cpu"],
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = place / "runs" / name
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, said
    assert [(tmp_path / f"code-{rank}").read_text() for rank in range(2)] == ["0", "0"], said
    found = status(run)
    assert (found["state"], found["reason"]) == ("stopped", number.name)
    assert (run / "checkpoints" / "latest").read_text() == f"step-{found['step']:08d}\n"
    assert not (run / "error.json").exists()
