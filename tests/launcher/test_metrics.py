"""metrics.jsonl and TensorBoard: what is written, read back with the tools that users have."""

import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.metrics import MetricsWriter, Position, encoded, go_on, last_whole, repair
from launcher.rundirectory import RunDirectory

CONFIG = {"optim": {"lr": 0.001}, "model": {"position": {"kind": "rope"}}}


@contextmanager
def writer(path: Path, **start: Any) -> Iterator[MetricsWriter]:
    with MetricsWriter(RunDirectory(path), CONFIG, rank=0, steps=9, stream=StringIO(), **start) as metrics:
        yield metrics


def lines(path: Path) -> list[dict[str, Any]]:
    text = (path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


def board(path: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(path / "tensorboard"), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def curve(path: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in board(path).Scalars(name)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (torch.tensor(-2.0), -2.0),
        ([1.5, math.nan], [1.5, "NaN"]),
        (7, 7),
        (True, True),
    ],
)
def test_values_as_strict_json(value: Any, text: Any) -> None:
    assert encoded(value) == text


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-300, 0.1])
def test_numbers_come_back(value: float) -> None:
    assert float(json.loads(json.dumps(encoded(value)))) == value
    assert math.isnan(float(encoded(math.nan)))


def test_one_object_an_attempt(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 2.5, "speed/mfu": None}, applied=True)
        metrics.write({"step": 2, "loss/train": math.nan, "monitor/verdict": 2}, applied=False)
        metrics.write({"step": 2, "loss/train": 2.25}, applied=True)
    assert lines(tmp_path) == [
        {"step": 1, "attempt": 1, "segment": 0, "loss/train": 2.5},
        {"step": 2, "attempt": 2, "segment": 0, "loss/train": "NaN", "monitor/verdict": 2},
        {"step": 2, "attempt": 3, "segment": 0, "loss/train": 2.25},
    ]


def test_tensorboard_has_the_applied_updates_only(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 2.5, "norm/grad": 1.0}, applied=True)
        metrics.write({"step": 2, "loss/train": 99.0}, applied=False)
        metrics.write({"step": 2, "loss/train": 2.25}, applied=True)
    assert curve(tmp_path, "loss/train") == [(1, 2.5), (2, 2.25)]
    assert sorted(board(tmp_path).Tags()["scalars"]) == ["loss/train", "norm/grad"]


def test_the_configuration_is_text_in_tensorboard(tmp_path: Path) -> None:
    with writer(tmp_path):
        pass
    found = board(tmp_path)
    texts = {
        name: found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("config", "hyper-parameters")
    }
    assert "  position:\n    kind: rope\n" in texts["config"]
    assert "| model.position.kind | rope |" in texts["hyper-parameters"]
    assert "| optim.lr | 0.001 |" in texts["hyper-parameters"]


def test_a_resumed_run_goes_on_counting_and_replaces_what_it_does_again(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss/train": float(step)}, applied=True)
    with writer(tmp_path, step=1, attempt=1, resumed=True) as metrics:
        assert (metrics.attempt, metrics.segment) == (3, 1)
        metrics.write({"step": 2, "loss/train": 20.0}, applied=True)
    assert [(r["step"], r["attempt"], r["segment"]) for r in lines(tmp_path)] == [
        (1, 1, 0), (2, 2, 0), (3, 3, 0), (2, 4, 1),
    ]  # fmt: skip
    assert curve(tmp_path, "loss/train") == [(1, 1.0), (2, 20.0)]


def test_a_start_from_nothing_after_a_crash_before_the_first_save(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 1.0}, applied=True)
        metrics.write({"step": 2, "loss/train": 2.0}, applied=True)
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 10.0}, applied=True)
    assert lines(tmp_path)[-1] == {"step": 1, "attempt": 3, "segment": 1, "loss/train": 10.0}
    assert curve(tmp_path, "loss/train") == [(1, 10.0)]


