"""A disk in memory that counts every operation, breaks at the one it is told to, and forgets like a real one.

After a crash the content of a file is what was last synced, and a directory shows the names of its last sync,
or any later state up to the crash: file systems keep the order of name changes, not when they become durable.
"""

import errno
import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path


class Crash(BaseException):
    """The process is gone: nothing may catch this."""


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Directory:
    names: dict[str, "File | Directory"] = field(default_factory=dict)
    history: list[dict] = field(default_factory=lambda: [{}])  # states since the last sync

    def changed(self) -> None:
        self.history.append(dict(self.names))


class Disk:
    """What all ranks share. `break_at` is the number of the operation that fails, counted from 1."""

    def __init__(self) -> None:
        self.root, self.lock = Directory(), threading.RLock()
        self.count, self.break_at, self.kind = 0, 0, ""  # kind: crash | ENOSPC | EIO
        self.only: int | None = None  # the rank that breaks alone; None: all
        self.rename_over = True
        self.log: list[str] = []

    def arm(self, break_at: int, kind: str, only: int | None = None) -> None:
        self.count, self.break_at, self.kind, self.only, self.log = 0, break_at, kind, only, []

    def operation(self, rank: int, name: str, path: Path) -> None:
        if self.only is not None and rank != self.only:
            return
        self.count += 1
        self.log.append(f"{rank} {name} {path.name}")
        if self.break_at and self.kind == "crash" and self.count >= self.break_at:
            raise Crash
        if self.count == self.break_at:
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number), str(path))

    def at(self, path: Path) -> File | Directory:
        node: File | Directory = self.root
        for part in path.parts[1:]:
            if not isinstance(node, Directory) or part not in node.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.names[part]
        return node

    def directory(self, path: Path) -> Directory:
        node = self.at(path)
        assert isinstance(node, Directory), path
        return node

    def file(self, path: Path) -> File:
        node = self.at(path)
        assert isinstance(node, File), path
        return node

    def after_crash(self, memory: str, seed: int = 0) -> "Disk":
        """The disk after a restart. memory: of what was unsynced stays nothing (`synced`), `some`, `all`."""
        draw = random.Random(seed)
        fresh = Disk()
        fresh.root, fresh.rename_over = self._survivor(self.root, memory, draw), self.rename_over
        return fresh

    def _survivor(self, node, memory: str, draw: random.Random):
        if isinstance(node, File):
            data = bytes(node.data)
            if memory == "synced":
                data = node.durable
            elif memory == "some" and data != node.durable:
                data = draw.choice([node.durable, data, data[: len(data) // 2], bytes(len(data))])
            return File(bytearray(data), data)
        states = {"synced": node.history[0], "all": node.names, "some": draw.choice(node.history)}
        names = {name: self._survivor(child, memory, draw) for name, child in states[memory].items()}
        return Directory(names, [dict(names)])


class DiskSink:
    def __init__(self, disk: Disk, rank: int, path: Path, file: File) -> None:
        self._disk, self._rank, self._path, self._file = disk, rank, path, file

    def write(self, data) -> None:
        with self._disk.lock:
            try:
                self._disk.operation(self._rank, "write", self._path)
            except BaseException:
                self._file.data += bytes(data[: len(data) // 2])  # torn in the middle
                raise
            self._file.data += bytes(data)

    def sync(self) -> None:
        with self._disk.lock:
            self._disk.operation(self._rank, "sync", self._path)
            self._file.durable = bytes(self._file.data)

    def close(self) -> None:
        pass


class DiskFiles:
    """The disk as one rank sees it: checkpoints.files.Files."""

    whole = False

    def __init__(self, disk: Disk, rank: int = 0, *, renames: bool = True) -> None:
        self._disk, self._rank, self.renames = disk, rank, renames

    def _start(self, name: str, path: Path) -> Disk:
        self._disk.operation(self._rank, name, path)
        return self._disk

    def names(self, directory: Path) -> list[str]:
        with self._disk.lock:
            disk = self._start("names", directory)
            try:
                node = disk.at(directory)
            except FileNotFoundError:
                return []
            return sorted(node.names) if isinstance(node, Directory) else []

    def size(self, path: Path) -> int:
        with self._disk.lock:
            return len(self._start("size", path).file(path).data)

    def read(self, path: Path, start: int, count: int) -> bytes:
        with self._disk.lock:
            return bytes(self._start("read", path).file(path).data[start : start + count])

    def read_into(self, path: Path, start: int, target: memoryview) -> int:
        data = self.read(path, start, len(target))
        target[: len(data)] = data
        return len(data)

    def create(self, path: Path) -> DiskSink:
        with self._disk.lock:
            parent = self._start("create", path).directory(path.parent)
            parent.names[path.name] = node = File()
            parent.changed()
            return DiskSink(self._disk, self._rank, path, node)

    def make_directory(self, path: Path) -> None:
        with self._disk.lock:
            node = self._start("make_directory", path).root
            for part in path.parts[1:]:
                if part not in node.names:
                    node.names[part] = Directory()
                    node.changed()
                node = node.names[part]
                assert isinstance(node, Directory)

    def rename(self, old: Path, new: Path) -> None:
        with self._disk.lock:
            self._start("rename", old)
            assert old.parent == new.parent
            parent = self._disk.directory(old.parent)
            assert new.name not in parent.names, new
            parent.names[new.name] = parent.names.pop(old.name)
            parent.changed()

    def replace(self, old: Path, new: Path) -> None:
        with self._disk.lock:
            parent = self._start("replace", old).directory(old.parent)
            if new.name in parent.names and not self._disk.rename_over:
                raise FileExistsError(errno.EEXIST, "no rename over a file", str(new))
            parent.names[new.name] = parent.names.pop(old.name)
            parent.changed()

    def remove(self, path: Path) -> None:
        with self._disk.lock:
            parent = self._start("remove", path).directory(path.parent)
            assert isinstance(parent.names.pop(path.name), File)
            parent.changed()

    def remove_directory(self, path: Path) -> None:
        with self._disk.lock:
            parent = self._start("remove_directory", path).directory(path.parent)
            node = parent.names.pop(path.name)
            assert isinstance(node, Directory) and not node.names, path
            parent.changed()

    def sync_directory(self, path: Path) -> None:
        with self._disk.lock:
            node = self._start("sync_directory", path).directory(path)
            node.history = [dict(node.names)]


class BucketFiles(DiskFiles):
    """The disk as an object store: files appear whole and durable, nothing is renamed, no directories."""

    whole = True

    def __init__(self, disk: Disk, rank: int = 0) -> None:
        super().__init__(disk, rank, renames=False)

    def create(self, path: Path) -> "BucketSink":
        with self._disk.lock:
            self._start("create", path)
            return BucketSink(self._disk, self._rank, path)

    def make_directory(self, path: Path) -> None:
        pass

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._settle(path)

    def remove_directory(self, path: Path) -> None:
        with self._disk.lock:
            parent = self._disk.directory(path.parent)
            assert not self._disk.directory(path).names
            parent.names.pop(path.name)
            parent.history = [dict(parent.names)]

    def sync_directory(self, path: Path) -> None:
        pass

    def rename(self, old: Path, new: Path) -> None:
        raise AssertionError("renamed in an object store")

    replace = rename

    def _settle(self, path: Path) -> None:
        node = self._disk.directory(path.parent)
        node.history = [dict(node.names)]


class BucketSink:
    def __init__(self, disk: Disk, rank: int, path: Path) -> None:
        self._disk, self._rank, self._path, self._data = disk, rank, path, bytearray()

    def write(self, data) -> None:
        with self._disk.lock:
            self._disk.operation(self._rank, "write", self._path)
            self._data += bytes(data)

    def sync(self) -> None:
        with self._disk.lock:
            self._disk.operation(self._rank, "sync", self._path)
            node = self._disk.root
            for part in self._path.parts[1:-1]:
                node = node.names.setdefault(part, Directory())
                assert isinstance(node, Directory)
            node.names[self._path.name] = File(self._data, bytes(self._data))
            for folder in self._path.parents:
                above = self._disk.directory(folder)
                above.history = [dict(above.names)]

    def close(self) -> None:
        pass
