"""Looking at checkpoints without a model: what is there, whether it is sound, what a tensor looks like."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from checkpoints import load, store, tensorfile
from checkpoints import manifest as manifests
from checkpoints.files import Files
from checkpoints.keeping import held_out_loss
from checkpoints.layout import Stretch
from checkpoints.manifest import Damaged, Entry, FileSum
from checkpoints.state import Part
from checkpoints.store import Found
from checkpoints.tensorfile import DTYPES

THREADS = 4
SOUND, MISSING, TRUNCATED, LONGER, CHANGED, SWAPPED, DAMAGED = (
    "sound",
    "missing",
    "truncated",
    "longer",
    "changed",
    "swapped",
    "damaged",
)
COMPLETE, UNFINISHED = "complete", "unfinished"


@dataclass(frozen=True)
class Row:
    """One file of a checkpoint. tensors: `kind of name` of what its damage touches."""

    file: str
    bytes: int  # as it should be; of the manifest: as it is
    state: str
    detail: str = ""
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listed:
    """One checkpoint as it lies there; None: not known, because its manifest cannot be read."""

    step: int
    path: Path
    health: str  # complete | unfinished | damaged
    detail: str
    bytes: int | None = None
    layout: dict[str, int] | None = None
    age_seconds: float | None = None
    attempt: int | None = None
    held_out_loss: float | None = None
    latest: bool = False


def directories(files: Files, path: Path) -> list[Path]:
    """The steps that a path holds (a step's directory, a run's, or that of its checkpoints), by step.

    ValueError when there is none.
    """
    if manifests.NAME in files.names(path) or (store.step_of(path.name) is not None and files.names(path)):
        return [path]
    for inner in (path / "checkpoints", path):
        found = [inner / store.step_name(step) for step in store.steps(files, inner)]
        if found:
            return found
    state = "holds no checkpoint" if files.names(path) else "does not exist or is empty"
    raise ValueError(f"{path} {state}; give the directory of a step, or of a run")


def newest(files: Files, path: Path) -> Found:
    """The step that a path is, or the newest of those that it holds; ValueError when damaged or missing."""
    found = [Found(d, *manifests.read(files, d)) for d in directories(files, path)]
    return max(found, key=lambda f: (f.manifest.cursor.attempt, f.manifest.step))


def verify(files: Files, directory: Path, known: Mapping[str, str] | None = None) -> list[Row]:
    """Read a whole checkpoint: a row for each file, the manifest first; all are sound or it is damaged.

    known: names of files of other checkpoints by their sum, to tell what lies in another's place.
    """
    try:
        content, checksum = manifests.read(files, directory)
        size = files.size(directory / manifests.NAME)
    except Damaged as error:
        state = DAMAGED if manifests.NAME in files.names(directory) else MISSING
        return [Row(manifests.NAME, 0, state, str(error))]
    fault = store.fault_of_pieces(content.pieces)
    rows = [Row(manifests.NAME, size, DAMAGED if fault else SOUND, fault or "")]
    found = Found(directory, content, checksum)
    sums = {**(known or {}), **{file.sum: file.name for file in content.files}}
    entries = store.by_file(found)

    def examine(file: FileSum) -> Row:
        return _examine(files, found, file, entries.get(file.name, []), sums)

    with ThreadPoolExecutor(THREADS) as pool:
        return rows + list(pool.map(examine, content.files))


def sums_of(files: Files, paths: Iterable[Path]) -> dict[str, str]:
    """`step/file` by sum, of the checkpoints whose manifests can be read."""
    sums = {}
    for path in paths:
        try:
            content, _ = manifests.read(files, path)
        except Damaged:
            continue
        sums.update({file.sum: f"{path.name}/{file.name}" for file in content.files})
    return sums


def _examine(
    files: Files, found: Found, expected: FileSum, entries: Sequence[Entry], sums: Mapping[str, str]
) -> Row:
    path, block_bytes = found.path / expected.name, found.manifest.block_bytes

    def row(state: str, detail: str, bad: Iterable[int]) -> Row:
        return Row(
            expected.name, expected.bytes, state, detail, _touched(expected, entries, block_bytes, bad)
        )

    everything = range(len(expected.blocks))
    if expected.name not in files.names(found.path):
        return row(MISSING, "there is no such file", everything)
    try:
        size = files.size(path)
        blocks = [
            manifests.digest(files.read(path, start, min(block_bytes, size - start)))
            for start in range(0, size, block_bytes)
        ]
    except OSError as error:
        return row(DAMAGED, f"cannot be read: {error}", everything)
    bad = [n for n in everything if n >= len(blocks) or blocks[n] != expected.blocks[n]]
    other = sums.get(manifests.digest_of_blocks(blocks))
    if bad and other and other != expected.name:
        return row(SWAPPED, f"holds what belongs into {other}", everything)
    if size != expected.bytes:
        state = TRUNCATED if size < expected.bytes else LONGER
        return row(state, f"{size:,} bytes instead of {expected.bytes:,}", bad)
    if bad:
        where = f"bytes {bad[0] * block_bytes:,} to {min(size, (bad[0] + 1) * block_bytes):,}"
        more = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
        return row(CHANGED, f"{where}{more} do not fit their checksum", bad)
    memory = tensorfile.Memory()
    try:
        store.check_file(path, tensorfile.Reader(files, path, expected, block_bytes, memory), entries)
    except Damaged as error:
        return row(DAMAGED, str(error), ())
    return row(SOUND, "", ())


def _touched(
    file: FileSum, entries: Sequence[Entry], block_bytes: int, bad: Iterable[int]
) -> tuple[str, ...]:
    """The tensors that lie in these blocks: entries stand in a file in the manifest's order, at its end."""
    bad = set(bad)
    position = file.bytes - sum(entry.count * manifests.ITEM_BYTES[entry.dtype] for entry in entries)
    touched = {}
    for entry in entries:
        stop = position + entry.count * manifests.ITEM_BYTES[entry.dtype]
        if not bad.isdisjoint(range(position // block_bytes, -(-stop // block_bytes))):
            touched[f"{entry.kind} of {entry.name}"] = None
        position = stop
    return tuple(touched)


def listing(files: Files, root: Path, *, now: float | None = None) -> list[Listed]:
    """All that lies in a directory of checkpoints, by step; manifests, sizes and heads are looked at."""
    names = files.names(root)
    pointer = files.read(root / store.LATEST, 0, 64).decode(errors="replace") if store.LATEST in names else ""
    found = []
    for name in names:
        step, path = store.step_of(name), root / name
        if step is None:
            continue
        if store.unfinished(files, path):
            found.append(Listed(step, path, UNFINISHED, "being written or deleted, or left so"))
            continue
        found.append(_listed(files, path, step, latest=pointer.strip() == name, now=now or time.time()))
    return sorted(found, key=lambda listed: (listed.step, listed.path.name))


def _listed(files: Files, path: Path, step: int, *, latest: bool, now: float) -> Listed:
    try:
        content, checksum = manifests.read(files, path)
    except Damaged as error:
        return Listed(step, path, DAMAGED, str(error), latest=latest)
    health, detail = COMPLETE, "" if not path.name.endswith(store.OLD) else "being replaced"
    try:
        if content.step != step:
            raise Damaged(f"{path} holds step {content.step}")
        store.check_heads(files, Found(path, content, checksum), 0, 1)
    except Damaged as error:
        health, detail = DAMAGED, str(error)
    return Listed(
        step=step,
        path=path,
        health=health,
        detail=detail,
        bytes=content.bytes,
        layout=content.layout,
        age_seconds=max(0.0, now - content.written),
        attempt=content.cursor.attempt,
        held_out_loss=held_out_loss(content.extra),
        latest=latest,
    )


def tensors(found: Found) -> dict[str, dict[str, Entry]]:
    """One entry of each logical tensor, by name and kind, in the order of the manifest."""
    by_name: dict[str, dict[str, Entry]] = {}
    for entry in found.manifest.pieces:
        by_name.setdefault(entry.name, {}).setdefault(entry.kind, entry)
    return by_name


def whole(files: Files, found: Found, name: str, kind: str) -> torch.Tensor:
    """One logical tensor; Damaged when its bytes are not what was written."""
    entry = tensors(found)[name][kind]
    shape = entry.shape
    part = Part(
        name=name,
        kind=kind,
        stretch=Stretch(shape, tuple(0 for _ in shape), shape, 0, prod(shape)),
        owner=True,
        tensor=torch.empty(prod(shape), dtype=DTYPES[entry.dtype], device="meta"),
    )
    return load.stage(files, load.only(found, [(kind, name)]), [part])[0].view(shape)


def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Of the finite elements: mean, std, min, max, rms, l2; and how many are zero or not finite."""
    flat = tensor.reshape(-1).double()
    finite = flat[torch.isfinite(flat)]
    facts: dict[str, Any] = {"count": flat.numel(), "non_finite": flat.numel() - finite.numel()}
    facts["zeros"] = int((finite == 0).sum())
    if not finite.numel():
        return facts
    square = float(finite.square().sum())
    facts |= {
        "mean": float(finite.mean()),
        "std": float(finite.std(correction=0)),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "rms": math.sqrt(square / finite.numel()),
        "l2": math.sqrt(square),
    }
    return facts
