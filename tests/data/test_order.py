"""The order of samples: a permutation, another one each epoch, an exact mixture."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamodel.data.order import Mixture, permute


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_every_order_holds_each_window_once(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed, "code", epoch)
    assert sorted(order.tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 2**20, 2**20 + 1, 2**40 + 3, 2**62])
def test_orders_of_any_size_stay_inside(count: int) -> None:
    index = np.unique(np.linspace(0, count - 1, 257).astype(np.int64).clip(0, count - 1))
    order = permute(index, count, 7)
    assert len(set(order.tolist())) == len(index)
    assert order.min() >= 0 and order.max() < count


def test_a_part_of_an_order_does_not_depend_on_what_is_asked_with_it() -> None:
    whole = permute(np.arange(1000), 1000, 3, "a", 0)
    assert [int(permute(np.array([k]), 1000, 3, "a", 0)[0]) for k in (0, 1, 500, 999)] == [
        int(whole[k]) for k in (0, 1, 500, 999)
    ]


def test_seed_source_and_epoch_each_give_another_order() -> None:
    index = np.arange(1000)
    orders = [permute(index, 1000, *parts) for parts in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1))]
    for k, first in enumerate(orders):
        assert abs((first == index).sum() - 1) < 8  # fixed points of a random order: 1 on average
        for second in orders[:k]:
            assert (first == second).mean() < 0.01


def test_orders_are_spread_evenly() -> None:
    """Each of 5 places gets window 0 in a fifth of 4000 orders: chi squared with 4 degrees of freedom."""
    seen = Counter(int(permute(np.array([0]), 5, seed)[0]) for seed in range(4000))
    assert sum((seen[k] - 800) ** 2 / 800 for k in range(5)) < 23  # p = 1e-4
    neighbours = permute(np.arange(100_000), 100_000, 1)
    correlation = np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]
    assert abs(correlation) < 0.015


def test_a_mixture_has_its_weights_exactly() -> None:
    mixture = Mixture({"a": 0.7, "b": 0.2, "c": 0.1})
    source, _ = mixture.locate(np.arange(10_000))
    assert np.bincount(source).tolist() == [7000, 2000, 1000]


@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=6), start=st.integers(0, 10**12))
def test_every_prefix_of_a_mixture_is_close_to_its_weights(weights: list[int], start: int) -> None:
    mixture = Mixture({str(k): float(w) for k, w in enumerate(weights)})
    source, draw = mixture.locate(np.arange(start, start + 300))
    shares = [Fraction(w, sum(weights)) for w in weights]
    for k, share in enumerate(shares):
        draws = draw[source == k].tolist()
        assert draws == list(range(draws[0], draws[0] + len(draws))) if draws else True
        for number, value in list(zip(np.flatnonzero(source == k).tolist(), draws, strict=True))[:50]:
            assert abs(value - share * (start + number)) < len(weights)


def test_weights_that_are_no_short_decimals_are_rounded_to_one_in_65536() -> None:
    source, _ = Mixture({"a": 2**0.5, "b": 1.0}).locate(np.arange(65_536))
    assert (source == 0).sum() == round(65_536 * 2**0.5 / (1 + 2**0.5))
    with pytest.raises(ValueError, match="smallest of the weights"):
        Mixture({"a": 1.0, "b": 1e-7})
