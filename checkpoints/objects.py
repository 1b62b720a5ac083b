"""Object stores and other places that fsspec reaches (s3, gcs, az, hdfs, memory, ...)."""

import contextlib
from pathlib import Path
from typing import Any

import fsspec

from checkpoints.files import Files, LocalFiles


def place(where: str, *, renames: bool = True) -> tuple[Files, Path]:
    """The file system of a path or a URL, and its path there; ValueError for a URL of no known kind.

    renames: whether a local file system renames directories.
    """
    if "://" not in where:
        return LocalFiles(renames=renames), Path(where).expanduser()
    try:
        system, path = fsspec.core.url_to_fs(where, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{where} cannot be opened: {error}") from error
    return ObjectFiles(system), Path(path)


class ObjectSink:
    """An object being written: it appears when `sync` has been called, and never without."""

    def __init__(self, system: Any, name: str) -> None:
        self._file = system.open(name, "wb", autocommit=False)
        self._done = False

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def sync(self) -> None:
        self._file.close()
        self._file.commit()
        self._done = True

    def close(self) -> None:
        if self._done:
            return
        with contextlib.suppress(
            Exception
        ):  # what is not committed costs room at most; the error comes first
            self._file.discard()


class ObjectFiles:
    """Files of an fsspec file system. Directories come and go with their files; nothing is renamed."""

    renames = False
    whole = True

    def __init__(self, system: Any) -> None:
        self._system = system

    def names(self, directory: Path) -> list[str]:
        self._system.invalidate_cache()  # other processes write here
        try:
            found = self._system.ls(str(directory), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {name.rstrip("/").rpartition("/")[2] for name in found if _same(name, directory)}
        return sorted(names)

    def size(self, path: Path) -> int:
        self._system.invalidate_cache()
        return int(self._system.info(str(path))["size"])

    def read(self, path: Path, start: int, count: int) -> bytes:
        return self._system.cat_file(str(path), start=start, end=start + count) if count else b""

    def read_into(self, path: Path, start: int, target: memoryview) -> int:
        data = self.read(path, start, len(target))
        target[: len(data)] = data
        return len(data)

    def create(self, path: Path) -> ObjectSink:
        return ObjectSink(self._system, str(path))

    def make_directory(self, path: Path) -> None:
        # Where there are true directories. A store that has none, or forbids it, shows with the first file.
        with contextlib.suppress(OSError, NotImplementedError):
            self._system.makedirs(str(path), exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        raise NotImplementedError(f"{old} is never renamed")

    def replace(self, old: Path, new: Path) -> None:
        raise NotImplementedError(f"{old} is never renamed")

    def remove(self, path: Path) -> None:
        self._system.rm_file(str(path))

    def remove_directory(self, path: Path) -> None:
        with contextlib.suppress(OSError, NotImplementedError):
            self._system.rmdir(str(path))

    def sync_directory(self, path: Path) -> None:
        pass


def _same(name: str, directory: Path) -> bool:
    """Whether a listed name lies in the directory: some stores list the directory itself."""
    return name.strip("/") != str(directory).strip("/")
