"""The batches of a step as a pure function of the cursor: same samples in the same order at every layout.

G sequences of a step = micro-batch rows x accumulation x data ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megamodel.data.batch import Batch, Cursor
from megamodel.data.order import Mixture, permute
from megamodel.data.poison import poison
from megamodel.data.tokens import Corpus, Source
from megamodel.data.windows import Windows, batch


@dataclass(frozen=True)
class LoadedStep:
    """What one step is fed: the micro-batches of one data rank, the sample numbers of all ranks in order,
    and the sample number that the next step begins with."""

    batches: list[Batch]
    samples: tuple[int, ...]
    next_sample: int


class Loader:
    """Training samples: sample n is a window of a source, chosen by (seed, n) alone. Thread-safe, no state.

    Each epoch of a source has an order of its own and holds each of its full windows once.
    """

    def __init__(
        self,
        corpora: Mapping[str, Corpus],
        *,
        sequence_length: int,
        seed: int,
        isolate_documents: bool,
        mixture: Mapping[str, float] | None = None,
        vocab_size: int,
        poisoned: Sequence[tuple[int, int]] = (),
    ) -> None:
        """corpora: Prepared.train; mixture: a weight for each (None: equal); vocab_size: the model's.

        poisoned: [start, stop) ranges of samples that are random ids instead, for rehearsals.
        """
        weights = dict.fromkeys(corpora, 1.0) if mixture is None else dict(mixture)
        if set(weights) != set(corpora):
            raise ValueError(f"the mixture names {sorted(weights)}, the data have {sorted(corpora)}")
        self._seed, self._vocab_size = seed, vocab_size
        self._poisoned = list(poisoned)
        self._mixture = Mixture(weights)
        self._windows = [
            Windows(
                corpora[name],
                sequence_length=sequence_length,
                isolate_documents=isolate_documents,
                vocab_size=vocab_size,
                partial=False,
            )
            for name in self._mixture.names
        ]
        for windows in self._windows:
            if windows.count == 0:
                raise ValueError(
                    f"data source {windows.corpus.name} has {windows.corpus.count} training tokens, fewer "
                    f"than train.sequence_length + 1 ({sequence_length + 1}); give more text or a shorter "
                    "sequence"
                )

    @property
    def epoch_samples(self) -> dict[str, int]:
        """Windows, and so draws in one epoch, of each source."""
        return {windows.corpus.name: windows.count for windows in self._windows}

    def at(
        self, cursor: Cursor, *, micro_batch: int, accumulation: int, data_rank: int, data_size: int
    ) -> LoadedStep:
        """The step that begins at the cursor, for one data rank.

        Sample k of the step's G goes to micro-batch k // (micro_batch data_size), data rank
        (k // micro_batch) % data_size, row k % micro_batch.
        """
        samples = next_samples(cursor, micro_batch * accumulation * data_size)
        own = samples.reshape(accumulation, data_size, micro_batch)[:, data_rank].reshape(-1)
        arrays = [x.reshape(accumulation, micro_batch, -1) for x in self._rows(own)]
        numbers = own.reshape(accumulation, micro_batch)
        tokens, targets, positions = arrays
        batches = [batch(tokens[m], targets[m], positions[m], numbers[m]) for m in range(accumulation)]
        return LoadedStep(batches, tuple(samples.tolist()), int(samples[-1]) + 1)

    def locate(self, sample: int) -> list[Source]:
        """The documents that a sample is made of, in order: file, record, byte range."""
        source, window = self._place(np.array([sample]))
        return self._windows[int(source[0])].sources(int(window[0]))

    def source_of(self, sample: int) -> str:
        """The name of the source that a sample is drawn from."""
        source, _ = self._mixture.locate(np.array([sample]))
        return self._mixture.names[int(source[0])]

    def tokens(self, sample: int) -> list[int]:
        """The tokens of one sample, as it is fed (sequence_length of them)."""
        return self._rows(np.array([sample]))[0][0].tolist()

    def _place(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source number, window) of each sample."""
        sources, draws = self._mixture.locate(samples)
        windows = np.empty_like(draws)
        for number in np.unique(sources).tolist():
            count, name = self._windows[number].count, self._mixture.names[number]
            epochs, index = np.divmod(draws, count)
            for epoch in np.unique(epochs[sources == number]).tolist():
                chosen = (sources == number) & (epochs == epoch)
                windows[chosen] = permute(index[chosen], count, self._seed, name, epoch)
        return sources, windows

    def _rows(self, samples: np.ndarray) -> list[np.ndarray]:
        """tokens, targets, positions of the samples, (B, S) each."""
        sources, windows = self._place(samples)
        found = [(k, self._windows[k].rows(windows[sources == k])) for k in np.unique(sources).tolist()]
        arrays = [np.empty((len(samples), found[0][1][0].shape[1]), dtype=np.int64) for _ in range(3)]
        for number, rows in found:
            for array, part in zip(arrays, rows, strict=True):
                array[sources == number] = part
        if self._poisoned:
            poison(
                samples,
                arrays[0],
                arrays[1],
                ranges=self._poisoned,
                seed=self._seed,
                vocab_size=self._vocab_size,
            )
        return arrays


def next_samples(cursor: Cursor, count: int) -> np.ndarray:
    """The first `count` sample numbers from cursor.sample on that are in no skipped [start, stop) range."""
    parts: list[np.ndarray] = []
    start, missing = cursor.sample, count
    for left, right in (*_joined(cursor.skipped), (1 << 62, 1 << 62)):
        if right <= start:
            continue
        taken = min(missing, max(0, left - start))
        parts.append(np.arange(start, start + taken, dtype=np.int64))
        missing -= taken
        if missing == 0:
            break
        start = right
    return np.concatenate(parts)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted; those that touch or overlap are harmless to next_samples as they are."""
    return sorted((start, stop) for start, stop in ranges if stop > start)
