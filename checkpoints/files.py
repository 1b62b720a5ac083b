"""The few file operations that checkpoints are made of, behind one small interface.

Everything a checkpoint does to a disk goes through `Files`, so that tests can record it, and break or stop it
at any operation. Names are paths; `OSError` is raised as the system raises it.
"""

import errno
import os
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """A file being written. Nothing is durable before `sync`."""

    def write(self, data: bytes | memoryview) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Files(Protocol):
    """A file system, or an object store."""

    @property
    def renames(self) -> bool:
        """Whether `rename` takes a whole directory at once; else the manifest completes a checkpoint."""
        ...

    @property
    def whole(self) -> bool:
        """Whether a file appears at once with `close` after `sync`, in the place of one of its name."""
        ...

    def names(self, directory: Path) -> list[str]:
        """Entries of a directory, sorted; empty when there is no such directory."""
        ...

    def size(self, path: Path) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""
        ...

    def read(self, path: Path, start: int, count: int) -> bytes:
        """At most `count` bytes from `start` on; fewer at the end of the file."""
        ...

    def read_into(self, path: Path, start: int, target: memoryview) -> int:
        """Fill `target` with the bytes from `start` on; how many there were."""
        ...

    def create(self, path: Path) -> Sink:
        """A new file, or an old one emptied."""
        ...

    def make_directory(self, path: Path) -> None:
        """The directory and those above it; nothing happens when it is there."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """A file or directory to a name that is free."""
        ...

    def replace(self, old: Path, new: Path) -> None:
        """A file to a name that may be taken, atomically; FileExistsError where the system cannot do that."""
        ...

    def remove(self, path: Path) -> None:
        """A file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """An empty directory."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...


class LocalSink:
    """A file of the operating system, unbuffered: blocks are large."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class LocalFiles:
    """Files of the operating system. renames: False where directories cannot be renamed (mounted buckets)."""

    whole = False
    renames = True

    def __init__(self, *, renames: bool = True) -> None:
        self.renames = renames

    def names(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def read(self, path: Path, start: int, count: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(count)

    def read_into(self, path: Path, start: int, target: memoryview) -> int:
        done = 0
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while done < len(target):
                count = file.readinto(target[done:])
                if not count:
                    break
                done += count
        return done

    def create(self, path: Path) -> LocalSink:
        return LocalSink(path)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.remove(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network and user-space file systems make names durable at once and refuse to be asked.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
        finally:
            os.close(handle)


def write_durably(files: Files, path: Path, data: bytes) -> None:
    """A small file, complete and on the disk when this returns (its name is not: sync the directory)."""
    sink = files.create(path)
    try:
        sink.write(data)
        sink.sync()
    finally:
        sink.close()


def put(files: Files, path: Path, data: bytes) -> None:
    """A small file in the place of one of its name, durable with its name: a reader sees the old or the new.

    Where the system cannot rename over a file the old one goes first: for a moment there is none.
    """
    if files.whole:
        write_durably(files, path, data)
        return
    fresh = path.with_name(path.name + ".writing")
    write_durably(files, fresh, data)
    try:
        files.replace(fresh, path)
    except FileExistsError:
        files.remove(path)
        files.rename(fresh, path)
    files.sync_directory(path.parent)


def remove_tree(files: Files, path: Path, *, first: str = "") -> None:
    """A directory of files. `first` goes first, durably: without it the rest counts for nothing."""
    names = files.names(path)
    if first in names:
        files.remove(path / first)
        files.sync_directory(path)
    for name in names:
        if name != first:
            files.remove(path / name)
    files.remove_directory(path)
