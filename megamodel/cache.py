"""What attention remembers of earlier tokens while a text is written.

B batch, N entries, w window. A cache holds exactly min(capacity, w) entries a row, whatever kind of attention
fills it: keys and values of the key/value heads, or the latent and the rotary key of MLA.
"""

import torch
from torch import Tensor


class Cache:
    """The memory of one layer: a buffer for each remembered tensor, overwritten in a ring when it is full.

    capacity: the longest text. window: no query looks further back than this many keys, itself included.
    """

    def __init__(self, *, capacity: int, window: int | None = None) -> None:
        self.entries = capacity if window is None else min(capacity, window)
        self.is_ring = window is not None and window < capacity
        self.capacity = capacity
        self.tokens = 0  # so far, padding included
        self.buffers: list[Tensor] = []
        self.positions = torch.empty(0, dtype=torch.int64)  # (B, N), -1 where nothing stands

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers; the positions, which are bookkeeping, not counted."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def extend(self, new: list[Tensor], positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Remember new (B, S, ...) at positions (B, S), -1 for padding.

        Returns (all that a query among the new ones may see (B, N, ...), their positions (B, N)).
        """
        length = positions.shape[1]
        if self.tokens + length > self.capacity:
            raise ValueError(f"{self.tokens + length} tokens do not fit a cache of {self.capacity}")
        if not self.buffers:
            self._start(new, positions)
        if length > 1 and self.is_ring:
            # The ring forgets what the first of several new queries may still see: join before it is written.
            before = self.positions
            joined = [torch.cat((b, x), dim=1) for b, x in zip(self.buffers, new, strict=True)]
            everything = torch.cat((before, positions), dim=1)
            if not self.tokens:
                joined, everything = list(new), positions
            self._write(new, positions)
            return joined, everything
        self._write(new, positions)
        used = min(self.tokens, self.entries)
        return [buffer[:, :used] for buffer in self.buffers], self.positions[:, :used]

    def _start(self, new: list[Tensor], positions: Tensor) -> None:
        rows = positions.shape[0]
        self.buffers = [x.new_zeros(rows, self.entries, *x.shape[2:]) for x in new]
        self.positions = positions.new_full((rows, self.entries), -1)

    def _write(self, new: list[Tensor], positions: Tensor) -> None:
        length = positions.shape[1]
        kept = min(length, self.entries)
        first = self.tokens + length - kept
        slots = torch.arange(first, first + kept, device=positions.device) % self.entries
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, slots] = x[:, -kept:]
        self.positions[:, slots] = positions[:, -kept:]
        self.tokens += length
