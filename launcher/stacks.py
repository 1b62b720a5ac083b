"""Where the threads of this process are: one line of the main thread, the stacks of all of them."""

import linecache
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / package) + "/" for package in ("parallel", "megamodel", "checkpoints", "launcher"))
# Files whose calls wait for other ranks, and lines that wait for the device, which may wait for them.
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
WAITS = re.compile(r"\.(tolist|item|cpu|wait|synchronize)\(")


def main_frame() -> FrameType | None:
    """The innermost Python frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def where(frame: FrameType | None) -> str:
    """`torch/distributed/distributed_c10d.py:3000 in all_reduce, from parallel/engine.py:360 in _decide`."""
    if frame is None:
        return "nowhere"
    ours: FrameType | None = frame
    while ours is not None and not ours.f_code.co_filename.startswith(OURS):
        ours = ours.f_back
    inner = _line(frame)
    return inner if ours is None or ours is frame else f"{inner}, from {_line(ours)}"


def waits(frame: FrameType | None) -> bool:
    """Whether this is a wait for other ranks: inside a collective, or for a device that may be in one."""
    if frame is None:
        return False
    if any(part in frame.f_code.co_filename for part in COLLECTIVES):
        return True
    return WAITS.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)) is not None


def stacks() -> str:
    """Every thread of this process with its stack, the main thread first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = []
    for ident, frame in frames:
        parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def write_stacks(file: Path, reason: str) -> None:
    """Append the stacks of all threads, with the time and the reason."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as target:
        target.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {reason}\n\n{stacks()}\n")


def _line(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _short(path: str) -> str:
    """A path without what comes before our root or site-packages."""
    if path.startswith(str(ROOT) + "/") and "/site-packages/" not in path:
        return path.removeprefix(str(ROOT) + "/")
    return re.sub(r"^.*/(?:site-packages|python3\.\d+)/", "", path)