def test_a_rewind_drops_the_curves_beyond_it(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss/train": float(step)}, applied=True)
        metrics.rewind(1)
        metrics.write({"step": 2, "loss/train": 20.0}, applied=True)
    assert curve(tmp_path, "loss/train") == [(1, 1.0), (2, 20.0)]
    assert [(r["attempt"], r["segment"]) for r in lines(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_many_rewinds_within_a_moment_are_read_in_order(tmp_path: Path) -> None:
    """The count in a name is unpadded: of two files of one second, the 10th sorts before the 9th."""
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 0.0}, applied=True)
        for attempt in range(4):
            metrics.rewind(0)
            metrics.write({"step": 1, "loss/train": float(attempt)}, applied=True)
    seconds = [int(path.name.split(".")[3]) for path in (tmp_path / "tensorboard").glob("events.out.*")]
    assert len(set(seconds)) == len(seconds) == 5
    assert curve(tmp_path, "loss/train") == [(1, 3.0)]


def test_a_clock_far_behind_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path):
        pass
    (file,) = (tmp_path / "tensorboard").glob("events.out.*")
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time()) + 3600}.host.1.0"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with writer(tmp_path):
        pass
    log = RunDirectory(tmp_path).log_file(0).read_text()
    assert re.search(r"this machine's clock is (36\d\d|35\d\d) s behind the newest file", log), log


def test_an_attempt_number_that_is_given_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "attempt": 5}, applied=True)
        assert metrics.write({"step": 2}, applied=True) == {"step": 2, "attempt": 6, "segment": 0}


def test_other_ranks_count_alike_and_write_nothing(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write({"step": 1, "loss/train": 1.0}, applied=True)
    before = sorted(path for path in tmp_path.rglob("*"))
    other = MetricsWriter(RunDirectory(tmp_path), CONFIG, rank=3, steps=9)
    other.write({"step": 2, "loss/train": 1.0}, applied=True)
    other.close()
    assert (other.attempt, other.segment) == (2, 1)
    assert sorted(path for path in tmp_path.rglob("*")) == before


WHOLE = b'{"step": 1, "attempt": 4, "segment": 2}\n'


@pytest.mark.parametrize(
    "rest", [b"", b'{"step": 2, "att', b'{"step": 2}', b"\0\0\0\0", b"\0\0\0\n", b"17\n", b'{"step": 2,\n\n']
)
def test_an_unfinished_last_line_is_cut_off(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + rest)
    assert last_whole(path) == {"step": 1, "attempt": 4, "segment": 2}
    assert path.read_bytes() == WHOLE + rest
    assert repair(path) == {"step": 1, "attempt": 4, "segment": 2}
    assert path.read_bytes() == WHOLE


def test_a_file_with_only_an_unfinished_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1')
    assert repair(path) is None
    assert path.read_bytes() == b""
    assert repair(tmp_path / "none") is None


@pytest.mark.parametrize("padding", [0, 60_000, 65_000, 65_536, 200_000])
def test_the_last_line_is_found_however_long_the_file(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "metrics.jsonl"
    long = json.dumps({"step": 1, "x": "y" * padding}).encode() + b"\n"
    path.write_bytes(long * 3 + WHOLE[:-1])
    record = repair(path)
    assert record is not None and record["step"] == 1 and len(record["x"]) == padding
    assert path.read_bytes() == long * 3


def test_numbering_goes_on_from_the_larger(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert go_on(directory) == Position(0, 0)
    assert go_on(directory, attempt=7, segment=3, resumed=True) == Position(7, 4)
    directory.metrics_file.write_bytes(WHOLE)
    assert go_on(directory, attempt=2, segment=0, resumed=True) == Position(4, 3)
    (tmp_path / "events.jsonl").write_text('{"attempt": 9, "event": "warn"}\n')
    assert go_on(directory) == Position(9, 3)
