"""The drill in its short form, and what of faults and the monitor is refused at the door."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.drill import CLEAN, Result, good, page
from launcher.monitor import History, Kind, Observation, Verdict
from launcher.picture import Picture
from tests.launcher.test_failing_rank import environment
from tests.launcher.test_monitored import place
from tests.launcher.test_report import Page

__all__ = ["place"]


@pytest.mark.slow  # a clean run and one for each fault
def test_a_short_drill_reports_every_fault(place: Path) -> None:
    given = ["data=files", "data.paths=[text]", "tokenizer.vocab_size=300", "model.vocab_size=300"]
    small = f"train={[*given, 'train.sequence_length=16']}"
    command = [sys.executable, "-m", "launcher", "drill", "out=drill", "layouts=[dp2]", "steps=100"]
    done = subprocess.run(
        [*command, "faults=[bit_flip]", "format=json", small],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["fault"]: Result(**result) for result in json.loads(done.stdout)["results"]}
    assert set(results) == {"clean", "bit_flip"} and all(map(good, results.values()))
    flip = results["bit_flip"]
    assert flip.detected == flip.fired == 66 and flip.rewound_to is not None and flip.rewound_to < 66
    assert flip.cause is not None and flip.cause.startswith("hardware: weight of blocks.0.feedforward.gate")
    report = (place / "drill" / "report.html").read_text()
    assert "bit_flip" in report and "data:image/png;base64," in report
    assert (place / "drill" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_worse_than_the_clean_one_is_not_ok() -> None:
    fine = Result("dp2", "lr", "finished", fired=80, detected=81, held_out=2.0, difference=0.001)
    assert good(fine)
    assert not good(Result(**{**vars(fine), "difference": 0.03}))
    assert not good(Result(**{**vars(fine), "detected": None}))
    assert not good(Result(**{**vars(fine), "state": "failed"}))


def test_its_page_stands_alone() -> None:
    picture = Picture()
    picture.panel("clean").add(Observation(1, 2.0), Verdict(Kind.OK, History()))
    clean = Result("dp2", CLEAN, "finished", held_out=2.0)
    bad = Result("dp2", "lr", "failed", fired=80, detected=81, verdict="skip", cause="<b>why")
    made = Page(page([clean, bad], picture))
    assert "1 of 2 runs are not ok." in made.inside["p"][0] and "<b>why" in made.inside["td"]
    (image,) = [attributes for tag, attributes in made.tags if tag == "img"]
    assert (image["src"] or "").startswith("data:image/png;base64,")
    assert made.inside["th"][:2] == ["layout", "fault"] and "not ok (failed)" in made.inside["td"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoint.every=0", "checkpoint.snapshot_every=0"], "monitor=rewind needs states to go back to"),
        (["monitor=rewind", "monitor.cooldown_steps=50"], "must be 0 to 49"),
        (["faults=[{kind: poison, step: 3}]"], "needs samples: [first, stop)"),
        (["faults=[{kind: poison, samples: [8, 8]}]"], "needs samples: [first, stop)"),
        (["faults=[{kind: lr}]"], "needs step and steps of 1 or more"),
        (["faults=[{kind: lr, step: 4, samples: [1, 2]}]"], "no samples"),
        (["faults=[{kind: gremlin, step: 4}]"], "faults"),
        (["faults=[{kind: nan_gradient, step: 4, rank: 9}]"], "on rank 9, but there are 1 processes"),
        (["faults=[{kind: tokens, step: 4, rank: 1}]"], "on rank 1, but there are 1 data ranks"),
        (["monitor.margin_steps=1001"], "must be at most 1000"),
    ],
)
def test_refused_at_the_door(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_state_to_go_back_to_is_not_asked_of_those_who_never_do() -> None:
    arguments = ["train", "model=tiny", "checkpoint.every=0", "checkpoint.snapshot_every=0", "monitor=skip"]
    assert main([*arguments, "--cfg", "job"]) == 0
