"""The command line with a fault in one rank: python -m tests.launcher.faulty KIND RANK train ..."""

import os
import sys
from typing import Any

from launcher.__main__ import main


def raising(kind: str, *, after: int) -> Any:
    calls = 0

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise RuntimeError(f"planted in {kind}")
            return function(*args, **kwargs)

        return wrapped

    return wrap


def plant(kind: str) -> None:
    """Break the forward pass, the reading of data or the writing of a checkpoint on this rank."""
    if kind == "forward":
        from megamodel.block import Block

        Block.forward = raising(kind, after=20)(Block.forward)  # type: ignore[method-assign]
    elif kind == "data":
        from megamodel.data.loader import Loader

        Loader.at = raising(kind, after=3)(Loader.at)  # type: ignore[method-assign]
    else:
        from checkpoints import store

        store.write_part = raising(kind, after=0)(store.write_part)


if __name__ == "__main__":
    fault, rank, *arguments = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    if os.environ["RANK"] == rank:
        plant(fault)
    sys.exit(main(arguments))
