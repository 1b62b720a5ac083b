"""Whole runs with faults on purpose: what the monitor does about them, and that nothing else is lost."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_failing_rank import environment
from tests.launcher.test_train import SMALL, last_of_each_step, lines, tensors, write_texts
from tests.spawn import Ranks

STEPS = 140
BASE = [
    "train",
    *SMALL,
    "data.held_out_fraction=0.2",
    f"train.steps={STEPS}",
    "evaluate.every=0",
    "evaluate.batches=null",
    "checkpoint.every=0",
    "checkpoint.snapshot_every=10",
    "optim.lr=1e-2",
    "sample.max_tokens=0",
    "hardware=cpu",
]
BAD = (400, 436)  # the samples of nine updates from the 101st on
POISON = f"faults=[{{kind: poison, samples: [{BAD[0]}, {BAD[1]}]}}]"
MARGIN = 4 * 4  # samples of the default margin


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with some 450 windows of text."""
    directory = tmp_path_factory.mktemp("monitored")
    write_texts(directory / "text", files=75, words=120)
    return directory


def recording(rank: int, *command: Any) -> Any:
    """The command line, with the samples of each attempt in fed-RANK.jsonl of the run."""
    import launcher.train
    from tests.spawn import _command

    original = launcher.train._attempt

    def attempt(run: Any, cursor: Any, fed: Any, **more: Any) -> Any:
        result, lr = original(run, cursor, fed, **more)
        with open(run.directory.path / f"fed-{rank}.jsonl", "a") as file:
            file.write(json.dumps([cursor.step + 1, list(fed.samples), result.applied]) + "\n")
        return result, lr

    launcher.train._attempt = attempt
    try:
        return _command(rank, *command)
    finally:
        launcher.train._attempt = original


def train(ranks: Ranks, place: Path, name: str, *more: str, world: int = 1, code: int = 0) -> Path:
    arguments = [*BASE, f"run.name={name}", *more]
    for finished in ranks.bare(world, recording, arguments, [], str(place)):
        assert finished.code == code, finished.stderr
    return place / "runs" / name


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    usual = {"save", "resume"}
    return [event for event in found if (event["event"] in kinds if kinds else event["event"] not in usual)]


def fed(run: Path, rank: int = 0) -> list[tuple[int, list[int], bool]]:
    return [tuple(json.loads(line)) for line in (run / f"fed-{rank}.jsonl").read_text().splitlines()]


def held_out(run: Path) -> float:
    return lines(run)[-1]["loss/eval"]


@pytest.fixture(scope="module")
def clean(place: Path, ranks: Ranks) -> Path:
    run = train(ranks, place, "clean")
    assert events(run) == [] and [event["step"] for event in events(run, "save")] == [STEPS]
    return run


@pytest.fixture(scope="module")
def poisoned(place: Path, ranks: Ranks) -> Path:
    return train(ranks, place, "poisoned", POISON)


def test_it_goes_round_the_bad_samples_and_loses_no_others(poisoned: Path, clean: Path) -> None:
    (rewind,) = events(poisoned, "rewind")
    assert (rewind["onset"], rewind["alarm"], rewind["snapshot_step"]) == (101, 101, 90)
    start, stop = rewind["skipped"]
    assert start == BAD[0] - MARGIN  # the first sample of the onset, less the margin
    seven = BAD[0] + 7 * 4  # a rise must last seven attempts to be one
    assert stop == seven + MARGIN > BAD[1]
    order = [sample for _, samples, _ in fed(poisoned) for sample in samples]
    bad = range(*BAD)
    assert all(order.count(sample) <= 1 for sample in bad)
    back = next(i for i in range(1, len(fed(poisoned))) if fed(poisoned)[i][0] < fed(poisoned)[i - 1][0])
    led = [
        *fed(poisoned)[: rewind["snapshot_step"]],
        *fed(poisoned)[back:],
    ]  # the attempts that led to the end
    samples = [sample for _, batch, _ in led for sample in batch]
    assert samples == [n for n in range(10_000) if not start <= n < stop][: len(samples)]
    assert len(led) - STEPS <= 1  # one update may have been left out for its own sake
    assert math.isclose(held_out(poisoned), held_out(clean), abs_tol=0.02)


