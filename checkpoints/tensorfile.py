"""safetensors files written and read in blocks, each with its checksum.

A file is 8 bytes of header length (little-endian), the header (JSON: dtype, shape and data_offsets of every
entry), and the entries' bytes, back to back. Each entry here is 1-d: a stretch of a logical tensor. Writing
streams live memory to the disk and hashes on the way, with no second copy; reading touches whole blocks only
and checks each one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.files import Files, Sink
from checkpoints.manifest import ITEM_BYTES, Damaged, FileSum, digest, digest_of_blocks

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Place:
    """Where an entry lies in its file, in bytes, and what it is."""

    start: int
    stop: int
    dtype: str


class _Blocks:
    """Passes bytes on to a sink and hashes them block by block."""

    def __init__(self, sink: Sink, block_bytes: int) -> None:
        self._sink, self._block_bytes = sink, block_bytes
        self._hash, self._room = hashlib.sha256(), block_bytes
        self.blocks: list[str] = []
        self.bytes = 0

    def write(self, data: memoryview) -> None:
        while data:
            part, data = data[: self._room], data[self._room :]
            self._sink.write(part)
            self._hash.update(part)
            self.bytes += len(part)
            self._room -= len(part)
            if not self._room:
                self._close_block()

    def _close_block(self) -> None:
        self.blocks.append(self._hash.hexdigest())
        self._hash, self._room = hashlib.sha256(), self._block_bytes

    def finish(self, name: str) -> FileSum:
        if self._room < self._block_bytes:
            self._close_block()
        return FileSum(name, self.bytes, digest_of_blocks(self.blocks), tuple(self.blocks))


def write(
    files: Files, path: Path, tensors: Sequence[tuple[str, torch.Tensor]], *, block_bytes: int
) -> FileSum:
    """A safetensors file of 1-d contiguous tensors, on the disk when this returns (its name is not)."""
    # Wide elements first, so that each entry begins at a multiple of its width.
    tensors = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for key, tensor in tensors:
        stop = position + tensor.numel() * tensor.element_size()
        entry = {
            "dtype": NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [position, stop],
        }
        header[key], position = entry, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink = files.create(path)
    try:
        blocks = _Blocks(sink, block_bytes)
        blocks.write(memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in tensors:
            blocks.write(_bytes_of(tensor))
        sink.sync()
    finally:
        sink.close()
    return blocks.finish(path.name)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.dim() == 1 and tensor.is_contiguous(), f"not 1-d contiguous: {tuple(tensor.shape)}"
    host = tensor.detach().cpu()
    return host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


class Reader:
    """One file of a checkpoint. Whatever it returns has been checked against the manifest."""

    def __init__(self, files: Files, path: Path, expected: FileSum, block_bytes: int) -> None:
        self._files, self._path, self._expected = files, path, expected
        self._block_bytes = block_bytes
        self._number, self._block = -1, b""  # the block read last: neighbours share one
        self._places: dict[str, Place] | None = None

    def check_size(self) -> None:
        """Damaged when the file is missing or has another length."""
        try:
            size = self._files.size(self._path)
        except OSError as error:
            raise Damaged(f"{self._path} cannot be read: {error}") from error
        if size != self._expected.bytes:
            raise Damaged(f"{self._path} has {size} bytes instead of {self._expected.bytes}")

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of the file; Damaged when a block that they touch is not as it was written."""
        data = bytearray(stop - start)
        for number in range(start // self._block_bytes, -(-stop // self._block_bytes)):
            begin = number * self._block_bytes
            block = self._checked(number)
            low, high = max(start, begin), min(stop, begin + len(block))
            data[low - start : high - start] = memoryview(block)[low - begin : high - begin]
        return data

    def _checked(self, number: int) -> bytes:
        if number == self._number:
            return self._block
        begin = number * self._block_bytes
        count = min(self._block_bytes, self._expected.bytes - begin)
        try:
            block = self._files.read(self._path, begin, count)
        except OSError as error:
            raise Damaged(f"{self._path} cannot be read: {error}") from error
        if len(block) != count or digest(block) != self._expected.blocks[number]:
            raise Damaged(
                f"{self._path} is damaged: bytes {begin} to {begin + count} do not fit their checksum"
            )
        self._number, self._block = number, block
        return block

    def check_all(self) -> None:
        """Read everything; Damaged at the first block that is not as it was written."""
        self.check_size()
        for number in range(len(self._expected.blocks)):
            self._checked(number)

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
        """Elements [first, stop) of an entry, on the host."""
        place = self.places()[key]
        width = ITEM_BYTES[place.dtype]
        data = self.read(place.start + first * width, place.start + stop * width)
        return torch.frombuffer(data, dtype=DTYPES[place.dtype])
