"""What a run leaves behind beside checkpoints and numbers: configuration, versions, status, first error."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from conf.saved import read, to_yaml
from conf.schema import plain

log = logging.getLogger(__name__)

State = Literal["running", "finished", "stopped", "failed"]
PACKAGES = (
    "torch",
    "deepspeed",
    "hydra-core",
    "pydantic",
    "numpy",
    "datasets",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "triton",
    "transformers",
)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that does not: that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _written_beside(path: Path, text: str) -> Iterator[Path]:
    """The text whole on disk in a temporary file beside `path`, which does not outlive the block."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file whole: a reader sees the old or the new one, and so does a machine that lost power.

    What cannot be written leaves the old one, nothing beside it, and an OSError that names the file.
    """
    with _written_beside(path, text) as temporary:
        os.replace(temporary, path)


def write_in_place(path: Path, text: str) -> None:
    """Write over the beginning of a file that is there: the blocks it has are enough on a full disk."""
    with naming(path), open(path, "r+b") as file:
        file.write(text.encode("utf-8"))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _claim(temporary: Path, path: Path) -> None:
    """Make a whole file appear as `path`; FileExistsError when there is one: the first wins."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.replace(temporary, path)


class RunDirectory:
    """The directory of one run. Rank 0 writes; any rank may write the first error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = False  # whether this process has started to work in it
        self.step = 0  # updates applied, as far as this process knows

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def error_file(self) -> Path:
        return self.path / "error.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def layers_file(self) -> Path:
        return self.path / "layers.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log_file(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def saved_config(self) -> dict[str, Any] | None:
        """The plain values of the configuration that lies there, or None; ValueError when unreadable."""
        return read(self.config_file) if self.config_file.exists() else None

    def status(self) -> dict[str, Any] | None:
        """{state, reason, step} as last written, or None."""
        try:
            return json.loads(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, config: Any, *, rank: int, step: int = 0, extra: Mapping[str, Any] | None = None) -> None:
        """From here on the run is under way. All ranks call it; rank 0 writes config, versions, status.

        A configuration that differs from the one already there moves the old one to config.1.yaml,
        config.2.yaml and so on. extra: more facts for versions.json, such as devices.
        """
        self.begun, self.step = True, step
        if rank != 0:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.error_file.unlink(missing_ok=True)
        text = to_yaml(plain(config))
        if self.config_file.exists() and self.config_file.read_text(encoding="utf-8") != text:
            number = 1 + sum(1 for _ in self.path.glob("config.[0-9]*.yaml"))
            self.config_file.rename(self.path / f"config.{number}.yaml")
        write_atomic(self.config_file, text)
        facts = {**versions(), **(extra or {})}
        write_atomic(self.path / "versions.json", json.dumps(facts, indent=1) + "\n")
        self.set_status("running", reason="", step=step)

    def set_status(self, state: State, *, reason: str, step: int) -> None:
        """Write status.json; it decides whether a scheduler starts the run again."""
        self.step = step
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"state": state, "reason": reason, "step": step})
        write_atomic(self.status_file, text + "\n")

    def record_error(self, report: Mapping[str, Any], *, since: float) -> bool:
        """Write status and error.json unless another rank of this start (since: its time) has.

        True when the error is recorded. Nothing is written into the directory of a run that this process has
        not begun to work in. A disk that takes no more is said in a warning: the error at hand is the news.
        """
        if not self.begun and self.status_file.exists():
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.error_file.exists():
                if self.error_file.stat().st_mtime >= since - 1:
                    return False
                self.error_file.unlink(missing_ok=True)  # of an earlier start
            if self.begun:
                state = "stopped" if report["type"] == "KeyboardInterrupt" else "failed"
                self._set_last_status(state, reason=report["message"])
            with _written_beside(self.error_file, json.dumps(report, indent=1) + "\n") as temporary:
                _claim(temporary, self.error_file)
        except FileExistsError:
            return False
        except OSError as error:
            log.warning(f"the error could not be recorded ({error})")
            return False
        return True

    def _set_last_status(self, state: State, *, reason: str) -> None:
        """As set_status, also on a full disk, where the old file's place takes what fits into it."""
        try:
            self.set_status(state, reason=reason, step=self.step)
        except OSError:
            short = json.dumps({"state": state, "reason": reason[:300], "step": self.step})
            write_in_place(self.status_file, short + "\n")


def versions(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What this run was made with: Python, packages, this source's git commit, the command line."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "git": git_state(Path(__file__).resolve().parents[1]),
        "command": list(sys.argv if arguments is None else arguments),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def package_versions() -> dict[str, str]:
    """Of what is installed and of interest."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return packages


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of a checkout and a hash of what is not committed in it; None outside one or without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout

    try:
        top = Path(git("rev-parse", "--show-toplevel").decode().strip())
        if top != directory:
            return None  # installed inside somebody else's checkout
        changes = git("diff", "HEAD")
        return {
            "commit": git("rev-parse", "HEAD").decode().strip(),
            "changes": hashlib.sha256(changes).hexdigest() if changes else None,
        }
    except (OSError, subprocess.SubprocessError):
        return None
