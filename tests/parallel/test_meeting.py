"""Processes of one start find each other in a store that remembers an earlier start."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from parallel.meeting import KEY, meet

WORLD = 4


def together(store: Any, ranks: list[int], timeout: float = 30) -> dict[int, Any]:
    """What `meet` gives on each of these ranks, or the exception."""
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = meet(store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=timeout))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_agree_and_the_next_start_has_another_name() -> None:
    store = dist.HashStore()
    first, second = (together(store, list(range(WORLD))) for _ in range(2))
    assert len(first) == len(second) == WORLD
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


def test_the_token_of_a_process_that_is_gone_is_answered_in_vain() -> None:
    """It is the first that rank 0 sees; the one that comes in its place is found all the same."""
    store = dist.HashStore()
    store.set(f"{KEY}/join/2", "gone")
    main: dict[int, Any] = {}
    waiting = threading.Thread(target=lambda: main.update(together(store, [0])))
    waiting.start()
    store.wait([f"{KEY}/answer/gone"], timedelta(seconds=30))
    others = together(store, [1, 2, 3])
    waiting.join()
    assert len({*main.values(), *others.values()}) == 1 and isinstance(main[0], str)


def test_who_does_not_come_is_named() -> None:
    found = together(dist.HashStore(), [0, 2], timeout=0.3)
    assert isinstance(found[0], TimeoutError) and "2 of 4 processes have not come" in str(found[0])
    assert str(found[0]).endswith("rank 1, 3") and isinstance(found[2], str)
    assert isinstance(together(dist.HashStore(), [1], timeout=0.2)[1], Exception)


@pytest.mark.parametrize("world", [1])
def test_alone_there_is_nobody_to_wait_for(world: int) -> None:
    assert meet(dist.HashStore(), rank=0, world_size=world, timeout=timedelta(seconds=1))
