"""From a block to documents: the one policy for what is written, skipped and rejected."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megamodel.data.blocks import LINE_BYTES, Block

SKIPPED = ("blank line", "empty text")


@dataclass(frozen=True)
class Document:
    """One document: its text, or its ids when the source is ready tokens; where it lies in its file."""

    text: str
    ids: np.ndarray | None
    record: int
    byte_start: int | None
    byte_length: int
    hash: int  # 64 bits of the content's hash: equal content lands on one side of the held-out split


@dataclass(frozen=True)
class Left:
    """A record that gave no document, and why. Skipped when there was nothing in it, else rejected."""

    record: int
    reason: str

    @property
    def rejected(self) -> bool:
        return self.reason not in SKIPPED


def records(block: Block, *, text_key: str, eos_id: int | None) -> Iterator[Document | Left]:
    """Every record of a block, in order, as a document or as left out.

    JSONL: a blank line and an empty text are skipped; a byte order mark at the start of the file and a CR
    before the line feed are no part of the line; U+2028 and NUL inside a text are kept. Rejected: what is not
    UTF-8 or not a JSON object (a last line that is cut off says so), a missing key, a value that is no
    string, a lone surrogate, an overlong line.
    """
    if block.kind == "overlong":
        yield Left(block.first_record, f"longer than {LINE_BYTES} bytes")
    elif block.kind == "text":
        yield _document(block.payload, block.first_record, block.byte_start, len(block.payload))
    elif block.kind == "lines":
        yield from _lines(block, text_key)
    elif block.kind == "rows":
        yield from _rows(block, text_key)
    else:
        yield from _ids(block, eos_id)


def _document(content: bytes, record: int, byte_start: int | None, byte_length: int) -> Document | Left:
    if not content:
        return Left(record, "empty text")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return Left(record, f"invalid UTF-8 at byte {error.start}")
    return Document(text, None, record, byte_start, byte_length, content_hash(content))


def _lines(block: Block, text_key: str) -> Iterator[Document | Left]:
    assert block.byte_start is not None
    start, record = block.byte_start, block.first_record
    lines = block.payload.split(b"\n")
    last = len(lines) - 1
    for number, line in enumerate(lines):
        if number == last and not line:
            return  # what follows the last line feed is no line
        unended = number == last and block.ended
        yield _line(line, text_key, record, start, unended)
        start, record = start + len(line) + 1, record + 1


def _line(line: bytes, text_key: str, record: int, start: int, unended: bool) -> Document | Left:
    line = line.removesuffix(b"\r")
    if not line.strip():
        return Left(record, "blank line")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Left(record, f"invalid UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Left(record, "truncated last line" if unended else f"invalid JSON ({error})")
    if not isinstance(value, dict):
        return Left(record, f"a JSON {type(value).__name__}, not an object")
    if text_key not in value:
        return Left(record, f"no key {text_key!r}")
    text = value[text_key]
    if not isinstance(text, str):
        return Left(record, f"{text_key!r} is a {type(text).__name__}, not a string")
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:
        return Left(record, "lone surrogate")
    return _document(content, record, start, len(line))


def _rows(block: Block, text_key: str) -> Iterator[Document | Left]:
    start = 0
    for record, length in enumerate(block.lengths, block.first_record):
        if length < 0:
            yield Left(record, f"{text_key!r} is not a string")
            continue
        yield _document(block.payload[start : start + length], record, None, length)
        start += length


def _ids(block: Block, eos_id: int | None) -> Iterator[Document]:
    """Ready tokens: a document ends with its EOS. Record = position of its first token, from 1."""
    assert block.byte_start is not None
    ids = np.frombuffer(block.payload, dtype=np.int64)
    stops = np.flatnonzero(ids == eos_id) + 1
    if not len(stops) or stops[-1] != len(ids):
        stops = np.append(stops, len(ids))
    start = 0
    for stop in stops.tolist():
        part, unit = ids[start:stop], block.unit_bytes
        place = block.byte_start + start * unit
        size = (stop - start) * unit
        yield Document("", part, block.first_record + start, place, size, content_hash(part.tobytes()))
        start = stop


def content_hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
