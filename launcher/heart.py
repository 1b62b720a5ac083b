"""Signs of life: a thread of each rank tells the store where its main thread is, and looks after others.

Rank 0 looks after all ranks; every rank looks after rank 0 and the processes of its own node, as only on the
node can be seen whether a process is gone, and only there can it be ended.
"""

import contextlib
import logging
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.cluster import Placement
from launcher.heartbeat import (
    ALLOWED,
    END,
    FIRST,
    FIRST_SECONDS,
    Beat,
    Finding,
    Heartbeat,
    interval,
    killed,
    silent,
    stragglers,
    stuck,
)
from launcher.stacks import main_frame, waits, where, write_stacks

log = logging.getLogger(__name__)
KEY = "megamodel/heartbeat"
RETRY_SECONDS = 1.0  # after a call of the store has failed
STEPS = 20  # whose work a sign of life speaks of


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str, /) -> Any: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@dataclass
class Seen:
    """The newest sign of a rank, and when it came, by this process's clock."""

    beat: Beat | None
    at: float


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time) of a process of this machine; None when there is none or no /proc.

    OSError when it cannot be looked at: too many open files say nothing about the process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return values[0], int(values[19])


def is_gone(beat: Beat) -> bool:
    """Whether the process that gave this sign, on this machine, has ended; False where that is not known."""
    if not beat.started:
        return False
    try:
        found = process_state(beat.pid)
    except OSError:
        return False
    return found is None or found[1] != beat.started or found[0] in "ZX"


