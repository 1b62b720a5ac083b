"""Who is silent, stuck or slow, from signs of life alone; and the sign itself."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster import Placement
from launcher.heart import Heart, is_gone, process_state
from launcher.heartbeat import Beat, Finding, Heartbeat, interval, stragglers, stuck
from launcher.stacks import main_frame, stacks, waits, where

WAITING = Beat(
    number=7,
    step=12,
    phase="train_step",
    still_seconds=100.0,
    allowed_seconds=60.0,
    where="torch/distributed/distributed_c10d.py:1 in all_reduce",
    waits=True,
    pid=1,
    started=1,
    host="a",
)


def test_while_there_is_progress_nothing_is_wrong() -> None:
    assert stuck({}, 60) is None
    assert stuck({0: replace(WAITING, still_seconds=59), 1: replace(WAITING, still_seconds=1)}, 60) is None


def test_the_one_that_does_not_wait_is_the_one() -> None:
    beats = {0: WAITING, 1: replace(WAITING, waits=False, where="x.py:3 in read", phase="data"), 2: WAITING}
    found = stuck(beats, 60)
    assert found is not None and (found.kind, found.rank) == ("RankStuck", 1)
    assert "at step 12 in data, at x.py:3 in read; the others wait for it" in found.message


def test_a_long_save_of_one_rank_holds_up_the_others_for_as_long_as_it_may() -> None:
    saving = replace(WAITING, waits=False, phase="save", still_seconds=200.0, allowed_seconds=240.0)
    beats = {0: replace(WAITING, still_seconds=199.0), 1: saving}
    assert stuck(beats, 60) is None
    found = stuck(beats | {1: replace(saving, still_seconds=241.0)}, 60)
    assert found is not None and found.rank == 1


def test_a_rank_that_works_while_others_wait_is_no_reason() -> None:
    """Slow, but each of its marks is young."""
    assert stuck({0: WAITING, 1: replace(WAITING, waits=False, still_seconds=2.0)}, 60) is None


def test_of_ranks_that_all_wait_the_one_that_is_behind_is_named_and_doubt_is_said() -> None:
    found = stuck({0: WAITING, 1: replace(WAITING, step=11), 2: WAITING}, 60)
    assert found is not None and found.rank == 1 and found.message.endswith("the others are further")
    found = stuck({0: WAITING, 1: replace(WAITING, still_seconds=101.0)}, 60)
    assert found is not None and found.rank == 1 and "see the stacks of all ranks" in found.message


def test_a_beat_is_the_same_after_its_way_through_the_store() -> None:
    assert Beat.from_json(WAITING.as_json().encode()) == WAITING


@pytest.mark.parametrize(
    ("seconds", "factor", "expected"),
    [
        ({0: 1.0, 1: 1.0, 2: 1.29}, 1.3, []),
        ({0: 1.0, 1: 1.0, 2: 1.31}, 1.3, [2]),
        ({0: 1.0, 1: 3.0}, 1.3, [1]),  # of two the slow one is not half of the median
        ({0: 2.0, 1: 1.0, 2: 1.0, 3: 4.0, 4: 1.0}, 1.5, [3, 0]),
        ({0: 1.0, 1: 9.0}, 0, []),
        ({0: 1.0}, 1.3, []),
        ({0: 0.0, 1: 1.0}, 1.3, []),
    ],
)
def test_slow_is_beyond_so_many_medians(
    seconds: dict[int, float], factor: float, expected: list[int]
) -> None:
    assert [one.rank for one in stragglers(seconds, factor)] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every_seconds": 0.0}, "every_seconds"),
        ({"every_seconds": 0.01}, "at least 0.05"),
        ({"every_seconds": float("nan")}, "every_seconds"),
        ({"timeout_seconds": 20.0}, "at least 3 times"),
        ({"straggler_factor": 1.0}, "above 1"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Heartbeat(**values)
    assert Heartbeat(timeout_seconds=0.0).timeout_seconds == 0


def test_the_timeout_is_held_against_the_interval_of_so_many_processes() -> None:
    assert interval(Heartbeat(timeout_seconds=60.0), 1000) == 10.0
    with pytest.raises(
        ValueError, match=r"16384 processes, which give a sign every 163.84 s; use at least 491"
    ):
        interval(Heartbeat(timeout_seconds=60.0), 16384)
    assert interval(Heartbeat(timeout_seconds=492.0), 16384) == 163.84
    assert interval(Heartbeat(timeout_seconds=0.0), 16384) == 163.84


def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = replace(WAITING, pid=os.getpid(), started=1)

    def refuse(number: int) -> Any:
        def read(path: Path, **named: Any) -> str:
            raise OSError(number, os.strerror(number))

        return read

    for number, gone in (
        (errno.EMFILE, False),
        (errno.EACCES, False),
        (errno.ENOENT, True),
        (errno.ESRCH, True),
    ):
        monkeypatch.setattr(Path, "read_text", refuse(number))
        assert is_gone(beat) is gone


def test_the_state_of_a_process_is_the_kernels() -> None:
    """Stopped, gone, and another process under the same number."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        state = process_state(process.pid)
        assert state is not None
        beat = replace(WAITING, pid=process.pid, started=state[1])
        assert not is_gone(beat) and is_gone(replace(beat, started=state[1] - 1))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = process_state(process.pid)
        assert stopped is not None and stopped[0] == "T" and not is_gone(beat)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(beat)  # still to be waited for: a zombie
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) is None and is_gone(beat)


