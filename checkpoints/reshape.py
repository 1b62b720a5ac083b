"""From one layout to another without processes: one stretch of one tensor in memory at a time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoints import load, store
from checkpoints.files import Files
from checkpoints.layout import Stretch
from checkpoints.manifest import Entry, FileSum
from checkpoints.state import Part
from checkpoints.store import Found
from checkpoints.tensorfile import DTYPES
from parallel.piece import Piece


def reshape(
    files: Files,
    found: Found,
    target_files: Files,
    target: Path,
    ranks: Sequence[Sequence[Piece]],
    *,
    layout: dict[str, int],
    configuration: dict[str, Any],
) -> Path:
    """Write the state of a checkpoint as those ranks would have saved it, and commit it below `target`.

    ranks: what each rank of the new layout holds. Everything of a tensor is moved: masters, moments, and
    weights where they were saved. ValueError when the model is another one or a block is damaged; `target`
    then holds no new checkpoint.
    """
    index = load.index(found)
    names = {piece.name for pieces in ranks for piece in pieces}
    unknown = sorted({name for _, name in index} - names)
    if unknown:
        raise ValueError(f"{found.path} holds {len(unknown)} tensors that its model has not: {unknown[0]}")
    content = found.manifest
    draft = store.prepare(target_files, target, content.step)
    sums: list[FileSum] = []
    entries: list[Entry] = []
    for rank, pieces in enumerate(ranks):
        state = [part for piece in pieces for part in _parts(found, index, piece)]
        total, written = store.write_part(
            target_files,
            draft,
            rank,
            state,
            block_bytes=content.block_bytes,
            read=lambda part: load.stage(files, load.only(found, [(part.kind, part.name)], index), [part])[0],
        )
        sums += [total] if total else []
        entries += written
    new = replace(
        content, layout=layout, configuration=configuration, files=tuple(sums), pieces=tuple(entries)
    )
    return store.commit(target_files, target, draft, new)


def _parts(found: Found, index: load.Index, piece: Piece) -> list[Part]:
    """What there is of one piece: master, moments, weights; without memory of their own."""
    kinds = {kind: entries[0] for (kind, name), entries in index.items() if name == piece.name}
    if not kinds:
        raise ValueError(f"{found.path} has no {piece.name}")
    return [
        Part(
            name=piece.name,
            kind=kind,
            stretch=Stretch(piece.shape, piece.offset, piece.extent, 0, piece.numel),
            owner=piece.owner,
            tensor=torch.empty(piece.numel, dtype=DTYPES[entry.dtype], device="meta"),
        )
        for kind, entry in kinds.items()
        if piece.numel
    ]
