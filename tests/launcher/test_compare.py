"""Runs side by side: from runs written by hand, so that every number of the table is known."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conf.saved import to_yaml
from conf.schema import plain
from conf.typed import parse
from launcher.__main__ import main
from launcher.config import Config
from megamodel.accounting import parameter_count
from megamodel.config import Model

MODEL = {
    "vocab_size": 64,
    "d_model": 32,
    "n_layers": 1,
    "attention": {"n_heads": 2, "n_kv_heads": 2, "head_width": 16},
}


def run(place: Path, name: str, settings: dict[str, Any], lines: list[dict[str, Any]]) -> Path:
    path = place / name
    path.mkdir()
    tree = parse(Config, {"run": {"name": name}, "model": MODEL} | settings)
    (path / "config.yaml").write_text(to_yaml(plain(tree)))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 99, "monitor/verd')  # still being written
    return path


def line(step: int, loss: float, verdict: int = 0, **more: float) -> dict[str, Any]:
    known = {"step": step, "attempt": step, "segment": 0, "monitor/verdict": verdict, "loss/train": loss}
    return {**known, "tokens/total": 8 * step, "speed/tokens_per_second": 100.0 + step, **more}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    first = [line(step, 5.0 - 0.1 * step) for step in range(1, 31)]
    first[-1]["loss/eval"] = 2.5
    second = [line(step, 6.0 - 0.1 * step) for step in range(1, 31)]
    second[-1]["loss/eval"] = 2.25
    # The last line of step 30 counts, and neither what was refused nor what was undone.
    undone = [line(30, 9.0, verdict=1), line(31, 50.0, verdict=2), line(31, 60.0, verdict=3)]
    changed = {"optim": {"lr": 0.01}, "model": {**MODEL, "z_loss": 1e-4}}
    return run(tmp_path, "a", {}, first), run(tmp_path, "b", changed, [*second[:-1], *undone, second[-1]])


def test_the_table_has_what_differs_and_the_numbers_that_count(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", f"runs=[{runs[0]},{runs[1]}]", "format=json"]) == 0
    a, b = json.loads(capsys.readouterr().out)["runs"]
    assert a["settings"] == {"model.z_loss": 0.0, "optim.lr": 3e-4}
    assert b["settings"] == {"model.z_loss": 1e-4, "optim.lr": 0.01}
    assert a["parameters"] == parameter_count(parse(Model, MODEL))
    assert a["train_loss"] == pytest.approx(5.0 - 0.1 * 20.5)  # the mean of updates 11 to 30
    assert b["train_loss"] == pytest.approx(6.0 - 0.1 * 20.5)
    assert (a["step"], b["step"], b["tokens"]) == (30, 30, 240)
    assert (a["against_first"], b["against_first"]) == (0.0, -0.25)
    assert a["tokens_per_second"] == pytest.approx(120.5)  # the median of updates 11 to 30
    assert (a["skips"], a["rewinds"], b["skips"], b["rewinds"]) == (0, 0, 1, 1)


def test_as_text_markdown_and_picture(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = runs[0].parent
    assert main(["compare", f"runs=['{place}/[ab]']", f"plot={tmp_path / 'plot.png'}"]) == 0
    assert "2.2500" in capsys.readouterr().out
    picture = Image.open(tmp_path / "plot.png")
    colours = {colour for _, colour in picture.getcolors(1 << 20) or []}
    assert {(0x3B, 0x6E, 0xA8), (0xC5, 0x22, 0x1F)} <= colours  # a curve of each run
    assert main(["compare", f"runs=[{runs[0]},{runs[1]}]", "format=markdown"]) == 0
    head, rule, *rows = capsys.readouterr().out.strip().splitlines()
    assert "| run | z_loss | lr |" in head and set(rule) <= set("| -") and len(rows) == 2


def test_what_is_not_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no").mkdir()
    assert main(["compare", f"runs=[{tmp_path / 'no'}]"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    empty = run(tmp_path, "empty", {}, [])
    assert main(["compare", f"runs=[{empty}]"]) == 2
    assert "no update on record" in capsys.readouterr().err
    assert main(["compare", "runs=[]"]) == 2


def test_the_cache_stands_there_where_it_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: one layer, 128 tokens, 2 K E numbers of 2 bytes with E = 16: 16 KiB for K = 2."""
    shared = {**MODEL, "attention": {**MODEL["attention"], "n_kv_heads": 1}}  # type: ignore[dict-item]
    length = {"train": {"sequence_length": 128}}
    a = run(tmp_path, "a", length, [line(1, 2.0)])
    b = run(tmp_path, "b", {"model": shared, **length}, [line(1, 2.0)])
    assert main(["compare", f"runs=[{a},{b}]", "format=markdown"]) == 0
    heads, _, *rows = [
        [cell.strip() for cell in row.split("|")] for row in capsys.readouterr().out.splitlines()
    ]
    assert [row[heads.index("cache KiB")] for row in rows] == ["16", "8"]
    assert main(["compare", f"runs=[{a},{a}]", "format=markdown"]) == 0
    assert "cache KiB" not in capsys.readouterr().out