def test_where_the_main_thread_is() -> None:
    frame = main_frame()
    assert "in main_frame" in where(frame) and "in test_where_the_main_thread_is" not in where(frame)
    assert not waits(frame)
    assert "thread MainThread" in stacks() and "test_where_the_main_thread_is" in stacks()
    code = compile("import sys\nf = sys._getframe()", "/x/site-packages/torch/distributed/c10d.py", "exec")
    values: dict[str, Any] = {}
    exec(code, values)
    assert waits(values["f"]) and where(values["f"]).startswith("torch/distributed/c10d.py:")


class Shelf:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]


def heart(rank: int, tmp_path: Path, **values: float) -> Heart:
    place = Placement(rank=rank, world_size=2, local_rank=rank, local_size=2)
    return Heart(Heartbeat(**{"every_seconds": 0.05, "timeout_seconds": 0.2, **values}), place, logs=tmp_path)


def test_a_rank_that_says_it_ends_is_not_missed(tmp_path: Path) -> None:
    import threading

    shelf, found, heard = Shelf(), [], threading.Event()

    def accuse(finding: Finding, reachable: bool) -> None:
        found.append((finding.rank, finding.kind, reachable))
        heard.set()

    first, second = heart(0, tmp_path), heart(1, tmp_path)
    second.start(shelf, accuse)
    first.start(shelf, accuse)
    second.stop()
    assert not heard.wait(0.6) and found == []
    first.stop()


class Broken(Shelf):
    """A store whose connection has failed for good."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection reset")


def test_a_failed_connection_to_the_store_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    shelf, found, heard, again = Shelf(), [], threading.Event(), threading.Event()

    def accuse(finding: Finding, reachable: bool) -> None:
        found.append(finding)
        heard.set()

    class Mended(Shelf):
        def set(self, key: str, value: str) -> None:
            shelf.set(key, value)
            again.set()

    alone = Heart(Heartbeat(every_seconds=0.05, timeout_seconds=5.0), Placement(world_size=2), logs=tmp_path)
    alone.start(Broken(), accuse, Mended)
    assert again.wait(20)
    alone.stop()
    assert found == [] and caplog.text.count("the rendezvous store fails (connection reset)") == 1


def test_a_store_that_stays_away_is_given_up(tmp_path: Path) -> None:
    import threading

    found, heard = [], threading.Event()

    def accuse(finding: Finding, reachable: bool) -> None:
        found.append((finding.rank, finding.kind, reachable))
        heard.set()

    second = heart(1, tmp_path)
    second.start(Broken(), accuse, Broken)
    assert heard.wait(20)
    second.stop()
    assert found == [(0, "RankSilent", False)]


def test_a_rank_that_falls_silent_is_missed_and_one_that_never_came_has_longer(tmp_path: Path) -> None:
    import threading

    shelf, found, heard = Shelf(), [], threading.Event()

    def accuse(finding: Finding, reachable: bool) -> None:
        found.append(finding)
        heard.set()

    first = heart(0, tmp_path)
    first.start(shelf, accuse)
    assert not heard.wait(0.6)
    own = process_state(os.getpid())
    assert own is not None
    last = replace(WAITING, pid=os.getpid(), started=own[1], host="elsewhere")
    shelf.set("megamodel/heartbeat/1", last.as_json())
    assert heard.wait(20)
    first.stop()
    assert (found[0].rank, found[0].kind) == (1, "RankSilent")
    assert "its last sign was at step 12 in train_step" in found[0].message
