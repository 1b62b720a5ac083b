"""What `prepare` leaves on disk: where it lies, how it is opened, what its manifest says.

CACHE/prepared-KEY/manifest.json                       everything below with sizes and hashes
                   tokenizer.json | tokenizer.model    (none for ready ids)
                   left_out.jsonl                      every record without a document, and why
                   NAME/{train,held_out}.{tokens,starts,documents}.npy      one directory a source
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from conf.typed import parse
from megamodel.data.config import Data
from megamodel.data.encode import DOCUMENT, SIDES
from megamodel.data.sources import SourceFile, discover
from megamodel.data.tokens import Corpus, check_array, content_sha256
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load

FORMAT = 1
MANIFEST = "manifest.json"
HASHED_BYTES = 64 << 20  # files up to this size are read whole and compared when they are opened
PARTS = ("tokens", "starts", "documents")
LEFT_OUT = "left_out.jsonl"  # every record without a document, and why


@dataclass(frozen=True)
class Report:
    """How many records went which way: written + skipped + rejected = lines.

    reasons: count of each reason for a skip or a rejection; examples: "file:line: reason", a few of each.
    """

    lines: int
    written: int
    skipped: int
    rejected: int
    reasons: dict[str, int]
    examples: list[str]


@dataclass(frozen=True)
class Prepared:
    """Data ready to be fed, opened. train and held_out: a corpus for each source, by name.

    digest: of all content (tokens, documents, tokenizer): equal on two machines when they feed the same.
    """

    directory: Path
    tokenizer: Tokenizer
    tokenizer_path: Path | None
    train: dict[str, Corpus]
    held_out: dict[str, Corpus]
    report: Report
    digest: str

    @property
    def manifest(self) -> Path:
        return self.directory / MANIFEST

    def verify(self) -> None:
        """Read everything and compare with the manifest; ValueError names the first file that differs."""
        _check(self.directory, _manifest(self.directory), hashed_bytes=None)


@dataclass(frozen=True)
class Plan:
    """What a configuration asks for: the files of each source, a given tokenizer, where it goes."""

    files: dict[str, list[SourceFile]]
    tokenizer: Tokenizer | None
    directory: Path


def plan(data: Data, tokenizer: TokenizerConfig, cache: Path) -> Plan:
    """Find everything; ValueError for what is missing. Own files are known by size and time."""
    files = {name: discover(source, cache) for name, source in data.sources().items()}
    given = None
    if tokenizer.path is not None or tokenizer.eos_id is not None:
        path = None if tokenizer.path is None else Path(tokenizer.path).expanduser()
        given = load(path, tokenizer)
    for file in (file for part in files.values() for file in part):
        if given is None and file.format in ("npy", "bin"):
            raise ValueError(
                f"{file.path} holds ready tokens, which no tokenizer can be trained on; give "
                "tokenizer.path=FILE, or tokenizer.vocab_size=N and tokenizer.eos_id=N"
            )
    facts: dict[str, Any] = {
        "format": FORMAT,
        "held_out_fraction": data.held_out_fraction,
        "allow_special": data.allow_special,
        "sources": {
            name: {
                "files": [dataclasses.astuple(file) for file in files[name]],
                "read": [source.text_key, source.split, source.dtype, source.document_bytes],
            }
            for name, source in data.sources().items()
        },
    }
    if given is None:
        facts["tokenizer"] = dataclasses.asdict(tokenizer)
        facts["tokenizers"] = tokenizers.__version__
    else:
        facts["tokenizer"] = [given.hash, given.vocab_size, given.eos_id, given.bos_id]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
    return Plan(files, given, cache / f"prepared-{key}")


def open_prepared(data: Data, tokenizer: TokenizerConfig, *, cache: Path | None = None) -> Prepared:
    """What `prepare` has built for this configuration; ValueError that names the command when it has not."""
    planned = plan(data, tokenizer, data.cache_path() if cache is None else cache.absolute())
    if not (planned.directory / MANIFEST).is_file():
        raise ValueError(
            f"the data of this configuration are not prepared ({planned.directory} is not there); "
            "run `python -m launcher prepare` with the same settings"
        )
    return open_directory(planned.directory)


def open_directory(directory: Path) -> Prepared:
    """A directory that `prepare` wrote, also without the configuration that asked for it.

    ValueError when it is not whole: a manifest or a tokenizer that is not what was written, a file of another
    size than the manifest says, or of other content. Content is compared in files of at most HASHED_BYTES;
    larger ones are known by header and size alone (`Prepared.verify` reads those too).
    """
    manifest = _manifest(directory)
    _check(directory, manifest, hashed_bytes=HASHED_BYTES)
    path = None if manifest.tokenizer_file is None else directory / manifest.tokenizer_file
    return Prepared(
        directory=directory,
        tokenizer=_tokenizer(directory, path, manifest),
        tokenizer_path=path,
        train={c.name: c for c in manifest.corpora if c.side == "train"},
        held_out={c.name: c for c in manifest.corpora if c.side == "held_out"},
        report=manifest.report,
        digest=manifest.digest,
    )


@dataclass(frozen=True)
class _Manifest:
    """What manifest.json says. sha256: of the content of each file of a corpus; ids: vocabulary, EOS, BOS."""

    tokenizer_file: str | None
    tokenizer_hash: str
    tokenizer_ids: tuple[int, int, int | None]
    setting: TokenizerConfig
    corpora: list[Corpus]
    dtypes: dict[str, np.dtype]
    sha256: dict[Path, str]
    report: Report
    digest: str


def _manifest(directory: Path) -> _Manifest:
    """The manifest of a directory; ValueError for anything that is not one."""
    try:
        raw = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        version = raw["format"]
        read = _parsed(raw, directory) if version == FORMAT else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ValueError(f"{directory} holds no readable manifest ({what}); {_again(directory)}") from None
    if read is None:
        raise ValueError(
            f"{directory} is of format {version}, this version reads {FORMAT}; {_again(directory)}"
        )
    return read


def _again(directory: Path) -> str:
    return f"delete {directory} and prepare again"


def _parsed(raw: dict[str, Any], directory: Path) -> _Manifest:
    tokenizer, corpora, sums, dtypes = raw["tokenizer"], [], {}, {}
    for name, source in raw["sources"].items():
        dtypes[name] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[source["dtype"]]
        files = tuple(str(file["path"]) for file in source["files"])
        for side in SIDES:
            counts = source[side]
            tokens, documents = int(counts["tokens"]), int(counts["documents"])
            corpora.append(Corpus(name, directory / name, side, files, tokens, documents))
            for part in PARTS:
                sums[directory / name / f"{side}.{part}.npy"] = counts[f"{part}_sha256"]
    if not corpora:
        raise ValueError("it names no source")
    return _Manifest(
        tokenizer_file=tokenizer["file"],
        tokenizer_hash=tokenizer["hash"],
        tokenizer_ids=(tokenizer["vocab_size"], tokenizer["eos_id"], tokenizer["bos_id"]),
        setting=parse(TokenizerConfig, tokenizer["setting"]),
        corpora=corpora,
        dtypes=dtypes,
        sha256=sums,
        report=Report(**raw["report"]),
        digest=raw["digest"],
    )


def _check(directory: Path, manifest: _Manifest, *, hashed_bytes: int | None) -> None:
    """Compare headers and sizes of all files, and the content of those up to hashed_bytes (None: of all)."""
    try:
        for corpus in manifest.corpora:
            kinds = (manifest.dtypes[corpus.name], np.dtype("<i8"), DOCUMENT)
            counts = (corpus.count, corpus.document_count + 1, corpus.document_count)
            for part, dtype, count in zip(PARTS, kinds, counts, strict=True):
                path = corpus.directory / f"{corpus.side}.{part}.npy"
                check_array(path, dtype, count)
                if hashed_bytes is not None and count * dtype.itemsize > hashed_bytes:
                    continue
                if content_sha256(path) != manifest.sha256[path]:
                    raise ValueError(f"{path} is not what was prepared")
    except ValueError as error:
        raise ValueError(f"{error}; {_again(directory)}") from None


def _tokenizer(directory: Path, path: Path | None, manifest: _Manifest) -> Tokenizer:
    """The tokenizer of a directory, compared with the manifest; what is wrong is no setting of the user."""
    if path is not None:
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"({error.strerror})"
            raise ValueError(f"the tokenizer {path} {what}; {_again(directory)}") from None
        if found != manifest.tokenizer_hash:
            raise ValueError(f"{path} is not the tokenizer that the data were made with; {_again(directory)}")
    tokenizer = load(path, manifest.setting)
    ids = (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    if tokenizer.hash != manifest.tokenizer_hash or ids != manifest.tokenizer_ids:
        raise ValueError(
            f"the tokenizer in {directory} has now (vocabulary, EOS, BOS) {ids}, and the data were made with "
            f"{manifest.tokenizer_ids}; {_again(directory)}"
        )
    return tokenizer
