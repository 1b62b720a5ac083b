"""Parameters that one rank holds, counted on the layers themselves, which are built without memory."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from megamodel.config import Model
from megamodel.model import layers
from parallel.mesh import Group
from parallel.piece import pieces_of
from parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Count:
    """Trained numbers of one rank; padding of the vocabulary is counted, being held."""

    matrices: int  # with weight decay: a group of the optimizer
    vectors: int

    def __add__(self, other: "Count") -> "Count":
        return Count(self.matrices + other.matrices, self.vectors + other.vectors)

    @property
    def total(self) -> int:
        return self.matrices + self.vectors


class Parameters:
    """Counts of a model's layers at any tp; each kind of layer is built once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._layers: dict[tuple[int, bool], tuple[Count, list[Count], Count]] = {}

    def layers(self, tp: int, sequence: bool = False) -> tuple[Count, list[Count], Count]:
        """(before the blocks, each block, after them); a tied matrix is counted where it is first."""
        key = (tp, sequence)
        if key not in self._layers:
            self._layers[key] = self._count(tp, sequence)
        return self._layers[key]

    def of_stages(self, bounds: list[int], tp: int) -> list[Count]:
        """Of each stage; a tied matrix stands on the first and on the last, once if they are one."""
        first, blocks, last = self.layers(tp)
        stages = [sum(blocks[a:b], Count(0, 0)) for a, b in pairwise(bounds)]
        stages[0] += first
        stages[-1] += last
        if self.model.tie_embeddings and len(stages) > 1:
            stages[-1] += self._tied
        return stages

    def _count(self, tp: int, sequence: bool) -> tuple[Count, list[Count], Count]:
        parallel = TensorParallel(Group(tuple(range(tp)), 0, None), sequence=sequence)
        before, after, blocks = Count(0, 0), Count(0, 0), []
        seen: list[tuple[object, Count]] = []
        shared: set[str] = set()
        built = layers(self.model, seed=0, documents=False, parallel=parallel, initial=False)
        for part in built:
            if part.is_block:
                own = self.model.layer(len(blocks))
                known = next((count for kind, count in seen if kind == own), None)
                if known is None or self.model.shares_over_layers:
                    known = _trained(part.build, shared)
                    seen.append((own, known))
                blocks.append(known)
            elif blocks and part.tied:
                continue
            elif blocks:
                after += _trained(part.build, shared)
            else:
                count = _trained(part.build, shared)
                before += count
                if part.tied:
                    self._tied = count
        return before, blocks, after


def _trained(build: Callable[[], nn.Module], shared: set[str]) -> Count:
    """Of what no layer before has: the names of its pieces tell."""
    with torch.device("meta"):
        module = build()
    new = [p for p in module.parameters() if p.requires_grad and pieces_of(p)[0].name not in shared]
    shared.update(pieces_of(p)[0].name for p in new)
    matrices = sum(p.numel() for p in new if p.dim() >= 2)
    return Count(matrices, sum(p.numel() for p in new) - matrices)