def test_each_event_says_what_why_and_where(poisoned: Path, place: Path) -> None:
    fault, skip, cause, *_ = events(poisoned)
    assert (fault["event"], fault["fault"]) == ("fault", {"kind": "poison", "samples": list(BAD)})
    assert (skip["event"], skip["attempt"], skip["step"]) == ("skip", 101, 101)
    assert skip["reason"].startswith("outlier: loss 1")
    record = next(line for line in lines(poisoned) if line["attempt"] == 101)
    assert skip["signals"]["loss"] == record["loss/train"] and record["monitor/verdict"] == 2
    worst = skip["worst"]
    assert len(worst) == 3 and all(entry["sample"] in range(400, 404) for entry in worst)
    assert worst == sorted(worst, key=lambda entry: -entry["loss"]) and all(w["text"] for w in worst)
    for source in skip["sources"]:
        text = Path(source["path"]).read_bytes()
        assert Path(source["path"]).parent == place / "text" and source["record"] == 1
        assert 0 <= source["byte_start"] < source["byte_stop"] <= len(text)
    assert cause["event"] == "diagnosis" and cause["cause"] == "data x state"
    assert cause["replayed"] == [cause["recorded"]] * 2
    norms = [entry["norm"] for entry in cause["largest_gradients"]]
    assert len(norms) == 3 and norms == sorted(norms, reverse=True)
    assert sum(norm**2 for norm in norms) < cause["recorded"]["norm"] ** 2
    (rewind,) = events(poisoned, "rewind")
    assert rewind["reason"].startswith("jump: loss +") and rewind["budget_left"] == 9
    assert rewind["snapshot"] == "memory" and rewind["lr_before"] > 0 and rewind["lr_after"] > 0
    assert events(poisoned)[-1]["cause"] == "data x state"
    last = lines(poisoned)[-1]
    assert last["monitor/rewinds"] == 1 and last["monitor/skipped_samples"] == 60
    texts = list((poisoned / "tensorboard" / "events").iterdir())
    assert texts


def test_the_next_bad_samples_are_gone_round_too(place: Path, ranks: Ranks, clean: Path) -> None:
    """Right behind the range that was left out."""
    behind = "faults=[{kind: poison, samples: [400, 436]}, {kind: poison, samples: [444, 540]}]"
    run = train(ranks, place, "behind", behind, "checkpoint.every=20")  # a file from further back
    first, second = events(run, "rewind")
    assert second["skipped"][1] > 500 and second["snapshot_step"] < first["snapshot_step"]
    assert second["lr_after"] < first["lr_after"]  # a relapse: a lower rate, a wider margin
    assert second["skipped"][0] < first["skipped"][0]
    order = [sample for _, samples, _ in fed(run) for sample in samples]
    assert all(order.count(sample) <= 1 for sample in [*range(400, 436), *range(444, 540)])
    assert math.isclose(held_out(run), held_out(clean), abs_tol=0.02)


def test_when_nothing_helps_it_stops_and_keeps_the_good_state(place: Path, ranks: Ranks, clean: Path) -> None:
    everywhere = "faults=[{kind: poison, samples: [400, 100000]}]"
    arguments = (everywhere, "monitor.budget_rewinds=2", "monitor.diagnose_attempts=0")
    run = train(ranks, place, "everywhere", *arguments, code=1)
    assert len(events(run, "rewind")) == 2
    (stop,) = events(run, "stop")
    assert "all 2 rewinds are used up" in stop["reason"] and stop["budget_left"] == 0
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "rewinds are used up" in status["reason"]
    (saved,) = (run / "checkpoints").glob("step-*")
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["step"] == stop["snapshot_step"] < 101
    # Started again it still has no rewinds left: it gives up once more, from the same good state.
    train(ranks, place, "everywhere", *arguments, code=1)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [saved.name]
    assert len(events(run, "rewind")) == 2 and len(events(run, "stop")) == 2


