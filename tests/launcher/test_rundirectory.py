"""What a run leaves behind."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from conf.typed import parse
from launcher.config import Config
from launcher.failure import guarded
from launcher.rundirectory import RunDirectory, git_state, versions, write_atomic

ERROR = {"rank": 1, "type": "ValueError", "message": "bad", "code": 1, "traceback": "", "time": 0.0}


def test_a_run_begins_with_its_configuration_versions_and_status(tmp_path: Path) -> None:
    config = Config(format="json")
    directory = RunDirectory(tmp_path / "runs" / "a")
    directory.begin(config, rank=0, step=3, extra={"devices": ["cpu"]})
    saved = directory.saved_config()
    assert saved is not None and parse(Config, saved) == config
    assert directory.status() == {"state": "running", "reason": "", "step": 3}
    facts = json.loads((directory.path / "versions.json").read_text())
    assert facts["devices"] == ["cpu"]
    assert facts["packages"]["deepspeed"] == "0.19.8"
    assert (directory.begun, directory.step) == (True, 3)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a")
    directory.begin(Config(), rank=1)
    assert directory.begun and not directory.path.exists()


def test_an_earlier_configuration_is_kept(tmp_path: Path) -> None:
    for kind in ("text", "json", "json", "text"):
        RunDirectory(tmp_path).begin(Config(format=kind), rank=0)
    names = ("config.1.yaml", "config.2.yaml", "config.yaml")
    assert sorted(path.name for path in tmp_path.glob("config*")) == list(names)
    assert [("format: json" in (tmp_path / name).read_text()) for name in names] == [False, True, False]


def test_the_status_is_replaced_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.status() is None
    directory.set_status("stopped", reason="SIGTERM", step=7)
    directory.set_status("finished", reason="", step=8)
    assert directory.status() == {"state": "finished", "reason": "", "step": 8}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_the_first_error_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin(Config(), rank=0)
    directory.step = 12
    assert directory.record_error(ERROR, since=0.0)
    assert not directory.record_error({**ERROR, "rank": 2, "message": "later"}, since=0.0)
    assert json.loads(directory.error_file.read_text()) == ERROR
    assert directory.status() == {"state": "failed", "reason": "bad", "step": 12}


def test_an_interrupted_run_has_stopped(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin(Config(), rank=0, step=3)
    assert directory.record_error({**ERROR, "type": "KeyboardInterrupt", "message": "interrupted"}, since=0.0)
    assert directory.status() == {"state": "stopped", "reason": "interrupted", "step": 3}


def test_an_error_of_an_earlier_start_gives_way(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.error_file.write_text("{}")
    os.utime(directory.error_file, (1000, 1000))
    assert directory.record_error(ERROR, since=2000.0)
    assert json.loads(directory.error_file.read_text()) == ERROR
    directory.begin(Config(), rank=0)
    assert not directory.error_file.exists()


def test_a_start_that_fails_leaves_somebodys_run_alone(tmp_path: Path) -> None:
    RunDirectory(tmp_path).set_status("finished", reason="", step=5)
    assert not RunDirectory(tmp_path).record_error(ERROR, since=0.0)
    assert RunDirectory(tmp_path).status() == {"state": "finished", "reason": "", "step": 5}
    assert not (tmp_path / "error.json").exists()


class FullDisk:
    """Every new file takes no byte; a file that is there can be written over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fsync = os.fsync
        self.inodes = set[int]()
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, number: int) -> None:
        found = os.fstat(number)
        if found.st_ino not in self.inodes:
            os.ftruncate(number, 0)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.fsync(number)


def test_a_full_disk_is_still_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin(Config(), rank=0, step=4)
    disk = FullDisk(monkeypatch)
    disk.inodes = {path.stat().st_ino for path in tmp_path.iterdir()}
    before = {path.name for path in tmp_path.iterdir()}
    assert not directory.record_error({**ERROR, "message": "boom"}, since=0.0)
    assert directory.status() == {"state": "failed", "reason": "boom", "step": 4}
    assert {path.name for path in tmp_path.iterdir()} == before
    assert f"No space left on device: '{directory.error_file}'" in caplog.text


def test_a_full_disk_does_not_hide_the_error_that_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")

    def work() -> int:
        directory.begin(Config(), rank=0)
        FullDisk(monkeypatch)
        raise RuntimeError("boom")

    assert guarded(work, rank=3, directory=directory) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error on rank 3: RuntimeError: boom"


def test_a_file_that_is_not_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/status.json'"):
        RunDirectory(tmp_path).set_status("running", reason="", step=0)
    assert list(tmp_path.iterdir()) == []


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "changes": None}
    (tmp_path / "a").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None and changed["commit"] == commit and len(changed["changes"]) == 64
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path / "inside") is None


def test_versions_name_what_is_installed() -> None:
    facts = versions(["train", "model=tiny"])
    assert facts["command"] == ["train", "model=tiny"]
    assert {"torch", "hydra-core", "pydantic", "tensorboard"} <= facts["packages"].keys()