class Heart:
    """`beat` marks where the main thread is; the rest happens in two threads between `start` and `stop`."""

    def __init__(self, settings: Heartbeat, place: Placement, *, logs: Path) -> None:
        self.settings, self.rank, self.size = settings, place.rank, place.world_size
        self._every = interval(settings, self.size)
        first = self.rank - place.local_rank
        self._near = [r for r in range(first, first + place.local_size) if r != self.rank and r < self.size]
        others = range(self.size) if self.rank == 0 else sorted({0, *self._near})
        self._watched = [rank for rank in others if rank != self.rank]
        self._logs = logs
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._started = 0
        with contextlib.suppress(OSError):
            own = process_state(self._pid)
            self._started = own[1] if own else 0
        self._mark: tuple[int, str, float] = (0, "prepare", time.monotonic())
        self._warm = False
        self._work: deque[float] = deque(maxlen=STEPS)
        self._number = 0
        self._seen: dict[int, Seen] = {}
        self._round = time.monotonic()  # when the last round was over
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._slow: tuple[int, ...] = ()
        self._store: Store | None = None
        self._reconnect: Callable[[], Store] | None = None
        self._warned = False
        self._accuse: Callable[[Finding, bool], None] = lambda finding, reachable: None

    def beat(self, step: int, phase: str) -> None:
        """The main thread is at this step, in this phase."""
        self._warm = self._warm or phase == "monitor"
        self._mark = (step, phase, time.monotonic())

    def worked(self, seconds: float) -> None:
        """How long this rank's own work on a step has taken."""
        self._work.append(seconds)

    def start(
        self,
        store: Store | None,
        accuse: Callable[[Finding, bool], None],
        reconnect: Callable[[], Store] | None = None,
    ) -> None:
        """Begin. accuse: told of what is found, and whether the store can be reached; called in a thread.
        reconnect: a new connection to the store, for one that has failed."""
        if not self.settings.timeout_seconds:
            return
        self._store, self._accuse, self._reconnect = store, accuse, reconnect
        self._round = time.monotonic()
        self._seen = {rank: Seen(None, self._round) for rank in self._watched}
        for work, name in ((self._tell, "heart"), (self._supervise, "heart-store")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """The work is over: what is not heard of this process from now on means nothing."""
        self._over.set()
        for thread in self._threads:
            thread.join(2)

    def blame(self) -> Finding | None:
        """Who has gone, when a connection has broken: a process of this node, or a rank unheard of."""
        pause, deadline = threading.Event(), time.monotonic() + 2
        while (
            self._near and self._threads and time.monotonic() < deadline
        ):  # a killed process gives up its memory last
            gone = self._gone()
            if gone:
                return gone
            pause.wait(0.05)
        now = time.monotonic()
        for rank, seen in self._seen.items():
            if self._threads and not self._has_ended(seen) and now - seen.at > 3 * self._every + 1:
                return silent(rank, seen.beat, now - seen.at)
        return None

    def write_stacks(self, reason: str) -> None:
        """The stacks of all threads of this process, beside the logs."""
        file = self._logs / f"stacks-rank-{self.rank}.txt"
        with contextlib.suppress(OSError):  # a full disk
            write_stacks(file, reason)
            log.error(f"the stacks of all threads are in {file}", extra={"file_only": True})

    def end_silent(self, rank: int) -> None:
        """End the process of a silent rank of this node; the lowest living rank of the node does it."""
        beat = self._beats().get(rank)
        if rank not in self._near or beat is None or beat.host != self._host or is_gone(beat):
            return
        others = [near for near in self._near if near < self.rank and near != rank]
        if any(not is_gone(self._beats()[near]) for near in others if near in self._beats()):
            return
        state = "?"
        with contextlib.suppress(OSError):
            state = (process_state(beat.pid) or ("?", 0))[0]
        log.error(f"rank {rank}'s process {beat.pid} (state {state}) is killed", extra={"file_only": True})
        with contextlib.suppress(OSError):
            os.kill(beat.pid, signal.SIGKILL)

    def _beats(self) -> dict[int, Beat]:
        return {rank: seen.beat for rank, seen in self._seen.items() if seen.beat is not None}

    def _own(self, now: float) -> Beat:
        step, phase, since = self._mark
        frame = main_frame()
        self._number += 1
        return Beat(
            number=self._number,
            step=step,
            phase=END if self._over.is_set() else phase,
            still_seconds=round(now - since, 3),
            allowed_seconds=self._allowed(phase),
            where=where(frame),
            waits=waits(frame),
            pid=self._pid,
            started=self._started,
            host=self._host,
            work_seconds=statistics.median(self._work) if len(self._work) == STEPS else None,
        )

    def _allowed(self, phase: str) -> float:
        """Seconds without a mark that are no reason to worry."""
        timeout = self.settings.timeout_seconds
        first = 0.0 if self._warm else max(FIRST * timeout, FIRST_SECONDS)
        return max(ALLOWED.get(phase, 1.0) * timeout, first)

    def _tell(self) -> None:
        """The thread that talks to the store."""
        wait = 0.0
        while not self._over.wait(wait):
            try:
                own = self._exchange()
            except Exception as error:
                # One failed call is no failed store; `_supervise` ends it when none succeeds for too long.
                wait = min(self._every, RETRY_SECONDS)
                if not self._over.wait(wait):
                    self._mend(error)
                continue
            finding = self._judge(own)
            if finding is not None:
                self._accuse(finding, True)
                return
            # Soon again until all are known, so that a pid is known before it is needed.
            complete = all(seen.beat for seen in self._seen.values())
            wait = self._every if complete else min(self._every, 0.5)
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(f"{KEY}/{self.rank}", self._own(time.monotonic()).as_json())

    def _mend(self, error: Exception) -> None:
        """Take a new connection in place of one that has failed."""
        if not self._warned:
            self._warned = True
            log.warning(f"heartbeat: the rendezvous store fails ({error}); trying again")
        if self._reconnect is not None:
            with contextlib.suppress(Exception):  # the next exchange fails, and it is tried again
                self._store = self._reconnect()

    def _exchange(self) -> Beat:
        """Give a sign, take those of others."""
        now = time.monotonic()
        if now - self._round > 3 * self._every:  # this process was stopped, or the store was: all start anew
            self._mark = (self._mark[0], self._mark[1], now)
            for seen in self._seen.values():
                seen.at = now
        own = self._own(now)
        if self._store is not None:
            self._store.set(f"{KEY}/{self.rank}", own.as_json())
            known = [
                rank
                for rank in self._watched
                if self._seen[rank].beat or self._store.check([f"{KEY}/{rank}"])
            ]
            texts = self._store.multi_get([f"{KEY}/{rank}" for rank in known]) if known else []
            now = time.monotonic()
            for rank, text in zip(known, texts, strict=True):
                beat, before = Beat.from_json(text), self._seen[rank].beat
                if before is None or beat.number != before.number:
                    self._seen[rank] = Seen(beat, now)
        self._round = now
        return own

    def _judge(self, own: Beat) -> Finding | None:
        now, timeout = time.monotonic(), self.settings.timeout_seconds
        found = self._gone()
        if found is not None:
            return found
        for rank, seen in self._seen.items():
            quiet, allowed = now - seen.at, timeout if seen.beat else self._allowed("start")
            if quiet > allowed and not self._has_ended(seen):
                return silent(rank, seen.beat, quiet)
        if self.rank != 0:
            return None
        beats = self._beats() | {0: own}
        if len(beats) < self.size or any(beat.phase == END for beat in beats.values()):
            return None
        self._name_stragglers(beats)
        return stuck(beats, timeout)

    def _gone(self) -> Finding | None:
        """A process of this node that has ended without saying so."""
        for rank in self._near:
            seen = self._seen.get(rank)
            beat = seen.beat if seen else None
            if beat and beat.host == self._host and beat.phase != END and is_gone(beat):
                return killed(rank, beat)
        return None

    @staticmethod
    def _has_ended(seen: Seen) -> bool:
        return seen.beat is not None and seen.beat.phase == END

    def _name_stragglers(self, beats: dict[int, Beat]) -> None:
        """Say who is slow, when it is not who was slow before."""
        work = {rank: beat.work_seconds for rank, beat in beats.items() if beat.work_seconds is not None}
        if len(work) < self.size:
            return
        found = stragglers(work, self.settings.straggler_factor)
        slow = tuple(sorted(one.rank for one in found))
        if slow != self._slow and found:
            first = found[0]
            more = f"; also ranks {', '.join(str(one.rank) for one in found[1:9])}" if found[1:] else ""
            log.warning(
                f"rank {first.rank} ({beats[first.rank].host}) is slow: its own work takes "
                f"{first.seconds:.3f} s a step, {first.factor:.1f} times the median of all "
                f"({first.median_seconds:.3f} s){more}"
            )
        elif slow != self._slow:
            log.info("no rank is slow any more")
        self._slow = slow

    def _supervise(self) -> None:
        """The thread that sees when the store answers no more: its process may be stopped."""
        timeout = self.settings.timeout_seconds
        before = time.monotonic()
        while not self._over.wait(min(self._every, timeout / 4)):
            now = time.monotonic()
            if now - before > timeout / 2:  # this process itself was stopped
                self._round = now
            before = now
            if self._threads[0].is_alive() and now - self._round > timeout + 2 * self._every:
                beat = self._beats().get(0)
                quiet = now - self._round
                if self.rank == 0:
                    message = f"the rendezvous store has not answered for {quiet:.0f} s"
                    self._accuse(Finding("RankSilent", 0, message), False)
                else:
                    self._accuse(silent(0, beat, quiet), False)
                return
