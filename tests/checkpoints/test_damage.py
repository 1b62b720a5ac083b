"""Whatever was changed on the disk is found, named, never loaded; the older checkpoint takes over."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest

from checkpoints import examine
from checkpoints.choose import Rewind, condemned
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.manager import Manager, holds_run
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import FakeEngine, Logical, holds, make_mesh, reference
from tests.checkpoints.test_round_trip import refused, restore, save

TENSORS = [Logical("a", (40, 8), axis=0), Logical("b", (8,)), Logical("c", (6, 6), axis=1, stage=0.9)]
OLD, NEW = reference(TENSORS, 1), reference(TENSORS, 2)
LAYOUT = (2, 2, 1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save(tmp_path, TENSORS, LAYOUT, OLD, Cursor(attempt=10, step=10))
    save(tmp_path, TENSORS, LAYOUT, NEW, Cursor(attempt=20, step=20))
    return tmp_path


def faults_of(directory: Path) -> list[str]:
    """Every file of a checkpoint that is not sound, and how."""
    rows = examine.verify(LocalFiles(), directory)
    return [f"{directory / row.file} is {row.state}" for row in rows if row.state != examine.SOUND]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_ranks(path: Path) -> None:
    """Two files of one checkpoint change places."""
    other = path.with_name("rank-00000.safetensors")
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def swap_steps(path: Path) -> None:
    """The same rank's file of another step: every header fits, only the sums do not."""
    shutil.copy(path.parent.parent / "step-00000010" / path.name, path)


DAMAGES = {
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "swapped within": swap_ranks,
    "swapped between": swap_steps,
    "first bit": lambda path: flip(path, 0),
    "header bit": lambda path: flip(path, 40),
    "last bit": lambda path: flip(path, -1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layout", [LAYOUT, (1, 1, 1)])
def test_a_damaged_file_is_named_and_the_older_step_is_taken(run_dir: Path, damage: str, layout) -> None:
    path = run_dir / "checkpoints" / "step-00000020" / "rank-00003.safetensors"
    assert faults_of(path.parent) == []
    DAMAGES[damage](path)
    faults = faults_of(path.parent)
    assert faults and any(str(path) in fault for fault in faults), faults
    results = restore(run_dir, TENSORS, layout)
    assert all(holds(engine, OLD) and engine.loaded == [10] for engine, _, _ in results)
    said = results[0][2]
    assert any("rank-0000" in line and "falling back" in line for line in said), said
    assert any("step-00000010" in line for line in said)
    # by name it is refused
    assert "rank-0000" in refused(run_dir, TENSORS, layout, str(path.parent))
    # and when the older one is gone too, nothing starts afresh by itself
    shutil.rmtree(run_dir / "checkpoints" / "step-00000010")
    message = refused(run_dir, TENSORS, layout)
    assert "rank-0000" in message and "start afresh" in message


def test_every_bit_matters(run_dir: Path) -> None:
    """A bit flipped anywhere in any file is seen by the rank that needs it, whichever that is."""
    directory = run_dir / "checkpoints" / "step-00000020"
    for path in sorted(directory.iterdir()):
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 9)):
            flip(path, position)
            assert any(str(path) in fault for fault in faults_of(directory)), (
                path,
                position,
            )
            engine, _, said = restore(run_dir, TENSORS, (1, 1, 1))[0]
            assert holds(engine, OLD), (path, position)
            assert any(str(path) in line for line in said)
            path.write_bytes(original)
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], NEW)


def rewrite(path: Path, change) -> None:
    """A forged manifest: changed, with a checksum that fits."""
    raw = json.loads(path.read_text())
    raw.pop("checksum")
    change(raw)
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    raw["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(raw))


def forge(raw: dict, **changes) -> None:
    raw["pieces"][0].update(changes)


FORGERIES = {
    "a file elsewhere": lambda raw: raw["files"][0].update(name="../../outside.safetensors"),
    "an absolute file": lambda raw: raw["files"][0].update(name="/etc/passwd"),
    "a negative offset": lambda raw: forge(raw, offset=[-1, 0]),
    "a box outside": lambda raw: forge(raw, extent=[10**12, 8]),
    "more than the box": lambda raw: forge(raw, count=10**12),
    "another kind": lambda raw: forge(raw, kind="code"),
    "another dtype": lambda raw: forge(raw, dtype="I64"),
    "a number as text": lambda raw: forge(raw, count="12"),
    "a truth as number": lambda raw: forge(raw, start=False),
    "an unknown field": lambda raw: forge(raw, reduce="x"),
    "no cursor": lambda raw: raw.pop("cursor"),
    "another step": lambda raw: raw["cursor"].update(step=21),
    "huge blocks": lambda raw: raw.update(block_bytes=2**40),
    "empty blocks": lambda raw: raw.update(block_bytes=0),
    "fewer blocks": lambda raw: raw["files"][0]["blocks"].pop(),
    "a later format": lambda raw: raw.update(version=2),
    "a list": lambda raw: raw.update(extra=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused(run_dir: Path, forgery: str) -> None:
    path = run_dir / "checkpoints" / "step-00000020" / "manifest.json"
    rewrite(path, FORGERIES[forgery])
    assert faults_of(path.parent)
    engine, answer, said = restore(run_dir, TENSORS, (1, 1, 1))[0]
    assert holds(engine, OLD) and answer.path.name == "step-00000010"
    assert any(str(path) in line for line in said), said


def test_a_piece_held_twice_or_not_at_all_is_refused(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step-00000020" / "manifest.json"
    rewrite(path, lambda raw: raw["pieces"].append(raw["pieces"][0]))
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], OLD)
    rewrite(path, lambda raw: (raw["pieces"].pop(), raw["pieces"].pop(0)))
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], OLD)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000, b"\x80\x04\x95cos\nsystem\n", b'{"step": NaN}', b"null", b"1" * 5000],
)
def test_a_manifest_that_is_none(run_dir: Path, content: bytes) -> None:
    path = run_dir / "checkpoints" / "step-00000020" / "manifest.json"
    path.write_bytes(content)
    assert holds(restore(run_dir, TENSORS, (2, 1, 1))[0][0], OLD)


