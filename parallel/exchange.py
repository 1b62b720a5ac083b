"""Small JSON messages between ranks, as bytes in tensors: never an object that could run code."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from parallel.errors import OtherRankFailed
from parallel.mesh import Group


class Exchange(Protocol):
    """What a group of ranks can tell each other. Every call is a collective."""

    rank: int
    size: int

    def everyone(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank: a barrier for all."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0; an empty list elsewhere."""
        ...

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        ...


class Alone:
    """One rank: needs no process group."""

    rank = 0
    size = 1

    def everyone(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value


class TensorExchange:
    """Over a process group that takes CPU tensors."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._first, self._handle = group.ranks[0], group.handle

    def everyone(self, value: Any) -> list[Any]:
        mine, lengths = self._padded(value)
        parts = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(parts, mine, group=self._handle)
        return [_decode(part[:n]) for part, n in zip(parts, lengths, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        mine, lengths = self._padded(value)
        parts = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else None
        dist.gather(mine, parts, dst=self._first, group=self._handle)
        return [_decode(part[:n]) for part, n in zip(parts, lengths, strict=True)] if parts else []

    def share(self, value: Any) -> Any:
        data = _encode(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        dist.broadcast(length, src=self._first, group=self._handle)
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=self._first, group=self._handle)
        return _decode(data)

    def _padded(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """This rank's message as long as the longest, and the true lengths of all."""
        data = _encode(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=self._handle)
        numbers = [int(length) for length in lengths]
        padded = torch.zeros(max(numbers), dtype=torch.uint8)
        padded[: data.numel()] = data
        return padded, numbers


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def exchange_over(group: Group, *, timeout: timedelta | None = None) -> Exchange:
    """An exchange with a gloo group of its own, so that a thread may use it while training goes on.

    Collective: all ranks of the default group call it with the same ranks, in the same order. One
    rank needs no process group.
    """
    if group.size == 1:
        return Alone()
    handle = dist.new_group(list(group.ranks), backend="gloo", timeout=timeout)
    return TensorExchange(replace(group, handle=handle))


def together(exchange: Exchange, action: Callable[[], Any]) -> Any:
    """Do something on every rank; where it fails on any, the others raise OtherRankFailed with its message.

    Without it the ranks that did not fail would wait for ever at the next collective. Returns this rank's
    result.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others must hear of it before it is raised
        failure = error
    told = exchange.everyone(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(told):
        if message is not None:
            raise OtherRankFailed(f"rank {rank} failed: {message}")
    return result
