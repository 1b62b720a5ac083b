"""What the ranks' signs of life say: who is silent, who is stuck, who is slow. Pure functions of values."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from conf.typed import config, setting

UNLIMITED = 1e9
LEAST_SECONDS = 0.05  # from beat to beat
# How much longer than heartbeat.timeout_seconds a phase may take: what waits for a disk, evaluates a whole
# corpus or computes steps again makes no other sign. `prepare` reads the corpus: hours, on one rank.
ALLOWED = {"prepare": UNLIMITED, "save": 4.0, "evaluate": 4.0, "monitor": 4.0}
FIRST, FIRST_SECONDS = 4.0, 300.0  # at least, until the first attempt is over: imports, restoring, compiling
END = "end"  # the phase of a process that leaves of its own will


@config
class Heartbeat:
    """Signs of life of each rank, for hung collectives, stopped processes and slow nodes."""

    timeout_seconds: float = setting(
        1800.0,
        on_resume="free",
        help="after so long without a sign of life of a rank, or without progress, the run ends and the rank "
        "is named; longer where that is usual (first step, save, evaluation: 4 times); 0 = never",
    )
    every_seconds: float = setting(
        10.0, on_resume="free", help="from sign to sign; above 1000 processes, a second for every 100 of them"
    )
    straggler_factor: float = setting(
        1.3,
        on_resume="free",
        help="a rank whose own work takes so many times the median is named in the log; 0 = never",
    )

    def __post_init__(self) -> None:
        every, timeout = self.every_seconds, self.timeout_seconds
        if not every >= LEAST_SECONDS or (timeout and not timeout >= 3 * every):
            raise ValueError(
                f"heartbeat.every_seconds ({every}) must be at least {LEAST_SECONDS} and "
                f"heartbeat.timeout_seconds ({timeout}) at least 3 times that, or 0"
            )
        if self.straggler_factor and self.straggler_factor <= 1:
            raise ValueError(
                f"heartbeat.straggler_factor ({self.straggler_factor}) must be above 1 (1.3 is usual), or 0"
            )


def interval(settings: Heartbeat, size: int) -> float:
    """Seconds from beat to beat among so many processes; ValueError where the timeout is too short for it."""
    every = max(settings.every_seconds, size / 100 if size > 1000 else 0.0)
    if settings.timeout_seconds and settings.timeout_seconds < 3 * every:
        raise ValueError(
            f"heartbeat.timeout_seconds ({settings.timeout_seconds}) is too short for {size} processes, "
            f"which give a sign every {every:g} s; use at least {3 * every:g}, or 0 for none"
        )
    return every


@dataclass(frozen=True)
class Beat:
    """One sign of life. number rises with each; still_seconds: since the main thread's last mark."""

    number: int
    step: int
    phase: str
    still_seconds: float
    allowed_seconds: float  # that this phase may take
    where: str  # the main thread
    waits: bool  # for other ranks, as far as one can see
    pid: int
    started: int  # of the process, in the kernel's clock ticks: a number used again is another process
    host: str
    work_seconds: float | None = None  # of one step, without waiting for the slowest

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Beat":
        return Beat(**json.loads(text))

    def last(self) -> str:
        """What it said, for people."""
        return f"its last sign was at step {self.step} in {self.phase}, at {self.where}"


Kind = Literal["RankKilled", "RankSilent", "RankStuck"]
KINDS: tuple[Kind, ...] = ("RankKilled", "RankSilent", "RankStuck")


@dataclass(frozen=True)
class Finding:
    """A rank that will not go on by itself."""

    kind: Kind
    rank: int
    message: str


def killed(rank: int, beat: Beat) -> Finding:
    """Its process is gone and has left no word."""
    message = f"rank {rank} ({beat.host}, process {beat.pid}) is gone without a word, as if killed"
    return Finding("RankKilled", rank, f"{message}: {beat.last()}")


def silent(rank: int, beat: Beat | None, seconds: float) -> Finding:
    """It has given no sign for so long."""
    if beat is None:
        return Finding("RankSilent", rank, f"rank {rank} has given no sign of life in {seconds:.0f} s")
    who = f"rank {rank} ({beat.host}, process {beat.pid})"
    message = f"{who} has given no sign of life for {seconds:.0f} s: {beat.last()}"
    return Finding("RankSilent", rank, message)


def stuck(beats: Mapping[int, Beat], timeout_seconds: float) -> Finding | None:
    """The rank that the others wait for, when there has been no progress for too long.

    All ranks meet in every step, so that one that is stuck holds up all. It is the one that does not wait for
    others; if several or none, the one that has come least far, then the one that has stood still longest.
    While that one makes progress, or its phase may take longer, nothing is wrong.
    """
    if not beats or max(beat.still_seconds for beat in beats.values()) <= timeout_seconds:
        return None

    def order(item: tuple[int, Beat]) -> tuple[bool, int, float, int]:
        rank, beat = item
        return beat.waits, beat.step, -beat.still_seconds, rank

    rank, beat = min(beats.items(), key=order)
    if beat.still_seconds <= beat.allowed_seconds:
        return None
    alone = not beat.waits and all(b.waits for r, b in beats.items() if r != rank)
    behind = all(b.step > beat.step for r, b in beats.items() if r != rank)
    if len(beats) == 1:
        why = ""
    elif alone:
        why = "; the others wait for it"
    elif behind:
        why = "; the others are further"
    else:
        why = "; it has stood still the longest, but others look alike: see the stacks of all ranks"
    who = f"rank {rank} ({beat.host}, process {beat.pid})"
    message = f"{who} has made no progress for {beat.still_seconds:.0f} s: {beat.last()}{why}"
    return Finding("RankStuck", rank, message)


@dataclass(frozen=True)
class Straggler:
    """A rank that works longer than the others."""

    rank: int
    seconds: float
    median_seconds: float

    @property
    def factor(self) -> float:
        return self.seconds / self.median_seconds


def stragglers(seconds: Mapping[int, float], factor: float) -> list[Straggler]:
    """Ranks beyond `factor` times the median of all, the slowest first."""
    if not factor or len(seconds) < 2:
        return []
    # The lower median: of two ranks the slow one must not hide itself.
    median = statistics.median_low(seconds.values())
    found = [Straggler(rank, own, median) for rank, own in seconds.items() if own > factor * median > 0]
    return sorted(found, key=lambda one: -one.seconds)
