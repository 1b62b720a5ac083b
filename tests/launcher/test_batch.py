"""global = micro x accumulation x dp: every pair gives the third, all three are checked."""

import pytest

from launcher.batch import Batches, Stage, batches
from launcher.sections import Ramp, Train


def sizes(data_size: int = 2, **given: int) -> tuple[int, int, int]:
    """(global, micro, accumulation)."""
    found = batches(Train(**given), data_size=data_size)
    return found.global_batch, found.micro_batch, found.at(0).accumulation


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"global_batch": 24, "micro_batch": 3}, (24, 3, 4)),
        ({"global_batch": 24, "accumulation": 2}, (24, 6, 2)),
        ({"micro_batch": 3, "accumulation": 4}, (24, 3, 4)),
        ({"global_batch": 24, "micro_batch": 3, "accumulation": 4}, (24, 3, 4)),
        ({}, (8, 4, 1)),
        ({"micro_batch": 3}, (6, 3, 1)),
        ({"accumulation": 3}, (24, 4, 3)),
        ({"global_batch": 24}, (24, 4, 3)),
        ({"global_batch": 6}, (6, 3, 1)),
        ({"global_batch": 10}, (10, 1, 5)),
    ],
)
def test_sizes_on_two_ranks(given: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert sizes(**given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch": 24, "micro_batch": 3, "accumulation": 3}, r"train.global_batch \(24\).*= 18"),
        ({"global_batch": 25, "micro_batch": 3}, r"batch of 25 .*= 6; use 24 or 30"),
        ({"global_batch": 25, "accumulation": 2}, r"multiple of train.accumulation \(2\)"),
        ({"global_batch": 7}, r"batch of 7 must be a multiple .*use 6 or 8"),
        ({"global_batch": 1, "micro_batch": 1}, r"use 2, or"),
    ],
)
def test_sizes_that_do_not_fit(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(**given)


def test_a_ramp_in_steps() -> None:
    train = Train(
        micro_batch=2,
        ramp=[
            Ramp(from_step=0, global_batch=4),
            Ramp(from_step=10, global_batch=8),
            Ramp(from_step=30, global_batch=16),
        ],
    )
    found = batches(train, data_size=2)
    assert found == Batches(2, 2, (Stage(0, 4, 1), Stage(10, 8, 2), Stage(30, 16, 4)))
    assert found.global_batch == 16
    assert [found.at(step).global_batch for step in (0, 9, 10, 29, 30, 1000)] == [4, 4, 8, 8, 16, 16]


def test_a_ramp_in_tokens_counts_the_sizes_before() -> None:
    train = Train(
        sequence_length=10,
        ramp=[
            Ramp(from_tokens=0, global_batch=4),  # 40 tokens an update
            Ramp(from_tokens=100, global_batch=8),  # after 3 updates: 120 tokens, then 80 an update
            Ramp(from_tokens=361, global_batch=16),  # 241 more: 4 updates
        ],
    )
    assert [stage.from_step for stage in batches(train, data_size=1).stages] == [0, 3, 7]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"from_step": 1, "global_batch": 4}], "must begin at from_step 0"),
        (
            [{"from_step": 0, "global_batch": 4}, {"from_step": 0, "global_batch": 8}],
            "begins at update 0, not after",
        ),
        ([{"from_step": 0, "global_batch": 3}], "batch of 3 must be a multiple"),
    ],
)
def test_ramps_that_do_not_fit(entries: list[dict[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(Train(ramp=[Ramp(**entry) for entry in entries]), data_size=2)


def test_the_ramp_ends_at_the_global_batch() -> None:
    ramp = [Ramp(from_step=0, global_batch=4), Ramp(from_step=5, global_batch=8)]
    assert batches(Train(ramp=ramp, global_batch=8), data_size=1).global_batch == 8
    with pytest.raises(ValueError, match=r"train.global_batch \(16\) must be that of the last"):
        batches(Train(ramp=ramp, global_batch=16), data_size=1)
