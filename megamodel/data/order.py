"""Which window is which sample: a pure function of (seed, sample number), without state and without a table.

An order of n windows is a keyed permutation of 0 .. n - 1: a Feistel network over the next even number of
bits, walked along its cycle until it lands below n.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

from parallel.seed import key

_ROUNDS = 8
_LARGEST_TABLE = 1 << 16


def permute(index: np.ndarray, count: int, *parts: int | str) -> np.ndarray:
    """Where the keyed permutation of 0 .. count - 1 sends each index; int64, same shape.

    parts: what the order depends on (seed, source, epoch).
    """
    assert count > 0 and (len(index) == 0 or (index.min() >= 0 and index.max() < count))
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    rounds = [np.uint64(key("order", *parts, number)) for number in range(_ROUNDS)]
    place = _feistel(index.astype(np.uint64), half, rounds)
    while (outside := place >= count).any():
        place[outside] = _feistel(place[outside], half, rounds)
    return place.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, rounds: list[np.uint64]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for number in rounds:
        left, right = right, left ^ (_mixed(right ^ number) & mask)
    return (left << half) | right


def _mixed(value: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which each input bit moves about half of the output bits."""
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return value ^ (value >> np.uint64(32))


class Mixture:
    """A weighted mixture: which source sample n is drawn from, and which draw of that source it is.

    The weights are made whole numbers with a sum of at most 65,536 (exact for weights of four decimals); in
    each run of that many samples every source has exactly its number, spread evenly.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(weights)
        self._counts = _whole(list(weights.values()))
        self._period = int(self._counts.sum())
        ideal = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        owner = np.repeat(np.arange(len(self._counts)), self._counts)
        self._owner = owner[np.argsort(ideal, kind="stable")]
        self._draw = np.empty(self._period, dtype=np.int64)
        for source, count in enumerate(self._counts):
            self._draw[self._owner == source] = np.arange(count)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, draw from it) of each sample number."""
        turn, slot = np.divmod(samples, self._period)
        source = self._owner[slot]
        return source, turn * self._counts[source] + self._draw[slot]


def _whole(weights: list[float]) -> np.ndarray:
    """Weights as whole numbers, each at least 1: exact where small enough, else by largest remainder."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period > _LARGEST_TABLE:
        period = _LARGEST_TABLE
    counts = [int(share * period) for share in shares]
    if 0 in counts:
        raise ValueError(
            f"data.mixture: the smallest of the weights {weights} is below 1/{_LARGEST_TABLE} of their sum; "
            "raise it, or leave that source out"
        )
    remainders = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * period, k))
    for source in remainders[: period - sum(counts)]:
        counts[source] += 1
    return np.array(counts, dtype=np.int64)
