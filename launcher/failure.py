"""One rank fails, all end: the first error is recorded once, and every process says it in its last line.

torchrun and deepspeed end the other processes themselves; `FailureWatch` does it under srun, mpirun and by
hand, also when a process hangs in a collective.
"""

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from launcher.cluster import placement
from launcher.heart import Heart
from launcher.heartbeat import KINDS, Finding
from launcher.log import discard_logs, log_traceback
from launcher.rundirectory import RunDirectory
from parallel.errors import OtherRankFailed, connection_lost

log = logging.getLogger(__name__)

DONE, FAILED, WRONG_INPUT = 0, 1, 2
KEY = "megamodel/first-error"
SEEN = "megamodel/first-error-seen"
# What a user can cause before any work: wrong values, a file that is missing or may not be read.
USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


@dataclass(frozen=True)
class Report:
    """The first error of a run."""

    rank: int
    type: str
    message: str
    code: int
    traceback: str
    time: float
    world_size: int = 1

    def line(self) -> str:
        """The last line of every process."""
        message = (self.message.strip() or "no message").splitlines()[0]
        what = "" if self.code == WRONG_INPUT else f"{self.type}: "
        where = f" on rank {self.rank}" if self.world_size > 1 else ""
        return f"error{where}: {what}{message}"

    def text(self) -> str:
        """The line, after the whole message where that is longer."""
        message = self.message.strip()
        return f"{message}\n{self.line()}" if "\n" in message else self.line()


def report_of(error: BaseException, *, rank: int, world_size: int, begun: bool) -> Report:
    """The report of an exception on one of world_size processes.

    begun: work had started, so that the error is not the user's input.
    """
    code = WRONG_INPUT if isinstance(error, USER_ERRORS) and not begun else FAILED
    return Report(
        rank=rank,
        type=type(error).__name__,
        message="interrupted" if isinstance(error, KeyboardInterrupt) else str(error),
        code=code,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        world_size=world_size,
    )


