"""What a model must beat: the entropy of the held-out tokens, and a bigram model of the training tokens.

V vocabulary size. All values in nats per token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megamodel.data.held_out import HeldOut
from megamodel.data.prepared import Prepared
from megamodel.data.tokens import Corpus

DISCOUNT = 0.75
_CHUNK_TOKENS = 1 << 23  # pairs are counted in pieces of so many


@dataclass(frozen=True)
class Baselines:
    """unigram_entropy: of the held-out targets' own distribution; bigram_cross_entropy: of a bigram model
    fitted on the training tokens, on the same targets; tokens: how many those are."""

    unigram_entropy: float
    bigram_cross_entropy: float
    tokens: int


def baselines(
    prepared: Prepared,
    held_out: HeldOut,
    *,
    isolate_documents: bool,
    windows: int | None = None,
    source: str | None = None,
) -> Baselines:
    """Both baselines on the counted targets of the first `windows` held-out windows (None: all).

    The bigram model is fitted on all training tokens of the source, and sees as context what the model sees:
    with isolation no token of another document. source None: the only one.
    """
    name = source or next(iter(prepared.train))
    model = Bigram(pairs(prepared.train[name], isolate_documents), prepared.tokenizer.vocab_size)
    context, target = held_out.pairs(windows, source=name)
    if len(target) == 0:
        raise ValueError(f"data source {name} has no held-out tokens; set data.held_out_fraction above 0")
    return Baselines(entropy(target), model.cross_entropy(context, target), len(target))


def pairs(corpus: Corpus, isolate_documents: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(token, next token) of a corpus in pieces; if isolated, without those that cross into a document."""
    for start in range(0, corpus.count - 1, _CHUNK_TOKENS):
        part = np.asarray(corpus.tokens[start : start + _CHUNK_TOKENS + 1]).astype(np.int64)
        keep = np.ones(len(part) - 1, dtype=bool)
        if isolate_documents:
            first, last = np.searchsorted(corpus.starts, [start + 1, start + len(part)])
            keep[np.asarray(corpus.starts[first:last]) - start - 1] = False
        yield part[:-1][keep], part[1:][keep]


def entropy(tokens: np.ndarray) -> float:
    """Entropy of the distribution of the tokens themselves."""
    counts = np.unique(tokens, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


class Bigram:
    """Interpolated Kneser-Ney of order 2 with absolute discount d = 0.75.

    P(w | v) = max(c(v w) - d, 0) / c(v) + d n(v) / c(v) P(w), n(v) = different tokens seen after v;
    P(w) = max(m(w) - d, 0) / M + d n / M 1 / V, m(w) = different tokens seen before w, M = different pairs,
    n = tokens w with m(w) > 0. After a v that was never seen, P(w | v) = P(w). Sums to 1 over w; never 0.
    """

    def __init__(self, counted: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> None:
        self._size = vocab_size
        self._keys = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.int64)
        for first, second in counted:
            self._add(*np.unique(first * vocab_size + second, return_counts=True))
        before, after = np.divmod(self._keys, vocab_size)
        self._total = np.bincount(before, weights=self._counts, minlength=vocab_size)
        self._followers = np.bincount(before, minlength=vocab_size)
        preceding, pair_kinds = np.bincount(after, minlength=vocab_size), max(1, len(self._keys))
        left = DISCOUNT * (preceding > 0).sum() / pair_kinds if len(self._keys) else 1.0
        self._unigram = np.maximum(preceding - DISCOUNT, 0) / pair_kinds + left / vocab_size

    def _add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Add counts of sorted pair numbers."""
        both, place = np.unique(np.concatenate((self._keys, keys)), return_inverse=True)
        weights = np.concatenate((self._counts, counts))
        self._keys, self._counts = both, np.bincount(place, weights=weights).astype(np.int64)

    def probability(self, context: np.ndarray, target: np.ndarray) -> np.ndarray:
        """P(target | context), element by element."""
        pair = context * self._size + target
        count = np.zeros(len(pair))
        if len(self._keys):
            place = np.minimum(np.searchsorted(self._keys, pair), len(self._keys) - 1)
            count = np.where(self._keys[place] == pair, self._counts[place], 0)
        total = self._total[context]
        seen = np.maximum(total, 1)
        left = np.where(total > 0, DISCOUNT * self._followers[context] / seen, 1.0)
        return np.maximum(count - DISCOUNT, 0) / seen + left * self._unigram[target]

    def cross_entropy(self, context: np.ndarray, target: np.ndarray) -> float:
        return float(-np.log(self.probability(context, target)).mean())
