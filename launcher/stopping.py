"""Stopping on request: a signal or the time limit asks, all ranks learn of it with the next step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIME_LIMIT = 1000  # beside the numbers of signals
# A launcher passes Ctrl-C on to processes that the terminal has told already: that is not a second one.
SAME_PRESS_SECONDS = 0.5


class StopRequest:
    """Remembers what asked first. deadline: of time.monotonic(); None: no time limit. handler: the request
    whose signals this one shares, as it has the handlers."""

    def __init__(self, deadline: float | None = None, handler: "StopRequest | None" = None) -> None:
        self._deadline = deadline
        self._handler = handler
        self._number = 0
        self._since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals; KeyboardInterrupt at the second SIGINT."""
        now = time.monotonic()
        if self._number == signal.SIGINT == number and now - self._since > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
        if not self._number:
            self._number, self._since = number, now

    def asked(self) -> int:
        """0, or the number of what asked for a stop: the larger of two ranks' numbers stands for both."""
        if self.signalled:
            return self.signalled
        if not self._number and self._deadline is not None and time.monotonic() >= self._deadline:
            self._number = TIME_LIMIT
        return self._number

    @property
    def signalled(self) -> int:
        """The number of the signal that asked, or 0: a time limit waits for the first step."""
        if self._handler is not None:
            return self._handler.signalled
        return 0 if self._number == TIME_LIMIT else self._number

    def ends_at_once(self, world_size: int) -> bool:
        """Whether a process that has not met the others yet leaves.

        With SIGTERM a launcher ends those whose peer has failed: the meeting would wait for that one. After
        another signal they meet first, as some may not have had it, and agree.
        """
        return self.signalled == signal.SIGTERM or (world_size == 1 and self.signalled != 0)


def reason(asked: int) -> str:
    """The name of what asked, as status.json has it."""
    return "time limit" if asked == TIME_LIMIT else signal.Signals(asked).name


@contextmanager
def stop_signals(deadline: float | None = None) -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and SIGINT ask for a save and a stop; a second SIGINT stops at once.

    Inside another `stop_signals` the signals remain with that one: what has asked before, asks here too. A
    thread that is not the main one cannot have handlers; there only the time limit asks.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, StopRequest):
        yield StopRequest(deadline, handler)
        return
    request = StopRequest(deadline)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def ended_by_term(wanted: bool) -> Iterator[None]:
    """While the processes meet, in calls that no handler can interrupt, SIGTERM ends this one, if wanted."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ignore_signals() -> None:
    """The exit code is settled: what asks for a stop now would only replace it."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