@pytest.mark.parametrize(
    ("name", "world", "kind", "more"),
    [
        ("one", 1, "nan", ["train.precision=bf16"]),
        ("one", 1, "finite", []),
        ("tp", 2, "nan", ["parallel.tp=2"]),
        ("tp", 2, "finite", ["parallel.tp=2", "train.precision=bf16"]),
        ("pp", 2, "nan", ["parallel.pp=2", "train.precision=bf16"]),
        ("pp", 2, "finite", ["parallel.pp=2"]),
        ("dp", 2, "nan", []),
        ("dp", 2, "finite", ["train.precision=bf16"]),
    ],
)
def test_a_skipped_update_is_a_batch_that_never_was(
    name: str, world: int, kind: str, more: list[str], place: Path, ranks: Ranks
) -> None:
    """At step 5, on one rank: NaN, or a finite gradient that DeepSpeed itself would take."""
    short = ["train.steps=9", "model.dropout.residual=0.1", *more]
    fault = f"faults=[{{kind: nan_gradient, step: 5, rank: {world - 1}}}]"
    arguments = [*BASE, *short]
    names = [f"{which}-{name}-{kind}" for which in ("skipped", "never")]
    for done in ranks.bare(world, spoilt, kind, [*arguments, f"run.name={names[0]}", fault], [], str(place)):
        assert done.code == 0, done.stderr
    for done in ranks.bare(world, without, (16, 20), [*arguments, f"run.name={names[1]}"], [], str(place)):
        assert done.code == 0, done.stderr
    skipped, never = (place / "runs" / each for each in names)
    found = lines(skipped)
    assert [line["monitor/verdict"] for line in found] == [0] * 4 + [2] + [0] * 5
    (skip,) = events(skipped, "skip")
    assert skip["signals"]["non_finite"] == (kind == "nan")
    assert skip["reason"].startswith("non_finite" if kind == "nan" else "outlier: norm")
    (cause,) = events(skipped, "diagnosis")
    assert cause["cause"] == "hardware"
    assert last_of_each_step(skipped) == last_of_each_step(never)
    assert tensors(skipped / "checkpoints/step-00000009") == tensors(never / "checkpoints/step-00000009")


def spoilt(rank: int, kind: str, *command: Any) -> Any:
    """The command line, where the fault in a gradient is NaN or finite."""
    import launcher.faults
    from tests.spawn import _command

    before = launcher.faults.SPOILT
    launcher.faults.SPOILT = math.nan if kind == "nan" else 1e8
    try:
        return _command(rank, *command)
    finally:
        launcher.faults.SPOILT = before


def without(rank: int, samples: tuple[int, int], *command: Any) -> Any:
    """The command line, never fed these samples."""
    import dataclasses

    import launcher.run
    from tests.spawn import _command

    original = launcher.run.loop
    launcher.run.loop = lambda run, cursor: original(run, dataclasses.replace(cursor, skipped=(samples,)))
    try:
        return _command(rank, *command)
    finally:
        launcher.run.loop = original


def test_one_data_rank_with_a_huge_loss_is_skipped_by_all_and_named(place: Path, ranks: Ranks) -> None:
    fault = "faults=[{kind: tokens, step: 90, rank: 1}]"
    run = train(ranks, place, "huge", fault, "monitor.fingerprint_every=1", "train.steps=95", world=2)
    (skip,) = events(run, "skip")
    assert (skip["attempt"], skip["signals"]["non_finite"]) == (90, False)
    assert fed(run, 0) == fed(run, 1)
    assert [taken for *_, taken in fed(run)].count(False) == 1
    (cause,) = events(run, "diagnosis")
    assert (cause["cause"], cause["rank"], cause["ranks"]) == ("hardware", 1, [1])


def test_a_flipped_bit_is_undone_and_its_weight_named(place: Path, ranks: Ranks, clean: Path) -> None:
    fault = "faults=[{kind: bit_flip, step: 100, rank: 1}]"
    run = train(ranks, place, "flip", fault, "monitor.fingerprint_every=1", "parallel.tp=2", world=2)
    (rewind,) = events(run, "rewind")
    assert rewind["snapshot_step"] < 100 <= rewind["onset"]
    cause = events(run, "diagnosis")[-1]
    assert (cause["cause"], cause["rank"], cause["compared_attempt"]) == ("hardware", 1, 100)
    assert cause["parameter"].startswith("weight of blocks.")
    assert math.isclose(held_out(run), held_out(clean), abs_tol=0.02)


def test_observing_changes_nothing_but_the_record(place: Path, ranks: Ranks) -> None:
    arguments = (POISON, "train.steps=115")
    seen = train(ranks, place, "observed", "monitor=observe", *arguments)
    blind = train(ranks, place, "unobserved", "monitor=none", *arguments)
    assert {event["event"] for event in events(seen)} == {"fault", "warn"}
    assert {event.get("verdict") for event in events(seen, "warn")} >= {"SKIP", "REWIND"}
    assert [event["event"] for event in events(blind)] == ["fault"]
    assert last_of_each_step(seen) == last_of_each_step(blind)
    name = "checkpoints/step-00000115"
    assert tensors(seen / name) == tensors(blind / name)
    verdicts = [line["monitor/verdict"] for line in lines(seen)]
    assert set(verdicts) == {0, 1} and {line["monitor/verdict"] for line in lines(blind)} == {0}


# A rate far too high for one update; what it leaves is saved before anything is noticed.
LASTING = ["faults=[{kind: lr, step: 60, factor: 3000}]", "train.steps=80", "checkpoint.every=4"]


