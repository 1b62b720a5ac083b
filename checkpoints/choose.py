"""Which checkpoint is taken: the newest that no rewind condemned, or the one that is named."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpoints import manifest as manifests
from checkpoints import store
from checkpoints.files import Files
from megamodel.data.batch import Cursor


@dataclass(frozen=True)
class Rewind:
    """A rewind that was decided: what was saved between its snapshot and its alarm is not to be trusted."""

    attempt: int  # of the alarm
    snapshot_step: int


@dataclass(frozen=True)
class Choices:
    """(path, checksum of its manifest) of what may be loaded, best first, and what is wrong with the rest."""

    where: str
    named: bool  # by its own path: nothing else will do
    paths: list[tuple[str, str]]
    faults: list[str]


def condemned(cursor: Cursor, rewinds: Iterable[Rewind]) -> bool:
    """Written after the snapshot of a rewind and not after its alarm."""
    return any(cursor.step > r.snapshot_step and cursor.attempt <= r.attempt for r in rewinds)


def look(files: Files, directory: Path, resume: str, path: Path, rewinds: Iterable[Rewind]) -> Choices:
    """What `resume` means: auto in `directory`, or `path`; ValueError when that holds no checkpoint."""
    if resume == "auto":
        return newest(files, directory, rewinds)
    names = files.names(path)
    if manifests.NAME in names:
        checksum = manifests.read(files, path)[1]
        return Choices(str(path), True, [(str(path), checksum)], [])
    for inner in (path / "checkpoints", path):
        if store.steps(files, inner):
            return newest(files, inner, rewinds)
    state = "is not a complete checkpoint" if names else "does not exist or is empty"
    raise ValueError(
        f"resume={resume} {state}; give the directory of a step (.../{store.step_name(1000)}) or of a run, "
        "or resume=auto"
    )


def newest(
    files: Files, directory: Path, rewinds: Iterable[Rewind], *, at_most: int | None = None
) -> Choices:
    """All that may be loaded, the newest first; at_most: none of more steps."""
    found, faults = store.scan(files, directory)
    rewinds = list(rewinds)
    paths = [
        (str(f.path), f.checksum)
        for f in found
        if not condemned(f.manifest.cursor, rewinds) and (at_most is None or f.manifest.step <= at_most)
    ]
    return Choices(str(directory), False, paths, faults)
