"""Text to token files: once, in parallel, streaming, all or nothing."""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megamodel.data.blocks import Block, blocks
from megamodel.data.config import Data, SourceConfig
from megamodel.data.encode import SIDES, Job, Pool, Result, Split, token_type
from megamodel.data.prepared import FORMAT, LEFT_OUT, MANIFEST, Plan, Prepared, Report, open_directory, plan
from megamodel.data.records import Document, Left, records
from megamodel.data.sources import SourceFile
from megamodel.data.tokens import CorpusWriter
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load, train

EXAMPLES = 3  # of each reason, in the report
_HASHES = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the hash again, so that what a tokenizer sees is not what is held out

Progress = Callable[[str, int], None]


def prepare(
    data: Data,
    tokenizer: TokenizerConfig,
    *,
    cache: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise what is not tokenised yet, and open it. Returns at once when everything is there.

    The result depends on the data and the settings alone, to the byte, whatever the number of workers.
    Several processes may call it: one builds, the others wait for it. A build that is killed leaves nothing
    that a later one would take for whole. progress(source, tokens so far) is called now and then. ValueError
    for anything wrong with the data, with file and line.
    """
    root = data.cache_path() if cache is None else cache.absolute()
    planned = plan(data, tokenizer, root)
    if (planned.directory / MANIFEST).is_file():
        return open_directory(planned.directory)
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{planned.directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system however this process ends
        if not (planned.directory / MANIFEST).is_file():
            building = root / f"building-{planned.directory.name}"
            shutil.rmtree(building, ignore_errors=True)  # of a build that was killed: we hold its lock
            building.mkdir()
            try:
                count = workers or data.workers or len(os.sched_getaffinity(0))
                _build(building, planned, data, tokenizer, count, progress)
                building.rename(planned.directory)
                _sync(root)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return open_directory(planned.directory)


def _build(
    directory: Path,
    planned: Plan,
    data: Data,
    setting: TokenizerConfig,
    workers: int,
    progress: Progress | None,
) -> None:
    """Fill the directory; the manifest is written last."""
    sources = data.sources()
    eos_id = None if planned.tokenizer is None else planned.tokenizer.eos_id
    split = Split(int(data.held_out_fraction * _HASHES))
    if data.held_out_fraction:
        for name, source in sources.items():
            split = _with_both_sides(split, _documents(planned.files[name], source, eos_id), name)
    path = _tokenizer_file(directory, planned, sources, setting, split)
    tokenizer = load(path, setting)
    job = Job(None if path is None else str(path), setting, split, data.allow_special)
    report = _ReportWriter(directory / LEFT_OUT)
    written: dict[str, Any] = {}
    with Pool(job, workers) as pool:
        for name, source in sources.items():
            feed = _feed(planned.files[name], source, tokenizer.eos_id)
            written[name] = _write_source(
                directory / name, planned.files[name], pool.encode(feed), report, tokenizer, progress
            )
    _check(written, report, data.held_out_fraction)
    manifest = {
        "format": FORMAT,
        "held_out_fraction": data.held_out_fraction,
        "allow_special": data.allow_special,
        "tokenizer": _tokenizer_facts(tokenizer, setting, path),
        "sources": written,
        "report": dataclasses.asdict(report.close()),
        "digest": _digest(tokenizer, written),
    }
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def _documents(files: list[SourceFile], source: SourceConfig, eos_id: int | None) -> Iterator[Document]:
    for file in files:
        for block in blocks(file, source, eos_id=eos_id):
            for record in records(block, text_key=source.text_key, eos_id=eos_id):
                if isinstance(record, Document):
                    yield record


def _feed(
    files: list[SourceFile], source: SourceConfig, eos_id: int
) -> Iterator[tuple[Block, int, str, str]]:
    for number, file in enumerate(files):
        for block in blocks(file, source, eos_id=eos_id):
            yield block, number, file.path, source.text_key


def _with_both_sides(split: Split, documents: Iterator[Document], name: str) -> Split:
    """The split, with an exception if it would leave a source without a side.

    Reads until it has seen both. Without one, the document of the smallest hash is held out, or that of the
    largest is trained on.
    """
    low, high, seen = _HASHES, -1, set()
    for document in documents:
        low, high = min(low, document.hash), max(high, document.hash)
        seen.add(split.side(document.hash))
        if len(seen) == 2:
            return split
    if low == high:
        raise ValueError(
            f"data source {name}: all documents are one and the same, so none can be held out; give more, "
            "cut a text file into more with data.document_bytes=N, or set data.held_out_fraction=0"
        )
    if "held_out" not in seen and seen:
        return dataclasses.replace(split, held_out=split.held_out | {low})
    return dataclasses.replace(split, train=split.train | {high}) if seen else split


def _tokenizer_file(
    directory: Path,
    planned: Plan,
    sources: dict[str, SourceConfig],
    setting: TokenizerConfig,
    split: Split,
) -> Path | None:
    """The tokenizer beside the data: trained on the training documents, or a copy of the given one."""
    if setting.eos_id is not None:
        return None
    if setting.path is not None:
        given = Path(setting.path).expanduser()
        beside = given.with_name("tokenizer_config.json")
        if beside.is_file():
            shutil.copyfile(beside, directory / beside.name)
        return Path(shutil.copyfile(given, directory / f"tokenizer{given.suffix}"))
    path = directory / "tokenizer.json"
    texts = _training_texts(planned.files, sources, split, setting.train_bytes)
    path.write_text(train(texts, setting), encoding="utf-8")
    return path


def _training_texts(
    files: dict[str, list[SourceFile]], sources: dict[str, SourceConfig], split: Split, limit_bytes: int
) -> Iterator[str]:
    """Training documents, of a large corpus an even share chosen by hash, up to about limit_bytes."""
    total = sum(file.size_bytes * (4 if file.compression else 1) for part in files.values() for file in part)
    share = int(_HASHES * min(1.0, limit_bytes / max(total, 1)))
    given = 0
    for name, source in sources.items():
        for document in _documents(files[name], source, None):
            if split.side(document.hash) == "held_out" or document.hash * _GOLDEN % _HASHES >= share:
                continue
            yield document.text
            given += len(document.text)
            if given >= limit_bytes * 5 // 4:
                return


def _write_source(
    directory: Path,
    files: list[SourceFile],
    results: Iterator[Result],
    report: "_ReportWriter",
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write both sides of a source; what the manifest says of it."""
    directory.mkdir()
    dtype = token_type(tokenizer.vocab_size)
    writers = {side: CorpusWriter(directory, side, dtype) for side in SIDES}
    for result in results:
        for side, writer in writers.items():
            writer.write(result.sides[side])
        report.add(result, files)
        if progress is not None:
            progress(directory.name, sum(writer.count for writer in writers.values()))
    described = [{"path": f.path, "format": f.format, "bytes": f.size_bytes, "state": f.state} for f in files]
    sides = {side: writer.close() for side, writer in writers.items()}
    return {"dtype": dtype.name, **sides, "files": described}


class _ReportWriter:
    """Counts records and writes down each that was left out."""

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter(lines=0, written=0, skipped=0, rejected=0)
        self.reasons: Counter[str] = Counter()
        self.examples: list[str] = []
        self._file = path.open("w", encoding="utf-8")

    def add(self, result: Result, files: list[SourceFile]) -> None:
        self.counts.update(result.counts)
        for left in result.left:
            self._add(left, files[result.file].path)

    def _add(self, left: Left, path: str) -> None:
        kind = left.reason.split(" (")[0]
        kind = kind.split(" at byte")[0]
        self.reasons[kind] += 1
        if self.reasons[kind] <= EXAMPLES:
            self.examples.append(f"{path}:{left.record}: {left.reason}")
        line = {"path": path, "line": left.record, "rejected": left.rejected, "reason": left.reason}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> Report:
        self._file.close()
        return Report(**self.counts, reasons=dict(sorted(self.reasons.items())), examples=self.examples)


def _check(written: dict[str, Any], report: _ReportWriter, held_out_fraction: float) -> None:
    """Each source must have something on each side."""
    for name, source in written.items():
        for side in SIDES if held_out_fraction else SIDES[:1]:
            if source[side]["documents"] == 0:
                counts = ", ".join(f"{count} {what}" for what, count in report.counts.items())
                examples = "".join(f"\n  {example}" for example in report.examples)
                raise ValueError(
                    f"data source {name} has no {side.replace('_', '-')} document ({counts}); check "
                    f"data.paths, data.text_key and data.held_out_fraction{examples}"
                )


def _tokenizer_facts(tokenizer: Tokenizer, setting: TokenizerConfig, path: Path | None) -> dict[str, Any]:
    return {
        "file": None if path is None else path.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id,
        "setting": dataclasses.asdict(setting),
    }


def _digest(tokenizer: Tokenizer, written: dict[str, Any]) -> str:
    """One hash of all content; paths and times have no part in it."""
    sides = {name: [source["dtype"], *(source[side] for side in SIDES)] for name, source in written.items()}
    return hashlib.sha256(json.dumps([tokenizer.hash, sides], sort_keys=True).encode()).hexdigest()


def _sync(directory: Path) -> None:
    """Make what was created or renamed in a directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