@pytest.fixture(scope="module")
def recovered(place: Path, ranks: Ranks) -> Path:
    run = train(ranks, place, "recovered", *LASTING)
    (rewind,) = events(run, "rewind")
    assert rewind["snapshot_step"] < 60
    return run


def kill_during_rewind(place: Path, name: str, point: str) -> None:
    """The run of LASTING under this name, dead at a point of its first rewind."""
    command = [sys.executable, "-m", "tests.launcher.killed_rewind", point, *BASE, *LASTING]
    killed = subprocess.run(
        [*command, f"run.name={name}"],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == 9, killed.stderr


@pytest.mark.parametrize(
    "point",
    [
        "after the record",
        "restored",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("before the record", "diagnosed", "saved")),
    ],
)
def test_killed_during_a_rewind_it_ends_as_if_nothing_had_been(
    point: str, place: Path, ranks: Ranks, recovered: Path
) -> None:
    name = "killed-" + point.replace(" ", "-")
    kill_during_rewind(place, name, point)
    run = train(ranks, place, name, *LASTING)
    assert len(events(run, "fault")) == 1, "a fault has fired twice"
    (rewind,) = events(run, "rewind")
    (wanted,) = events(recovered, "rewind")
    assert rewind["skipped"] == wanted["skipped"] and rewind["budget_left"] == wanted["budget_left"] == 9
    assert last_of_each_step(run)[80] == last_of_each_step(recovered)[80]
    final = "checkpoints/step-00000080"
    assert tensors(run / final) == tensors(recovered / final)
    budgets = [monitor_state(path / final)["budget"] for path in (run, recovered)]
    assert budgets[0]["used"] == budgets[1]["used"] == 1


def test_killed_during_a_rewind_and_started_at_another_layout(
    place: Path, ranks: Ranks, recovered: Path
) -> None:
    kill_during_rewind(place, "killed-moved", "after the record")
    run = train(ranks, place, "killed-moved", *LASTING, "parallel.tp=2", world=2)
    assert len(events(run, "rewind")) == 1
    loss, wanted = (last_of_each_step(each)[80]["loss/train"] for each in (run, recovered))
    assert math.isclose(loss, wanted, rel_tol=1e-4)  # 1e-5 a step, and these are thirty since the restart


def monitor_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())["extra"]["monitor"]


def test_what_the_monitor_remembers_is_the_same_after_a_resume(place: Path, ranks: Ranks) -> None:
    whole = train(ranks, place, "remembered", "train.steps=40", "checkpoint.every=20")
    cut = place / "runs" / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000040")
    (cut / "checkpoints" / "latest").unlink()
    (cut / "status.json").write_text('{"state": "running", "reason": "", "step": 30}')
    train(ranks, place, "cut", "train.steps=40", "checkpoint.every=20")
    final = "checkpoints/step-00000040"
    assert monitor_state(cut / final) == monitor_state(whole / final)
    assert tensors(cut / final) == tensors(whole / final)


def test_a_checkpoint_from_beyond_the_delay_always_stays(place: Path, ranks: Ranks) -> None:
    """However few are kept: the monitor may yet need one from before what it notices late."""
    run = train(ranks, place, "kept", "train.steps=80", "checkpoint.every=2", "checkpoint.keep=1")
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert saved[-1] == 80 and len(saved) <= 4
    assert any(16 <= step <= 80 - 32 for step in saved), saved


def test_told_to_stop_under_suspicion_it_saves_the_good_state_too(place: Path, ranks: Ranks) -> None:
    """What is saved after the damage may be bad, and the copies in memory end with the process."""
    (place / "runs").mkdir(exist_ok=True)
    more = [*LASTING[:2], "checkpoint.snapshots=5"]
    for done in ranks.bare(1, stopping, 63, [*BASE, *more, "run.name=suspected"], [], str(place)):
        assert done.code == 0, done.stderr
    run = place / "runs" / "suspected"
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert saved == [20, 60]  # of the copies of 20, 30, .. only the first is older than the delay of 32
    train(ranks, place, "suspected", *more)
    (rewind,) = events(run, "rewind")
    assert rewind["snapshot_step"] == 20
    assert events(run, "resume")


def stopping(rank: int, attempt: int, *command: Any) -> Any:
    """The command line, told to stop at an attempt."""
    import os
    import signal

    import launcher.train
    from tests.spawn import _command

    original = launcher.train._attempt

    def signalled(run: Any, cursor: Any, fed: Any, **more: Any) -> Any:
        if cursor.attempt + 1 == attempt:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, cursor, fed, **more)

    launcher.train._attempt = signalled
    try:
        return _command(rank, *command)
    finally:
        launcher.train._attempt = original
