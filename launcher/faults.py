"""Faults on purpose, to rehearse what a run does about them: `faults=[{kind: lr, step: 40, steps: 8}]`.

A fault fires once in the life of a run, whatever is resumed or rewound: its event is written first. Poisoned
samples are part of the data and stay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from launcher.sections import Fault
from megamodel.data.batch import IGNORE, Batch, Cursor
from megamodel.data.poison import random_tokens
from parallel.engine import Engine

SPOILT = float("nan")  # what stands in the gradient
HIGHEST_EXPONENT_BIT = 30  # of an fp32 number: 0.01 becomes 3e36


def poisoned(faults: Iterable[Fault]) -> list[tuple[int, int]]:
    """The [start, stop) ranges of samples that are poisoned."""
    return [(f.samples[0], f.samples[1]) for f in faults if f.kind == "poison" and f.samples]


@dataclass
class Faults:
    """Those of a run and which of them have fired. fired: as their events have it."""

    faults: Sequence[Fault]
    vocab_size: int
    seed: int
    fired: list[dict[str, Any]] = field(default_factory=list)
    _until: dict[int, int] = field(default_factory=dict)  # number of a fault -> last attempt that it acts on

    def due(self, cursor: Cursor, samples: Sequence[int]) -> list[Fault]:
        """Those that fire at this attempt; from now on they have fired. Equal on every rank."""
        found = []
        for number, fault in enumerate(self.faults):
            if fault.as_json() in self.fired:
                continue
            if fault.samples:
                start, stop = fault.samples
                hit = any(start <= sample < stop for sample in samples)
            else:
                hit = fault.step is not None and cursor.step + 1 >= fault.step
            if hit:
                self.fired.append(fault.as_json())
                self._until[number] = cursor.attempt + fault.steps
                found.append(fault)
        return found

    def acting(self, cursor: Cursor, kind: str) -> list[Fault]:
        """Those of a kind that act on this attempt."""
        last = self._until
        return [f for n, f in enumerate(self.faults) if f.kind == kind and last.get(n, 0) > cursor.attempt]

    def lr_factor(self, cursor: Cursor) -> float:
        factor = 1.0
        for fault in self.acting(cursor, "lr"):
            factor *= fault.factor
        return factor

    def batches(self, cursor: Cursor, batches: Sequence[Batch], *, data_rank: int) -> list[Batch]:
        """The micro-batches as this data rank gets them."""
        if not any(f.rank == data_rank for f in self.acting(cursor, "tokens")):
            return list(batches)
        return [self._scrambled(batch) for batch in batches]

    def _scrambled(self, batch: Batch) -> Batch:
        length = batch.tokens.shape[1]
        rows = [random_tokens(self.seed + 1, int(s), length, self.vocab_size) for s in batch.samples]
        ids = torch.stack([torch.from_numpy(row) for row in rows])
        targets = torch.where(batch.targets == IGNORE, IGNORE, ids[:, 1:])
        return replace(batch, tokens=ids[:, :-1].contiguous(), targets=targets)

    def gradients(self, cursor: Cursor, found: list[tuple[str, Tensor, Tensor]], *, rank: int) -> None:
        """Spoil this rank's own gradients, in place."""
        if any(f.rank == rank for f in self.acting(cursor, "nan_gradient")):
            inner = [g for name, _, g in found if name.startswith("blocks.")] or [g for *_, g in found]
            max(inner, key=lambda gradient: gradient.numel()).view(-1)[0] = SPOILT

    def weights(self, cursor: Cursor, engine: Engine) -> None:
        """Flip a bit of one weight of a rank's last large matrix in a block, before the attempt. Collective.

        Not of the embedding: nobody would notice it in the row of a rare token.
        """
        flips = self.acting(cursor, "bit_flip")
        if not flips:
            return
        if any(fault.rank == engine.mesh.world.rank for fault in flips):
            masters = [part for part in engine.state() if part.kind == "master"]
            inner = [part for part in masters if part.piece.name.startswith("blocks.")] or masters
            largest = max(reversed(inner), key=lambda part: part.tensor.numel()).tensor
            largest.data.view(torch.int32)[0] ^= 1 << HIGHEST_EXPONENT_BIT
        engine.load_done(engine.optimizer_step)
