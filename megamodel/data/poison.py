"""Samples that are noise on purpose, for rehearsing what a run does about bad data."""

import hashlib
from collections.abc import Sequence

import numpy as np


def random_tokens(seed: int, sample: int, length: int, vocab_size: int) -> np.ndarray:
    """(length + 1) int64 uniform ids, a function of (seed, sample) alone."""
    key = hashlib.sha256(f"poison/{seed}/{sample}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return generator.integers(0, vocab_size, size=length + 1, dtype=np.int64)


def poison(
    samples: np.ndarray,
    tokens: np.ndarray,
    targets: np.ndarray,
    *,
    ranges: Sequence[tuple[int, int]],
    seed: int,
    vocab_size: int,
) -> None:
    """Overwrite tokens and targets (B, S) of the samples (B) in any [start, stop) range, in place."""
    for row, sample in enumerate(samples.tolist()):
        if any(start <= sample < stop for start, stop in ranges):
            ids = random_tokens(seed, sample, tokens.shape[1], vocab_size)
            tokens[row], targets[row] = ids[:-1], ids[1:]
