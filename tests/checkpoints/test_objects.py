"""Checkpoints behind fsspec: the manifest completes them, nothing is renamed."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoints import examine
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.manager import Manager, holds_run
from checkpoints.objects import ObjectFiles, place
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import FakeEngine, holds, make_mesh, model, on_ranks, reference
from tests.launcher.test_train import BASE, last_of_each_step
from tests.launcher.test_train import place as corpus
from tests.spawn import Ranks

__all__ = ["corpus"]
VALUES = {version: reference(model(), version) for version in range(4)}


@pytest.fixture(params=["memory://bucket-{}/run", "file://{}/bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    where = str(tmp_path) if request.param.startswith("file") else tmp_path.name
    return request.param.format(where)


def on(url: str, action: Any, layout: tuple[int, int, int] = (2, 1, 1), **options: Any) -> list[Any]:
    """`action(engine, manager)` on every rank."""
    tp, pp, dp = layout

    def run(rank: int, exchange: Any) -> Any:
        engine = FakeEngine(model(), make_mesh(rank, tp, pp, dp))
        config = Checkpoint(store=url, **options)
        return action(engine, Manager(Path("unused"), config, engine.mesh, exchange=exchange))

    return on_ranks(tp * pp * dp, run)


def save(url: str, step: int, version: int, **options: Any) -> None:
    def action(engine: FakeEngine, manager: Manager) -> Path:
        engine.fill(VALUES[version], step)
        path = manager.save(engine, Cursor(attempt=10 * version + step, step=step), {"version": version})
        manager.wait()
        return path

    assert all(isinstance(path, Path) for path in on(url, action, **options))


def loaded(url: str, resume: str = "auto", layout: tuple[int, int, int] = (1, 2, 1)) -> list[Any]:
    def action(engine: FakeEngine, manager: Manager) -> Any:
        found = manager.restore(engine, resume)
        return (
            None if found is None else (found.extra["version"], holds(engine, VALUES[found.extra["version"]]))
        )

    return on(url, action, layout)


def test_saved_loaded_replaced_and_pruned(url: str) -> None:
    files, root = place(url)
    assert isinstance(files, ObjectFiles)
    assert loaded(url) == [None, None]
    for step, version in ((10, 0), (20, 1), (20, 2), (30, 3)):
        save(url, step, version, keep=2, keep_best=0)
        assert loaded(url) == [(version, True)] * 2
    assert files.names(root) == ["latest", "step-00000020", "step-00000030"]
    for step in (20, 30):  # two ranks and the manifest: nothing of a save that was replaced
        assert len(files.names(root / f"step-000000{step}")) == 3
    assert loaded(url, f"{url}/step-00000020") == [(2, True)] * 2
    assert holds_run(Path("unused"), Checkpoint(store=url))
    listed = examine.listing(files, root)
    assert [(one.step, one.health, one.latest) for one in listed] == [
        (20, "complete", False),
        (30, "complete", True),
    ]
    assert all(row.state == "sound" for row in examine.verify(files, root / "step-00000030"))


def test_a_path_on_the_disk_and_a_url_may_be_mixed(url: str, tmp_path: Path) -> None:
    save(str(tmp_path / "local"), 10, 1)
    assert loaded(url, str(tmp_path / "local")) == [(1, True)] * 2
    save(url, 20, 2)
    assert loaded(str(tmp_path / "local"), url) == [(2, True)] * 2
    for missing in (f"{url}/step-00000070", "memory://nowhere", "nothing://x"):
        assert all(isinstance(error, ValueError) for error in loaded(url, missing)), missing


def test_what_is_damaged_is_passed_over_and_what_is_unfinished_ignored(url: str) -> None:
    files, root = place(url)
    save(url, 10, 1)
    save(url, 20, 2)
    system, _ = fsspec.core.url_to_fs(url)
    name = next(n for n in files.names(root / "step-00000020") if n.endswith("rank-00001.safetensors"))
    target = str(root / "step-00000020" / name)
    data = system.cat_file(target)
    system.pipe_file(target, data[:-1] + bytes([data[-1] ^ 1]))
    assert loaded(url) == [(1, True)] * 2
    save(url, 30, 3)
    system.rm_file(str(root / "step-00000030" / "manifest.json"))
    assert loaded(url) == [(1, True)] * 2
    assert [one.health for one in examine.listing(files, root)] == ["complete", "damaged", "unfinished"]
    save(url, 40, 0)  # clears up what was not finished
    assert "step-00000030" not in files.names(root)


def test_nothing_appears_without_being_complete(tmp_path: Path) -> None:
    files, root = place(f"file://{tmp_path}")
    files.make_directory(root / "a")
    sink = files.create(root / "a" / "b")
    sink.write(b"half")
    sink.close()
    assert files.names(root / "a") == []
    sink = files.create(root / "a" / "b")
    sink.write(b"whole")
    assert files.names(root / "a") == []
    sink.sync()
    sink.close()
    assert files.names(root / "a") == ["b"]
    assert (files.size(root / "a" / "b"), files.read(root / "a" / "b", 1, 3)) == (5, b"hol")
    with pytest.raises(FileNotFoundError):
        files.size(root / "a" / "c")


def test_a_plain_path_is_the_disk(tmp_path: Path) -> None:
    files, path = place(str(tmp_path), renames=False)
    assert isinstance(files, LocalFiles) and not files.renames and path == tmp_path


def test_a_run_saves_at_a_url_and_resumes_from_it(corpus: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Its run directory may be lost: the checkpoints are elsewhere."""
    url = f"file://{tmp_path}/bucket"
    whole = [*BASE[:-1], "run.name=whole"]
    assert [f.code for f in ranks.launch(2, whole, corpus)] == [0, 0]
    arguments = [*BASE[:-1], f"checkpoint.store={url}"]
    first = [*arguments, "run.name=stored", "train.steps=6", "schedule=constant"]
    assert [f.code for f in ranks.launch(2, first, corpus)] == [0, 0]
    assert not (corpus / "runs" / "stored" / "checkpoints").exists()
    found = json.loads((tmp_path / "bucket" / "step-00000006" / "manifest.json").read_text())
    assert found["cursor"]["step"] == 6
    override = "resume_override=[train.steps,schedule]"
    results = ranks.launch(2, [*arguments, "run.name=other", override], corpus)
    assert [f.code for f in results] == [0, 0], results[0].stderr
    steps = last_of_each_step(corpus / "runs" / "other")
    assert sorted(steps) == list(range(7, 13))
    rates = {step: line["lr"] for step, line in last_of_each_step(corpus / "runs" / "whole").items()}
    assert {step: line["lr"] for step, line in steps.items()} == {step: rates[step] for step in steps}
    said = results[0].stdout
    assert "resume_override: train.steps was 6 and is 12" in said
    assert f"update 7 has learning rate {rates[7]:.6g} and begins at sample 24" in said
