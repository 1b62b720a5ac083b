"""Small corpora made directly from token lists, without `prepare`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megamodel.data.encode import DOCUMENT, Encoded
from megamodel.data.tokens import Corpus, CorpusWriter


def corpus(
    directory: Path,
    documents: Sequence[Sequence[int]],
    *,
    name: str = "made",
    side: str = "train",
    dtype: str = "<u2",
) -> Corpus:
    """Document k has record k + 1 of file "made.txt" and the bytes 10 k .. 10 k + 7."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = CorpusWriter(directory, side, np.dtype(dtype))
    for k, document in enumerate(documents):
        row = np.array([(0, k + 1, 10 * k, 7, k)], dtype=DOCUMENT)
        writer.write(Encoded(np.array(document, dtype=dtype).tobytes(), np.array([len(document)]), row))
    writer.close()
    return Corpus(name, directory, side, ("made.txt",), sum(map(len, documents)), len(documents))


def random_documents(seed: int, count: int, vocab_size: int, longest: int = 40) -> list[list[int]]:
    """Documents of 1 .. longest tokens; 0 ends each and is nowhere else."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, longest, count)
    return [[*random.integers(1, vocab_size, size).tolist(), 0] for size in sizes]
