"""The manifest of a checkpoint: strict JSON that says what is in which file, and proves itself.

Read as an outsider's file: every number is checked before it is used, no name leaves the directory, and
whatever is wrong is `Damaged`, with the file's name.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from checkpoints.files import Files
from checkpoints.layout import Stretch
from megamodel.data.batch import Cursor

NAME = "manifest.json"
FORMAT = "megamodel-checkpoint"
VERSION = 1
HASH = "sha256"
BLOCK_BYTES = 16 * 2**20
KINDS = ("parameter", "master", "exp_avg", "exp_avg_sq")
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # the names safetensors uses
LIMIT_BYTES = 2**32  # a manifest is megabytes; nobody's four gigabytes are parsed

_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Damaged(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Entry:
    """One stretch of a logical tensor, and the entry `key` of the safetensors file that holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    start: int
    count: int
    dtype: str
    file: str
    key: str

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.shape, self.offset, self.extent, self.start, self.count)


@dataclass(frozen=True)
class FileSum:
    """Size and checksums of one file: one of each block of `block_bytes`, and one of those."""

    name: str
    bytes: int
    sum: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers themselves."""

    step: int
    optimizer_step: int
    cursor: Cursor
    layout: dict[str, int]  # tp, pp, dp of the run that wrote it
    configuration: dict[str, Any]
    versions: dict[str, str]
    tokenizer: str
    extra: dict[str, Any]
    written: float  # seconds since 1970
    block_bytes: int
    files: tuple[FileSum, ...]
    pieces: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.bytes for file in self.files)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of_blocks(blocks: tuple[str, ...] | list[str]) -> str:
    """The sum of a file: the digest of its blocks' digests, as bytes, in order."""
    return digest(b"".join(bytes.fromhex(block) for block in blocks))


def canonical(raw: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON object that its checksum is taken of: keys sorted, no blanks, ASCII.

    ValueError when a value is not JSON or not finite.
    """
    try:
        text = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a checkpoint keeps plain JSON, with non-finite numbers as strings: {error}"
        ) from error
    return text.encode()


def plain(value: Any) -> dict[str, Any]:
    """A flat dataclass as a JSON object; `typed` is the way back."""
    pairs = ((name, getattr(value, name)) for name in _hints(type(value)))
    return {name: list(item) if isinstance(item, tuple) else item for name, item in pairs}


def encode(manifest: Manifest) -> bytes:
    """The file of a manifest."""
    raw = asdict(manifest) | {"format": FORMAT, "version": VERSION, "hash": HASH}
    return canonical(raw | {"checksum": digest(canonical(raw))})


def read(files: Files, directory: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint and its checksum; Damaged when it is missing or not what was written."""
    path = directory / NAME
    try:
        size = files.size(path)
        data = files.read(path, 0, min(size, LIMIT_BYTES))
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    try:
        raw = json.loads(data, parse_constant=_not_json)
        return _parse(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse(raw: Any) -> tuple[Manifest, str]:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT}")
    if raw.get("version") != VERSION or raw.get("hash") != HASH:
        raise ValueError(
            f"format version {raw.get('version')!r} with {raw.get('hash')!r} sums; "
            f"this program reads version {VERSION} with {HASH}"
        )
    said = raw.pop("checksum", None)
    if said != digest(canonical(raw)):
        raise ValueError("the checksum does not fit the content")
    for name in ("format", "version", "hash"):
        raw.pop(name)
    manifest = typed(Manifest, raw)
    _check(manifest)
    return manifest, said


def typed(cls: Any, raw: Any) -> Any:
    """A dataclass from a JSON object with exactly its fields, each of the type that is declared."""
    hints = _hints(cls)
    names = list(hints)
    if not isinstance(raw, dict) or raw.keys() != hints.keys():
        raise ValueError(f"{cls.__name__} needs the fields {names}")
    values = {name: _value(hints[name], raw[name], name) for name in names}
    return cls(**values)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(hint: Any, value: Any, name: str) -> Any:
    if hint in (Cursor,):
        return typed(hint, value)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list")
        return tuple(_item(hint, item, name) for item in value)
    kind = get_origin(hint) or hint
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} must be {kind.__name__}, not {str(value)[:40]!r}")
    return value


def _item(hint: Any, item: Any, name: str) -> Any:
    inner = hint.__args__[0]
    if inner in (FileSum, Entry):
        return typed(inner, item)
    return _value(inner, item, name)


def _check(manifest: Manifest) -> None:
    """ValueError for anything that a reader could stumble over."""
    if not 0 < manifest.block_bytes <= BLOCK_BYTES:
        raise ValueError(f"block_bytes {manifest.block_bytes} is not in [1, {BLOCK_BYTES}]")
    if manifest.step != manifest.cursor.step:
        raise ValueError(f"step {manifest.step} is not the cursor's {manifest.cursor.step}")
    for pair in manifest.cursor.skipped:
        if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
            raise ValueError(f"{pair} is not a range of samples")
    files = {}
    for file in manifest.files:
        blocks = -(-file.bytes // manifest.block_bytes)
        if not _FILE.fullmatch(file.name) or file.name in files:
            raise ValueError(f"{file.name!r} is not a file of a checkpoint, or named twice")
        if file.bytes < 8 or len(file.blocks) != blocks:
            raise ValueError(f"{file.name} has {file.bytes} bytes and {len(file.blocks)} blocks")
        if not all(_DIGEST.fullmatch(block) for block in file.blocks):
            raise ValueError(f"{file.name} has a block without a checksum")
        if digest_of_blocks(file.blocks) != file.sum:
            raise ValueError(f"the sum of {file.name} does not fit its blocks")
        files[file.name] = file
    for entry in manifest.pieces:
        fault = entry.stretch.fault()
        if fault or entry.kind not in KINDS or entry.dtype not in ITEM_BYTES or entry.file not in files:
            raise ValueError(
                f"piece {entry.name}: {fault or (entry.kind, entry.dtype, entry.file)} is impossible"
            )
