"""What is read, how it is split into documents, and in which proportion it is fed."""

import math
from pathlib import Path
from typing import Literal

from conf.typed import config, setting

Kind = Literal["stdlib", "shakespeare", "files"]
TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]


@config
class SourceConfig:
    """One named part of a mixture."""

    kind: Kind = setting(
        "files",
        on_resume="must_equal",
        help="stdlib: source of the running Python's standard library; shakespeare: the plays fetched by "
        "`make data-shakespeare`; files: one's own",
    )
    paths: list[str] = setting(
        factory=list,
        on_resume="needs_override",
        help="files, directories, patterns or hf:NAME for a dataset of the Hub: text, .jsonl, .parquet (text "
        "and JSONL also .gz or .zst), a saved `datasets` directory, tokens as .npy or raw .bin",
    )
    text_key: str = setting("text", on_resume="must_equal", help="field or column that holds the text")
    split: str = setting("train", on_resume="must_equal", help="split of a Hugging Face dataset")
    dtype: TokenType | None = setting(
        None, on_resume="must_equal", help="number type of raw .bin token files (little-endian)"
    )
    document_bytes: int = setting(
        65536,
        on_resume="must_equal",
        help="a plain text file longer than this is cut at line ends into documents of about so many bytes",
    )
    weight: float = setting(
        1.0, on_resume="needs_override", help="share of the samples, relative to the others"
    )

    def __post_init__(self) -> None:
        if self.kind == "files" and not self.paths:
            raise ValueError("data.kind=files needs data.paths=[FILE, ...]")
        if self.kind != "files" and self.paths:
            raise ValueError(
                f"data.paths {self.paths} is read only by data.kind=files (it is {self.kind}); use data=files"
            )
        if self.document_bytes < 1:
            raise ValueError(f"data.document_bytes ({self.document_bytes}) must be at least 1")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"weight ({self.weight}) must be a positive number; leave a source out to drop it"
            )


@config
class Data:
    """The data of a run: one source, or a weighted mixture of named ones."""

    kind: Literal["stdlib", "shakespeare", "files", "mixture"] = setting(
        "stdlib",
        on_resume="must_equal",
        help="stdlib: source of the running Python's standard library; shakespeare: the plays fetched by "
        "`make data-shakespeare`; files: data.paths; mixture: data.mixture",
    )
    paths: list[str] = setting(
        factory=list,
        on_resume="needs_override",
        help="files, directories, patterns or hf:NAME for a dataset of the Hub (kind=files): text, .jsonl, "
        ".parquet (text and JSONL also .gz, .zst), a saved `datasets` directory, tokens as .npy or raw .bin",
    )
    text_key: str = setting("text", on_resume="must_equal", help="field or column that holds the text")
    split: str = setting("train", on_resume="must_equal", help="split of a Hugging Face dataset")
    dtype: TokenType | None = setting(
        None, on_resume="must_equal", help="number type of raw .bin token files (little-endian)"
    )
    document_bytes: int = setting(
        65536,
        on_resume="must_equal",
        help="a plain text file longer than this is cut at line ends into documents of about so many bytes",
    )
    mixture: dict[str, SourceConfig] = setting(
        factory=dict,
        on_resume="needs_override",
        help="named sources with weights (kind=mixture): {code: {kind: stdlib, weight: 0.7}, ...}",
    )
    held_out_fraction: float = setting(
        0.05,
        on_resume="must_equal",
        help="share of the documents that is kept for evaluation, chosen by the hash of their content",
    )
    isolate_documents: bool = setting(
        True,
        on_resume="needs_override",
        help="documents packed into one window do not see each other: positions restart, no target crosses",
    )
    allow_special: bool = setting(
        False,
        on_resume="must_equal",
        help="let the literal text of a special token stand for the token; false: it stays text",
    )
    workers: int | None = setting(
        None, on_resume="free", help="processes that tokenise; null: one for each core this process may use"
    )
    cache: str = setting(".cache/megamodel", on_resume="free", help="directory of the prepared data")

    def __post_init__(self) -> None:
        if (self.kind == "mixture") != bool(self.mixture):
            raise ValueError(
                f"data.kind is {self.kind} and data.mixture names {sorted(self.mixture) or 'no source'}; "
                "use data.kind=mixture together with data.mixture={NAME: {kind: ..., weight: ...}, ...}"
            )
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction ({self.held_out_fraction}) must be in [0, 1)")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"data.workers ({self.workers}) must be at least 1, or null for one a core")
        for name in self.mixture:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"data.mixture: the name {name!r} may hold letters, digits, - and _ only")
        self.sources()

    def sources(self) -> dict[str, SourceConfig]:
        """Every source by name, in a fixed order; a run without a mixture has one, named by its kind."""
        if self.kind == "mixture":
            return dict(sorted(self.mixture.items()))
        source = SourceConfig(
            weight=1.0,
            kind=self.kind,
            paths=self.paths,
            text_key=self.text_key,
            split=self.split,
            dtype=self.dtype,
            document_bytes=self.document_bytes,
        )
        return {self.kind: source}

    def weights(self) -> dict[str, float]:
        return {name: source.weight for name, source in self.sources().items()}

    def cache_path(self) -> Path:
        return Path(self.cache).expanduser().absolute()
