"""Packed windows of a corpus: documents one after another, cut every S tokens.

S sequence length, B rows. Window w covers tokens w S .. w S + S: its last token is the first of the next
window, so that each token but the first is a target once.
"""

import numpy as np
import torch

from megamodel.data.batch import IGNORE, Batch
from megamodel.data.tokens import Corpus, Source


class Windows:
    """The windows of one corpus, read from its memory map. Thread-safe: nothing changes once made."""

    def __init__(
        self, corpus: Corpus, *, sequence_length: int, isolate_documents: bool, vocab_size: int, partial: bool
    ) -> None:
        """partial: also the last window when it is not full (its missing targets are not counted)."""
        self.corpus = corpus
        self._length = sequence_length
        self._isolate = isolate_documents
        self._vocab_size = vocab_size
        spare = corpus.count - 1
        self.count = max(0, -(-spare // sequence_length) if partial else spare // sequence_length)

    def rows(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, targets, positions of the given windows, each (B, S) int64.

        A window number of self.count or more gives a row without counted targets. ValueError for an id
        outside the vocabulary, with its file and position.
        """
        length, corpus = self._length, self.corpus
        stream = np.zeros((len(windows), length + 1), dtype=np.int64)
        targets = np.full((len(windows), length), IGNORE, dtype=np.int64)
        positions = np.tile(np.arange(length, dtype=np.int64), (len(windows), 1))
        for row, window in enumerate(windows.tolist()):
            if window >= self.count:
                continue
            start = window * length
            part = corpus.tokens[start : start + length + 1]
            stream[row, : len(part)] = part
            targets[row, : len(part) - 1] = part[1:]
            if self._isolate:
                self._separate(start, len(part), targets[row], positions[row])
        if stream.size and stream.max() >= self._vocab_size:
            self._refuse(windows, stream)
        return stream[:, :-1], targets, positions

    def _separate(self, start: int, size: int, targets: np.ndarray, positions: np.ndarray) -> None:
        """Restart positions and ignore the target at each document that begins inside the window."""
        starts = self.corpus.starts
        first = int(np.searchsorted(starts, start, side="right"))
        last = int(np.searchsorted(starts, start + size, side="left"))
        begins = np.asarray(starts[first:last]) - start
        targets[begins - 1] = IGNORE
        begins = begins[begins < len(positions)]
        bounds = np.concatenate(([0], begins, [len(positions)]))
        positions -= np.repeat(bounds[:-1], np.diff(bounds))

    def _refuse(self, windows: np.ndarray, stream: np.ndarray) -> None:
        row, column = np.argwhere(stream >= self._vocab_size)[0].tolist()
        raise ValueError(
            f"{self.corpus.path}: token {stream[row, column]} at position "
            f"{int(windows[row]) * self._length + column} is outside the vocabulary of {self._vocab_size}; "
            "set model.vocab_size to the tokenizer's"
        )

    def sources(self, window: int) -> list[Source]:
        """Where the documents of a window come from, in order."""
        start = window * self._length
        return self.corpus.sources(start, min(start + self._length + 1, self.corpus.count))


def batch(tokens: np.ndarray, targets: np.ndarray, positions: np.ndarray, samples: np.ndarray) -> Batch:
    """A Batch of (B, S) arrays and (B,) sample numbers, copied into tensors of their own."""
    return Batch(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (tokens, targets, positions, samples)))
