"""Copies in host memory: training goes on while they are written, and they can be gone back to."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.choose import Rewind
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.layout import Stretch
from checkpoints.manager import Manager
from checkpoints.snapshots import Slot, Writer
from checkpoints.state import Part
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import FakeEngine, holds, make_mesh, model, on_ranks, reference

VALUES = {step: reference(model(), step) for step in (10, 20, 30, 40)}


def at(step: int) -> Cursor:
    return Cursor(attempt=step, step=step)


class Gate(LocalFiles):
    """No file is begun before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def create(self, path: Path) -> Any:
        assert self.gate.wait(60)
        return super().create(path)


class Broken(LocalFiles):
    def create(self, path: Path) -> Any:
        raise OSError(28, "No space left on device")


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    """The memory that was saved is overwritten before the first byte is written."""

    def work(rank, exchange):
        files = Gate()
        engine = FakeEngine(model(), make_mesh(rank, 2, 1, 1))
        manager = Manager(tmp_path, Checkpoint(), engine.mesh, files=files, exchange=exchange)
        extra = {"history": [1.0]}
        engine.fill(VALUES[10], 10)
        manager.save(engine, at(10), extra)
        assert manager.latest() is None
        extra["history"].append(2.0)
        engine.fill(VALUES[20], 20)
        files.gate.set()
        manager.save(engine, at(20), extra)  # waits for the one before
        engine.fill(VALUES[30], 30)
        manager.check()
        manager.save(engine, at(30), extra)
        for memory in engine.memory.values():
            memory.zero_()
        # a load waits for what is being written
        answers = []
        for step in (30, 10, 20):
            resume = "auto" if step == 30 else str(tmp_path / "checkpoints" / f"step-{step:08d}")
            found = manager.restore(engine, resume)
            assert found
            answers.append(
                (found.cursor.step, found.extra, holds(engine, VALUES[step]), engine.optimizer_step)
            )
        assert manager.write_seconds > 0 and manager.stall_seconds > 0
        return answers

    expected = [(30, {"history": [1.0, 2.0]}, True, 30), (10, {"history": [1.0]}, True, 10)]
    expected.append((20, {"history": [1.0, 2.0]}, True, 20))
    assert on_ranks(2, work) == [expected, expected]


def test_a_failed_background_save_is_raised_on_every_rank(tmp_path: Path) -> None:
    def work(rank, exchange):
        engine = FakeEngine(model(), make_mesh(rank, 2, 1, 1))
        files = Broken() if rank == 1 else LocalFiles()
        manager = Manager(tmp_path, Checkpoint(), engine.mesh, files=files, exchange=exchange)
        manager.save(engine, at(10), {})
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            manager.wait()
        manager.wait()  # told once
        assert manager.latest() is None
        return "raised"

    assert on_ranks(2, work) == ["raised", "raised"]


def test_check_tells_of_a_failure_without_waiting() -> None:
    writer, gate = Writer(), threading.Event()

    def fail() -> None:
        gate.wait(60)
        raise OSError("full")

    writer.start(fail)
    writer.check()
    gate.set()
    with pytest.raises(OSError, match="full"):
        writer.wait()
    ran = []
    writer.start(lambda: ran.append(1))
    writer.wait()
    assert ran == [1]


def rewinding(run_dir: Path, rank: int, exchange: Any, steps=(10, 20, 30, 40)) -> tuple[Manager, FakeEngine]:
    """Two snapshots are kept; steps 10 and 30 are saved too."""
    engine = FakeEngine(model(), make_mesh(rank, 1, 2, 1))
    config = Checkpoint(snapshot_every=10, snapshots=2)
    manager = Manager(run_dir, config, engine.mesh, exchange=exchange)
    for step in steps:
        engine.fill(VALUES[step], step)
        manager.snapshot(engine, at(step), {"step": step})
        if step in (10, 30):
            manager.save(engine, at(step), {"step": step})
    return manager, engine


@pytest.mark.parametrize(
    ("to", "step", "source"), [(40, 40, "memory"), (39, 30, "memory"), (29, 10, "file"), (10, 10, "file")]
)
def test_rewind(tmp_path: Path, to: int, step: int, source: str) -> None:
    def work(rank, exchange):
        manager, engine = rewinding(tmp_path, rank, exchange)
        for memory in engine.memory.values():
            memory.fill_(9.0)
        answer = manager.rewind(engine, to)
        assert answer.cursor == at(step) and answer.extra == {"step": step}
        assert answer.source == ("memory" if source == "memory" else f"{manager.directory}/step-{step:08d}")
        return holds(engine, VALUES[step]), engine.optimizer_step

    assert on_ranks(2, work) == [(True, step)] * 2


def test_a_rewind_leaves_nothing_of_the_undone_past(tmp_path: Path) -> None:
    def work(rank, exchange):
        manager, engine = rewinding(tmp_path, rank, exchange)
        assert manager.rewind(engine, 35).cursor.step == 30
        assert manager.rewind(engine, 99).cursor.step == 30  # the one of step 40 is gone
        # a file between the snapshot and the alarm is condemned
        assert manager.rewind(engine, 29).cursor.step == 10
        manager.save(engine, Cursor(attempt=50, step=20), {"step": 20})
        condemning = [Rewind(attempt=40, snapshot_step=10)]
        assert manager.rewind(engine, 35, rewinds=condemning).cursor.attempt == 50
        with pytest.raises(ValueError, match="at most 9 steps"):
            manager.rewind(engine, 9)
        return engine.optimizer_step

    assert on_ranks(2, work) == [10, 10]


def test_a_save_of_a_snapshot_copies_nothing_and_its_memory_waits(tmp_path: Path) -> None:
    """One copy for the ring and the file; the slot is not given to another step before it is written."""

    def work(rank, exchange):
        files = Gate()
        engine = FakeEngine(model(), make_mesh(rank, 1, 1, 1))
        config = Checkpoint(snapshot_every=1, snapshots=1)
        manager = Manager(tmp_path, config, engine.mesh, files=files, exchange=exchange)
        size = sum(part.tensor.numel() * part.tensor.element_size() for part in engine.state())
        assert manager.host_bytes(engine) == 2 * size
        engine.fill(VALUES[10], 10)
        manager.snapshot(engine, at(10), {"a": 1})
        engine.fill(VALUES[20], 20)  # the live state has moved on: only the copy can be meant
        manager.save(engine, at(10), {"a": 2})
        opener = threading.Timer(0.2, files.gate.set)
        opener.start()
        manager.snapshot(engine, at(20), {})  # takes the only slot, once it is written
        assert files.gate.is_set() and manager.latest() is not None
        costs = manager.take()
        assert costs.stall_seconds is not None and costs.stall_seconds > 0
        assert [written.path.name for written in costs.written] == ["step-00000010"]
        assert manager.take().stall_seconds is None
        found = manager.restore(engine, "auto")
        assert found and found.extra == {"a": 2}
        return holds(engine, VALUES[10])

    assert on_ranks(1, work) == [True]


@pytest.mark.gpu
def test_copies_of_a_gpu_lie_in_pinned_memory() -> None:
    part = Part("a", "master", Stretch((8,), (0,), (8,), 0, 8), True, torch.arange(8.0, device="cuda"))
    (copied,) = Slot().fill([part])
    assert copied.tensor.is_pinned() and copied.tensor.tolist() == list(range(8))
