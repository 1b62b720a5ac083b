"""The command `replay` on every kind of log: what it prints, draws and refuses."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.tensorboard.writer import SummaryWriter

from launcher import __main__ as command_line
from launcher.monitor import Kind
from launcher.picture import COLOURS, span, ticks

STEPS, ONSET = 900, 701


def losses() -> list[float]:
    """A falling curve with one bad batch, one that is not finite, and a jump that stays."""
    at = np.arange(1, STEPS + 1)
    values = 2.5 + 8 * at**-0.4 + 0.1 * np.random.default_rng(1).normal(size=STEPS)
    values[ONSET - 1 :] += 2.0
    values[[399, 499]] = 9.0, np.nan
    return [round(float(value), 4) for value in values]


def as_csv(path: Path) -> Path:
    text = "step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses(), 1))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def as_jsonl(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, loss in enumerate(losses(), 1):
        value = "NaN" if np.isnan(loss) else loss
        lines.append(json.dumps({"step": step, "attempt": step, "segment": 0, "loss/train": value}))
        if step == 300:  # an attempt without any valid target has no loss
            lines.append(json.dumps({"step": step, "attempt": step, "segment": 0, "monitor/verdict": 2}))
    path.write_text("\n".join(lines) + '\n{"step": 901, "los')
    return path


def as_tensorboard(path: Path) -> Path:
    with SummaryWriter(str(path)) as writer:
        for step, loss in enumerate(losses(), 1):
            writer.add_scalar("loss/train", loss, step)
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert command_line.main(["replay", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.csv", as_csv),
        ("a.csv.gz", as_csv),
        ("run/metrics.jsonl", as_jsonl),
        ("board", as_tensorboard),
    ],
)
def test_every_kind_of_log_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, write: Any
) -> None:
    path = write(tmp_path / name)
    if path.name == "metrics.jsonl":
        assert replayed(capsys, f"files=[{path}]")[0]["file"] == str(path)
        path = path.parent  # a run's directory stands for its record
    *verdicts, last = replayed(capsys, f"files=[{path}]")
    found = [(v["step"], v["verdict"], v["onset"]) for v in verdicts]
    assert found[:2] == [(400, "SKIP", None), (500, "SKIP", None)]
    assert found[-1] == (ONSET + 6, "REWIND", ONSET)
    assert [step for step, _, _ in found[2:]] == list(range(ONSET, ONSET + 7))
    assert [v["loss"] for v in verdicts[:2]] == [9.0, "NaN"]
    assert all(list(v) == ["file", "step", "verdict", "loss", "onset", "reason"] for v in verdicts)
    assert last == {"file": str(path), "summary": {"steps": STEPS, "warn": 0, "skip": 8, "rewind": 1}}


def test_patterns_and_many_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        (tmp_path / f"log-{number}").mkdir()
        as_csv(tmp_path / f"log-{number}" / "loss.csv")
    lines = replayed(capsys, f"files=[{tmp_path}/*/loss.csv, {tmp_path}/log-1/loss.csv]")
    files = [line["file"] for line in lines if "summary" in line]
    assert files == [f"{tmp_path}/log-{number}/loss.csv" for number in range(3)]


def test_the_rules_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = as_csv(tmp_path / "a.csv")
    (quiet,) = replayed(capsys, f"files=[{path}]", "monitor=none")
    assert quiet["summary"] == {"steps": STEPS, "warn": 0, "skip": 0, "rewind": 0}
    coarse = replayed(capsys, f"files=[{path}]", "monitor.rise=5", "monitor.drift=9", "monitor.outlier=90")
    assert coarse[-1]["summary"]["rewind"] == 0


def test_gradient_norms_are_judged_where_they_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Step,Loss,grad_norm"]
    for step in range(1, 301):
        norm = "" if step % 3 == 0 else 60.0 if step == 200 else 1.0 + 0.01 * (step % 7)
        lines.append(f"{step},{5 - step / 200 + 0.02 * (step % 5)},{norm}")
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n\n")
    first, *_ = replayed(capsys, f"files=[{path}]")
    assert (first["step"], first["verdict"]) == (200, "SKIP")
    assert first["reason"].startswith("outlier: norm 60")


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = as_csv(tmp_path / "a.csv")
    assert command_line.main(["replay", f"files=[{path}]", "format=text"]) == 0
    *_, rewind, last = capsys.readouterr().out.splitlines()
    assert rewind.startswith(f"{path}  step 707  REWIND since step 701  jump: loss +1.9")
    assert last == f"{path}  steps 900  warn 0  skip 8  rewind 1"


def test_the_picture_shows_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = as_csv(tmp_path / "a.csv"), tmp_path / "out.png"
    replayed(capsys, f"files=[{path}, {path.parent}/a*]", f"plot={picture}")
    image = Image.open(picture)
    assert image.format == "PNG" and image.size == (1100, 300)
    pixels = np.asarray(image.convert("RGB"))
    red = tuple(bytes.fromhex(COLOURS[Kind.REWIND][1:]))
    columns = np.flatnonzero((pixels[40:260] == red).all(axis=-1).sum(axis=0) > 200)
    inside = (columns.mean() - 64) / (1100 - 64 - 16)
    assert abs(inside - (707 - 1) / (900 - 1)) < 0.003
    orange = tuple(bytes.fromhex(COLOURS[Kind.SKIP][1:]))
    assert (pixels[34:45] == orange).all(axis=-1).any()  # beyond the range, at its edge


def test_round_numbers_on_the_axes() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(2.97, 5.41) == pytest.approx([3, 3.5, 4, 4.5, 5])
    low, high = span(np.array([50.0, *[3.0] * 900, np.nan, 1e30]))
    assert low < 3 < high < 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "time,value\n1,2\n", "the first line must be step,loss[,grad_norm]; it is time,value"),
        ("a.csv", "step,loss\n1,2\n2,x\n", "a.csv:3: 'x' is not a number"),
        ("a.csv", "step,loss\n,2\n", "a.csv:2: '' is no step"),
        ("a.csv", "step,loss\n1.5,2\n", "a.csv:2: '1.5' is no step, which is a whole number"),
        ("a.csv", "step,loss\nnan,2\n", "a.csv:2: 'nan' is no step"),
        ("a.csv", "", "the first line must be step,loss"),
        ("a.jsonl", '{"step": 1, "loss": 2}\n[1\n{"step": 2, "loss": 2}\n', "a.jsonl:2: not a JSON object"),
        ("a.csv.gz", "no gzip", "a.csv.gz: Not a gzipped file"),
        ("a.npy", "x", "a.npy: not a log"),
        ("a.pt", "x", "a.pt: not a log"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_others_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    good = as_csv(tmp_path / "good.csv")
    assert command_line.main(["replay", f"files=[{tmp_path / name}, {good}]"]) == 2
    output = capsys.readouterr()
    first, *_, last = [json.loads(line) for line in output.out.splitlines()]
    assert message in first["error"] and list(first) == ["file", "error"]
    assert last["file"] == str(good) and last["summary"]["rewind"] == 1
    assert message in output.err and "Traceback" not in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["files=[nowhere/*.csv]"], "nowhere/*.csv: there is no such file or directory"),
        (["files=[]"], "files must name at least one log"),
        ([], "files must be given"),
        (["files=[.]"], "neither metrics.jsonl nor TensorBoard events"),
        (["files=[a.csv]", "monitor.alarms=3"], "the nearest is monitor.alarm"),
    ],
)
def test_wrong_input_is_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    as_csv(tmp_path / "a.csv")
    assert command_line.main(["replay", *arguments]) == 2
    assert message in capsys.readouterr().err
