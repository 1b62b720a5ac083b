"""How the processes of one start find each other in a store that may remember an earlier start.

torchrun keeps its store when it starts the processes again, with the keys of those that are gone: who reads
them connects to nobody. Nor is its count of restarts the same on all nodes. So the processes of a start agree
on a name of their own first, and put it before every key.
"""

import time
import uuid
from datetime import timedelta
from typing import Any, Protocol

KEY = "megamodel/meeting"


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def meet(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """The name of this start, the same on all its ranks and on those of no other. Collective.

    Each rank leaves a token that was never used before and waits for the answer to it. Rank 0 answers every
    token that it finds until all ranks have confirmed: that of a process that is gone never does, and the
    one that comes in its place is found later. Raises TimeoutError with the ranks that are missing.
    """
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"{KEY}/join/{rank}", token)
        store.wait([f"{KEY}/answer/{token}"], timeout)
        name = store.get(f"{KEY}/answer/{token}").decode()
        store.set(f"{KEY}/{name}/{rank}", "")
        return name
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing, answered = set(range(1, world_size)), {}
    while missing:
        for other in sorted(missing):
            if store.check([f"{KEY}/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"{KEY}/join/{other}"]):
                token = store.get(f"{KEY}/join/{other}").decode()
                if answered.get(other) != token:
                    answered[other] = token
                    store.set(f"{KEY}/answer/{token}", name)
        if missing and time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(missing)[:8]))
            raise TimeoutError(
                f"{len(missing)} of {world_size} processes have not come in {timeout.total_seconds():.0f} s: "
                f"rank {shown}"
            )
        time.sleep(0.01 if missing else 0)
    return name
