"""Copies of the state in host memory: the source of a background write, and of a rewind in about a second."""

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkpoints import manifest as manifests
from checkpoints.state import Engine, Part, parts
from megamodel.data.batch import Cursor


@dataclass(frozen=True)
class Snapshot:
    """The state of this rank after cursor.step updates; `state` is live memory or a copy of it."""

    cursor: Cursor
    extra: dict[str, Any]
    optimizer_step: int
    state: list[Part]


class Slot:
    """Host memory for one copy of this rank's state, pinned under CUDA, allocated once."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def fill(self, state: list[Part]) -> list[Part]:
        """The state copied here; what was here before is overwritten. Complete when this returns."""
        live = [part.tensor for part in state]
        if [(m.dtype, m.numel()) for m in self._memory] != [(t.dtype, t.numel()) for t in live]:
            self._memory = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=t.is_cuda) for t in live]
        with torch.no_grad():
            for memory, tensor in zip(self._memory, live, strict=True):
                memory.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in live if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return [replace(part, tensor=memory) for part, memory in zip(state, self._memory, strict=True)]


def collect(engine: Engine, cursor: Cursor, extra: dict[str, Any], slot: Slot | None) -> Snapshot:
    """The state of the engine, copied into the slot; without one it stays live memory.

    extra is copied as JSON. ValueError when it is not plain JSON, or not finite.
    """
    plain = plain_json(extra)
    state = parts(engine)
    return Snapshot(cursor, plain, engine.optimizer_step, slot.fill(state) if slot else state)


def plain_json(extra: dict[str, Any]) -> dict[str, Any]:
    """A copy of plain JSON; ValueError when it is not, or not finite."""
    return json.loads(manifests.canonical(extra))


def state_bytes(engine: Engine) -> int:
    """Size of one copy of this rank's state."""
    return sum(part.tensor.numel() * part.tensor.element_size() for part in parts(engine))


class Ring:
    """The last `size` snapshots, oldest first. Host memory: size times this rank's state."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: deque[tuple[Slot, Snapshot]] = deque()

    def add(self, engine: Engine, cursor: Cursor, extra: dict[str, Any]) -> None:
        """Copy the state; the oldest snapshot makes room. Later steps are an undone past: they go."""
        assert self._size > 0, "a ring without slots"
        self.forget_after(cursor.step - 1)
        slot = self._held.popleft()[0] if len(self._held) == self._size else Slot()
        self._held.append((slot, collect(engine, cursor, extra, slot)))

    @property
    def steps(self) -> list[int]:
        """Of the snapshots that are held, oldest first."""
        return [snapshot.cursor.step for _, snapshot in self._held]

    def at(self, cursor: Cursor) -> Snapshot | None:
        """The snapshot of exactly this cursor, if there is one."""
        return next((s for _, s in self._held if s.cursor == cursor), None)

    def next_out(self, step: int) -> Snapshot | None:
        """The snapshot whose memory the next `add`, of this step, will overwrite."""
        held = [s for _, s in self._held if s.cursor.step < step]
        return held[0] if len(held) == self._size else None

    def at_or_before(self, step: int) -> Snapshot | None:
        """The newest snapshot of at most `step` updates."""
        return next((s for _, s in reversed(self._held) if s.cursor.step <= step), None)

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of more than `step` updates."""
        while self._held and self._held[-1][1].cursor.step > step:
            self._held.pop()


class Writer:
    """One action at a time in a thread; what it raises is raised by the next call here, never lost."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, action: Callable[[], None]) -> None:
        """Run the action in a thread, after the one before is done."""
        self.wait()

        def run() -> None:
            try:
                action()
            except Exception as error:  # raised in the thread that asked, by `wait` or `check`
                self._failure = error

        # A daemon: when another rank has died the meeting of all ranks never ends, but the process must.
        self._thread = threading.Thread(target=run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; raises what the writing raised."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self._raise()

    def check(self) -> None:
        """Raise what the writing raised, if it has ended; never waits."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure
