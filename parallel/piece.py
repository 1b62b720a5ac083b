"""How the local part of a parameter lies in the logical tensors it is made of.

A local parameter may hold rows of several logical tensors (fused q, k and v). Each is one `Piece`: a box of
the logical tensor, stored row-major and contiguous from `start` in the flattened local tensor. Saving,
counting, clipping, gradient sums and reshaping all read the pieces; nothing else knows about sharding.
"""

from dataclasses import dataclass, replace
from math import prod

import torch


@dataclass(frozen=True)
class Piece:
    """A box of the logical tensor `name` of global `shape` (true rows only, never padding).

    offset, extent: the box in the logical tensor; start: its first element in the flattened local tensor.
    owner: this rank counts it in the norm and saves it (False on replicas over tp and on tied copies).
    summed: this rank's gradient is one summand; the gradient of the logical tensor is the sum over tp.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    start: int = 0
    owner: bool = True
    summed: bool = False

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the logical tensor."""
        return tuple(slice(o, o + e) for o, e in zip(self.offset, self.extent, strict=True))


@dataclass(frozen=True)
class Fill:
    """Initial values of a logical tensor: normal with this mean and standard deviation (0: constant)."""

    mean: float
    std: float


def tag(parameter: torch.nn.Parameter, pieces: list[Piece], fill: Fill) -> None:
    """Attach what the parameter is made of and how it starts; read by `pieces_of` and `fill_of`."""
    parameter.pieces = tuple(pieces)  # type: ignore[attr-defined]
    parameter.fill = fill  # type: ignore[attr-defined]


def pieces_of(parameter: torch.Tensor) -> tuple[Piece, ...]:
    """The pieces of a tagged parameter; AttributeError if a layer forgot to tag it."""
    return parameter.pieces  # type: ignore[attr-defined]


def fill_of(parameter: torch.Tensor) -> Fill:
    """The initial values of a tagged parameter."""
    return parameter.fill  # type: ignore[attr-defined]


def disown(parameter: torch.nn.Parameter) -> None:
    """Mark a parameter as a copy that another rank owns (a tied copy on a later stage)."""
    pieces = [replace(piece, owner=False) for piece in pieces_of(parameter)]
    tag(parameter, pieces, fill_of(parameter))
