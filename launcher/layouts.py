"""What each rank of a layout holds of a model, without processes and without memory for it."""

import torch

from megamodel.config import Model
from megamodel.model import Layer, layers
from parallel.config import Parallel
from parallel.mesh import Group
from parallel.piece import Piece, disown, pieces_of
from parallel.stages import stage_bounds
from parallel.tensor import TensorParallel


def pieces_by_rank(model: Model, parallel: Parallel) -> list[list[Piece]]:
    """The pieces of every (stage, tp rank), tp fastest; ValueError when the layout does not divide."""
    ranks = []
    for stage in range(parallel.pp):
        for rank in range(parallel.tp):
            group = Group(tuple(range(parallel.tp)), rank, None)
            built = layers(
                model,
                seed=0,
                documents=False,
                parallel=TensorParallel(group, sequence=parallel.sequence_parallel),
            )
            bounds = stage_bounds(
                [layer.cost for layer in built],
                [layer.is_block for layer in built],
                pp=parallel.pp,
                stage_layers=parallel.stage_layers,
            )
            ranks.append(_pieces(built[bounds[stage] : bounds[stage + 1]], built[: bounds[stage]]))
    return ranks


def _pieces(ours: list[Layer], before: list[Layer]) -> list[Piece]:
    """The pieces of the layers of one stage; a tied layer belongs to the first stage that has it."""
    elsewhere = {layer.tied for layer in before if layer.tied}
    pieces: list[Piece] = []
    here: set[str] = set()
    for layer in ours:
        if layer.tied in here:  # one module for both
            continue
        here |= {layer.tied} if layer.tied else set()
        with torch.device("meta"):
            module = layer.build()
        for parameter in module.parameters():
            if layer.tied in elsewhere:
                disown(parameter)
            pieces += pieces_of(parameter)
    return pieces