def test_directories_that_changed_places(run_dir: Path) -> None:
    root = run_dir / "checkpoints"
    (root / "step-00000020").rename(root / "step-00000030")
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], OLD)


def test_newest_is_what_was_tried_last(run_dir: Path) -> None:
    """After a rewind to 10 a save at 15 is newer than the one at 20; a condemned one is never taken."""
    rewound = reference(TENSORS, 3)
    save(run_dir, TENSORS, LAYOUT, rewound, Cursor(attempt=26, step=15))
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], rewound)
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-00000015\n"

    def chosen(*rewinds: Rewind) -> int | None:
        engine = FakeEngine(TENSORS, make_mesh(0, 1, 1, 1))
        found = Manager(run_dir, Checkpoint(background=False), engine.mesh).restore(
            engine, "auto", rewinds=rewinds
        )
        return found and found.cursor.step

    assert chosen(Rewind(attempt=21, snapshot_step=10)) == 15
    assert chosen(Rewind(attempt=27, snapshot_step=14)) == 10
    assert chosen(Rewind(attempt=27, snapshot_step=14), Rewind(attempt=27, snapshot_step=9)) is None
    assert not condemned(Cursor(attempt=20, step=10), [Rewind(attempt=20, snapshot_step=10)])
    assert condemned(Cursor(attempt=20, step=11), [Rewind(attempt=20, snapshot_step=10)])
    assert not condemned(Cursor(attempt=21, step=11), [Rewind(attempt=20, snapshot_step=10)])


def test_refused_by_the_caller_before_anything_is_loaded(run_dir: Path) -> None:
    engine = FakeEngine(TENSORS, make_mesh(0, 1, 1, 1))
    manager = Manager(run_dir, Checkpoint(background=False), engine.mesh)

    def accept(found) -> None:
        raise ValueError(f"seed {found.about.configuration['train']['seed']} is not 2")

    with pytest.raises(ValueError, match="seed 1 is not 2"):
        manager.restore(engine, "auto", accept=accept)
    assert engine.loaded == [] and not any(memory.any() for memory in engine.memory.values())


def test_an_outside_number_in_extra_is_refused_before_writing(tmp_path: Path) -> None:
    engine = FakeEngine(TENSORS, make_mesh(0, 1, 1, 1))
    manager = Manager(tmp_path, Checkpoint(background=False), engine.mesh)
    for extra in ({"x": float("nan")}, {"x": {1, 2}}, {"x": engine}):
        with pytest.raises(ValueError, match="plain JSON"):
            manager.save(engine, Cursor(), extra)
    assert not (tmp_path / "checkpoints").exists()


def test_holds_run(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert holds_run(run_dir, Checkpoint())
    other = tmp_path_factory.mktemp("other")
    assert not holds_run(other, Checkpoint()) and not holds_run(other / "gone", Checkpoint())
    (other / "config.yaml").write_text("")  # written before it is known whether the run starts
    assert not holds_run(other, Checkpoint())
    (other / "metrics.jsonl").write_text("")
    assert holds_run(other, Checkpoint())


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_booby_traps_do_not_go_off(run_dir: Path, tmp_path: Path) -> None:
    """Pickled code under every name that a checkpoint has, or that others load: refused, never run."""
    mark = tmp_path / "gone-off"
    code = pickle.dumps(Trap(mark))
    pickle.loads(code)
    assert mark.exists()  # the trap is a trap
    mark.unlink()
    step = run_dir / "checkpoints" / "step-00000020"
    (step / "rank-00000.safetensors").write_bytes(code)
    engine = restore(run_dir, TENSORS, (1, 1, 1))[0][0]
    assert holds(engine, OLD)
    (step / "manifest.json").write_bytes(code)
    assert holds(restore(run_dir, TENSORS, (1, 1, 1))[0][0], OLD)
    for name in ("model.pt", "pytorch_model.bin", "weights.npy"):
        file = tmp_path / name
        file.write_bytes(code)
        assert "no" in refused(run_dir, TENSORS, (1, 1, 1), str(file))
        folder = tmp_path / f"folder-{name}"
        folder.mkdir()
        (folder / name).write_bytes(code)
        assert "not a complete checkpoint" in refused(run_dir, TENSORS, (1, 1, 1), str(folder))
    assert {row.state for row in examine.verify(LocalFiles(), step)} == {"damaged"}
    assert not mark.exists()
