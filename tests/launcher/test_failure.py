"""One rank fails, all end, and all say why in their last line."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launcher.config import Config
from launcher.failure import FailureWatch, RankFailure, Report, guarded, report_of, write_error_file
from launcher.log import logging_to
from launcher.rundirectory import RunDirectory
from parallel.errors import OtherRankFailed


def raising(error: BaseException) -> Any:
    raise error


def test_the_code_of_a_command_goes_through() -> None:
    assert guarded(lambda: 0, rank=0) == 0
    assert guarded(lambda: 2, rank=0) == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("optim.lr (0) must be above 0"), 2, "error on rank 3: optim.lr (0) must be above 0"),
        (
            FileNotFoundError(2, "No such file", "x.txt"),
            2,
            "error on rank 3: [Errno 2] No such file: 'x.txt'",
        ),
        (RuntimeError("no memory"), 1, "error on rank 3: RuntimeError: no memory"),
        (KeyError("x"), 1, "error on rank 3: KeyError: 'x'"),
        (RuntimeError(""), 1, "error on rank 3: RuntimeError: no message"),
        (KeyboardInterrupt(), 1, "error on rank 3: KeyboardInterrupt: interrupted"),
    ],
)
def test_an_error_is_a_code_and_a_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: raising(error), rank=3) == code
    assert capsys.readouterr().err == line + "\n"


def test_the_rank_is_said_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert guarded(lambda: raising(RuntimeError("a")), rank=0) == 1
    monkeypatch.setenv("RANK", "0")
    for world in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("MASTER_PORT", "1")
        assert guarded(lambda: raising(RuntimeError("a")), rank=0) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error: RuntimeError: a", "error: RuntimeError: a", "error on rank 0: RuntimeError: a"]


def test_many_lines_end_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: raising(ValueError("2 errors\n  a\n  b")), rank=0) == 2
    assert capsys.readouterr().err == "2 errors\n  a\n  b\nerror: 2 errors\n"


def test_once_work_has_begun_no_error_is_the_users() -> None:
    assert report_of(ValueError("x"), rank=0, world_size=1, begun=False).code == 2
    assert report_of(ValueError("x"), rank=0, world_size=1, begun=True).code == 1


def test_a_failed_run_leaves_its_error_and_status(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)

    def work() -> int:
        directory.begin(Config(), rank=0, step=4)
        raise RuntimeError("no memory")

    assert guarded(work, rank=0, directory=directory) == 1
    error = json.loads(directory.error_file.read_text())
    assert (error["rank"], error["type"], error["message"]) == (0, "RuntimeError", "no memory")
    assert "in work" in error["traceback"]
    assert directory.status() == {"state": "failed", "reason": "no memory", "step": 4}


def test_torchelastic_can_read_the_error_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    write_error_file(file, report_of(RuntimeError("no memory"), rank=3, world_size=4, begun=True))
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "error on rank 3: RuntimeError: no memory"
    assert failure.timestamp > 0


def store(port: int, *, master: bool = False) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def watch(master: dist.TCPStore, rank: int, directory: RunDirectory, **more: Any) -> FailureWatch:
    options = {"interval_seconds": 0.01, **more}
    return FailureWatch(lambda: store(master.port), rank=rank, world_size=2, directory=directory, **options)


def test_another_rank_ends_when_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    master, directory = store(0, master=True), RunDirectory(tmp_path)
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with watch(master, 0, directory, end=end):
        with pytest.raises(RankFailure) as caught, watch(master, 1, directory):
            raise RuntimeError("boom")
        assert ended.wait(20)
    assert caught.value.report.rank == 1
    assert codes == [1]
    assert capsys.readouterr().err == "error on rank 1: RuntimeError: boom\n"
    assert json.loads(directory.error_file.read_text())["rank"] == 1


def test_a_connection_that_breaks_is_renewed_and_the_run_goes_on(tmp_path: Path) -> None:
    """The watching connection of rank 0 fails once it is used; later rank 1's error still arrives."""
    master, directory = store(0, master=True), RunDirectory(tmp_path)
    ended, renewed, codes = threading.Event(), threading.Event(), []

    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise ConnectionResetError("reset by peer")

    connections: list[Any] = [store(master.port), Broken()]  # the main thread's, and the watch's

    def connect() -> Any:
        if connections:
            return connections.pop(0)
        renewed.set()
        return store(master.port)

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    options = {"interval_seconds": 0.01, "grace_seconds": 2.0, "end": end}
    with FailureWatch(connect, rank=0, world_size=2, directory=directory, **options):
        assert renewed.wait(20)
        assert not ended.wait(3) and not codes
        with pytest.raises(RankFailure), watch(master, 1, directory):
            raise RuntimeError("boom")
        assert ended.wait(20)
    assert codes == [1]
    assert json.loads(directory.error_file.read_text())["message"] == "boom"


def test_an_error_that_follows_from_another_is_not_the_first(tmp_path: Path) -> None:
    master, directory = store(0, master=True), RunDirectory(tmp_path)
    with pytest.raises(RankFailure), watch(master, 1, directory, grace_seconds=0.0):
        raise RuntimeError("boom")
    with pytest.raises(RankFailure) as caught, watch(master, 0, directory, interval_seconds=60.0):
        raise ConnectionError("peer closed")
    assert caught.value.report.line() == "error on rank 1: RuntimeError: boom"
    assert json.loads(directory.error_file.read_text())["message"] == "boom"


