"""Stopping on request: a signal or the time limit asks, all ranks learn of it with the next step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIME_LIMIT = 1000  # beside the numbers of signals
# A launcher passes Ctrl-C on to processes that the terminal has told already: that is not a second one.
SAME_PRESS_SECONDS = 0.5


class StopRequest:
    """Remembers what asked first. deadline: of time.monotonic(); None: no time limit."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
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
        if not self._number and self._deadline is not None and time.monotonic() >= self._deadline:
            self._number = TIME_LIMIT
        return self._number


def reason(asked: int) -> str:
    """The name of what asked, as status.json has it."""
    return "time limit" if asked == TIME_LIMIT else signal.Signals(asked).name


@contextmanager
def stop_signals(deadline: float | None = None) -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and SIGINT ask for a save and a stop; a second SIGINT stops at once."""
    request = StopRequest(deadline)
    before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
