"""One rank raises: all processes end soon, non-zero, and the first error is the last thing they say."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.test_train import BASE, place

__all__ = ["place"]
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 60


def environment() -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return inherited | ours


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(("kind", "rank", "extra"), [("forward", 1, ["parallel.pp=2"]), ("save", 0, [])])
def test_without_a_launcher_that_kills_all_end_by_themselves(
    kind: str, rank: int, extra: list[str], place: Path
) -> None:
    """Two processes started by hand, as srun would: nobody ends the one that waits in a collective."""
    port = free_port()
    arguments = [*BASE[:-1], f"run.name=fails-{kind}", "run.timeout_seconds=600", "hardware=cpu", *extra]
    processes = []
    for number in range(2):
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.launcher.faulty", kind, str(rank), *arguments],
                cwd=place,
                env=environment() | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    start = time.monotonic()
    outputs = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    assert time.monotonic() - start < DEADLINE_SECONDS
    assert [process.returncode for process in processes] == [1, 1]
    for _, stderr in outputs:
        assert stderr.strip().splitlines()[-1] == f"error on rank {rank}: RuntimeError: planted in {kind}"
    error = json.loads((place / "runs" / f"fails-{kind}" / "error.json").read_text())
    assert error["rank"] == rank and error["message"] == f"planted in {kind}"
    status = json.loads((place / "runs" / f"fails-{kind}" / "status.json").read_text())
    assert status["state"] == "failed"


def test_under_torchrun_the_error_is_recorded_and_the_job_ends(place: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "tests.launcher.faulty"]
    arguments = [*BASE[:-1], "run.name=fails-torchrun", "run.timeout_seconds=600", "hardware=cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    finished = subprocess.run(
        [*torchrun, "data", "1", *arguments],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert finished.returncode == 1
    assert "error on rank 1: RuntimeError: planted in data" in finished.stderr
    error = json.loads((place / "runs" / "fails-torchrun" / "error.json").read_text())
    assert (error["rank"], error["type"], error["message"]) == (1, "RuntimeError", "planted in data")
