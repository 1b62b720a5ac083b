"""Python's garbage, collected at steps that all ranks share, so that no rank pauses while the others wait."""

import gc
from types import TracebackType


class GarbageCollection:
    """`with GarbageCollection(every) as garbage:` around the loop; `garbage.step(n)` after each step.

    every: steps between collections; 0 leaves it to Python.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> "GarbageCollection":
        self._was_enabled = gc.isenabled()
        if self._every:
            gc.disable()
            gc.collect()
        return self

    def step(self, step: int) -> bool:
        """Whether garbage was collected after this step."""
        due = self._every > 0 and step % self._every == 0
        if due:
            gc.collect()
        return due

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()
