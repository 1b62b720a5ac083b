"""The sbatch script with srun, scontrol and sbatch replaced by small programs, and a real run under it."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters import Slurm
from launcher.scripts import Work, sbatch
from tests.launcher.test_failing_rank import DEADLINE_SECONDS, environment, free_port
from tests.launcher.test_train import BASE, place

__all__ = ["place"]
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
echo $$ > "$FAKE/task"
exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$1" in
show) echo 127.0.0.1 ;;
requeue) echo "$2" >> "$FAKE/requeued" ;;
esac
"""
SBATCH = """#!/bin/bash
echo "$@" >> "$FAKE/submitted"
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        program(tmp_path / name, text)
    return tmp_path


def variables(fake: Path, restarts: int = 0) -> dict[str, str]:
    ours = {"PATH": f"{fake}:{os.environ['PATH']}", "FAKE": str(fake), "SLURM_JOB_ID": "42"}
    return environment() | ours | {"SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts)}


@pytest.mark.parametrize(
    ("status", "code", "settings", "restarts", "expected", "requeued"),
    [
        (("finished", ""), 0, {}, 0, 0, False),
        (("stopped", "SIGUSR1"), 1, {}, 0, 0, True),
        (("stopped", "time limit"), 0, {}, 3, 0, True),
        (("stopped", "SIGUSR1"), 1, {"max_requeues": 3}, 3, 1, False),
        (("stopped", "SIGUSR1"), 1, {"requeue": False}, 0, 0, False),
        (("stopped", "SIGTERM"), 1, {}, 0, 0, False),  # scancel, or a preemption that requeues by itself
        (("stopped", "SIGTERM"), 1, {"requeue_on_sigterm": True}, 0, 0, True),
        (("stopped", "SIGINT"), 1, {"requeue_on_sigterm": True}, 0, 0, False),
        (("failed", 'an "odd" \\ reason: stopped'), 1, {}, 0, 1, False),
        (("failed", "killed"), 0, {}, 0, 1, False),
        (("running", ""), 137, {}, 0, 137, False),
        (None, 1, {}, 0, 1, False),  # it never began; what an earlier start has left says `stopped`
        (None, 0, {}, 0, 0, False),  # nothing to do
    ],
    ids=str,
)
def test_the_status_decides_what_comes_after(
    status: Any, code: int, settings: dict[str, Any], restarts: int, expected: int, requeued: bool, fake: Path
) -> None:
    run = fake / "a run"
    run.mkdir()
    (run / "status.json").write_text('{"state": "stopped", "reason": "SIGUSR1", "step": 3}\n')
    os.utime(run / "status.json", (1, 1))
    lines = ["#!/bin/bash", f"exit {code}"]
    if status is not None:
        text = json.dumps({"state": status[0], "reason": status[1], "step": 7})
        lines.insert(1, f"cat > '{run}/status.json' <<'END'\n{text}\nEND")
    program(fake / "srun", "\n".join(lines) + "\n")
    work = Work("x", run, fake, ("model=tiny",), 1, 2)
    script = fake / "script"
    script.write_text(sbatch(work, Slurm(**settings), "python", "launch", preflight=False))
    done = subprocess.run(
        ["bash", str(script)], env=variables(fake, restarts), capture_output=True, text=True, timeout=30
    )
    assert done.stderr == "" and done.returncode == expected, done
    assert (fake / "requeued").exists() is requeued


def test_without_a_good_preflight_nothing_is_trained(fake: Path) -> None:
    program(fake / "srun", '#!/bin/bash\necho "$@" >> "$FAKE/calls"\nexit 1\n')
    script = fake / "script"
    script.write_text(sbatch(Work("x", fake, fake, (), 1, 2), Slurm(), "python", "", preflight=True))
    done = subprocess.run(["bash", str(script)], env=variables(fake), capture_output=True, timeout=30)
    assert done.returncode == 1
    (call,) = (fake / "calls").read_text().splitlines()
    assert call.endswith("launcher doctor")


@pytest.mark.slow
def test_the_time_limit_saves_requeues_and_the_next_start_finishes(fake: Path, place: Path) -> None:
    """Slurm's signal reaches the step's task, which is torchrun."""
    more = ["train.steps=150", "checkpoint.every=0", "evaluate.batches=0", "sample.max_tokens=0"]
    cluster = ["cluster=slurm", f"cluster.port={free_port()}", "gpus_per_node=1", "execute=true"]
    arguments = [*BASE[1:-1], *more, "run.name=slurm", "hardware=cpu", *cluster]
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "launch", *arguments],
        cwd=place,
        env=variables(fake),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    run = place / "runs" / "slurm"
    assert done.returncode == 0, done.stderr
    assert (fake / "submitted").read_text() == f"{run}/launch.sbatch\n"
    with open(fake / "log", "w+b") as log:
        script = ["bash", str(run / "launch.sbatch")]
        first = subprocess.Popen(script, env=variables(fake), stdout=log, stderr=log, cwd="/")
        try:
            deadline, metrics = time.monotonic() + DEADLINE_SECONDS, run / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
                assert first.poll() is None and time.monotonic() < deadline, (fake / "log").read_text()
                time.sleep(0.05)
            os.kill(int((fake / "task").read_text()), signal.SIGUSR1)
            assert first.wait(DEADLINE_SECONDS) == 0, (fake / "log").read_text()
        finally:
            first.kill()
        status = json.loads((run / "status.json").read_text())
        assert (status["state"], status["reason"]) == ("stopped", "SIGUSR1") and status["step"] < 150
        assert (fake / "requeued").read_text() == "42\n"
        second = subprocess.run(script, env=variables(fake, 1), stdout=log, stderr=log, timeout=90, cwd="/")
    said = (fake / "log").read_text()
    assert second.returncode == 0 and f"step {status['step']}" in said, said
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert (fake / "requeued").read_text() == "42\n"  # not again
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 151))
