"""W&B and MLflow with stand-ins on the path that write down what they are called with."""

import importlib
import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from conf.typed import parse
from launcher.__main__ import main
from launcher.metrics import MetricsWriter
from launcher.rundirectory import RunDirectory
from launcher.sinks import Mlflow, MlflowSink, Sinks, Wandb, WandbSink, deliveries

WANDB = """
calls = []
broken = False

class Run:
    def __init__(self, known):
        self.id = known or "made"
    def define_metric(self, name, step_metric=None):
        calls.append(("define_metric", name, step_metric))
    def log(self, line):
        if broken:
            raise OSError("no route")
        calls.append(("log", line))
    def finish(self, exit_code):
        calls.append(("finish", exit_code))

def init(**settings):
    calls.append(("init", settings))
    return Run(settings["id"])
"""
MLFLOW = """
from types import SimpleNamespace
calls = []

def set_tracking_uri(uri):
    calls.append(("uri", uri))
def set_experiment(name):
    calls.append(("experiment", name))
def start_run(run_id, run_name):
    calls.append(("start", run_id, run_name))
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made"))
def log_params(values):
    assert len(values) <= 100 and all(len(v) <= 500 for v in values.values())
    calls.append(("params", values))
def log_metrics(values, step):
    calls.append(("metrics", step, values))
def end_run(status):
    calls.append(("end", status))
"""
CONFIG = {"optim": {"lr": 0.001}, "data": {"paths": ["x" * 900]}}
ALL = {
    "wandb": {"kind": "offline", "project": "p", "group": "g", "tags": ["t"]},
    "mlflow": {"kind": "mlflow", "tracking_uri": "file:mlruns", "experiment": "e"},
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(WANDB)
    (folder / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("wandb"), importlib.import_module("mlflow")
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def writer(path: Path, settings: dict[str, Any] = ALL, **start: Any) -> MetricsWriter:
    directory = RunDirectory(path)
    path.mkdir(exist_ok=True)
    flat = {"optim.lr": 0.001, **{f"key{i}": i for i in range(150)}, "data.paths": "x" * 900}
    sinks = deliveries(parse(Sinks, settings), directory, flat)
    return MetricsWriter(directory, CONFIG, rank=0, steps=9, stream=StringIO(), sinks=sinks, **start)


def logged(wandb: Any) -> list[tuple[float, float, float]]:
    return [(c[1]["attempt"], c[1]["step"], c[1]["loss/train"]) for c in wandb.calls if c[0] == "log"]


def test_both_get_every_attempt_and_the_configuration(tmp_path: Path, stand_ins: tuple[Any, Any]) -> None:
    wandb, mlflow = stand_ins
    run = tmp_path / "run"
    with writer(run) as metrics:
        metrics.write({"step": 1, "loss/train": 2.5, "words": "no number"}, applied=True)
        metrics.write({"step": 2, "loss/train": float("inf")}, applied=False)
    name, settings = wandb.calls[0]
    assert name == "init" and settings["mode"] == "offline" and settings["dir"] == str(run)
    assert (settings["project"], settings["group"], settings["tags"]) == ("p", "g", ["t"])
    assert settings["id"] is None and settings["config"]["optim.lr"] == 0.001
    assert logged(wandb) == [(1.0, 1.0, 2.5), (2.0, 2.0, float("inf"))]
    assert all("words" not in call[1] for call in wandb.calls if call[0] == "log")
    assert wandb.calls[-1] == ("finish", 0)
    assert [call[0] for call in mlflow.calls] == [
        *("uri", "experiment", "start", "params", "params", "metrics", "metrics", "end")
    ]
    parameters = mlflow.calls[3][1] | mlflow.calls[4][1]
    assert parameters["optim.lr"] == "0.001" and len(parameters) == 152
    assert mlflow.calls[5] == ("metrics", 1, {"step": 1.0, "segment": 0.0, "loss/train": 2.5})
    assert mlflow.calls[-1] == ("end", "FINISHED")
    assert json.loads((run / "sinks.json").read_text()) == {"wandb": "made", "mlflow": "made"}


def test_steps_that_go_back_are_further_attempts_on_an_axis_that_does_not(
    tmp_path: Path, stand_ins: tuple[Any, Any]
) -> None:
    wandb, mlflow = stand_ins
    with writer(tmp_path / "run") as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss/train": 1.0}, applied=True)
        metrics.rewind(1)
        metrics.write({"step": 2, "loss/train": 2.0}, applied=True)
    with writer(tmp_path / "run", step=2, attempt=4, segment=1, resumed=True) as metrics:
        metrics.write({"step": 3, "loss/train": 3.0}, applied=True)
    assert ("define_metric", "*", "attempt") in wandb.calls
    assert [(a, s) for a, s, _ in logged(wandb)] == [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3)]
    assert [c[1]["id"] for c in wandb.calls if c[0] == "init"] == [None, "made"]
    assert {c[1]["resume"] for c in wandb.calls if c[0] == "init"} == {"allow"}
    assert [call[1] for call in mlflow.calls if call[0] == "metrics"] == [1, 2, 3, 4, 5]
    assert [call[1] for call in mlflow.calls if call[0] == "start"] == [None, "made"]
    assert sum(call[0] == "params" for call in mlflow.calls) == 2  # set once: not again after the resume


def test_a_failed_run_ends_as_one_there(tmp_path: Path, stand_ins: tuple[Any, Any]) -> None:
    wandb, mlflow = stand_ins
    metrics = writer(tmp_path / "run")
    metrics.write({"step": 1, "loss/train": 1.0}, applied=True)
    try:
        raise RuntimeError("on purpose")
    except RuntimeError:
        metrics.close()  # as a `finally` does it
    assert wandb.calls[-1] == ("finish", 1) and mlflow.calls[-1] == ("end", "FAILED")


def test_a_sink_that_fails_is_said_once_and_stops_nothing(
    tmp_path: Path, stand_ins: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """After a failure 0, 1, 3, 7 ... attempts are left out before the next try."""
    wandb, mlflow = stand_ins
    wandb.broken = True
    with writer(tmp_path / "run") as metrics:
        for step in range(1, 31):
            metrics.write({"step": step, "loss/train": 1.0}, applied=True)
    said = [record for record in caplog.records if "sinks.wandb" in record.message]
    assert len(said) == 1 and "no route" in said[0].message and "training goes on" in said[0].message
    assert logged(wandb) == []
    assert len([c for c in mlflow.calls if c[0] == "metrics"]) == 30
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 30


def test_it_goes_on_when_the_service_is_back(
    tmp_path: Path, stand_ins: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wandb, _ = stand_ins
    wandb.broken = True
    only = {"wandb": ALL["wandb"]}
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    (delivery,) = deliveries(parse(Sinks, only), directory, {})
    original = WandbSink.write

    def back(self: WandbSink, line: Any) -> None:
        wandb.broken = line["attempt"] < 3
        original(self, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WandbSink, "write", back)
        for attempt in range(1, 9):
            delivery.put({"attempt": attempt, "step": attempt, "loss/train": 1.0})
        delivery.close(failed=False)
    # 1 failed, 2 was tried at once and failed, 3 was left out, from 4 on it works.
    assert [attempt for attempt, *_ in logged(wandb)] == [4, 5, 6, 7, 8]


def test_other_ranks_open_nothing_and_none_is_the_default(tmp_path: Path) -> None:
    assert deliveries(parse(Sinks, {}), RunDirectory(tmp_path), {}) == []
    assert Wandb().kind == "online" and Mlflow().kind == "mlflow"
    assert MlflowSink(Mlflow(), tmp_path).name == "mlflow"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_one_that_is_not_installed_is_refused_at_the_door(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as good as not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda found: None)
    kind = {"wandb": "online", "mlflow": "mlflow"}[name]
    arguments = ["train", "model=tiny", f"sinks.{name}.kind={kind}", f"run.dir={tmp_path / 'run'}"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"pip install 'megamodel[{name}]'" in said and f"sinks.{name}.kind=none" in said
    assert not (tmp_path / "run").exists()


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=tiny", "sinks.wandb.kind=cloud"]) == 2
    assert "there are none, offline, online" in capsys.readouterr().err
