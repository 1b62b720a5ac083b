"""From a checkpoint's files to this rank's state, at any layout: into host memory first, then in place.

Nothing live is touched before every rank has all it needs, checked.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import torch

from checkpoints import store
from checkpoints.files import Files
from checkpoints.layout import Region, chunks, filled, moves
from checkpoints.manifest import Entry
from checkpoints.state import Part
from checkpoints.store import Found
from checkpoints.tensorfile import DTYPES, Reader

READ_BYTES = 16 * 2**20  # the most that a thread reads at once; a rank needs them beside its own state
READ_THREADS = 4


Index = dict[tuple[str, str], list[Entry]]
_Wanted = tuple[Part, torch.Tensor]  # and where its saved value goes
_Copy = tuple[Entry, Region, torch.Tensor]  # from a region of an entry, to a view of staged memory


def index(found: Found) -> Index:
    """The entries of a checkpoint by kind and name."""
    by_name: Index = {}
    for entry in found.manifest.pieces:
        by_name.setdefault((entry.kind, entry.name), []).append(entry)
    return by_name


def only(found: Found, tensors: Iterable[tuple[str, str]], entries: Index | None = None) -> Found:
    """The same checkpoint as if it held these (kind, name) alone. entries: its index, if there is one."""
    entries = entries or index(found)
    pieces = tuple(entry for key in tensors for entry in entries.get(key, []))
    names = {entry.file for entry in pieces}
    files = tuple(file for file in found.manifest.files if file.name in names)
    return replace(found, manifest=replace(found.manifest, pieces=pieces, files=files))


def sources(found: Found, entries_of: Index, part: Part) -> list[Entry]:
    """The entries that a part is filled from.

    Weights that were not saved apart from their fp32 masters are rounded from them. ValueError when the
    checkpoint has no such tensor, or one of another shape or dtype.
    """
    rounded = part.kind == "parameter" and ("parameter", part.name) not in entries_of
    kind = "master" if rounded else part.kind
    entries = entries_of.get((kind, part.name), [])
    if not entries:
        raise ValueError(
            f"{found.path} has no {part.kind} of {part.name}; "
            "resume with the model that was saved, or start afresh in another run.dir"
        )
    if entries[0].shape != part.stretch.shape:
        raise ValueError(
            f"{part.name} has shape {list(entries[0].shape)} in {found.path} but {list(part.stretch.shape)} "
            "in this model; resume with the model that was saved, or start afresh in another run.dir"
        )
    if not rounded and DTYPES[entries[0].dtype] != part.tensor.dtype:
        raise ValueError(
            f"{kind} of {part.name} is {DTYPES[entries[0].dtype]} in {found.path} but {part.tensor.dtype} "
            "here; resume with the train.precision that was saved"
        )
    return entries


def stage(files: Files, found: Found, state: Sequence[Part]) -> list[torch.Tensor]:
    """The saved value of each part, on the host, in its order.

    Damaged when bytes are not what was written; ValueError when the checkpoint does not fit the model.
    """
    entries_of = index(found)
    by_name: dict[tuple[str, str], list[_Wanted]] = {}
    staged = []
    for part in state:
        staged.append(torch.empty(part.stretch.count, dtype=part.tensor.dtype))
        by_name.setdefault((part.kind, part.name), []).append((part, staged[-1]))
    copies = [copy for group in by_name.values() for copy in _plan(found, entries_of, group)]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for done in [pool.submit(_read, files, found, run) for run in _runs(found, copies)]:
            done.result()
    return staged


def _plan(found: Found, entries_of: Index, group: list[_Wanted]) -> list[_Copy]:
    """The copies that fill all parts of one tensor."""
    entries = sources(found, entries_of, group[0][0])
    wanted = [part.stretch for part, _ in group]
    plan = moves([entry.stretch for entry in entries], wanted)
    for count, stretch in zip(filled(plan, wanted), wanted, strict=True):
        if count != stretch.count:
            raise ValueError(f"{found.path} holds {count} of {stretch.count} elements of {entries[0].name}")
    return [(entries[move.have], move.source, view(group[move.want][1], move.target)) for move in plan]


def _runs(found: Found, copies: list[_Copy]) -> list[list[_Copy]]:
    """The copies in the order of the files, cut into one run a thread of about as many elements.

    Neighbours in a file share blocks: in this order each block is read once, or twice where two runs meet.
    """
    number = {(e.file, e.key): i for i, e in enumerate(found.manifest.pieces)}
    copies = sorted(copies, key=lambda c: (c[0].file, number[c[0].file, c[0].key], c[1].span))
    total = sum(target.numel() for _, _, target in copies)
    runs, done = [[] for _ in range(READ_THREADS)], 0
    for copy in copies:
        runs[done * READ_THREADS // total].append(copy)
        done += copy[2].numel()
    return runs


def _read(files: Files, found: Found, copies: list[_Copy]) -> None:
    reading = store.readers(files, found)
    for entry, source, target in copies:
        _copy(reading[entry.file], entry, source, target)


def view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a stretch as a strided view."""
    array = flat[region.position : region.position + prod(region.extent)].view(region.extent)
    return array[tuple(slice(o, o + s) for o, s in zip(region.offset, region.size, strict=True))]


def _copy(reader: Reader, entry: Entry, source: Region, target: torch.Tensor) -> None:
    """Read a region in parts of bounded size, each into its place in `target`."""
    limit = max(1, READ_BYTES // DTYPES[entry.dtype].itemsize)
    for part in chunks(source, limit):
        first, stop = part.span
        data = reader.elements(entry.key, first, stop)
        strides = _strides(part.extent)
        values = data.as_strided(part.size, strides)
        inner = tuple(
            slice(o - base, o - base + size)
            for o, base, size in zip(part.offset, source.offset, part.size, strict=True)
        )
        target[inner].copy_(values)


def _strides(extent: Sequence[int]) -> list[int]:
    strides = [1] * len(extent)
    for axis in range(len(extent) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * extent[axis + 1]
    return strides


def unknown(found: Found, names: set[tuple[str, str]]) -> list[str]:
    """Tensors of the checkpoint that no rank asks for; weights beside their masters need not be asked."""
    saved = {(e.kind, e.name) for e in found.manifest.pieces}
    extra = {
        (kind, name) for kind, name in saved - names if kind != "parameter" or ("master", name) not in names
    }
    return sorted({name for _, name in extra})


def put(state: Sequence[Part], staged: Sequence[torch.Tensor]) -> None:
    """Overwrite live memory in place."""
    with torch.no_grad():
        for part, value in zip(state, staged, strict=True):
            part.tensor.copy_(value)