def test_an_error_that_tells_of_another_rank_waits_for_that_ranks_own(tmp_path: Path) -> None:
    master, directory = store(0, master=True), RunDirectory(tmp_path)
    caught: list[RankFailure] = []

    def follow() -> None:
        try:
            with watch(master, 0, directory, interval_seconds=60.0):
                raise OtherRankFailed("rank 1 failed: RuntimeError: boom")
        except RankFailure as failure:
            caught.append(failure)

    following = threading.Thread(target=follow)
    following.start()
    with pytest.raises(RankFailure), watch(master, 1, directory, interval_seconds=60.0):
        raise RuntimeError("boom")
    following.join(20)
    assert [failure.report.line() for failure in caught] == ["error on rank 1: RuntimeError: boom"]


def test_guarded_says_the_first_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Report(rank=5, type="OSError", message="disk", code=1, traceback="", time=0.0, world_size=6)
    directory = RunDirectory(tmp_path / "run")
    assert guarded(lambda: raising(RankFailure(first)), rank=2, directory=directory) == 1
    assert capsys.readouterr().err == "error on rank 5: OSError: disk\n"
    assert not directory.path.exists()


def test_work_that_ends_well_is_left_alone(tmp_path: Path) -> None:
    master, codes = store(0, master=True), []
    with watch(master, 0, RunDirectory(tmp_path), end=codes.append):
        pass
    assert codes == [] and list(tmp_path.iterdir()) == []


def test_alone_no_store_is_needed(tmp_path: Path) -> None:
    def connect() -> Any:
        raise AssertionError("no other process")

    lone = FailureWatch(connect, rank=0, world_size=1, directory=RunDirectory(tmp_path))
    with pytest.raises(RankFailure, match=r"^error: boom$"), lone:
        raise ValueError("boom")


@pytest.mark.parametrize("before", [[], ["logs"], ["logs/rank-0.log"], ["config.yaml"]])
def test_wrong_input_leaves_only_what_was_there(tmp_path: Path, before: list[str]) -> None:
    directory = RunDirectory(tmp_path / "runs" / "a")
    for name in before:
        path = directory.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old\n") if path.suffix else path.mkdir()
    lone = FailureWatch(lambda: raising(AssertionError()), rank=0, world_size=1, directory=directory)
    with logging_to(directory.log_file(0), rank=1, level="info"):
        logging.getLogger("launcher").info("looking")
        with pytest.raises(RankFailure), lone:
            raise ValueError("there is no such file")
    files = [str(path.relative_to(directory.path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [name for name in before if Path(name).suffix]
    assert list(tmp_path.iterdir()) == ([tmp_path / "runs"] if files else []) or before == ["logs"]


def test_wrong_input_on_another_rank_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    master, directory = store(0, master=True), RunDirectory(tmp_path / "run")
    ended = threading.Event()
    with (
        logging_to(directory.log_file(0), rank=1, level="info"),
        watch(master, 0, directory, end=lambda code: ended.set()),
    ):
        with pytest.raises(RankFailure), watch(master, 1, RunDirectory(directory.path)):
            raise ValueError("too small")
        assert ended.wait(20)
    assert capsys.readouterr().err == "error on rank 1: too small\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_begun_is_failed_by_what_another_rank_took_for_wrong_input(tmp_path: Path) -> None:
    master, directory = store(0, master=True), RunDirectory(tmp_path)
    ended = threading.Event()
    with watch(master, 0, directory, end=lambda code: ended.set()):
        directory.begin(Config(), rank=0)
        with pytest.raises(RankFailure), watch(master, 1, RunDirectory(tmp_path)):
            raise ValueError("too small")
        assert ended.wait(20)
    status = directory.status()
    assert status is not None and (status["state"], status["reason"]) == ("failed", "too small")


@pytest.mark.parametrize("name", ["file/run", "file"])
def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / name
    with (
        pytest.raises(ValueError, match=rf"^run\.dir: {place}/logs/rank-0\.log cannot be written \("),
        logging_to(RunDirectory(place).log_file(0), rank=0, level="info"),
    ):
        pass


HANGING = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from launcher.failure import FailureWatch, guarded
from launcher.log import logging_to
from launcher.rundirectory import RunDirectory
rank, port, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
directory = RunDirectory(path)

def work():
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=timedelta(seconds=300)
    )
    connect = lambda: dist.TCPStore("127.0.0.1", port, is_master=False)
    with FailureWatch(connect, rank=rank, world_size=3, directory=directory, interval_seconds=0.05):
        directory.begin({}, rank=rank)
        dist.barrier()
        if rank == int(sys.argv[4]):
            raise RuntimeError("the data are broken")
        other = 3 - rank - int(sys.argv[4])
        # Waits for a living rank that sends nothing: only the watch can end this.
        dist.recv(torch.zeros(1), src=other)
    return 0

sys.exit(guarded(work, rank=rank, directory=directory))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("failing", [0, 2])
def test_ranks_that_hang_in_a_collective_end_with_the_first_error(tmp_path: Path, failing: int) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HANGING, str(rank), str(port), str(tmp_path), str(failing)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    try:
        ends = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1, 1]
    last = f"error on rank {failing}: RuntimeError: the data are broken"
    assert [text.strip().splitlines()[-1] for text in ends] == [last] * 3
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["rank"], error["message"]) == (failing, "the data are broken")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