class RankFailure(Exception):
    """The run has failed and the first error is recorded, perhaps another rank's; `report` has it."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.line())
        self.report = report


class Store(Protocol):
    """The part of torch.distributed.Store that is used; a connection of its own, as calls on one block."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class FailureWatch:
    """`with FailureWatch(connect, ...):` around the work of a run, entered once the processes have met.

    connect: opens a new connection to the rendezvous store; called for each thread, as a waiting call must
    not hold up another. heart: started and stopped with the work; what it finds is an error like others.
    When the work raises, the error becomes the first error in the store unless there is one already, and
    RankFailure is raised. When another rank's error appears there, this process prints it and ends itself
    with code 1. Leave the block together, after a barrier.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        world_size: int,
        directory: RunDirectory,
        interval_seconds: float = 1.0,
        grace_seconds: float = 5.0,
        end: Callable[[int], Any] = os._exit,
        heart: Heart | None = None,
    ) -> None:
        self._connect = connect
        self.rank, self.world_size, self.directory = rank, world_size, directory
        self._interval, self._grace, self._end = interval_seconds, grace_seconds, end
        self._over = threading.Event()
        self._started = time.time()
        self._store: Store | None = None
        self._heart = heart

    @property
    def store(self) -> Store | None:
        """This process's connection to the store, inside the block; None when it is alone."""
        return self._store

    def __enter__(self) -> "FailureWatch":
        if self.world_size > 1:
            self._store = self._connect()
            watching = self._connect()
            threading.Thread(target=self._watch, args=(watching,), name="failure-watch", daemon=True).start()
        if self._heart is not None:
            self._heart.start(self._connect() if self.world_size > 1 else None, self._accuse, self._connect)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        try:
            if error is not None and not isinstance(error, SystemExit | GeneratorExit):
                self._fail(error)
        finally:
            if self._heart is not None:
                self._heart.stop()

    def _fail(self, error: BaseException) -> NoReturn:
        report = self._report(error, begun=self.directory.begun)
        follows = isinstance(error, OtherRankFailed)
        gone = self._heart.blame() if self._heart is not None and connection_lost(error) else None
        if gone is not None:
            report = self._found(gone)
        elif self._store is not None and self.rank != 0 and connection_lost(error):
            with contextlib.suppress(Exception):  # rank 0 may know better who has gone
                self._wait_for(self._store, [KEY])
        first = self._agree(report, follows=follows)
        log_traceback(error)
        if self._heart is not None and first.type in KINDS:
            self._heart.write_stacks(first.message)
            if first.type != "RankStuck":
                self._heart.end_silent(first.rank)
        self._leave_word(first)
        if self._store is not None:
            self._wait_until_seen(self._store, first)
        raise RankFailure(first) from error

    def _report(self, error: BaseException, *, begun: bool) -> Report:
        return report_of(error, rank=self.rank, world_size=self.world_size, begun=begun)

    def _found(self, finding: Finding) -> Report:
        """What the heart has found, as the error of that rank."""
        kind, message = finding.kind, finding.message
        return Report(finding.rank, kind, message, FAILED, "", time.time(), self.world_size)

    def _accuse(self, finding: Finding, reachable: bool) -> None:
        """A rank cannot speak for itself any more: its end is the first error. Called by the heart's threads.

        reachable: the store answers. If so the watch tells all, this process included; else, and in a process
        that is alone, nobody does.
        """
        report = self._found(finding)
        first = self._agree(report, follows=False) if reachable else report
        if first == report:
            self.directory.record_error(asdict(report), since=self._started)
        if self._store is None or not reachable:
            self._give_up(first, None)

    def _leave_word(self, first: Report) -> None:
        """Record our error, also another's that took itself for wrong input though the run has begun; of
        wrong input before that, nothing is left behind."""
        if first.code == WRONG_INPUT and not self.directory.begun:
            discard_logs()
        elif first.rank == self.rank or first.code == WRONG_INPUT or first.type in KINDS:
            self.directory.record_error(asdict(first), since=self._started)

    def _agree(self, mine: Report, *, follows: bool) -> Report:
        """The first error of all ranks: mine, unless another was quicker. follows: mine only tells of it."""
        if self._store is None:
            return mine
        try:
            if follows:
                self._wait_for(self._store, [KEY])
            found = self._store.compare_set(KEY, "", json.dumps(asdict(mine)))
            self._store.set(f"{SEEN}/{self.rank}", "")
            return Report(**json.loads(found))
        except Exception:  # the store died with its process: ours is the only error that can be known
            return mine

    def _wait_until_seen(self, store: Store, first: Report) -> None:
        """Rank 0 may hold the store, and the failed rank's end may end the others before they could tell why:
        both stay until all have read the error, or for the grace time."""
        if self.rank not in (0, first.rank):
            return
        with contextlib.suppress(Exception):  # the store is gone, and with it the process that held it
            self._wait_for(store, [f"{SEEN}/{rank}" for rank in range(self.world_size)])

    def _wait_for(self, store: Store, keys: list[str]) -> None:
        """Until all the keys are there, or the grace time is over."""
        deadline, pause = time.monotonic() + self._grace, threading.Event()
        while not store.check(keys) and time.monotonic() < deadline:
            pause.wait(0.05)

    def _watch(self, store: Store) -> None:
        while not self._over.wait(self._interval):
            try:
                if not store.check([KEY]):
                    continue
                first = Report(**json.loads(store.get(KEY)))
            except Exception as error:
                renewed = self._renewed()
                # One that is about to end well has time to.
                if self._over.wait(self._grace):
                    return
                with contextlib.suppress(queue.Empty):
                    store = renewed.get_nowait()
                    log.warning(f"a connection to the rendezvous store has failed and was renewed ({error})")
                    continue
                # The store's process is gone without a word.
                message = f"lost the rendezvous store; its process has ended ({type(error).__name__})"
                gone = self._heart.blame() if self._heart is not None else None
                first = self._found(gone) if gone else self._report(ConnectionError(message), begun=True)
                if gone:
                    self._leave_word(first)
                self._give_up(first, None)
                return
            else:
                if first.rank == self.rank and self._over.is_set():
                    return
            self._give_up(first, store)
            return

    def _renewed(self) -> "queue.SimpleQueue[Store]":
        """Where a new connection will be, once it answers: one that breaks is no store that is gone."""
        found: queue.SimpleQueue[Store] = queue.SimpleQueue()

        def attempt() -> None:
            with contextlib.suppress(Exception):
                store = self._connect()
                store.check([KEY])
                found.put(store)

        # Of a store that is gone the attempt would last for minutes.
        threading.Thread(target=attempt, name="failure-watch-renewal", daemon=True).start()
        return found

    def _give_up(self, first: Report, store: Store | None) -> None:
        """Say the first error and end this process, whatever its main thread does."""
        log.error(first.line(), extra={"file_only": True})
        if self._heart is not None and first.type in KINDS:
            self._heart.write_stacks(first.message)
            # Not before all have written theirs: the end of one breaks the connections of others.
            threading.Event().wait(1.5 * self._interval)
            if first.type != "RankStuck":  # that one can end by itself
                self._heart.end_silent(first.rank)
        if store is not None:
            with contextlib.suppress(Exception):
                for rank in {self.rank} | ({first.rank} if first.type in KINDS[:2] else set()):
                    store.set(f"{SEEN}/{rank}", "")
                self._wait_until_seen(store, first)
        if first.code == WRONG_INPUT:
            self._leave_word(first)
        say(first)
        self._end(FAILED)


