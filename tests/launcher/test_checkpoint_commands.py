"""The commands on checkpoints: every damage is named, statistics are right, reshaping moves every bit."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import examine, load
from checkpoints import manifest as manifests
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.manager import About, Manager
from checkpoints.store import Found
from conf.schema import plain
from launcher import __main__ as command_line
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import Logical, reference
from tests.checkpoints.test_damage import LAYOUT, NEW, OLD, TENSORS, flip, swap_ranks, swap_steps, truncate
from tests.checkpoints.test_engine import equal, update
from tests.checkpoints.test_round_trip import save
from tests.parallel.training import Case, build, join, logical_state, settings
from tests.spawn import Ranks

FILES = LocalFiles()
SAVED = Case(tp=2, pp=2, dp=2, n_layers=5, vocabulary=257, tied=True)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save(tmp_path, TENSORS, LAYOUT, OLD, Cursor(attempt=10, step=10))
    save(tmp_path, TENSORS, LAYOUT, NEW, Cursor(attempt=20, step=20))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert command_line.main(list(arguments)) == code
    return capsys.readouterr().out


def test_sound_checkpoints_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "verify", f"source={run_dir}")
    assert "step-00000010: sound" in text and text.endswith("2 of 2 checkpoints sound\n")
    told = json.loads(run(capsys, "verify", f"source={run_dir}/checkpoints/step-00000020", "format=json"))
    assert told["damaged"] is False and len(told["checkpoints"]) == 1
    names = [row["file"] for row in told["checkpoints"][0]["files"]]
    assert names == ["manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(4))]


@pytest.mark.parametrize(
    ("damage", "state", "detail"),
    [
        (truncate, "truncated", "bytes instead of"),
        (Path.unlink, "missing", "no such file"),
        (lambda path: flip(path, -1), "changed", "do not fit their checksum"),
        (lambda path: flip(path, 3), "changed", "bytes 0 to 512"),
        (swap_ranks, "swapped", "belongs into rank-00000.safetensors"),
        (swap_steps, "swapped", "belongs into step-00000010/rank-00003.safetensors"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "longer", "bytes instead of"),
    ],
)
def test_each_damage_is_named(
    damage: Any, state: str, detail: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_dir / "checkpoints" / "step-00000020"
    damage(directory / "rank-00003.safetensors")
    text = run(capsys, "verify", f"source={run_dir}", code=1)
    assert "step-00000010: sound" in text and "step-00000020: damaged" in text
    told = json.loads(run(capsys, "verify", f"source={directory}", "format=json", code=1))
    assert told["damaged"] is True
    rows = {row["file"]: row for row in told["checkpoints"][0]["files"]}
    row = rows["rank-00003.safetensors"]
    assert row["state"] == state and detail in row["detail"]
    assert f"{state}  {row['detail']}" in text
    sound = {name for name, row in rows.items() if row["state"] == "sound"}
    assert sound == rows.keys() - {"rank-00003.safetensors"} - (
        {"rank-00000.safetensors"} if damage is swap_ranks else set()
    )


def test_a_damaged_block_names_what_lies_in_it(run_dir: Path) -> None:
    """The last bit of a file is in the last entry; one entry before it is 6 x 6 floats of 4 bytes further."""
    directory = run_dir / "checkpoints" / "step-00000020"
    content, _ = manifests.read(FILES, directory)
    last = [entry for entry in content.pieces if entry.file == "rank-00003.safetensors"][-1]
    flip(directory / "rank-00003.safetensors", -1)
    (row,) = [row for row in examine.verify(FILES, directory) if row.state != "sound"]
    assert row.tensors[-1] == f"{last.kind} of {last.name}"


def test_a_damaged_manifest_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_dir / "checkpoints" / "step-00000020"
    flip(directory / "manifest.json", 100)
    assert "manifest.json" in run(capsys, "verify", f"source={directory}", code=1)
    (directory / "manifest.json").unlink()
    assert "missing" in run(capsys, "verify", f"source={directory}", code=1)


def test_the_list_of_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_dir / "checkpoints"
    (root / "step-00000030.writing").mkdir()
    truncate(root / "step-00000010" / "rank-00001.safetensors")
    told = json.loads(run(capsys, "checkpoints", f"source={run_dir}", "format=json"))["checkpoints"]
    assert [(one["step"], one["health"], one["latest"]) for one in told] == [
        (10, "damaged", False),
        (20, "complete", True),
        (30, "unfinished", False),
    ]
    assert "rank-00001.safetensors" in told[0]["detail"]
    assert told[1]["layout"] == {"tp": 2, "pp": 2, "dp": 1} and 0 <= told[1]["age_seconds"] < 300
    sizes = sum(file.stat().st_size for file in (root / "step-00000020").glob("*.safetensors"))
    assert told[1]["bytes"] == sizes
    text = run(capsys, "checkpoints", f"source={root}")
    assert "tp2 pp2 dp1" in text and "complete (latest)" in text
    assert run(capsys, "checkpoints", f"source={root / 'step-00000020'}").count("\n") == 2


def test_statistics_of_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [Logical("a", (40, 8), axis=0)]
    values = reference(tensors)
    master = values["master", "a"]
    drawn = np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)
    master.copy_(torch.from_numpy(drawn))
    master[3, 4], master[0, 0], master[0, 1] = float("nan"), float("-inf"), 0.0
    save(tmp_path, tensors, (2, 1, 2), values, Cursor(attempt=7, step=7))
    arguments = ["inspect", f"source={tmp_path}", "tensor=a", "kind=master", "format=json"]
    told = json.loads(run(capsys, *arguments))
    assert (told["tensor"], told["step"], list(told["kinds"])) == ("a", 7, ["master"])
    facts = told["kinds"]["master"]
    finite = master.numpy().astype(np.float64).reshape(-1)
    finite = finite[np.isfinite(finite)]
    assert (facts["shape"], facts["dtype"]) == ([40, 8], "F32")
    assert (facts["count"], facts["non_finite"], facts["zeros"]) == (320, 2, 1)
    for name, value in (
        ("mean", finite.mean()),
        ("std", finite.std()),
        ("min", finite.min()),
        ("max", finite.max()),
        ("l2", np.linalg.norm(finite)),
        ("rms", np.sqrt((finite**2).mean())),
    ):
        assert facts[name] == pytest.approx(value, rel=1e-9), name
    assert "exp_avg_sq" in run(capsys, "inspect", f"source={tmp_path}", "tensor=a")
    (listed,) = json.loads(run(capsys, "inspect", f"source={tmp_path}", "format=json"))["tensors"]
    assert (listed["name"], listed["shape"]) == ("a", [40, 8])
    assert set(listed["kinds"]) == {"parameter", "master", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify"], "source must be given"),
        (["verify", "source=gone"], "gone does not exist or is empty"),
        (["checkpoints", "source=gone"], "gone does not exist or is empty"),
        (["inspect", "source={run}", "tensor=x"], "has no tensor x"),
        (["reshape", "source={run}", "target={run}/b"], "does not say of which model"),
        (["verify", "source=nothing://x/y"], "nothing://x/y cannot be opened"),
    ],
)
def test_wrong_input_is_code_2(
    arguments: list[str], words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([argument.format(run=run_dir) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == ""


def begin(case: Case, run_dir: str) -> list[Any]:
    engine = build(case)
    for step in (1, 2):
        update(engine, case, step)
    about = About({"model": plain(settings(case)), "parallel": {"tp": 2}})
    Manager(Path(run_dir), Checkpoint(background=False), engine.mesh, about).save(
        engine, Cursor(attempt=2, step=2, sample=16), {"segment": 3}
    )
    return logical_state(engine)


def go_on(case: Case, source: str, target: str) -> dict[str, Any]:
    """Restore, save at this layout, one update."""
    engine = build(case)
    manager = Manager(Path(target), Checkpoint(background=False), engine.mesh)
    found = manager.restore(engine, source)
    assert found and found.cursor.sample == 16 and found.extra == {"segment": 3}
    manager.save(engine, found.cursor, {})
    return {"state": logical_state(engine), "next": update(engine, case, 3)}


def pieces(directory: Path) -> set[tuple[Any, ...]]:
    """What is in which rank's file."""
    content, _ = manifests.read(FILES, directory)
    return {(e.file, e.kind, e.name, e.shape, e.offset, e.extent, e.start, e.count) for e in content.pieces}


