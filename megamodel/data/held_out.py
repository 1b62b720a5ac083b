"""Held-out windows: each held-out token is a target once, in an order that is the same for every run.

B rows of a micro-batch, S sequence length.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from megamodel.data.batch import IGNORE, Batch
from megamodel.data.order import permute
from megamodel.data.tokens import Corpus
from megamodel.data.windows import Windows, batch


class HeldOut:
    """The held-out side of every source. The order is fixed, so that the first n windows are a fair part of
    all documents and the same in every run and layout."""

    def __init__(
        self,
        corpora: Mapping[str, Corpus],
        *,
        sequence_length: int,
        isolate_documents: bool,
        vocab_size: int,
    ) -> None:
        self._windows = {
            name: Windows(
                corpus,
                sequence_length=sequence_length,
                isolate_documents=isolate_documents,
                vocab_size=vocab_size,
                partial=True,
            )
            for name, corpus in corpora.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Sources that have held-out windows."""
        return tuple(name for name, windows in self._windows.items() if windows.count)

    def count(self, source: str) -> int:
        """Windows of a source."""
        return self._windows[source].count

    def batches(
        self,
        micro_batch: int,
        limit: int | None = None,
        data_rank: int = 0,
        data_size: int = 1,
        *,
        source: str | None = None,
    ) -> Iterator[Batch]:
        """Micro-batches of one data rank over the first `limit` windows (None: all), equally many on each.

        Row r of micro-batch m on data rank d is window (m data_size + d) micro_batch + r of the fixed order;
        rows past the end or the limit have no counted target, so that every layout counts the same windows.
        source None: the only one.
        """
        windows = self._windows[self._only(source)]
        total = windows.count if limit is None else min(limit, windows.count)
        for number in range(-(-total // (micro_batch * data_size))):
            first = (number * data_size + data_rank) * micro_batch
            places = np.arange(first, first + micro_batch, dtype=np.int64)
            tokens, targets, positions = windows.rows(self._ordered(windows, places))
            targets[places >= total] = IGNORE
            yield batch(tokens, targets, positions, places)

    def pairs(self, count: int | None = None, *, source: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(token, target) of every counted target in the first `count` windows of the fixed order."""
        windows = self._windows[self._only(source)]
        total = windows.count if count is None else min(count, windows.count)
        found = [(np.empty(0, dtype=np.int64),) * 2]
        for first in range(0, total, 1024):
            places = np.arange(first, min(first + 1024, total), dtype=np.int64)
            tokens, targets, _ = windows.rows(self._ordered(windows, places))
            counted = targets != IGNORE
            found.append((tokens[counted], targets[counted]))
        return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])

    def _only(self, source: str | None) -> str:
        if source is None:
            assert len(self._windows) == 1, "several sources: name one"
            return next(iter(self._windows))
        return source

    def _ordered(self, windows: Windows, places: np.ndarray) -> np.ndarray:
        """The window at each place of the fixed order; places past the end stay past the end."""
        inside = places < windows.count
        ordered = places.copy()
        if inside.any():
            ordered[inside] = permute(places[inside], windows.count, "held_out", windows.corpus.name)
        return ordered