def guarded(
    work: Callable[[], int],
    *,
    rank: int,
    directory: RunDirectory | None = None,
    error_file: str | None = None,
) -> int:
    """Run `work` and give the exit code; an error becomes a clear line or two on stderr, never a traceback.

    error_file: where torchelastic wants the error (TORCHELASTIC_ERROR_FILE). 2: wrong input, found before any
    work; 1: a failed run, or a reader of the output that has gone (`| head`), of which nothing is said.
    """
    started = time.time()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except RankFailure as failure:
        report = failure.report
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not reader_is_there():
            return FAILED
        begun = directory is not None and directory.begun
        report = report_of(error, rank=rank, world_size=started_processes(rank), begun=begun)
        log_traceback(error)
    if directory is not None and report.rank == rank and report.code != WRONG_INPUT:
        directory.record_error(asdict(report), since=started)
    if error_file:
        write_error_file(Path(error_file), report)
    say(report)
    return report.code


def started_processes(rank: int) -> int:
    """How many processes the environment speaks of, also where it is too broken for a placement."""
    try:
        return max(placement(os.environ).world_size, rank + 1)
    except ValueError:
        return rank + 1


def reader_is_there() -> bool:
    """Whether standard output can still be written; if not, what is left in it is thrown away."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # no file of the system
        return True
    watched = select.poll()
    watched.register(number, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0)):
        return True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)  # the interpreter flushes once more at its end
    os.close(nowhere)
    return False


def write_error_file(path: Path, report: Report) -> None:
    """The error as torchelastic's agent reads it."""
    shown = report.line() if report.code == WRONG_INPUT else report.traceback  # in torchrun's own summary
    details = {"py_callstack": shown, "timestamp": str(int(report.time))}
    message = {"message": report.line(), "extraInfo": details, "errorCode": report.code}
    try:
        path.write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as error:
        print(f"the error file {path} could not be written: {error}", file=sys.stderr)


def say(report: Report) -> None:
    """The error in one write, so that lines of several processes do not mix."""
    if reader_is_there():
        sys.stdout.flush()
    sys.stderr.write(report.text() + "\n")
    sys.stderr.flush()
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        sys.__stdout__.write("\x1b[?25h")  # a live progress line hides the cursor
        sys.__stdout__.flush()
