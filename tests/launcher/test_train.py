"""Whole runs of a tiny model on a tiny corpus, through the command line."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.spawn import Ranks

STEPS = 12
SMALL = [
    "model=tiny",
    "model.vocab_size=300",
    "model.d_model=32",
    "model.n_layers=2",
    "model.attention.n_heads=4",
    "model.attention.n_kv_heads=2",
    "model.attention.head_width=8",
    "model.feedforward.d_ff=64",
    "data=files",
    "data.paths=[text]",
    "data.workers=1",
    "tokenizer.vocab_size=300",
    "train.sequence_length=16",
    "train.global_batch=4",
    "checkpoint.keep=0",
]
BASE = [
    "train",
    *SMALL,
    "model.z_loss=1e-4",
    "model.dropout.attention=0.1",
    "model.dropout.residual=0.1",
    "model.dropout.embedding=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch=2",
    "evaluate.every=4",
    "evaluate.batches=2",
    "checkpoint.every=6",
    "optim.lr=2e-2",
    "sample.max_tokens=5",
    "run.name=run",
]


def write_texts(folder: Path, *, files: int, words: int) -> None:
    """Files of so many words each, the same whenever they are written."""
    folder.mkdir()
    known = "the cat sat on a mat while seven dogs ran over that old hill and slept".split()
    for number in range(files):
        state, line = number + 1, []
        for _ in range(words):
            state = (state * 48271) % 2147483647
            line.append(known[state % len(known)])
        (folder / f"{number:02d}.txt").write_text(" ".join(line))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a corpus of some 40 windows: twelve steps of four cross an epoch."""
    directory = tmp_path_factory.mktemp("work")
    write_texts(directory / "text", files=12, words=60)
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
        evaluated = {step: line["loss/eval"] for step, line in theirs.items() if "loss/eval" in line}
        assert evaluated.keys() == {4, 8, 12}
        for step in (8, 12):  # the same held-out sequences, whatever the layout
            assert ours[step]["loss/eval"] == pytest.approx(evaluated[step], rel=1e-5)


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


def test_ready_tokens_without_a_tokenizer_are_trained_on(place: Path, ranks: Ranks) -> None:
    """No text can be written at the end; the run is finished all the same."""
    ids = np.random.default_rng(1).integers(1, 300, 3000).astype(np.uint32)
    ids[::97] = 0
    np.save(place / "ids.npy", ids)
    source = ["data.paths=[ids.npy]", "tokenizer=ids", "tokenizer.vocab_size=300", "tokenizer.eos_id=0"]
    base = [a for a in BASE[:-1] if not a.startswith(("data.paths", "tokenizer."))]
    (finished,) = ranks.launch(1, [*base, *source, "run.name=ids", "format=json"], place)
    assert finished.code == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert (facts["state"], facts["step"], facts["sample"]) == ("finished", STEPS, None)
    assert facts["held_out"]["files"]["unigram_entropy"] > 0
    assert json.loads((place / "runs" / "ids" / "status.json").read_text())["state"] == "finished"


def test_a_mixture_feeds_its_own_sources_alone_and_evaluates_each(place: Path, ranks: Ranks) -> None:
    for name, word in (("left", "one two three "), ("right", "red green blue ")):
        (place / name).mkdir()
        for number in range(4):
            (place / name / f"{number}.txt").write_text(f"{number} " + word * (60 + number))
    mixture = "data.mixture={a: {paths: [left], weight: 0.75}, b: {paths: [right], weight: 0.25}}"
    base = [a for a in BASE[:-1] if not a.startswith("data.paths") and a != "data=files"]
    (finished,) = ranks.launch(1, [*base, "data=mixture", mixture, "run.name=mixed"], place)
    assert finished.code == 0, finished.stderr
    last = lines(place / "runs" / "mixed")[-1]
    assert {name for name in last if name.startswith("loss/eval/")} == {"loss/eval/a", "loss/eval/b"}


def test_records_that_are_left_out_are_told_with_their_line(place: Path, ranks: Ranks) -> None:
    good = [json.dumps({"text": f"number {n} " + "word " * 50}) for n in range(12)]
    (place / "some.jsonl").write_text("\n".join([*good[:3], '{"text": 7}', *good[3:]]) + "\n")
    base = [a for a in BASE[:-1] if not a.startswith("data.paths")]
    arguments = [*base, "data.paths=[some.jsonl]", "run.name=told", "train.steps=2"]
    (finished,) = ranks.launch(1, arguments, place)
    assert finished.code == 0, finished.stderr
    assert "records 13 = written 12 + skipped 0 + rejected 1" in finished.stdout
    assert "some.jsonl:4" in finished.stdout


def test_a_vocabulary_that_is_too_small_for_the_data_is_refused(place: Path, ranks: Ranks) -> None:
    arguments = [*BASE[:-1], "run.name=narrow", "tokenizer.vocab_size=400"]
    (finished,) = ranks.launch(1, arguments, place)
    assert finished.code == 2
    assert "tokenizer.vocab_size (400)" in finished.stderr and "model.vocab_size" in finished.stderr
    assert not (place / "runs" / "narrow" / "status.json").exists()
