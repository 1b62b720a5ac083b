"""Whether the collectives of a group give the right values, and how fast they are."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_reduce, gather_rows, reduce_scatter_rows
from parallel.mesh import Group

ROW = 1024


def marks(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(size,) numbers from 1 to 7, exact in every type and another one for each neighbour."""
    return (torch.arange(size, device=device) % 7 + 1).to(dtype)


def wrong_collectives(group: Group, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Names of the collectives that gave this rank wrong values. Collective over the group.

    Each rank puts its mark into its own place, so that no sum rounds and every wrong place shows.
    """
    if group.size == 1:
        return []
    size, rank, wrong = group.size, group.rank, []
    expected = marks(size, device, dtype)
    own = torch.zeros(size, ROW, device=device, dtype=dtype)
    own[rank] = expected[rank]
    if not torch.equal(all_reduce(own.clone(), group), expected[:, None].expand(size, ROW)):
        wrong.append("all-reduce")
    after = own.roll(1, 0)  # my mark for the next rank
    if not torch.equal(reduce_scatter_rows(after, group), expected[rank - 1].expand(1, ROW)):
        wrong.append("reduce-scatter")
    if not torch.equal(gather_rows(own[rank : rank + 1], group), expected[:, None].expand(size, ROW)):
        wrong.append("all-gather")
    return wrong


def wrong_transfers(group: Group, device: torch.device, dtype: torch.dtype) -> list[str]:
    """As above for sending to the next and back, as the stages of a pipeline do."""
    if group.size == 1:
        return []
    expected, wrong = marks(group.size, device, dtype), []
    for step, name in ((1, "send forward"), (-1, "send back")):
        source, target = group.rank - step, group.rank + step
        if 0 <= source < group.size:
            got = torch.zeros(ROW, device=device, dtype=dtype)
            dist.recv(got, src=group.ranks[source], group=group.handle)
            if not torch.equal(got, expected[source].expand(ROW)):
                wrong.append(name)
        if 0 <= target < group.size:
            own = expected[group.rank].expand(ROW).contiguous()
            dist.send(own, dst=group.ranks[target], group=group.handle)
    return wrong


def all_reduce_speed(group: Group, device: torch.device, size_bytes: int, repeats: int) -> float | None:
    """Bytes a second over each rank's link in an all-reduce: 2 (n - 1) / n of the size, as in a ring."""
    if group.size == 1:
        return None
    x = torch.zeros(max(size_bytes // 4, 1), device=device)
    seconds = _timed(lambda: all_reduce(x, group), x, repeats)
    return 2 * (group.size - 1) / group.size * x.numel() * 4 / seconds


def pair_speed(group: Group, device: torch.device, size_bytes: int, repeats: int) -> float | None:
    """Bytes a second between this rank and another; the better of two partners: a slow partner is not held
    against it. None when it has no partner."""
    found = []
    for partner in partners(group.rank, group.size):
        if partner is None:
            dist.barrier(group=group.handle)
            continue
        x = torch.zeros(max(size_bytes // 4, 1), device=device)
        there = group.ranks[partner]

        def both(x: Tensor = x, there: int = there, first: bool = group.rank < partner) -> None:
            for sends in (first, not first):
                dist.send(x, there, group=group.handle) if sends else dist.recv(x, there, group=group.handle)

        found.append(2 * x.numel() * 4 / _timed(both, x, repeats))
        dist.barrier(group=group.handle)
    return max(found, default=None)


def partners(rank: int, size: int) -> tuple[int | None, int | None]:
    """The neighbour, and the one half of all ranks away: two different ones from 4 ranks on."""
    near, half = rank ^ 1, size // 2
    far = rank + half if rank < half else rank - half if rank < 2 * half else None
    return near if near < size else None, far


def matmul_speed(device: torch.device, dtype: torch.dtype, width: int, repeats: int) -> float:
    """FLOP/s of this rank alone."""
    x = torch.ones(width, width, device=device, dtype=dtype)
    return 2 * width**3 / _timed(lambda: x @ x, x, repeats)


def _timed(work: Callable[[], object], x: Tensor, repeats: int) -> float:
    """Seconds of one call, the best of so many after one that warms up."""
    best = float("inf")
    for number in range(repeats + 1):
        x.view(-1)[:1].tolist()  # the device is idle
        start = time.perf_counter()
        work()
        x.view(-1)[:1].tolist()
        best = min(best, time.perf_counter() - start) if number else best
    return best
