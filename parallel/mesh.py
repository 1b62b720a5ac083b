"""Which rank is where: the tensor (tp), pipeline (pp) and data (dp) axes and their process groups.

Rank order is that of DeepSpeed's PipeModelDataParallelTopology: tp varies fastest (neighbours, usually one
node), then dp, then pp.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """One axis as this rank sees it: `ranks` are global, `rank` is the index of this process among them."""

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None  # None when size is 1: no collective is ever needed

    @property
    def size(self) -> int:
        return len(self.ranks)


SINGLE = Group(ranks=(0,), rank=0, handle=None)


@dataclass(frozen=True)
class Mesh:
    """The place of this process. `world` spans all processes."""

    world: Group
    tp: Group
    dp: Group
    pp: Group
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def single_mesh(device: torch.device | str = "cpu") -> Mesh:
    """One process, no process group: for generation, conversion and references in tests."""
    return Mesh(world=SINGLE, tp=SINGLE, dp=SINGLE, pp=SINGLE, device=torch.device(device))


def coordinates(rank: int, *, tp: int, dp: int) -> tuple[int, int, int]:
    """(pp, dp, tp) indices of a global rank; tp varies fastest."""
    return rank // (dp * tp), rank // tp % dp, rank % tp


def global_rank(pp: int, dp: int, tp: int, *, dp_size: int, tp_size: int) -> int:
    """The inverse of `coordinates`."""
    return (pp * dp_size + dp) * tp_size + tp


def data_parallel_size(world_size: int, *, tp: int, pp: int) -> int:
    """World size over tp x pp; ValueError when it does not divide."""
    if world_size % (tp * pp):
        raise ValueError(
            f"{world_size} processes cannot be split into parallel.tp ({tp}) x parallel.pp ({pp}); "
            f"start a multiple of {tp * pp} processes or lower tp or pp"
        )
    return world_size // (tp * pp)


def build_mesh(*, tp: int, pp: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Process groups over the initialised default group. Collective: every rank must call it.

    Raises ValueError when the world size is not a multiple of tp x pp.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    dp = data_parallel_size(world_size, tp=tp, pp=pp)
    ours = coordinates(rank, tp=tp, dp=dp)
    place: dict[tuple[int, ...], int] = {coordinates(r, tp=tp, dp=dp): r for r in range(world_size)}
    axes: list[Group] = []
    for axis, size in enumerate((pp, dp, tp)):
        # Every rank creates every group, in one order: torch.distributed requires it.
        mine = SINGLE
        others = sorted({c[:axis] + c[axis + 1 :] for c in place})
        for rest in others:
            ranks = tuple(place[rest[:axis] + (i,) + rest[axis:]] for i in range(size))
            handle = dist.new_group(list(ranks), timeout=timeout) if size > 1 else None
            if rest == ours[:axis] + ours[axis + 1 :]:
                assert not isinstance(handle, int)
                mine = Group(ranks=ranks, rank=ours[axis], handle=handle)
        axes.append(mine)
    world = Group(
        ranks=tuple(range(world_size)), rank=rank, handle=dist.group.WORLD if world_size > 1 else None
    )
    return Mesh(world=world, pp=axes[0], dp=axes[1], tp=axes[2], device=device)
