"""One rank fails, all end, and all say why in their last line."""

import json
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


def test_many_lines_end_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: raising(ValueError("2 errors\n  a\n  b")), rank=0) == 2
    assert capsys.readouterr().err == "2 errors\n  a\n  b\nerror on rank 0: 2 errors\n"


def test_once_work_has_begun_no_error_is_the_users() -> None:
    assert report_of(ValueError("x"), rank=0, begun=False).code == 2
    assert report_of(ValueError("x"), rank=0, begun=True).code == 1


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
    write_error_file(file, report_of(RuntimeError("no memory"), rank=3, begun=True))
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
    first = Report(rank=5, type="OSError", message="disk", code=1, traceback="", time=0.0)
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
    with pytest.raises(RankFailure, match="error on rank 0: boom"), lone:
        raise ValueError("boom")


HANGING = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from launcher.failure import FailureWatch, guarded
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
