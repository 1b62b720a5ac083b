"""profile.steps leaves a trace of just those steps, and the run is the same."""

import json
from pathlib import Path

import pytest

from conf.typed import InvalidConfiguration, parse
from launcher.__main__ import main
from launcher.profile import Profile
from tests.launcher.test_models import arguments


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss/train"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_are_traced_and_nothing_else_changes(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"text-{number}.txt").write_text(f"{number} the cat sat on the mat " * 20)
    common = ["train", *arguments(tmp_path), "model=tiny", "train.steps=5", "checkpoint.every=0"]
    assert main([*common, f"run.dir={tmp_path / 'plain'}"]) == 0
    assert main([*common, f"run.dir={tmp_path / 'traced'}", "profile.steps=[2,3]"]) == 0
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    place = tmp_path / "traced" / "profile" / "rank-0"
    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    # AdamW runs once an update: two updates were traced.
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 2
    assert "aten::" in (place / "operators.txt").read_text()
    operators = json.loads((place / "memory.json").read_text())["operators"]
    assert operators["aten::empty"]["calls"] > 0


def test_steps_that_cannot_be_are_refused() -> None:
    for steps in ([3], [0, 2], [5, 4]):
        with pytest.raises(InvalidConfiguration, match=r"must be \[first, last\]"):
            parse(Profile, {"steps": steps})
