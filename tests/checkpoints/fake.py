"""A model without layers: logical tensors of every awkward kind, cut for any (tp, pp, dp) by plain indexing.

The cutting here is the reference: it shares nothing with checkpoints/layout.py.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parallel.mesh import Group, Mesh, coordinates, global_rank
from parallel.piece import Piece

KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Logical:
    """One tensor of the model: the axis that tp splits (None: replicated), the stages that hold it."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    stage: float = 0.0  # depth, 0 to 1
    tied: bool = False  # a copy lives on the last stage too
    heads: int = 0  # blocks along the axis that must not be cut; replicated when fewer than tp


def model(vocabulary: int = 250) -> list[Logical]:
    tensors = [Logical("embedding", (vocabulary, 8), axis=0, tied=True)]
    for layer in range(5):
        depth, name = (layer + 0.5) / 5, f"layers.{layer}"
        tensors += [
            Logical(f"{name}.norm", (8,), stage=depth),
            Logical(f"{name}.q", (16, 8), axis=0, stage=depth),
            Logical(f"{name}.k", (8, 8), axis=0, stage=depth, heads=2),
            Logical(f"{name}.down", (8, 12), axis=1, stage=depth),
            Logical(f"{name}.experts", (3, 4, 5), axis=1, stage=depth),
            Logical(f"{name}.scale", (), stage=depth),
        ]
    return [*tensors, Logical("norm", (8,), stage=1.0)]


