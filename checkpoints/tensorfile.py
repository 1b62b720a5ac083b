"""safetensors files written and read in blocks, each with its checksum.

A file is 8 bytes of header length (little-endian), the header (JSON: dtype, shape and data_offsets of every
entry), and the entries' bytes, back to back. Each entry here is 1-d: a stretch of a logical tensor. Writing
streams live memory to the disk and hashes on the way, with no second copy; reading touches whole blocks only
and checks each one.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.files import Files, Sink
from checkpoints.manifest import ITEM_BYTES, Damaged, FileSum, digest, digest_of_blocks

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 * 2**20
HASH_THREADS = 2
AHEAD_BLOCKS = 8


@dataclass(frozen=True)
class Place:
    """Where an entry lies in its file, in bytes, and what it is."""

    start: int
    stop: int
    dtype: str


class _Blocks:
    """Passes bytes on to a sink; other threads hash them meanwhile, block by block."""

    def __init__(self, sink: Sink, block_bytes: int, pool: Executor) -> None:
        self._sink, self._block_bytes, self._pool = sink, block_bytes, pool
        self._parts: list[memoryview] = []
        self._room = block_bytes
        self._sums: list[Future[str]] = []
        self.bytes = 0

    def write(self, data: memoryview) -> None:
        while data:
            part, data = data[: self._room], data[self._room :]
            self._sink.write(part)
            self._parts.append(part)
            self.bytes += len(part)
            self._room -= len(part)
            if not self._room:
                self._close_block()

    def _close_block(self) -> None:
        self._sums.append(self._pool.submit(_digest_of_parts, self._parts))
        self._parts, self._room = [], self._block_bytes
        if len(self._sums) > AHEAD_BLOCKS:  # what is not hashed yet stays in memory
            self._sums[-AHEAD_BLOCKS].result()

    def finish(self, name: str) -> FileSum:
        if self._parts:
            self._close_block()
        blocks = tuple(future.result() for future in self._sums)
        return FileSum(name, self.bytes, digest_of_blocks(blocks), blocks)


def _digest_of_parts(parts: list[memoryview]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


@dataclass(frozen=True)
class Content:
    """One entry to be written: `load` gives its 1-d contiguous tensor when its turn comes."""

    key: str
    dtype: torch.dtype
    count: int
    load: Callable[[], torch.Tensor]


def write(files: Files, path: Path, contents: Sequence[Content], *, block_bytes: int) -> FileSum:
    """A safetensors file of these entries in this order, durable on return (its name is not).

    Wide elements come first, so that each entry begins at a multiple of its width.
    """
    widths = [content.dtype.itemsize for content in contents]
    assert widths == sorted(widths, reverse=True), widths
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for content, width in zip(contents, widths, strict=True):
        stop = position + content.count * width
        entry = {
            "dtype": NAMES[content.dtype],
            "shape": [content.count],
            "data_offsets": [position, stop],
        }
        header[content.key], position = entry, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        sink = files.create(path)
        try:
            blocks = _Blocks(sink, block_bytes, pool)
            blocks.write(memoryview(len(text).to_bytes(8, "little") + text))
            for content in contents:
                blocks.write(_bytes_of(content.load()))
            sink.sync()
        finally:
            sink.close()
        return blocks.finish(path.name)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.dim() == 1 and tensor.is_contiguous(), f"not 1-d contiguous: {tuple(tensor.shape)}"
    host = tensor.detach().cpu()
    return host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


class Memory:
    """What one thread reads through, used again and again: fresh memory costs more than reading."""

    def __init__(self) -> None:
        self.block, self.range = bytearray(), bytearray()
        self.holds: tuple[Path, int] | None = None  # the block that is in `block`: neighbours share one


class Reader:
    """One file of a checkpoint. Whatever it returns has been checked against the manifest."""

    def __init__(self, files: Files, path: Path, expected: FileSum, block_bytes: int, memory: Memory) -> None:
        self._files, self._path, self._expected = files, path, expected
        self._block_bytes = block_bytes
        self._memory = memory
        self._places: dict[str, Place] | None = None

    def check_size(self) -> None:
        """Damaged when the file is missing or has another length."""
        try:
            size = self._files.size(self._path)
        except OSError as error:
            raise Damaged(f"{self._path} cannot be read: {error}") from error
        if size != self._expected.bytes:
            raise Damaged(f"{self._path} has {size} bytes instead of {self._expected.bytes}")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the file, valid until the next call on the same memory.

        Damaged when a block that they touch is not as it was written.
        """
        if len(self._memory.range) < stop - start:
            self._memory.range = bytearray(stop - start)
        data = memoryview(self._memory.range)[: stop - start]
        for number in range(start // self._block_bytes, -(-stop // self._block_bytes)):
            begin = number * self._block_bytes
            block = self._checked(number)
            low, high = max(start, begin), min(stop, begin + len(block))
            data[low - start : high - start] = block[low - begin : high - begin]
        return data

    def _checked(self, number: int) -> memoryview:
        begin = number * self._block_bytes
        count = min(self._block_bytes, self._expected.bytes - begin)
        memory = self._memory
        if len(memory.block) < count:
            memory.block = bytearray(count)
        block = memoryview(memory.block)[:count]
        if memory.holds == (self._path, number):
            return block
        memory.holds = None
        try:
            found = self._files.read_into(self._path, begin, block)
        except OSError as error:
            raise Damaged(f"{self._path} cannot be read: {error}") from error
        if found != count or digest(block) != self._expected.blocks[number]:
            raise Damaged(
                f"{self._path} is damaged: bytes {begin} to {begin + count} do not fit their checksum"
            )
        memory.holds = self._path, number
        return block

    def places(self) -> dict[str, Place]:
        """Where the entries lie; Damaged when the header is impossible."""
        if self._places is None:
            length = int.from_bytes(self.read(0, 8), "little")
            if length > min(self._expected.bytes - 8, MAX_HEADER_BYTES):
                raise Damaged(f"{self._path} has an impossible header of {length} bytes")
            text = bytes(self.read(8, 8 + length))
            try:
                header = json.loads(text)
                header.pop("__metadata__", None)
                self._places = {key: self._place(key, raw, 8 + length) for key, raw in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise Damaged(f"{self._path} has an impossible header: {error}") from error
        return self._places

    def _place(self, key: str, raw: dict, data_start: int) -> Place:
        (count,), (start, stop) = raw["shape"], raw["data_offsets"]
        dtype = raw["dtype"]
        if stop - start != count * ITEM_BYTES[dtype]:
            raise ValueError(f"{key} has {stop - start} bytes for {count} elements")
        if start < 0 or data_start + stop > self._expected.bytes:
            raise ValueError(f"{key} lies outside the file")
        return Place(data_start + start, data_start + stop, dtype)

    def elements(self, key: str, first: int, stop: int) -> torch.Tensor:
        """Elements [first, stop) of an entry, on the host, valid as what `read` returns."""
        place = self.places()[key]
        width = ITEM_BYTES[place.dtype]
        data = self.read(place.start + first * width, place.start + stop * width)
        return torch.frombuffer(data, dtype=DTYPES[place.dtype])
