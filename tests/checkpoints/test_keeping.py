"""Which checkpoints stay, and how much of them is read."""

from pathlib import Path

import pytest

from checkpoints import load
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.keeping import HELD_OUT_LOSS, kept
from checkpoints.manager import Manager
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import FakeEngine, Logical, holds, make_mesh, on_ranks, reference
from tests.checkpoints.test_round_trip import restore, save

TENSORS = [Logical("a", (64, 64), axis=0)]


@pytest.mark.parametrize(
    ("present", "newest", "options", "stay"),
    [
        ([10, 20, 30, 40], 40, {"keep": 2, "keep_every": 0}, {30, 40}),
        ([10, 20, 30, 40], 40, {"keep": 0, "keep_every": 0}, {10, 20, 30, 40}),
        ([10, 20, 30, 40, 50], 50, {"keep": 1, "keep_every": 20}, {20, 40, 50}),
        ([10, 20, 30, 40], 40, {"keep": 1, "keep_every": 0, "protected": [10, 99]}, {10, 40}),
        # rewound from 40 to 20, saved 25: 30 and 40 are of a past that is no more, and count as the oldest
        ([10, 20, 25, 30, 40], 25, {"keep": 3, "keep_every": 0}, {10, 20, 25}),
        ([20, 25, 30, 40], 25, {"keep": 3, "keep_every": 0}, {20, 25, 40}),
        ([30, 40, 5], 5, {"keep": 1, "keep_every": 0}, {5}),
    ],
)
def test_kept(present, newest, options, stay) -> None:
    assert kept(present, newest=newest, **options).keys() == stay


def test_each_step_stays_for_the_first_reason_that_holds() -> None:
    """At most keep + keep_best + 2 beside the multiples; the best of an undone past does not count."""
    present = list(range(10, 130, 10))
    losses = {10: 3.0, 20: 1.5, 40: 2.0, 60: 1.0, 110: 2.5, 120: 0.1}
    stay = kept(present, newest=110, keep=2, keep_every=50, keep_best=2, protected=[70, 30], losses=losses)
    assert stay == {
        110: "newest",
        70: "protected",
        30: "protected",
        60: "best",
        20: "best",
        50: "every",
        100: "every",
    }
    # 110 and 100 are the last two; 120 is of a past that a rewind undid
    assert len(stay) - 2 <= 2 + 2 + 2
    assert kept(present, newest=120, keep=2, keep_best=1, losses=losses) == {120: "newest", 110: "last"}
    assert kept([10, 20, 30], newest=30, keep=1, keep_best=1, losses={}) == {30: "newest"}