def reference(tensors: list[Logical], seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Logical values, (kind, name) -> tensor; parameters are bfloat16. All bits are random."""
    values = {}
    for tensor in tensors:
        for kind in ("parameter", *KINDS):
            label = hashlib.sha256(f"{seed} {kind} {tensor.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(label[:7], "little"))
            dtype = torch.int16 if kind == "parameter" else torch.int32
            info = torch.iinfo(dtype)
            bits = torch.randint(info.min, info.max, tensor.shape, generator=generator, dtype=dtype)
            values[kind, tensor.name] = bits.view(torch.bfloat16 if kind == "parameter" else torch.float32)
    return values


def make_mesh(rank: int, tp: int, pp: int, dp: int) -> Mesh:
    p, d, t = coordinates(rank, tp=tp, dp=dp)

    def at(pp: int, dp_rank: int, tp_rank: int) -> int:
        return global_rank(pp, dp_rank, tp_rank, dp_size=dp, tp_size=tp)

    return Mesh(
        world=Group(tuple(range(tp * pp * dp)), rank, None),
        tp=Group(tuple(at(p, d, i) for i in range(tp)), t, None),
        dp=Group(tuple(at(p, i, t) for i in range(dp)), d, None),
        pp=Group(tuple(at(i, d, t) for i in range(pp)), p, None),
        device=torch.device("cpu"),
    )


def cut(tensor: Logical, rank: int, size: int) -> tuple[int, int, bool]:
    """(first row, rows, owner) along the split axis of a tensor on one tp rank."""
    if tensor.axis is None:
        return 0, 0, rank == 0
    total = tensor.shape[tensor.axis]
    if tensor.heads and tensor.heads < size:
        copies, rows = size // tensor.heads, total // tensor.heads
        return rank // copies * rows, rows, rank % copies == 0
    rows = -(-total // size)  # the last rank may have fewer true rows, or none: its memory is padded
    first = min(rank * rows, total)
    return first, min(rows, total - first), True


@dataclass
class FakeState:
    piece: Piece
    kind: str
    tensor: torch.Tensor
    flat_start: int


class FakeEngine:
    """Holds its share of the state in one flat buffer a kind, cut into dp partitions at any element."""

    def __init__(self, tensors: list[Logical], mesh: Mesh, *, bf16: bool = True) -> None:
        self.mesh, self.optimizer_step, self.loaded = mesh, 0, []
        self.pieces = [piece for tensor in tensors for piece in self._pieces(tensor)]
        total = sum(piece.numel for piece in self.pieces)
        part = -(-total // mesh.dp.size)
        self.low, self.high = part * mesh.dp.rank, min(total, part * (mesh.dp.rank + 1))
        self.kinds = ("parameter", *KINDS) if bf16 else KINDS
        self.memory = {
            kind: torch.zeros(
                max(0, self.high - self.low), dtype=torch.bfloat16 if kind == "parameter" else None
            )
            for kind in self.kinds
        }

    def _pieces(self, tensor: Logical) -> list[Piece]:
        pp, tp = self.mesh.pp, self.mesh.tp
        stage = min(int(tensor.stage * pp.size), pp.size - 1)
        tied = tensor.tied and pp.size > 1 and self.mesh.is_last_stage
        if pp.rank != stage and not tied:
            return []
        first, rows, owner = cut(tensor, tp.rank, tp.size)
        offset, extent = [0] * len(tensor.shape), list(tensor.shape)
        if tensor.axis is not None:
            offset[tensor.axis], extent[tensor.axis] = first, rows
        return [Piece(tensor.name, tensor.shape, tuple(offset), tuple(extent), 0, owner and pp.rank == stage)]

    def state(self) -> list[FakeState]:
        found, position = [], 0
        for piece in self.pieces:
            low, high = max(self.low, position), min(self.high, position + piece.numel)
            if low < high:
                for kind in self.kinds:
                    view = self.memory[kind][low - self.low : high - self.low]
                    found.append(FakeState(piece, kind, view, low - position))
            position += piece.numel
        return found

    def load_done(self, step: int) -> None:
        self.optimizer_step = step
        self.loaded.append(step)

    def expected(self, values: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor]:
        """What each of `state()` must hold, by plain indexing of the logical tensors."""
        out = []
        for item in self.state():
            box = values[item.kind, item.piece.name][item.piece.slices].reshape(-1)
            out.append(box[item.flat_start : item.flat_start + item.tensor.numel()])
        return out

    def fill(self, values: dict[tuple[str, str], torch.Tensor], step: int) -> None:
        for item, value in zip(self.state(), self.expected(values), strict=True):
            item.tensor.copy_(value)
        self.optimizer_step = step


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def holds(engine: FakeEngine, values: dict[tuple[str, str], torch.Tensor]) -> bool:
    """Whether every stretch has exactly the bits of the logical values."""
    pairs = zip(engine.state(), engine.expected(values), strict=True)
    return all(same_bits(item.tensor, value) for item, value in pairs)


class Deserted(Exception):
    """Another rank ended before it came to this meeting; a process group would wait for ever."""


class Meetings:
    """Where ranks that are threads exchange JSON; each call of each rank is its next meeting."""

    def __init__(self, size: int) -> None:
        self.size, self._condition = size, threading.Condition()
        self._rounds: dict[int, dict[int, str]] = {}
        self._gone: set[int] = set()

    def attend(self, number: int, rank: int, value: Any) -> list[Any]:
        with self._condition:
            said = self._rounds.setdefault(number, {})
            said[rank] = json.dumps(value)
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(said) == self.size or self._gone - said.keys())
            if len(said) < self.size:
                raise Deserted(f"ranks {self._gone - said.keys()}")
            return [json.loads(said[r]) for r in range(self.size)]

    def leave(self, rank: int) -> None:
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()


class ThreadExchange:
    """parallel.exchange.Exchange between threads."""

    def __init__(self, rank: int, meetings: Meetings) -> None:
        self.rank, self.size, self._meetings, self._number = rank, meetings.size, meetings, 0

    def everyone(self, value: Any) -> list[Any]:
        self._number += 1
        return self._meetings.attend(self._number, self.rank, value)

    def gather(self, value: Any) -> list[Any]:
        values = self.everyone(value)
        return values if self.rank == 0 else []

    def share(self, value: Any) -> Any:
        return self.everyone(value)[0]


def on_ranks(size: int, work: Callable[[int, ThreadExchange], Any]) -> list[Any]:
    """Run `work(rank, exchange)` as threads; each rank's result, or what it raised."""
    meetings = Meetings(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, ThreadExchange(rank, meetings))
        except BaseException as error:
            results[rank] = error
        meetings.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
