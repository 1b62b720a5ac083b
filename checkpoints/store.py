"""Checkpoints on a disk: one directory each, there completely or not at all.

    checkpoints/step-00001000/rank-00000.safetensors ..., manifest.json
    checkpoints/latest                      the name of the newest, one line
    checkpoints/step-00001000.writing       not finished; nothing reads it
    checkpoints/step-00001000.old           the one being replaced; counts while step-00001000 is not there

Where directories cannot be renamed the files are written below their final directory, under names that no
other save uses, and the manifest, written last and at once, makes them a checkpoint.

Each rank calls `write_part`; rank 0 calls `prepare` before and `commit` after all of them.
"""

import re
import secrets
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from checkpoints import manifest as manifests
from checkpoints import tensorfile
from checkpoints.files import Files, put, remove_tree, write_durably
from checkpoints.layout import cover
from checkpoints.manifest import Damaged, Entry, FileSum, Manifest
from checkpoints.state import Part
from checkpoints.tensorfile import Content

LATEST = "latest"
WRITING, OLD = ".writing", ".old"
_STEP = re.compile(r"step-(\d{8,})(\.old|\.writing)?")


@dataclass(frozen=True)
class Found:
    """A directory with a manifest that proves itself; `checksum` is the manifest's."""

    path: Path
    manifest: Manifest
    checksum: str


@dataclass(frozen=True)
class Draft:
    """Where a step is written before it counts; prefix: what the names of its files begin with."""

    directory: Path
    prefix: str = ""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that the name of a directory stands for, whatever state the name tells of."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(files: Files, root: Path) -> list[int]:
    """Steps that have a directory under their own name, ascending; not looked into."""
    matches = [_STEP.fullmatch(name) for name in files.names(root)]
    return sorted(int(match[1]) for match in matches if match and not match[2])


def scan(files: Files, root: Path) -> tuple[list[Found], list[str]]:
    """The checkpoints below a directory, newest first, and what is wrong with the others.

    Newest means tried last (the cursor's attempt): after a rewind a smaller step may be newer.
    """
    found, faults = [], []
    for name in files.names(root):
        match = _STEP.fullmatch(name)
        if not match or unfinished(files, root / name):
            continue
        try:
            content, checksum = manifests.read(files, root / name)
            if content.step != int(match[1]):
                raise Damaged(f"{root / name} holds step {content.step}")
            found.append(Found(root / name, content, checksum))
        except Damaged as error:
            faults.append(str(error))
    found.sort(key=lambda f: (f.manifest.cursor.attempt, f.manifest.step, f.path.suffix != OLD), reverse=True)
    return found, faults


def unfinished(files: Files, directory: Path) -> bool:
    """Whether a directory is no checkpoint yet, or none any more: being written, or being deleted."""
    if directory.name.endswith(WRITING):
        return True
    ends_with_manifest = not files.renames or directory.name.endswith(OLD)
    return ends_with_manifest and manifests.NAME not in files.names(directory)


def prepare(files: Files, root: Path, step: int) -> Draft:
    """Clear up what an earlier process left half done; where to write the step."""
    files.make_directory(root)
    files.sync_directory(root.parent)  # or a crash could take the whole of `root` with it
    names = files.names(root)
    for name in names:
        match = _STEP.fullmatch(name)
        if match and unfinished(files, root / name):
            remove_tree(files, root / name, first=manifests.NAME)
        elif match and match[2] == OLD:
            _settle(files, root / name, root / name.removesuffix(OLD))
    if LATEST + WRITING in names:
        files.remove(root / (LATEST + WRITING))
    name = step_name(step)
    draft = (
        Draft(root / (name + WRITING)) if files.renames else Draft(root / name, f"{secrets.token_hex(4)}-")
    )
    files.make_directory(draft.directory)
    return draft


def _settle(files: Files, old: Path, new: Path) -> None:
    """A replacement that was interrupted: the new one stays if it got its name, else the old one returns."""
    if manifests.NAME in files.names(new):
        remove_tree(files, old, first=manifests.NAME)
    elif manifests.NAME in files.names(old):
        if files.names(new):
            remove_tree(files, new)
        files.rename(old, new)
        files.sync_directory(old.parent)
    else:
        remove_tree(files, old)


def held(part: Part) -> torch.Tensor:
    """What a part holds itself."""
    return part.tensor


def write_part(
    files: Files,
    draft: Draft,
    rank: int,
    state: Sequence[Part],
    *,
    block_bytes: int,
    read: Callable[[Part], torch.Tensor] = held,
) -> tuple[FileSum | None, list[Entry]]:
    """This rank's share: one file of the stretches it owns, durable; (None, []) when it owns nothing.

    The entries are in the order of the file. read: gives the values of a part when its turn comes.
    """
    mine = sorted((part for part in state if part.owner), key=lambda part: -part.tensor.element_size())
    if not mine:
        return None, []
    name = f"{draft.prefix}rank-{rank:05d}.safetensors"
    tensors, entries, used = [], [], {}
    for part in mine:
        label = f"{part.kind}/{part.name}"
        number = used[label] = used.get(label, -1) + 1
        key = f"{label}#{number}"
        tensors.append(Content(key, part.tensor.dtype, part.stretch.count, partial(read, part)))
        s = part.stretch
        dtype = tensorfile.NAMES[part.tensor.dtype]
        entries.append(
            Entry(part.name, part.kind, s.shape, s.offset, s.extent, s.start, s.count, dtype, name, key)
        )
    total = tensorfile.write(files, draft.directory / name, tensors, block_bytes=block_bytes)
    files.sync_directory(draft.directory)
    return total, entries


