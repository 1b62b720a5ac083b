"""The state of an engine as named stretches of logical tensors: what the rest of this package works on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from checkpoints.layout import Stretch
from parallel.mesh import Mesh
from parallel.piece import Piece


class StateTensor(Protocol):
    """A 1-d contiguous live view: elements [flat_start, flat_start + numel) of the piece, row-major."""

    @property
    def piece(self) -> Piece: ...
    @property
    def kind(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def flat_start(self) -> int: ...


class Engine(Protocol):
    """As much of an engine as saving and loading needs."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def optimizer_step(self) -> int: ...
    def state(self) -> Sequence[StateTensor]: ...
    def load_done(self, step: int) -> None: ...


@dataclass(frozen=True)
class Part:
    """One stretch of the state on this rank; `tensor` is live memory or a copy, 1-d."""

    name: str
    kind: str
    stretch: Stretch
    owner: bool
    tensor: torch.Tensor


def parts(engine: Engine) -> list[Part]:
    """The state of this rank, replicas included, empty stretches left out."""
    return [
        Part(
            name=item.piece.name,
            kind=item.kind,
            stretch=Stretch(
                tuple(item.piece.shape),
                tuple(item.piece.offset),
                tuple(item.piece.extent),
                item.flat_start,
                item.tensor.numel(),
            ),
            owner=item.piece.owner,
            tensor=item.tensor,
        )
        for item in engine.state()
        if item.tensor.numel()
    ]
