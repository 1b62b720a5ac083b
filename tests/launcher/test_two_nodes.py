"""Two torchruns on this machine as two nodes, from launch's own lines; a killed worker is started again."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launcher.test_failing_rank import environment, free_port
from tests.launcher.test_train import BASE, last_of_each_step, place, tensors
from tests.spawn import Ranks

__all__ = ["place"]
DEADLINE_SECONDS = 120
STEPS = 40
RUN = [*BASE[1:-1], f"train.steps={STEPS}", "checkpoint.every=10", "hardware=cpu", "hardware.threads=1"]


def children(pid: int) -> list[int]:
    """The processes that a torchrun has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lines(run: list[str], place: Path) -> list[list[str]]:
    """What launch says for two nodes that meet on loopback."""
    cluster = ["cluster=torchrun", "hosts=[127.0.0.1,localhost]", f"cluster.port={free_port()}"]
    cluster += ["gpus_per_node=1", "cluster.max_restarts=1", "format=json"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "launch", *run, *cluster],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["processes"] == 2
    return [shlex.split(one["command"]) for one in facts["commands"]]


def test_a_killed_worker_is_started_again_and_the_curve_is_that_of_an_undisturbed_run(
    place: Path, ranks: Ranks, tmp_path: Path
) -> None:
    whole, run = place / "runs" / "undisturbed", place / "runs" / "elastic"
    finished = ranks.launch(2, ["train", *RUN, f"run.name={whole.name}"], place)
    assert [one.code for one in finished] == [0, 0], finished[0].stderr
    log = tmp_path / "log"
    with open(log, "wb") as target:
        agents = [
            subprocess.Popen(command, cwd=place, env=environment(), stdout=target, stderr=target)
            for command in lines([*RUN, f"run.name={run.name}"], place)
        ]
        try:
            deadline, metrics = time.monotonic() + DEADLINE_SECONDS, run / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 13):
                assert all(agent.poll() is None for agent in agents), log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            (worker,) = children(agents[1].pid)
            os.kill(worker, signal.SIGKILL)
            assert [agent.wait(DEADLINE_SECONDS) for agent in agents] == [0, 0], log.read_text()
        finally:
            for agent in agents:
                agent.kill()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert not (run / "error.json").exists()
    assert last_of_each_step(run) == last_of_each_step(whole)
    last = f"checkpoints/step-{STEPS:08d}"
    assert tensors(run / last) == tensors(whole / last)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert records[-1]["segment"] == 1 and len(records) > STEPS  # it did go back
