"""How far a run is: one live line on a terminal, plain lines elsewhere and in the log file."""

import math
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

WIDE = 120  # columns of a terminal that has room for a bar beside the numbers


def duration(seconds: float) -> str:
    """h:mm:ss, with days where there are any."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def described(
    *,
    loss: float | None = None,
    lr: float | None = None,
    norm: float | None = None,
    tokens_per_second: float | None = None,
    mfu: float | None = None,
    eta_seconds: float | None = None,
) -> str:
    """The numbers of a step in one line; unknown ones are left out. mfu is a fraction."""
    parts = [
        f"loss {loss:.4f}" if loss is not None else None,
        f"lr {lr:.2e}" if lr is not None else None,
        f"norm {norm:.3f}" if norm is not None else None,
        f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else None,
        f"MFU {mfu:.1%}" if mfu is not None else None,
        f"ETA {duration(eta_seconds)}" if eta_seconds is not None else None,
    ]
    return "  ".join(part for part in parts if part)


class Pace:
    """Seconds a step, as a mean that forgets: the last 20 steps or so count."""

    def __init__(self, memory: int = 20) -> None:
        self._memory = memory
        self._count = 0
        self._mean = 0.0

    def add(self, seconds: float) -> float:
        """The mean with one more step."""
        self._count += 1
        self._mean += (seconds - self._mean) / min(self._count, self._memory)
        return self._mean


class Progress:
    """The progress of the main rank, between start() and stop().

    steps: updates of the run; step: where it starts; every: steps between plain lines; file: a log file that
    gets the plain lines too; stream: stdout by default. On a terminal one line is kept up to date instead.
    """

    def __init__(
        self,
        *,
        steps: int,
        step: int = 0,
        every: int = 10,
        file: Path | None = None,
        stream: TextIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self._console = Console(file=stream, force_terminal=terminal, highlight=False, soft_wrap=True)
        self._steps, self._first, self._every = steps, step, every
        self._pace = Pace()
        self._log = open(file, "a", encoding="utf-8") if file is not None else None  # noqa: SIM115
        self._bar: Bar | None = None
        if self._console.is_terminal:
            bar = (BarColumn(20),) if self._console.width >= WIDE else ()  # the numbers come first
            counts = TextColumn("step {task.completed:.0f}/{task.total:.0f}")
            columns = (counts, *bar, TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=steps, completed=step)

    def start(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.close()

    def update(
        self,
        step: int,
        *,
        seconds: float,
        loss: float | None = None,
        lr: float | None = None,
        norm: float | None = None,
        tokens_per_second: float | None = None,
        mfu: float | None = None,
    ) -> None:
        """Update `step` (counted from 1) has been made, in so many seconds."""
        eta = self._pace.add(seconds) * (self._steps - step)
        text = described(
            loss=loss, lr=lr, norm=norm, tokens_per_second=tokens_per_second, mfu=mfu, eta_seconds=eta
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        if step % self._every == 0 or step == self._steps or step == self._first + 1:
            line = f"step {step}/{self._steps}  {text}"
            if self._bar is None:
                self._print(line)
            self._write(line)

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a save."""
        self._print(text)
        self._write(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()

    def _write(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()
