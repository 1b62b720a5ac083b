"""Whole runs of a tiny model on a tiny corpus, through the command line."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.spawn import Ranks

STEPS = 12
BASE = [
    "train",
    "model=tiny",
    "model.vocab_size=300",
    "model.d_model=32",
    "model.n_layers=2",
    "model.attention.n_heads=4",
    "model.attention.n_kv_heads=2",
    "model.attention.head_width=8",
    "model.feedforward.d_ff=64",
    "model.z_loss=1e-4",
    "model.dropout.attention=0.1",
    "model.dropout.residual=0.1",
    "model.dropout.embedding=0.1",
    "data=files",
    "data.paths=[text]",
    "data.workers=1",
    "tokenizer.vocab_size=300",
    f"train.steps={STEPS}",
    "train.sequence_length=16",
    "train.global_batch=4",
    "train.micro_batch=2",
    "evaluate.every=4",
    "evaluate.batches=2",
    "checkpoint.every=6",
    "checkpoint.keep=0",
    "optim.lr=2e-2",
    "sample.max_tokens=5",
    "run.name=run",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a corpus of some 40 windows: twelve steps of four cross an epoch."""
    directory = tmp_path_factory.mktemp("work")
    (directory / "text").mkdir()
    words = "the cat sat on a mat while seven dogs ran over that old hill and slept".split()
    for number in range(12):
        state, line = number + 1, []
        for _ in range(60):
            state = (state * 48271) % 2147483647
            line.append(words[state % len(words)])
        (directory / "text" / f"{number:02d}.txt").write_text(" ".join(line))
    return directory


@pytest.fixture(scope="module")
def straight(place: Path, ranks: Ranks) -> Path:
    """The run that was never stopped."""
    (finished,) = ranks.launch(1, BASE, place)
    assert finished.code == 0, finished.stderr
    return place / "runs" / "run"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_of_each_step(run: Path) -> dict[int, dict[str, Any]]:
    """Numbers that must repeat, by step: without attempt, segment, time, memory and speed."""
    kept = ("loss", "norm", "lr", "tokens", "logit")
    return {line["step"]: {k: v for k, v in line.items() if k.split("/")[0] in kept} for line in lines(run)}


def cut_back(run: Path, target: Path, step: int) -> None:
    """A copy of a run as if it had been killed after its save at `step` and before the next one."""
    shutil.copytree(run, target)
    for saved in (target / "checkpoints").glob("step-*"):
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    (target / "checkpoints" / "latest").unlink()
    (target / "status.json").write_text('{"state": "running", "reason": "", "step": 9}')


