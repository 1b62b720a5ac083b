"""Stopped, or refused by the disk, at every single operation: the old checkpoint or the new one loads."""

from functools import partial
from pathlib import Path

import pytest

from checkpoints import store
from checkpoints.config import Checkpoint
from checkpoints.manager import Manager, Restored
from megamodel.data.batch import Cursor
from tests.checkpoints.disk import BucketFiles, Crash, Disk, DiskFiles
from tests.checkpoints.fake import FakeEngine, Logical, holds, make_mesh, on_ranks, reference

RUN = Path("/runs/a")
TENSORS = [Logical("a", (5, 3), axis=0), Logical("b", (4,))]
RANKS = 2
VALUES = {version: reference(TENSORS, version) for version in range(4)}


def cursor(step: int, version: int) -> Cursor:
    return Cursor(attempt=100 * version + step, step=step, sample=version)


# How a checkpoint is committed: by renaming; by its manifest, on a disk; by its manifest, in an object store.
PLACES = {"rename": DiskFiles, "manifest": partial(DiskFiles, renames=False), "bucket": BucketFiles}


def work(disk: Disk, action, place: str = "rename"):
    """`action(engine, manager)` on every rank; the results, or what was raised."""

    def run(rank, exchange):
        engine = FakeEngine(TENSORS, make_mesh(rank, 2, 1, 1))
        files = PLACES[place](disk, rank)
        config = Checkpoint(keep=1, background=False)
        return action(
            engine, Manager(RUN, config, engine.mesh, files=files, exchange=exchange, block_bytes=128)
        )

    return on_ranks(RANKS, run)


def save(disk: Disk, step: int, version: int, place: str = "rename") -> list:
    def action(engine, manager):
        engine.fill(VALUES[version], step)
        return manager.save(engine, cursor(step, version), {"version": version})

    return work(disk, action, place)


def load(disk: Disk, place: str = "rename") -> list:
    """The version that each rank restored, after a look at every bit; or what was raised."""

    def action(engine, manager):
        answer = manager.restore(engine, "auto")
        if answer is None:
            return None
        version = answer.extra["version"]
        assert holds(engine, VALUES[version]) and answer.cursor.sample == version
        return version

    return work(disk, action, place)


def first_saved(place: str = "rename") -> Disk:
    """A disk with version 1 at step 10; the run's directory itself is durable."""
    disk = Disk()
    DiskFiles(disk).make_directory(RUN)
    for path in (RUN, *RUN.parents):
        DiskFiles(disk).sync_directory(path)
    save(disk, 10, 1, place)
    return disk


def operations(step: int, place: str = "rename") -> int:
    """How many there are in the second save; a few more or less by the order of the ranks."""
    disk = first_saved(place)
    disk.arm(0, "")
    assert all(isinstance(path, Path) for path in save(disk, step, 2, place))
    assert any("sync " in line for line in disk.log)
    assert any("rename" in line for line in disk.log) == (place == "rename")
    return disk.count


@pytest.mark.parametrize("step", [20, 10], ids=["another step", "the same step again"])
@pytest.mark.parametrize(
    ("place", "memory"),
    [
        *(("rename", memory) for memory in ("synced", "some", "all")),
        ("manifest", "some"),
        pytest.param("manifest", "synced", marks=pytest.mark.slow),
        pytest.param("manifest", "all", marks=pytest.mark.slow),
        ("bucket", "all"),
    ],
)
def test_the_machine_stops_at_every_operation(step: int, place: str, memory: str) -> None:
    outcomes = []
    for number in range(1, operations(step, place) + 2):
        disk = first_saved(place)
        disk.arm(number, "crash")
        results = save(disk, step, 2, place)
        survivor = disk.after_crash(memory, seed=number)
        _, faults = store.scan(PLACES[place](survivor), RUN / "checkpoints")
        assert faults == [], "what is half written or half deleted must not look like a damaged checkpoint"
        versions = load(survivor, place)
        assert versions in ([1, 1], [2, 2]), (number, disk.log[-3:], versions)
        if all(isinstance(result, Path) for result in results):
            assert versions == [2, 2], "a save that returned was lost"
        outcomes.append(versions[0])
        # and life goes on: the rubbish is cleared, the next save commits
        assert all(isinstance(path, Path) for path in save(survivor, 30, 3, place)), number
        assert load(survivor.after_crash("synced"), place) == [3, 3], number
        names = DiskFiles(survivor).names(RUN / "checkpoints")
        assert names == ["latest", "step-00000030"], (number, names)
        files = DiskFiles(survivor).names(RUN / "checkpoints" / "step-00000030")
        assert len(files) == 3, files
    assert outcomes[0] == 1 and outcomes[-1] == 2
    assert outcomes == sorted(outcomes) or memory == "some"


