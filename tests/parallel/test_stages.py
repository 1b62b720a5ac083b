"""Stage bounds against a search over all partitions."""

import itertools

import pytest

from parallel.stages import stage_bounds


def brute_force(cost: list[float], parts: int) -> float:
    """The smallest possible largest part."""
    cuts = itertools.combinations(range(1, len(cost)), parts - 1)
    return min(max(sum(cost[a:b]) for a, b in itertools.pairwise((0, *cut, len(cost)))) for cut in cuts)


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("head", [0.0, 0.5, 3.0, 20.0])
def test_the_largest_stage_is_as_small_as_can_be(pp: int, head: float) -> None:
    costs = [0.1, *[1.0] * 8, 0.1, head]
    is_block = [False, *[True] * 8, False, False]
    bounds = stage_bounds(costs, is_block, pp=pp)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and len(bounds) == pp + 1
    sizes = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    assert all(any(is_block[a:b]) for a, b in itertools.pairwise(bounds))
    joined = [1.1, *[1.0] * 6, 1.1 + head]
    assert max(sizes) == pytest.approx(brute_force(joined, pp))


def test_an_expensive_head_takes_blocks_off_the_last_stage() -> None:
    bounds = stage_bounds([0.0, *[1.0] * 8, 0.0, 3.0], [False, *[True] * 8, False, False], pp=2)
    assert bounds == [0, 6, 11]  # embedding and 5 blocks; 3 blocks, norm and head


def test_given_blocks_of_each_stage_are_taken() -> None:
    is_block = [False, *[True] * 5, False, False]
    assert stage_bounds([1.0] * 8, is_block, pp=2, stage_layers=[2, 3]) == [0, 3, 8]
    assert stage_bounds([1.0] * 8, is_block, pp=3, stage_layers=[1, 3, 1]) == [0, 2, 5, 8]


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    is_block = [False, True, True, False, False]
    with pytest.raises(ValueError, match=r"n_layers \(2\) must be at least parallel.pp \(3\)"):
        stage_bounds([1.0] * 5, is_block, pp=3)
    with pytest.raises(ValueError, match=r"\[2, 1\] adds up to 3 blocks but model.n_layers is 2"):
        stage_bounds([1.0] * 5, is_block, pp=2, stage_layers=[2, 1])
