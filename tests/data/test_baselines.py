"""Baselines against sums written out, and against probabilities that must add up to 1."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megamodel.data.baselines import Bigram, entropy, pairs
from tests.data.corpora import corpus, random_documents

D = 0.75


def by_hand(training: list[tuple[int, int]], vocabulary: int, v: int, w: int) -> float:
    """P(w | v), counted with loops."""
    kinds = set(training)
    m = Counter(second for _, second in kinds)
    low = (max(m[w] - D, 0) + D * len(m) / vocabulary) / len(kinds)
    after = [second for first, second in training if first == v]
    if not after:
        return low
    return max(after.count(w) - D, 0) / len(after) + D * len(set(after)) / len(after) * low


def test_entropy_of_known_distributions() -> None:
    assert entropy(np.array([3, 3, 5, 5, 7, 7, 9, 9])) == pytest.approx(math.log(4), abs=1e-12)
    assert entropy(np.array([1, 1, 1, 2])) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-12
    )


def test_the_bigram_model_equals_its_formula_counted_with_loops() -> None:
    training = [(0, 1), (0, 1), (0, 2), (1, 2), (2, 0), (2, 0), (2, 0), (0, 3), (3, 1)]
    first, second = (np.array(x) for x in zip(*training, strict=True))
    vocabulary = 6  # 4 and 5 are never seen
    whole = Bigram([(first, second)], vocabulary)
    pieces = Bigram([(first[:4], second[:4]), (first[4:], second[4:])], vocabulary)
    context, target = (
        x.reshape(-1) for x in np.meshgrid(range(vocabulary), range(vocabulary), indexing="ij")
    )
    expected = [by_hand(training, vocabulary, v, w) for v, w in zip(context, target, strict=True)]
    np.testing.assert_allclose(whole.probability(context, target), expected, rtol=1e-12)
    np.testing.assert_allclose(pieces.probability(context, target), expected, rtol=1e-12)
    np.testing.assert_allclose(np.reshape(expected, (6, 6)).sum(axis=1), 1, rtol=1e-12)
    held_out = (np.array([0, 5, 1]), np.array([1, 4, 2]))
    terms = [math.log(by_hand(training, vocabulary, v, w)) for v, w in zip(*held_out, strict=True)]
    assert whole.cross_entropy(*held_out) == pytest.approx(-sum(terms) / 3, rel=1e-12)


def test_a_model_of_nothing_is_uniform() -> None:
    model = Bigram([], 8)
    assert model.cross_entropy(np.array([0, 1]), np.array([2, 3])) == pytest.approx(math.log(8))


@pytest.mark.parametrize("isolate", [True, False])
def test_training_pairs_stay_within_documents_when_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    monkeypatch.setattr("megamodel.data.baselines._CHUNK_TOKENS", 7)
    documents = random_documents(1, 20, 30)
    made = corpus(tmp_path, documents)
    found = [pair for a, b in pairs(made, isolate) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    flat = [token for document in documents for token in document]
    within = [pair for d in documents for pair in pairwise(d)]
    assert found == (within if isolate else list(pairwise(flat)))
