"""Errors that one rank raises because of another."""

import re

# What gloo (a bare RuntimeError), NCCL and the store say when the process at the other end is no more.
BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|broken)|broken pipe|remote process exited|"
    r"remote peer|failed to recv|socket|NCCL error|watchdog|timed out|timeout",
    re.IGNORECASE,
)


class OtherRankFailed(RuntimeError):
    """Another rank failed; its own error is the one that counts."""


def connection_lost(error: BaseException | None) -> bool:
    """Whether this error, or what caused it, may be the end of another process."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, RuntimeError) and BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
