"""Seconds that the device has worked, without making the host wait for it."""

import time

import torch


class Stopwatch:
    """`begin`, `end`, then `seconds` once the device has been waited for anyway."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began = self._ended = 0.0

    def begin(self) -> None:
        self._mark(0)
        self._began = time.perf_counter()

    def end(self) -> None:
        self._mark(1)
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Between begin and end: of the host on a CPU, of the current stream on a GPU."""
        if self._events is None:
            return self._ended - self._began
        return self._events[0].elapsed_time(self._events[1]) / 1000

    def _mark(self, index: int) -> None:
        if self._events is not None:
            self._events[index].record()
