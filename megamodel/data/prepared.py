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

import tokenizers

from megamodel.data.config import Data
from megamodel.data.encode import SIDES
from megamodel.data.sources import SourceFile, discover
from megamodel.data.tokens import Corpus, content_sha256
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load

FORMAT = 1
MANIFEST = "manifest.json"


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
        raw = json.loads(self.manifest.read_text(encoding="utf-8"))
        for name, source in raw["sources"].items():
            for side in SIDES:
                for part in ("tokens", "starts", "documents"):
                    path = self.directory / name / f"{side}.{part}.npy"
                    if content_sha256(path) != source[side][f"{part}_sha256"]:
                        raise ValueError(
                            f"{path} is not what was prepared; delete {self.directory} and prepare again"
                        )


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
    """A directory that `prepare` wrote, also without the configuration that asked for it."""
    try:
        raw = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        version = raw["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory} holds no readable manifest ({error}); prepare again") from None
    if version != FORMAT:
        raise ValueError(
            f"{directory} is of format {version}, this version reads {FORMAT}; delete it and prepare again"
        )
    setting = TokenizerConfig(**raw["tokenizer"]["setting"])
    file = raw["tokenizer"]["file"]
    path = None if file is None else directory / file
    tokenizer = load(path, setting)
    if tokenizer.hash != raw["tokenizer"]["hash"]:
        raise ValueError(f"{path} is not the tokenizer that the data were made with; prepare again")
    corpora = {
        side: {name: _corpus(name, side, source, directory) for name, source in raw["sources"].items()}
        for side in SIDES
    }
    return Prepared(
        directory=directory,
        tokenizer=tokenizer,
        tokenizer_path=path,
        train=corpora["train"],
        held_out=corpora["held_out"],
        report=Report(**raw["report"]),
        digest=raw["digest"],
    )


def _corpus(name: str, side: str, source: dict[str, Any], directory: Path) -> Corpus:
    files = tuple(file["path"] for file in source["files"])
    counts = source[side]
    corpus = Corpus(name, directory / name, side, files, counts["tokens"], counts["documents"])
    unit = 2 if source["dtype"] == "uint16" else 4
    if not corpus.path.is_file() or corpus.path.stat().st_size < corpus.count * unit:
        raise ValueError(f"{corpus.path} is missing or cut off; delete {directory} and prepare again")
    return corpus
