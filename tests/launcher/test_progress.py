"""Progress for people, logs for later, garbage at agreed steps."""

import gc
import logging
from io import StringIO
from pathlib import Path

import pytest

from launcher.garbage import GarbageCollection
from launcher.log import log_traceback, logging_to
from launcher.progress import Pace, Progress, described, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (3661, "1:01:01"),
        (90000, "1d 1:00:00"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_numbers_of_a_step() -> None:
    text = described(loss=2.34567, lr=3e-4, norm=0.5, tokens_per_second=12345.6, mfu=0.4125, eta_seconds=61)
    assert text == "loss 2.3457  lr 3.00e-04  norm 0.500  12,346 tokens/s  MFU 41.2%  ETA 0:01:01"
    assert described(lr=3e-4) == "lr 3.00e-04"


def test_the_pace_forgets_the_first_steps() -> None:
    pace = Pace(memory=2)
    assert [pace.add(seconds) for seconds in (8.0, 4.0, 4.0)] == [8.0, 6.0, 5.0]


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = StringIO()
    progress = Progress(steps=5, every=2, file=tmp_path / "log", stream=stream)
    progress.start()
    for step in range(1, 6):
        progress.update(step, seconds=2.0, loss=float(step), lr=0.5, norm=1.0)
        if step == 3:
            progress.note("saved [bold]")
    progress.stop()
    expected = [
        "step 1/5  loss 1.0000  lr 5.00e-01  norm 1.000  ETA 0:00:08",
        "step 2/5  loss 2.0000  lr 5.00e-01  norm 1.000  ETA 0:00:06",
        "saved [bold]",
        "step 4/5  loss 4.0000  lr 5.00e-01  norm 1.000  ETA 0:00:02",
        "step 5/5  loss 5.0000  lr 5.00e-01  norm 1.000  ETA 0:00:00",
    ]
    assert stream.getvalue().splitlines() == expected
    assert (tmp_path / "log").read_text().splitlines() == expected


@pytest.mark.parametrize(("columns", "bar"), [("130", True), ("90", False)])
def test_one_live_line_on_a_terminal(
    tmp_path: Path, columns: str, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = StringIO()
    progress = Progress(steps=3, file=tmp_path / "log", stream=stream, terminal=True)
    progress.start()
    progress.update(3, seconds=1.0, loss=2.5, lr=0.5, norm=1.0)
    progress.stop()
    assert "step 3/3" in stream.getvalue() and "ETA 0:00:00" in stream.getvalue()
    assert ("━" in stream.getvalue()) == bar
    assert "\x1b[" in stream.getvalue()  # the line is rewritten in place
    assert (tmp_path / "log").read_text().startswith("step 3/3  loss 2.5000")


def test_words_go_to_the_log_of_the_rank_and_from_rank_0_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = logging.getLogger("launcher.run"), logging.getLogger("somebody")
    for rank in (0, 1):
        with logging_to(tmp_path / "logs" / f"rank-{rank}.log", rank=rank, level="info"):
            ours.info("begin %s", rank)
            ours.debug("hidden")
            theirs.info("chatter")
            theirs.warning("watch out")
    ours.warning("after")
    assert capsys.readouterr().err.startswith("begin 0\nwarning: watch out\n")
    for rank in (0, 1):
        lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line.split(" ", 2)[2] for line in lines] == [
            f"INFO launcher.run: begin {rank}",
            "WARNING somebody: watch out",
        ]


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_tracebacks_are_for_the_log_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, shown: bool
) -> None:
    with logging_to(tmp_path / "rank-0.log", rank=0, level=level):
        log_traceback(RuntimeError("no memory"))
    assert "RuntimeError: no memory" in (tmp_path / "rank-0.log").read_text()
    assert ("stopped by an error" in capsys.readouterr().err) == shown


def test_without_a_log_file_rank_0_still_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(None, rank=0, level="info"):
        logging.getLogger("parallel.engine").info("built")
    assert capsys.readouterr().err == "built\n"


def test_garbage_is_collected_at_multiples_only() -> None:
    class Node:
        pass

    def leave_a_cycle() -> int:
        node = Node()
        node.self = node  # type: ignore[attr-defined]
        return id(node)

    def alive() -> int:
        return sum(type(thing) is Node for thing in gc.get_objects())

    assert gc.isenabled()
    with GarbageCollection(3) as garbage:
        assert not gc.isenabled()
        leave_a_cycle()
        assert [(garbage.step(step), alive()) for step in (1, 2, 3)] == [(False, 1), (False, 1), (True, 0)]
    assert gc.isenabled()
    with GarbageCollection(0) as garbage:
        assert gc.isenabled() and not garbage.step(3)
