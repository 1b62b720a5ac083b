"""A profile of some steps: a trace for a viewer, a table of operators, a snapshot of memory."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from conf.typed import config, setting

ROWS = 40  # operators in each table
TRACE, OPERATORS, MEMORY = "trace.json", "operators.txt", "memory.json"


@config
class Profile:
    """Which steps are profiled. A profiled step is slower; those around it are not."""

    steps: list[int] | None = setting(
        None, on_resume="free", help="[first, last] step to profile, into run.dir/profile; null: none"
    )
    ranks: list[int] = setting(factory=lambda: [0], on_resume="free", help="processes that write one")

    def __post_init__(self) -> None:
        steps = self.steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile.steps ({steps}) must be [first, last] with 1 <= first <= last")


class Profiling:
    """Starts before the first wanted step, writes after the last; what was begun is written at the end."""

    def __init__(self, settings: Profile, directory: Path, *, rank: int, cuda: bool) -> None:
        wanted = settings.steps is not None and rank in settings.ranks
        self.first, self.last = settings.steps if wanted and settings.steps else (0, 0)
        self.directory = directory / "profile" / f"rank-{rank}"
        self.cuda = cuda
        self.running: Any = None
        self.done = not wanted

    def before(self, step: int) -> None:
        """Called with the step about to be tried."""
        if self.done or self.running is not None or not self.first <= step <= self.last:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        if self.cuda:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=20_000)
        self.running = profile(activities=activities, profile_memory=True, record_shapes=True)
        self.running.start()

    def after(self, step: int) -> None:
        """Called with the updates applied so far."""
        if self.running is not None and step >= self.last:
            self._write()

    def _write(self) -> None:
        running, self.running, self.done = self.running, None, True
        running.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.directory / TRACE))
        found = running.key_averages()
        time = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        space = "self_device_memory_usage" if self.cuda else "self_cpu_memory_usage"
        tables = [found.table(sort_by=key, row_limit=ROWS) for key in (time, space)]
        (self.directory / OPERATORS).write_text("\n\n".join(tables), encoding="utf-8")
        operators = {
            event.key: {"calls": event.count, "bytes": getattr(event, space)}
            for event in found
            if getattr(event, space)
        }
        snapshot: dict[str, Any] = {"operators": operators}
        if self.cuda:  # torch's own writer would pickle it
            snapshot["cuda"] = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        (self.directory / MEMORY).write_text(json.dumps(snapshot, default=str), encoding="utf-8")

    def __enter__(self) -> "Profiling":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running is not None:
            self._write()
