"""How turns are ordered and compared, and the whole harness once on a model of no size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import order, pairwise_ratio, spread, table

ROOT = Path(__file__).resolve().parents[2]


def test_each_entry_has_each_place_once() -> None:
    rounds = [order(["a", "b", "c"], number) for number in range(3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert order(["a", "b", "c"], 3) == rounds[0]


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    rounds = [{"ours": 2.0 * s, "peer": 1.0 * s} for s in (100.0, 10.0, 1.0)]
    assert pairwise_ratio(rounds, "ours", "peer") == 2.0
    # The ratio of the medians would be 20 / 2 = 10.
    crossed = [{"ours": 20.0, "peer": 10.0}, {"ours": 2.0, "peer": 1.0}, {"ours": 30.0, "peer": 2.0}]
    assert pairwise_ratio(crossed, "ours", "peer") == 2.0


def test_spread_is_relative_to_the_median() -> None:
    assert spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)


def test_a_table_lines_up() -> None:
    assert table(["", "tokens/s"], [["ours", "12"], ["a peer", "3456789"]]).splitlines() == [
        "        tokens/s",
        "ours          12",
        "a peer   3456789",
    ]


@pytest.mark.slow
def test_the_harness_runs_every_entry() -> None:
    command = [sys.executable, "-m", "benchmarks.training", "--model", "smoke", "--rounds", "1"]
    command += ["--warmup", "1", "--steps", "1", "--sequence-length", "32", "--threads", "1"]
    command += ["--entries", "run", "engine", "module", "peer", "control"]
    command += ["--reference", "peer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["entries"]) == ["run", "engine", "module", "peer", "control"]
    assert result["entries"]["peer"]["tokens_per_second_ratio"] == 1.0
    losses = {entry: turn["losses"] for entry, turn in result["rounds"][0].items()}
    # One architecture, one initial state and the same tokens: the plain loop and the engine agree.
    assert losses["engine"] == pytest.approx(losses["module"], rel=1e-5)
    assert all(5.5 < value < 8.0 for values in losses.values() for value in values)  # ln 512 = 6.24


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_each_part(tmp_path: Path) -> None:
    """On a CPU: the tests for a GPU are skipped, which pytest tells with 0."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    parts = json.loads(done.stdout.splitlines()[-1])
    assert {part["part"]: part["result"] for part in parts}.items() >= dict.fromkeys(
        ["gpu-tests", "kernel-tests", "kernels", "matmul", "engine", "module", "peer_compiled"], "done"
    ).items(), done.stdout
    assert all(part["numbers"] for part in parts[2:])