def tensors(checkpoint: Path) -> dict[str, str]:
    """Hash of each data file of a checkpoint."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert files
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_run_leaves_what_it_promises(straight: Path) -> None:
    assert json.loads((straight / "status.json").read_text())["state"] == "finished"
    assert (straight / "config.yaml").exists() and (straight / "versions.json").exists()
    found = lines(straight)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["attempt"] for line in found] == list(range(1, STEPS + 1))
    assert {line["segment"] for line in found} == {0}
    assert [line["step"] for line in found if "loss/eval" in line] == [4, 8, 12]
    names = {
        *("loss/train", "loss/z", "norm/grad", "lr", "tokens/total", "speed/tokens_per_second"),
        *("time/step_seconds", "memory/peak_bytes", "monitor/verdict"),
    }
    assert names <= set(found[0])
    assert found[0]["loss/train"] == pytest.approx(5.9, abs=0.6)  # near ln 300 = 5.70
    assert found[-1]["loss/train"] < found[0]["loss/train"] - 0.3


def test_tensorboard_has_the_same_numbers(straight: Path) -> None:
    events = EventAccumulator(str(straight / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss/train", "norm/grad", "lr"):
        shown = {e.step: e.value for e in events.Scalars(name)}
        assert shown == pytest.approx({line["step"]: line[name] for line in lines(straight)}, rel=1e-6)
    assert any("config" in tag for tag in events.Tags()["tensors"])


def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(
    straight: Path, place: Path, ranks: Ranks
) -> None:
    """Dropout is on and the epoch ends between: losses, norms, learning rates, weights, moments."""
    target = place / "runs" / "resumed"
    cut_back(straight, target, 6)
    (finished,) = ranks.launch(1, [*BASE[:-1], "run.name=resumed"], place)
    assert finished.code == 0, finished.stderr
    assert "step 6" in finished.stderr + finished.stdout
    assert last_of_each_step(target) == last_of_each_step(straight)
    last = f"checkpoints/step-{STEPS:08d}"
    assert tensors(target / last) == tensors(straight / last)
    segments = [line["segment"] for line in lines(target)]
    assert segments == [0] * STEPS + [1] * 6
    attempts = [line["attempt"] for line in lines(target)]
    assert attempts == list(range(1, STEPS + 7))
    events = EventAccumulator(str(target / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("loss/train")] == list(range(1, STEPS + 1))


def test_resumed_at_another_layout_it_follows_the_same_curve(
    straight: Path, place: Path, ranks: Ranks
) -> None:
    for world, layout in (
        (2, []),
        (4, ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]),
    ):
        target = place / "runs" / f"resumed-{world}"
        cut_back(straight, target, 6)
        arguments = [*BASE[:-1], f"run.name=resumed-{world}", *layout]
        results = ranks.launch(world, arguments, place)
        assert [result.code for result in results] == [0] * world, results[0].stderr
        ours, theirs = last_of_each_step(target), last_of_each_step(straight)
        for step in range(7, STEPS + 1):
            assert ours[step]["loss/train"] == pytest.approx(theirs[step]["loss/train"], rel=1e-5)
            assert ours[step]["norm/grad"] == pytest.approx(theirs[step]["norm/grad"], rel=1e-4)
            assert ours[step]["tokens/total"] == theirs[step]["tokens/total"]


def test_a_finished_run_says_so_and_changes_nothing(straight: Path, place: Path, ranks: Ranks) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    (finished,) = ranks.launch(1, BASE, place)
    assert finished.code == 0
    assert "finished at step 12; nothing to do" in finished.stdout
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["resume=none"], ["holds a run", "resume=none"]),
        (["train.seed=5"], ["train.seed", "1234", "5"]),
        (["optim.lr=0.1"], ["optim.lr", "resume_override=[optim.lr]"]),
        (["model.d_model=64"], ["model.d_model", "32", "64"]),
        (["resume=runs/nothing"], ["runs/nothing"]),
    ],
)
def test_a_configuration_that_does_not_continue_the_run_is_refused(
    straight: Path, place: Path, ranks: Ranks, change: list[str], words: list[str]
) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    (finished,) = ranks.launch(1, [*BASE, *change], place)
    assert finished.code == 2, finished.stderr
    for word in words:
        assert word in finished.stderr
    assert "Traceback" not in finished.stderr
    assert (straight / "metrics.jsonl").read_bytes() == before
    assert json.loads((straight / "status.json").read_text())["state"] == "finished"


def test_ranks_that_were_started_differently_are_refused(place: Path, ranks: Ranks) -> None:
    base = [*BASE[:-1], "run.name=unlike", "run.timeout_seconds=60"]
    results = ranks.launch(2, base, place, rank_1=["optim.lr=0.5"])
    assert results[1].code == 2, results[1].stderr
    assert "optim.lr is 0.02 on rank 0 and 0.5 on rank 1" in results[1].stderr
    assert results[0].code != 0 and "error on rank 1" in results[0].stderr
    assert not (place / "runs" / "unlike" / "metrics.jsonl").exists()


def test_a_dry_run_builds_everything_and_writes_nothing(place: Path, ranks: Ranks) -> None:
    arguments = [*BASE[:-1], "run.name=dry", "dry_run=true", "parallel.pp=2"]
    results = ranks.launch(2, arguments, place)
    assert [result.code for result in results] == [0, 0]
    assert "one forward and backward pass" in results[0].stdout
    assert not (place / "runs" / "dry").exists()


def test_a_vocabulary_that_is_too_small_for_the_data_is_refused(place: Path, ranks: Ranks) -> None:
    arguments = [*BASE[:-1], "run.name=narrow", "tokenizer.vocab_size=400"]
    (finished,) = ranks.launch(1, arguments, place)
    assert finished.code == 2
    assert "tokenizer.vocab_size (400)" in finished.stderr and "model.vocab_size" in finished.stderr
    assert not (place / "runs" / "narrow" / "status.json").exists()
