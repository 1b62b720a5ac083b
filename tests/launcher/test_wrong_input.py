"""What a user gets wrong: said in words that lead on, and nothing is left lying about."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher import __main__ as command_line
from parallel.start import pick_device
from tests.launcher.test_command_line import ROOT, SMALL, calls
from tests.launcher.test_train import BASE, place
from tests.spawn import Ranks

__all__ = ["calls", "place"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "model.position=rop",
            "model.position: 'rop' is not a section; give model/position=rope or model.position.kind=rope",
        ),
        (
            "model.position=none",
            "model.position: 'none' is not a section; give model/position=none or model.position.kind=none",
        ),
        (
            "~optim.lr",
            "optim.lr: ~optim.lr: nothing can be removed, only given another value: optim.lr=VALUE",
        ),
    ],
)
def test_the_way_out_is_said(
    calls: list, argument: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([*SMALL, argument]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert calls == []


def test_what_no_variant_resembles_gets_the_list(calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*SMALL, "model.position=7"]) == 2
    said = capsys.readouterr().err
    assert "give model/position=NAME or model.position.kind=NAME (NAME is one of " in said and "rope" in said


def test_what_the_message_names_works(calls: list) -> None:
    assert command_line.main([*SMALL, "model/position=none"]) == 0
    assert command_line.main([*SMALL, "model.position.kind=none"]) == 0
    assert [tree.model.position.kind for tree in calls] == ["none", "none"]


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (0, "hardware=cuda: there is no GPU here; use hardware=cpu or hardware=auto"),
        (
            1,
            "this node has 1 GPU and its process 3 wants one of its own; start at most 1 process a node, ",
        ),
        (
            2,
            "this node has 2 GPUs and its process 3 wants one of its own; start at most 2 processes a node, ",
        ),
    ],
)
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, count: int, line: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError) as caught:
        pick_device("cuda", 2)
    assert str(caught.value) == line + ("or use hardware=cpu" if count else "")


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--help"]])
def test_a_reader_that_goes_is_not_spoken_of(tmp_path: Path, arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "launcher", *arguments]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=120
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_pipe_of_ones_own_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, calls: list, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(tree: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys.modules["launcher.run"], "train", broken)
    assert command_line.main(SMALL) == 1
    assert capsys.readouterr().err == "error: BrokenPipeError: [Errno 32] Broken pipe\n"


def test_a_sweep_goes_on_after_a_member_that_fails(
    monkeypatch: pytest.MonkeyPatch, calls: list, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def train(tree: object) -> int:
        ended.append(tree.train.steps)  # type: ignore[attr-defined]
        if tree.train.steps == 2:  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return 0

    monkeypatch.setattr(sys.modules["launcher.run"], "train", train)
    assert command_line.main([*SMALL, "-m", "train.steps=1,2,3"]) == 1
    assert ended == [1, 2, 3]
    assert capsys.readouterr().err == "error: RuntimeError: no memory\n"
    runs = Path("runs")
    assert [path.name for path in runs.iterdir()] == ["tiny-stdlib-1"]
    error = json.loads((runs / "tiny-stdlib-1" / "error.json").read_text())
    assert (error["message"], error["code"]) == ("no memory", 1)


def test_a_run_that_is_refused_leaves_no_directory(place: Path, ranks: Ranks) -> None:
    """The data say what is wrong, after the processes have met and written into their logs."""
    base = [*BASE[:-1], "run.timeout_seconds=60"]
    (alone,) = ranks.launch(1, [*base, "run.name=narrow", "tokenizer.vocab_size=400"], place)
    assert alone.code == 2 and alone.stderr.splitlines()[-1].startswith("error: ")
    both = ranks.launch(2, [*base, "run.name=unlike"], place, rank_1=["optim.lr=0.5"])
    assert both[1].code == 2 and "error on rank 1" in both[0].stderr
    runs = place / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []
