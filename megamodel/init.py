"""Initial weights: each logical tensor from its own key, so that they are the same at every layout."""

import torch
from torch import nn

from parallel.piece import fill_of, pieces_of
from parallel.seed import generator


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int) -> nn.Module:
    """Fill every tagged parameter in place; returns the module.

    The full fp32 tensor of each logical name is drawn on the CPU from hash(seed, name) and sliced, one tensor
    at a time. What no piece covers is vocabulary padding and stays zero. On the meta device nothing is drawn.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            continue
        fill = fill_of(parameter)
        flat = parameter.data.view(-1).zero_()
        for piece in pieces_of(parameter):
            stretch = flat[piece.start : piece.start + piece.numel]
            if fill.std == 0:
                stretch.fill_(fill.mean)
                continue
            draw = torch.empty(piece.shape).normal_(
                fill.mean, fill.std, generator=generator(seed, piece.name)
            )
            stretch.copy_(draw[piece.slices].reshape(-1))
    return module