def commit(files: Files, root: Path, draft: Draft, content: Manifest) -> Path:
    """Make the step that was drafted the newest checkpoint.

    RuntimeError when pieces are missing or held twice, or a file that a rank wrote cannot be seen from here.
    A crash at any point leaves either this or the one before loadable.
    """
    fault = fault_of_pieces(content.pieces)
    if fault:
        raise RuntimeError(f"step {content.step} would not be whole: {fault}")
    names = files.names(draft.directory)
    for file in content.files:
        path = draft.directory / file.name
        if file.name not in names or files.size(path) != file.bytes:
            raise RuntimeError(
                f"{path} is not visible from rank 0 with its {file.bytes} bytes; "
                "checkpoints need one file system that all nodes share"
            )
    final = root / step_name(content.step)
    if draft.directory == final:
        put(files, final / manifests.NAME, manifests.encode(content))
        put(files, root / LATEST, final.name.encode() + b"\n")
        current = {file.name for file in content.files} | {manifests.NAME}
        for name in set(files.names(final)) - current:  # of the save that this one replaced
            files.remove(final / name)
    else:
        _rename(files, draft.directory, final, manifests.encode(content))
    return final


def _rename(files: Files, directory: Path, final: Path, content: bytes) -> None:
    """Complete the drafted directory and give it its name; an older one of that name stays until then."""
    root, old = final.parent, final.with_name(final.name + OLD)
    write_durably(files, directory / manifests.NAME, content)
    files.sync_directory(directory)
    if manifests.NAME in files.names(final):
        files.rename(final, old)
        files.sync_directory(root)
    elif final.name in files.names(root):
        remove_tree(files, final)
    files.rename(directory, final)
    files.sync_directory(root)
    put(files, root / LATEST, final.name.encode() + b"\n")
    if old.name in files.names(root):
        remove_tree(files, old, first=manifests.NAME)


def fault_of_pieces(pieces: Iterable[Entry]) -> str | None:
    """None when each logical tensor is held exactly once, else what is wrong."""
    by_name: dict[tuple[str, str], list[Entry]] = {}
    for entry in pieces:
        by_name.setdefault((entry.kind, entry.name), []).append(entry)
    for (kind, name), entries in by_name.items():
        fault = cover([entry.stretch for entry in entries])
        if fault is None and len({entry.dtype for entry in entries}) > 1:
            fault = "its pieces have different dtypes"
        if fault:
            return f"{kind} of {name}: {fault}"
    return None


def latest(files: Files, root: Path) -> Path | None:
    """What `latest` names, if it is there; without a pointer the newest that proves itself."""
    if LATEST in files.names(root):
        name = files.read(root / LATEST, 0, 64).decode(errors="replace").strip()
        if _STEP.fullmatch(name) and manifests.NAME in files.names(root / name):
            return root / name
    found, _ = scan(files, root)
    return found[0].path if found else None


def prune(files: Files, root: Path, stay: Container[int]) -> list[int]:
    """Delete the other steps; the steps that went. Each stops being a checkpoint first, then its files go."""
    gone = [step for step in steps(files, root) if step not in stay]
    for step in gone:
        path = root / step_name(step)
        if files.renames:
            files.rename(path, path.with_name(path.name + WRITING))
            files.sync_directory(root)
            path = path.with_name(path.name + WRITING)
        remove_tree(files, path, first=manifests.NAME)
    return gone


def readers(files: Files, found: Found) -> dict[str, tensorfile.Reader]:
    """A reader for every file of a checkpoint, by name, all for one thread."""
    content, memory = found.manifest, tensorfile.Memory()
    return {
        file.name: tensorfile.Reader(files, found.path / file.name, file, content.block_bytes, memory)
        for file in content.files
    }


def check_heads(files: Files, found: Found, share: int, shares: int) -> None:
    """One rank's share of what is checked before loading; Damaged when it is not as the manifest says.

    Sizes and headers of every `shares`-th file; the first share also checks that the tensors are whole.
    """
    fault = None if share else fault_of_pieces(found.manifest.pieces)
    if fault:
        raise Damaged(f"{found.path / manifests.NAME} is damaged: {fault}")
    reading, entries = readers(files, found), by_file(found)
    for name in sorted(reading)[share::shares]:
        reading[name].check_size()
        check_file(found.path / name, reading[name], entries.get(name, []))


def by_file(found: Found) -> dict[str, list[Entry]]:
    """The entries of each file, in the order of the manifest, which is theirs in the file."""
    entries: dict[str, list[Entry]] = {}
    for entry in found.manifest.pieces:
        entries.setdefault(entry.file, []).append(entry)
    return entries


def check_file(path: Path, reader: tensorfile.Reader, entries: Iterable[Entry]) -> None:
    """Damaged when the header of a file does not say what the manifest says of it."""
    places = reader.places()
    for entry in entries:
        place, width = places.get(entry.key), manifests.ITEM_BYTES[entry.dtype]
        if place is None or place.dtype != entry.dtype or place.stop - place.start != entry.count * width:
            raise Damaged(f"{path} does not hold {entry.key} as the manifest says")
