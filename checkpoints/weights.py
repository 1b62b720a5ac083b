"""The weights of a checkpoint alone, into a model in one process: whatever layout saved them."""

from pathlib import Path

import torch
from torch import nn

from checkpoints import load, store
from checkpoints import manifest as manifests
from checkpoints.files import Files, LocalFiles
from checkpoints.layout import Stretch
from checkpoints.state import Part
from checkpoints.store import Found
from parallel.piece import pieces_of


def load_weights(path: Path, module: nn.Module, *, files: Files | None = None) -> None:
    """Overwrite every parameter of the module, which must be fp32, with the masters of a step's directory.

    The module's parameters are tagged with their pieces. ValueError when the checkpoint does not fit or is
    damaged; nothing is overwritten then.
    """
    files = files or LocalFiles()
    content, checksum = manifests.read(files, path)
    found = Found(path, content, checksum)
    store.check_heads(files, found, 0, 1)
    wanted = [
        Part(
            name=piece.name,
            kind="master",
            stretch=Stretch(piece.shape, piece.offset, piece.extent, 0, piece.numel),
            owner=True,
            tensor=parameter.data.view(-1)[piece.start : piece.start + piece.numel],
        )
        for parameter in module.parameters()
        for piece in pieces_of(parameter)
    ]
    staged = load.stage(files, found, wanted)
    with torch.no_grad():
        load.put(wanted, staged)
