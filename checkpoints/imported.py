"""Weights from elsewhere as a checkpoint of step 0, which a run at any layout goes on from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints.config import Checkpoint
from checkpoints.manager import About, Manager
from conf.typed import parse
from megamodel.data.batch import Cursor
from parallel.mesh import Mesh, single_mesh
from parallel.piece import Piece, pieces_of

MOMENTS = ("exp_avg", "exp_avg_sq")
IMPORTED = "imported"  # in `extra` of such a checkpoint


@dataclass(frozen=True)
class _View:
    piece: Piece
    kind: str
    tensor: torch.Tensor
    flat_start: int = 0


class _Untrained:
    """A model in one process with Adam's moments at zero, as saving sees an engine."""

    optimizer_step = 0

    def __init__(self, module: nn.Module) -> None:
        self.mesh: Mesh = single_mesh()
        self._module = module

    def state(self) -> list[_View]:
        found = []
        for parameter in self._module.parameters():
            for piece in pieces_of(parameter):
                master = parameter.data.view(-1)[piece.start : piece.start + piece.numel].float()
                found.append(_View(piece, "master", master))
                if parameter.requires_grad:
                    found += [_View(piece, kind, torch.zeros_like(master)) for kind in MOMENTS]
        return found

    def load_done(self, step: int) -> None:
        raise AssertionError("nothing is loaded into it")


def save_imported(
    module: nn.Module, directory: Path, configuration: dict[str, Any], extra: dict[str, Any]
) -> Path:
    """Write directory/checkpoints/step-00000000 with the weights of a model in one process; its path.

    extra: what else is known of it, plain JSON that is kept beside the mark IMPORTED.
    """
    settings = parse(Checkpoint, {"background": False})
    manager = Manager(directory, settings, single_mesh(), About(configuration=configuration))
    return manager.save(_Untrained(module), Cursor(), {IMPORTED: True, **extra})