@pytest.mark.parametrize("tp_pp", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_reshaped_offline_is_what_that_layout_would_have_saved(
    tp_pp: tuple[int, int],
    ranks: Ranks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From tp 2 x pp 2 x dp 2: ragged vocabulary, tied, five layers, k/v heads replicated at tp 4."""
    source, target, online = (str(tmp_path / name) for name in ("source", "target", "online"))
    state = join([part for parts in ranks.run(8, begin, SAVED, source) for part in parts])
    at_once = []
    stage = load.stage
    monkeypatch.setattr(
        load, "stage", lambda files, found, parts: at_once.append(len(parts)) or stage(files, found, parts)
    )
    tp, pp = tp_pp
    arguments = ["reshape", f"source={source}", f"target={target}", f"parallel.tp={tp}", f"parallel.pp={pp}"]
    told = json.loads(run(capsys, *arguments, "format=json"))
    assert told == {
        "source": f"{source}/checkpoints/step-00000002",
        "target": f"{target}/step-00000002",
        "step": 2,
        "layout": {"tp": tp, "pp": pp, "dp": 1},
    }
    assert set(at_once) == {1}, "more than one stretch in memory"
    directory = Path(told["target"])
    assert all(row.state == "sound" for row in examine.verify(FILES, directory))
    found = Found(directory, *manifests.read(FILES, directory))
    for (name, kind), value in state.items():
        assert np.array_equal(examine.whole(FILES, found, name, kind).numpy(), value), (name, kind)
    case = replace(SAVED, tp=tp, pp=pp, dp=1)
    results = ranks.run(case.world, go_on, case, target, online)
    assert equal(join([part for result in results for part in result["state"]]), state)
    assert pieces(directory) == pieces(Path(online) / "checkpoints" / "step-00000002")
    straight = ranks.run(8, go_on, SAVED, source, str(tmp_path / "again"))
    np.testing.assert_allclose(results[0]["next"], straight[0]["next"], rtol=1e-5)
    assert found.manifest.configuration["parallel"]["tp"] == tp
    assert sum(e.count for e in found.manifest.pieces) == 3 * sum(
        prod(v.shape) for (_, k), v in state.items() if k == "master"
    )


def test_a_layout_that_does_not_divide_is_refused(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(1, begin, replace(SAVED, tp=1, pp=1, dp=1), str(tmp_path))
    for layout, words in (("parallel.tp=3", "3"), ("parallel.pp=6", "parallel.pp (6)")):
        assert command_line.main(["reshape", f"source={tmp_path}", f"target={tmp_path}/b", layout]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    inside = f"target={tmp_path}/checkpoints"
    assert command_line.main(["reshape", f"source={tmp_path}", inside]) == 2
    assert "holds the source" in capsys.readouterr().err
