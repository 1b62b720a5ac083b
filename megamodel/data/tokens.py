"""Token files: plain .npy, memory-mapped, the number type in their own header. And the corpus they make."""

import hashlib
import io
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megamodel.data.encode import DOCUMENT, NO_OFFSET, Encoded

_COUNT_WIDTH = 20  # room in a header for any number of rows, so that it can be written last


@dataclass(frozen=True)
class Source:
    """Where a document came from: record counts from 1 (row, line, or document of a text file); byte range in
    the decompressed file, None for rows of a table."""

    path: str
    record: int
    byte_start: int | None
    byte_stop: int | None


@dataclass(frozen=True)
class Corpus:
    """One side of one source: documents one after another in a single row of tokens.

    tokens (T,) uint16 or uint32; starts (D + 1,) int64, the first token of each document and T at the end;
    documents (D,) DOCUMENT; all memory maps, opened at first use.
    """

    name: str
    directory: Path
    side: str
    files: tuple[str, ...]
    count: int
    document_count: int

    @property
    def path(self) -> Path:
        return self.directory / f"{self.side}.tokens.npy"

    @cached_property
    def tokens(self) -> np.ndarray:
        return open_array(self.path)

    @cached_property
    def starts(self) -> np.ndarray:
        return open_array(self.directory / f"{self.side}.starts.npy")

    @cached_property
    def documents(self) -> np.ndarray:
        return open_array(self.directory / f"{self.side}.documents.npy")

    def sources(self, start: int, stop: int) -> list[Source]:
        """The documents that tokens [start, stop) come from, in order."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        rows = self.documents[first : min(last, self.document_count)]
        return [_source(row, self.files) for row in rows]


def _source(row: np.void, files: tuple[str, ...]) -> Source:
    start, length = int(row["byte_start"]), int(row["byte_length"])
    path, record = files[int(row["file"])], int(row["record"])
    if start == NO_OFFSET:
        return Source(path, record, None, None)
    return Source(path, record, start, start + length)


def open_array(path: Path) -> np.ndarray:
    """The array of a .npy file as a memory map; ValueError when it is missing or not whole."""
    try:
        if path.stat().st_size <= 1 << 12:  # an empty map is refused by the system, and small ones are no use
            return np.load(path, allow_pickle=False)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete its directory and prepare again") from None


def check_array(path: Path, dtype: np.dtype, count: int) -> None:
    """ValueError, without what to do about it, unless the file has the header and the size of count rows."""
    header = npy_header(dtype, count)
    expected = len(header) + count * dtype.itemsize
    try:
        with path.open("rb") as file:
            size, found = os.fstat(file.fileno()).st_size, file.read(len(header))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    if size != expected:
        raise ValueError(f"{path} has {size} bytes, and {expected} were written")
    if found != header:
        raise ValueError(f"{path} does not begin as it was written")


class ArrayWriter:
    """A one-dimensional .npy file written piece by piece; its header is completed at the end."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.count = 0
        self._dtype = dtype
        self._hash = hashlib.sha256()
        self._file = path.open("wb")
        self._file.write(npy_header(dtype, 0))

    def write(self, content: bytes) -> None:
        self._hash.update(content)
        self._file.write(content)
        self.count += len(content) // self._dtype.itemsize

    def close(self) -> str:
        """Complete the file on disk; the SHA-256 of its content after the header."""
        self._file.seek(0)
        self._file.write(npy_header(self._dtype, self.count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


def npy_header(dtype: np.dtype, count: int) -> bytes:
    """A .npy header (format 1.0) for count rows, of a size that depends on the type alone."""
    description = np.lib.format.dtype_to_descr(dtype)

    def body(rows: int) -> str:
        return repr({"descr": description, "fortran_order": False, "shape": (rows,)})

    size = -(-(10 + len(body(10**_COUNT_WIDTH)) + 1) // 64) * 64
    text = body(count).ljust(size - 11) + "\n"
    return np.lib.format.magic(1, 0) + (size - 10).to_bytes(2, "little") + text.encode("latin1")


class CorpusWriter:
    """Writes one side of one source."""

    def __init__(self, directory: Path, side: str, dtype: np.dtype) -> None:
        self._tokens = ArrayWriter(directory / f"{side}.tokens.npy", dtype)
        self._starts = ArrayWriter(directory / f"{side}.starts.npy", np.dtype("<i8"))
        self._documents = ArrayWriter(directory / f"{side}.documents.npy", DOCUMENT)

    @property
    def count(self) -> int:
        return self._tokens.count

    def write(self, encoded: Encoded) -> None:
        if len(encoded.lengths):
            starts = self.count + np.cumsum(encoded.lengths) - encoded.lengths
            self._starts.write(starts.astype("<i8").tobytes())
            self._tokens.write(encoded.ids)
            self._documents.write(encoded.documents.tobytes())

    def close(self) -> dict[str, int | str]:
        """What the manifest says of this side."""
        self._starts.write(np.array([self.count], dtype="<i8").tobytes())
        return {
            "tokens": self._tokens.count,
            "documents": self._documents.count,
            "tokens_sha256": self._tokens.close(),
            "starts_sha256": self._starts.close(),
            "documents_sha256": self._documents.close(),
        }


def content_sha256(path: Path) -> str:
    """The SHA-256 of what follows the header of a .npy file, as the manifest has it."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        assert version == (1, 0)
        np.lib.format.read_array_header_1_0(file)
        while chunk := file.read(io.DEFAULT_BUFFER_SIZE << 7):
            whole.update(chunk)
    return whole.hexdigest()
