"""Words, not numbers: what happened, into logs/rank-N.log of the run and, from rank 0, onto the terminal."""

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OURS = ("conf", "parallel", "megamodel", "checkpoints", "launcher")
NOISY = ("DeepSpeed", "deepspeed", "torch.distributed", "datasets", "filelock", "fsspec", "urllib3")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # not the fault of what was asked for
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TerminalFormatter(logging.Formatter):
    """The message alone; the level only where it matters."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class RunLog(logging.FileHandler):
    """The log file of one process in the directory of a run, which is made for it where there is none."""

    def __init__(self, file: Path) -> None:
        self._made = [] if file.exists() else [file, *file.parents[:2]]  # of whichever process comes last
        self._made += [folder for folder in file.parents[2:] if not folder.exists()]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(file, encoding="utf-8")
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise ValueError(
                f"run.dir: {file} cannot be written ({error.strerror}); give a run.dir that can"
            ) from None
        self.setFormatter(logging.Formatter(FORMAT))

    def discard(self) -> None:
        """Take away a file that is new, and its folders where they hold nothing else."""
        logging.getLogger().removeHandler(self)  # it would open the file again
        self.close()
        with suppress(OSError):  # another process's log lies there too
            for path in self._made:
                path.rmdir() if path.is_dir() else path.unlink()


def discard_logs() -> None:
    """Leave no trace of a run that has not begun; what was there before it stays."""
    for handler in [found for found in logging.getLogger().handlers if isinstance(found, RunLog)]:
        handler.discard()


@contextmanager
def logging_to(file: Path | None, *, rank: int, level: str) -> Iterator[None]:
    """Send the log records of this process to `file` (None: no file), of rank 0 also to stderr.

    Our own packages speak from `level` on, other libraries from warning on, the chatty ones from error on.
    Modules log with logging.getLogger(__name__). Everything is put back at the end.
    """
    handlers: list[logging.Handler] = []
    if file is not None:
        handlers.append(RunLog(file))
    if rank == 0:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(TerminalFormatter())
        shown.addFilter(lambda record: not getattr(record, "file_only", False))
        handlers.append(shown)
    root = logging.getLogger()
    before = {name: logging.getLogger(name).level for name in (*OURS, *NOISY)}
    root_level = root.level
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(root_level)
        for name, old in before.items():
            logging.getLogger(name).setLevel(old)


def log_traceback(error: BaseException) -> None:
    """The traceback of an error into the log file; the terminal gets it only when the level is debug."""
    logger = logging.getLogger("launcher.failure")
    hidden = not logger.isEnabledFor(logging.DEBUG)
    if logging.getLogger().handlers:  # without one, logging would print it by itself
        logger.error("stopped by an error", exc_info=error, extra={"file_only": hidden})