def test_the_best_by_held_out_loss_stays(tmp_path: Path) -> None:
    """Also when another process saved it; a damaged manifest has no loss."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, "NaN"), (50, None)):
        engine = FakeEngine(TENSORS, make_mesh(0, 1, 1, 1))
        engine.fill(reference(TENSORS), step)
        config = Checkpoint(background=False, keep=1, keep_best=1)
        extra = {} if loss is None else {HELD_OUT_LOSS: loss}
        Manager(tmp_path, config, engine.mesh).save(engine, Cursor(attempt=step, step=step), extra)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000020", "step-00000050"]


def test_pruning_after_each_save(tmp_path: Path) -> None:
    values = reference(TENSORS)
    for step in range(10, 70, 10):
        save(tmp_path, TENSORS, (1, 1, 1), values, Cursor(attempt=step, step=step), keep=2, keep_every=30)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000030", "step-00000050", "step-00000060"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first, second = reference(TENSORS, 1), reference(TENSORS, 2)
    save(tmp_path, TENSORS, (2, 1, 1), first, Cursor(attempt=10, step=10))
    save(tmp_path, TENSORS, (1, 1, 1), second, Cursor(attempt=15, step=10))
    assert holds(restore(tmp_path, TENSORS, (1, 1, 1))[0][0], second)
    directory = tmp_path / "checkpoints" / "step-00000010"
    assert sorted(p.name for p in directory.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert sorted(p.name for p in directory.parent.iterdir()) == ["latest", "step-00000010"]


def test_latest_is_the_pointer_or_the_newest(tmp_path: Path) -> None:
    mesh = make_mesh(0, 1, 1, 1)
    manager = Manager(tmp_path, Checkpoint(background=False), mesh)
    assert manager.latest() is None
    for step in (10, 20):
        save(tmp_path, TENSORS, (1, 1, 1), reference(TENSORS), Cursor(attempt=step, step=step))
    root = tmp_path / "checkpoints"
    assert manager.latest() == root / "step-00000020"
    (root / "latest").write_text("step-00000010\n")
    assert manager.latest() == root / "step-00000010"
    (root / "latest").write_text("../../elsewhere\n")
    assert manager.latest() == root / "step-00000020"
    (root / "latest").unlink()
    assert manager.latest() == root / "step-00000020"


class Counting(LocalFiles):
    """Remembers how much was read of which file."""

    def __init__(self) -> None:
        self.read_bytes: dict[str, int] = {}

    def read_into(self, path: Path, start: int, target: memoryview) -> int:
        count = super().read_into(path, start, target)
        self.read_bytes[path.name] = self.read_bytes.get(path.name, 0) + count
        return count


def test_a_rank_reads_only_the_blocks_it_needs(tmp_path: Path) -> None:
    """One file of 64 rows of 64; half of the rows are wanted: about half is read, in blocks of 512 bytes."""
    values = reference(TENSORS)
    path = save(tmp_path, TENSORS, (1, 1, 1), values)
    size = (path / "rank-00000.safetensors").stat().st_size
    counting = [Counting(), Counting()]

    def work(rank, exchange):
        engine = FakeEngine(TENSORS, make_mesh(rank, 2, 1, 1))
        manager = Manager(
            tmp_path, Checkpoint(background=False), engine.mesh, files=counting[rank], exchange=exchange
        )
        manager.restore(engine, "auto")
        return holds(engine, values)

    assert on_ranks(2, work) == [True, True]
    for files in counting:
        # the header is in blocks of its own twice (heads, then loading); each of 4 kinds may share two blocks
        assert size / 2 - 512 <= files.read_bytes["rank-00000.safetensors"] <= size / 2 + 512 * 16


def test_each_block_is_read_about_once_from_any_layout(tmp_path: Path) -> None:
    """Eight files that hold every tensor in turns: still in the order of the files, not to and fro."""
    tensors = [Logical(f"t{i}", (8, 16), axis=1) for i in range(40)]
    path = save(tmp_path, tensors, (4, 1, 2), reference(tensors))
    sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert len(sizes) == 8
    files = Counting()
    engine = FakeEngine(tensors, make_mesh(0, 1, 1, 1))
    assert Manager(tmp_path, Checkpoint(background=False), engine.mesh, files=files).restore(engine, "auto")
    assert holds(engine, reference(tensors))
    for name, size in sizes.items():
        header = int.from_bytes((path / name).read_bytes()[:8], "little") + 8
        # its header for each thread that comes by and once before, its content, and where runs meet
        assert size - header <= files.read_bytes[name] <= size + 2 * header + 6 * 512


@pytest.mark.parametrize("read_bytes", [4, 100, 5000])
def test_reading_in_small_parts_gives_the_same(tmp_path: Path, monkeypatch, read_bytes: int) -> None:
    monkeypatch.setattr(load, "READ_BYTES", read_bytes)
    tensors = [Logical("a", (24, 12), axis=1), Logical("e", (3, 8, 5), axis=1), Logical("s", ())]
    values = reference(tensors)
    save(tmp_path, tensors, (2, 1, 2), values)
    assert all(holds(engine, values) for engine, _, _ in restore(tmp_path, tensors, (1, 2, 2)))


def test_a_negative_number_is_refused() -> None:
    for name in ("every", "keep", "keep_every"):
        with pytest.raises(ValueError, match=rf"checkpoint\.{name} \(-1\)"):
            Checkpoint(**{name: -1})
