"""The command `prepare` in a process of its own: what it prints is one JSON object and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launcher.test_command_line import ROOT


def prepare(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launcher", "prepare", "data=files", "data.paths=[text]"]
    settings = ["data.cache=cache", "data.workers=1", "tokenizer.vocab_size=300", *arguments]
    return subprocess.run(
        [*command, *settings], cwd=place, env=environment, capture_output=True, text=True, timeout=120
    )


def test_json_is_all_that_prepare_prints(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(
            f"the cat number {number} sat on mat {number * 7}. " * 9
        )
    first, again = prepare(tmp_path, "format=json"), prepare(tmp_path, "format=json")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    told = json.loads(first.stdout)
    assert told == json.loads(again.stdout)
    (directory,) = (path for path in (tmp_path / "cache").glob("prepared-*") if path.is_dir())
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (told["directory"], told["digest"]) == (str(directory), manifest["digest"])
    assert told["train_tokens"]["files"] == manifest["sources"]["files"]["train"]["tokens"] > 0
    assert (told["records"], told["written"]) == (40, 40)
