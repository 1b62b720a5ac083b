"""Files cut into blocks of whole records: read once, in order, in memory that does not grow with the file."""

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import zstandard

from megamodel.data.config import SourceConfig
from megamodel.data.sources import SourceFile

BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = 1 << 20  # a stretch of ready tokens without EOS is cut after so many
LINE_BYTES = 1 << 28  # a longer line is rejected: nothing may hold a whole file in memory
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
_BOM = b"\xef\xbb\xbf"
_SCENE = re.compile(rb"^(?:#{1,2} [^\n]*\n+)*### ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file.

    kind: text (one document), lines (JSON, one a line), rows (texts of a table), ids (ready tokens, int64),
    overlong (a line that is not kept); first_record counts from 1; byte_start: of the payload in the
    decompressed file, None where there is no such thing; unit_bytes: of one token as stored (ids); ended: the
    payload ends the file.
    """

    kind: Literal["text", "lines", "rows", "ids", "overlong"]
    payload: bytes
    first_record: int
    byte_start: int | None
    unit_bytes: int = 0
    ended: bool = False
    lengths: tuple[int, ...] = ()


def blocks(file: SourceFile, source: SourceConfig, *, eos_id: int | None) -> Iterator[Block]:
    """The blocks of a file in order. eos_id ends a document in ready tokens.

    Raises ValueError for a damaged file and for one that holds something else than its name says.
    """
    if file.format in ("npy", "bin"):
        return _token_blocks(file, source, eos_id)
    if file.format in ("parquet", "dataset"):
        from megamodel.data.tables import row_blocks  # `datasets` takes a second to import: only where needed

        return row_blocks(file, source)
    return _byte_blocks(file, source)


def _byte_blocks(file: SourceFile, source: SourceConfig) -> Iterator[Block]:
    with open(file.path, "rb") as raw:
        chunks = _without_bom(_decompressed(raw, file))
        if file.format == "jsonl":
            yield from line_blocks(chunks)
        elif file.cut == "lines":
            yield from text_blocks(chunks, source.document_bytes)
        else:
            yield from _whole_text(chunks, file.cut == "scenes")


def _decompressed(raw: IO[bytes], file: SourceFile) -> Iterator[bytes]:
    try:
        if file.compression == "zst":
            yield from _zstandard(raw)
            return
        stream = gzip.GzipFile(fileobj=raw) if file.compression == "gz" else raw
        while chunk := stream.read(BLOCK_BYTES):
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{file.path} is damaged or cut off ({error}); fetch it again") from None


def _zstandard(raw: IO[bytes]) -> Iterator[bytes]:
    """All frames of a file. The library's own reader takes a file that is cut off for a whole one."""
    reader = zstandard.ZstdDecompressor()
    frame, begun = reader.decompressobj(), False
    while chunk := raw.read(BLOCK_BYTES >> 3):
        while chunk:
            begun = True
            if part := frame.decompress(chunk):
                yield part
            chunk = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, begun = reader.decompressobj(), False
    if begun:
        raise EOFError("the last frame has no end")


def _without_bom(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """(byte offset, chunk) of each chunk, without a byte order mark at the very start."""
    offset, head = 0, b""
    for chunk in chunks:
        if offset == 0 and len(head) < len(_BOM):
            head += chunk
            if len(head) < len(_BOM):
                continue
            offset = len(_BOM) if head.startswith(_BOM) else 0
            chunk, head = head[offset:], _BOM
        yield offset, chunk
        offset += len(chunk)
    if head and head != _BOM:
        yield 0, head


def line_blocks(chunks: Iterator[tuple[int, bytes]], *, line_bytes: int = LINE_BYTES) -> Iterator[Block]:
    """Blocks of whole lines; only a line feed ends a line."""
    record, start, pending, dropping = 1, 0, bytearray(), False
    for offset, chunk in chunks:
        if dropping:
            end = chunk.find(b"\n") + 1
            if not end:
                continue
            yield Block("overlong", b"", record, start)
            record, dropping = record + 1, False
            offset, chunk = offset + end, chunk[end:]
        start = start if pending else offset
        cut = chunk.rfind(b"\n") + 1
        if cut:
            payload = bytes(pending) + chunk[:cut]
            yield Block("lines", payload, record, start)
            record, start, pending = record + payload.count(b"\n"), offset + cut, bytearray(chunk[cut:])
        else:
            pending += chunk
        if len(pending) > line_bytes:
            pending.clear()
            dropping = True
    if dropping:
        yield Block("overlong", b"", record, start)
    elif pending:
        yield Block("lines", bytes(pending), record, start, ended=True)


def text_blocks(chunks: Iterator[tuple[int, bytes]], document_bytes: int) -> Iterator[Block]:
    """Documents of at most document_bytes, cut after a line, or inside one where it has no line end."""
    record, start, pending = 1, 0, bytearray()
    for offset, chunk in chunks:
        start = start if pending else offset
        pending += chunk
        while len(pending) > document_bytes:
            cut = pending.rfind(b"\n", 0, document_bytes) + 1 or _character_start(pending, document_bytes)
            yield Block("text", bytes(pending[:cut]), record, start)
            record, start = record + 1, start + cut
            del pending[:cut]
    if pending or record == 1:
        yield Block("text", bytes(pending), record, start, ended=True)


def _character_start(text: bytearray, position: int) -> int:
    """The last start of a UTF-8 character at or before position (position itself in what is no UTF-8)."""
    for back in range(min(4, position)):
        if text[position - back] & 0xC0 != 0x80:
            return position - back
    return position


def _whole_text(chunks: Iterator[tuple[int, bytes]], scenes: bool) -> Iterator[Block]:
    parts = list(chunks)
    text, first = b"".join(part for _, part in parts), parts[0][0] if parts else 0
    starts = [match.start() for match in _SCENE.finditer(text)][1:] if scenes else []
    for record, (start, stop) in enumerate(zip([0, *starts], [*starts, len(text)], strict=True), 1):
        yield Block("text", text[start:stop], record, first + start)


def _token_blocks(file: SourceFile, source: SourceConfig, eos_id: int | None) -> Iterator[Block]:
    tokens, offset = open_tokens(Path(file.path), source.dtype if file.format == "bin" else None)
    unit, start = tokens.dtype.itemsize, 0
    while start < len(tokens):
        ids = np.asarray(tokens[start : start + BLOCK_TOKENS]).astype(np.int64)
        if start + len(ids) < len(tokens):
            ends = np.flatnonzero(ids == eos_id)
            ids = ids[: ends[-1] + 1] if len(ends) else ids
        yield Block("ids", ids.tobytes(), start + 1, offset + start * unit, unit_bytes=unit)
        start += len(ids)


def open_tokens(path: Path, dtype: str | None) -> tuple[np.ndarray, int]:
    """(the numbers of a token file as a memory map, byte offset of the first).

    dtype None: a .npy file, whose header says the type; else raw little-endian numbers. ValueError for
    anything but one row of whole numbers, and for a file that is really a pickle.
    """
    if dtype is None:
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{path} is not a .npy file of plain numbers ({error})") from None
        right = isinstance(tokens, np.memmap) and tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not right or not tokens.size:
            raise ValueError(f"{path} must hold one row of whole numbers, not none or another shape or type")
        return tokens, int(tokens.offset)
    size, unit = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % unit:
        raise ValueError(f"{path} has {size} bytes, which is no whole number of {dtype}; check data.dtype")
    with path.open("rb") as raw:
        head = raw.read(len(_TORCH))
        raw.seek(-1, os.SEEK_END)
        pickled = head[:2] in _PICKLES and raw.read(1) == b"."
    if pickled or head == _TORCH or head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path} is a zip or pickle file, not raw {dtype} numbers")
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r"), 0