def test_stopped_again_while_clearing_up_after_the_first_stop() -> None:
    """Where only `.old` is left, the next save must bring it back before anything else."""
    left, number = first_saved(), 0
    while DiskFiles(left).names(RUN / "checkpoints") != [
        "latest",
        "step-00000010.old",
        "step-00000010.writing",
    ]:
        number += 1
        disk = first_saved()
        disk.arm(number, "crash")
        save(disk, 10, 2)
        left = disk.after_crash("all")
    for number in range(1, operations(30) + 10):
        for memory in ("synced", "all"):
            disk = left.after_crash("all")
            disk.arm(number, "crash")
            save(disk, 30, 3)
            assert load(disk.after_crash(memory)) in ([1, 1], [3, 3]), (number, memory)


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_is_killed_at_every_operation(rank: int) -> None:
    disk = first_saved()
    disk.arm(0, "", only=rank)
    save(disk, 20, 2)
    for number in range(1, disk.count + 1):
        killed = first_saved()
        killed.arm(number, "crash", only=rank)
        results = save(killed, 20, 2)
        assert isinstance(results[rank], Crash)
        assert load(killed.after_crash("all")) in ([1, 1], [2, 2]), number


@pytest.mark.parametrize(
    ("kind", "place"), [("ENOSPC", "rename"), ("EIO", "rename"), ("ENOSPC", "bucket"), ("EIO", "manifest")]
)
@pytest.mark.parametrize("step", [20, 10])
def test_the_disk_refuses_every_operation_of_a_save(kind: str, place: str, step: int) -> None:
    failures = 0
    for number in range(1, operations(step, place) + 1):
        disk = first_saved(place)
        disk.arm(number, kind)
        results = save(disk, step, 2, place)
        raised = [result for result in results if not isinstance(result, Path)]
        assert len(raised) in (0, RANKS), "the ranks must agree"
        assert all(isinstance(error, OSError | RuntimeError) for error in raised), raised
        assert not raised or any(isinstance(error, OSError) for error in raised)
        failures += bool(raised)
        disk.arm(0, "")
        versions = load(disk, place)
        assert versions in ([1, 1], [2, 2]), (number, versions)
        assert raised or versions == [2, 2]
        assert all(isinstance(path, Path) for path in save(disk, 30, 3, place)), number
        assert load(disk, place) == [3, 3]
    assert failures > 15


def test_the_disk_refuses_every_operation_of_a_load() -> None:
    disk = first_saved()
    disk.arm(0, "")
    assert load(disk) == [1, 1]
    for number in range(1, disk.count + 1):
        disk.arm(number, "EIO")
        versions = load(disk)
        assert versions == [1, 1] or all(isinstance(v, ValueError | OSError) for v in versions), versions


def test_without_rename_over_a_file() -> None:
    disk = first_saved()
    disk.rename_over = False
    assert all(isinstance(path, Path) for path in save(disk, 20, 2))
    assert bytes(disk.file(RUN / "checkpoints" / "latest").data) == b"step-00000020\n"
    for number in range(1, operations(20) + 3):
        disk = first_saved()
        disk.rename_over = False
        disk.arm(number, "crash")
        save(disk, 20, 2)
        assert load(disk.after_crash("some", seed=number)) in ([1, 1], [2, 2])


def test_restored_is_what_restore_returns() -> None:
    found = work(first_saved(), lambda engine, manager: manager.find("auto"))
    assert all(isinstance(item, Restored) and item.cursor == cursor(10, 1) for item in found)
