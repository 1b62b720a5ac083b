"""What the model is fed, and where in the data a run stands.

B micro-batch rows, S sequence length.
"""

from dataclasses import dataclass

import torch

IGNORE = -100  # a target that is not counted


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data rank.

    tokens (B, S) int64; targets (B, S) int64, IGNORE where not counted; positions (B, S) int64, which restart
    at 0 with each document when documents are isolated (they are then the document mask), else 0 .. S - 1;
    samples (B,) int64, the global sample numbers.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    samples: torch.Tensor

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())

    def pinned(self) -> "Batch":
        """The same in memory that a GPU reads by itself, while the host goes on."""
        tensors = (self.tokens, self.targets, self.positions, self.samples)
        return Batch(*(tensor.pin_memory() for tensor in tensors))


@dataclass(frozen=True)
class Cursor:
    """Where a run stands. Order of data is a pure function of (seed, sample number).

    attempt: batches tried; step: updates applied; sample: the next sample number; tokens: valid tokens
    applied; skipped: sorted disjoint [start, stop) ranges of samples that are never fed.
    """

    attempt: int = 0
    step: int = 0
    sample: int = 0
    tokens: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
