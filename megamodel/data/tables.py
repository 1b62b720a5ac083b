"""Rows of Parquet files and of Hugging Face datasets, read by `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from megamodel.data.blocks import Block
from megamodel.data.config import SourceConfig
from megamodel.data.sources import SourceFile

BLOCK_ROWS = 256
NO_TEXT = -1  # the length of a row without a text


def row_blocks(file: SourceFile, source: SourceConfig) -> Iterator[Block]:
    """The texts of a table, row by row; ValueError where it has no such split or column."""
    table = _open(file, source)
    columns = table.column_names
    if columns is not None and source.text_key not in columns:
        raise ValueError(
            f"{file.path} has no column {source.text_key!r}; name one of {sorted(columns)} with data.text_key"
        )
    record = 1
    for batch in table.select_columns([source.text_key]).with_format("arrow").iter(batch_size=BLOCK_ROWS):
        texts = [_encoded(value) for value in batch.column(source.text_key).to_pylist()]
        lengths = tuple(NO_TEXT if text is None else len(text) for text in texts)
        yield Block("rows", b"".join(filter(None, texts)), record, None, lengths=lengths)
        record += len(texts)


def _encoded(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else None


def _open(file: SourceFile, source: SourceConfig) -> Any:
    """A table that is read in pieces: a memory map or a stream, never a whole copy in memory."""
    try:
        if file.format == "parquet":
            return datasets.load_dataset(
                "parquet", data_files={"train": file.path}, split="train", streaming=True
            )
        if Path(file.path).is_dir():
            table = datasets.load_from_disk(file.path)
            if not isinstance(table, datasets.DatasetDict):
                return table
            if source.split not in table:
                raise ValueError(f"no split {source.split!r}; set data.split to one of {sorted(table)}")
            return table[source.split]
        name, _, configuration = file.path.partition(":")
        return datasets.load_dataset(name, configuration or None, split=source.split, streaming=True)
    except Exception as error:  # the library and its file systems raise all kinds
        what = "cannot be had from the Hub" if file.state.startswith("name:") else "cannot be read"
        raise ValueError(f"data.paths: {file.path} {what} ({type(error).__name__}: {error})") from error
