"""Ranks for tests: a pool of gloo processes that stays, and takes any function on any number of ranks.

One pool serves a whole test run: starting processes and importing DeepSpeed costs more than the tests.
"""

import contextlib
import io
import multiprocessing
import os
import queue
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120


class RankError(AssertionError):
    """An exception on a rank, re-raised here with its rank and traceback."""


def _worker(rank: int, tasks: Any, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while (task := tasks.get()) is not None:
        number, world_size, store, function, args = task
        try:
            results.put((number, rank, True, _run(rank, world_size, store, function, args)))
        except BaseException:
            results.put((number, rank, False, traceback.format_exc()))


def _run(rank: int, world_size: int, store: str, function: Any, args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    from parallel import start

    if isinstance(function, _Bare):
        try:
            return function.function(rank, *args)
        finally:
            start.stop()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS - 30),
    )
    start.adopt(rank)
    try:
        return function(*args)
    finally:
        start.stop()


@dataclass(frozen=True)
class Finished:
    """How a command ended on one rank."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class _Bare:
    """A function that starts its own process group; it gets its rank first."""

    function: Callable[..., Any]


def _command(
    rank: int, arguments: list[str], more: list[str], directory: str, port: int, world_size: int
) -> Finished:
    from launcher.__main__ import main

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world_size > 1 else {}
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        if world_size > 1:
            variables[name] = str(value)
    out, err = io.StringIO(), io.StringIO()
    before = {name: os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    os.environ.update(variables)
    os.chdir(directory)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments + more if rank == 1 else arguments)
    for name in variables:
        os.environ.pop(name)
    os.environ.update({name: value for name, value in before.items() if value is not None})
    return Finished(code, out.getvalue(), err.getvalue())


class Ranks:
    """A pool of at most `size` processes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0
        self._store = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        # A worker is forked from a server that has the imports already.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(self._size)]
        with _worker_environment():
            self._processes = [
                context.Process(target=_worker, args=(rank, tasks, self._results), daemon=True)
                for rank, tasks in enumerate(self._tasks)
            ]
            for process in self._processes:
                process.start()

    def run(self, world_size: int, function: Any, *args: Any) -> list[Any]:
        """function(*args) on ranks 0 .. world_size - 1 in a process group of their own; results by rank.

        A rank's exception is raised here, and the processes, which may hang, are replaced.
        """
        assert world_size <= len(self._processes)
        self._number += 1
        store = str(Path(self._store.name) / f"group-{self._number}")
        for tasks in self._tasks[:world_size]:
            tasks.put((self._number, world_size, store, function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(results) + len(errors) < world_size and time.monotonic() < deadline:
            try:
                _, rank, fine, value = self._results.get(timeout=1)
            except queue.Empty:
                gone = [r for r, p in enumerate(self._processes[:world_size]) if not p.is_alive()]
                if gone and not errors:
                    errors[gone[0]] = "the process has ended without an answer"
                    deadline = min(deadline, time.monotonic() + 5)
                continue
            (results if fine else errors)[rank] = value
            if not fine:
                # The others may hang in a collective; a moment shows who fails too.
                deadline = min(deadline, time.monotonic() + 5)
        if len(results) + len(errors) < world_size and not errors:
            errors[-1] = f"no answer in {TIMEOUT_SECONDS} s; only ranks {sorted(results)} finished"
        if errors:
            self._kill()
            self._start()
            raise RankError(
                "\n".join(f"rank {rank} of {world_size}:\n{errors[rank]}" for rank in sorted(errors))
            )
        return [results[rank] for rank in range(world_size)]

    def launch(
        self, world_size: int, arguments: list[str], directory: Path, rank_1: list[str] | None = None
    ) -> list["Finished"]:
        """The command line on so many ranks, as torchrun would start it, in a working directory.

        rank_1: arguments that only rank 1 gets besides.
        """
        more = rank_1 or []
        return self.bare(world_size, _command, arguments, more, str(directory))

    def bare(self, world_size: int, function: Any, *args: Any) -> list[Any]:
        """function(rank, *args, port, world_size), which starts its own process group; results by rank."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return self.run(world_size, _Bare(function), *args, port, world_size)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the processes."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._store.cleanup()


@contextlib.contextmanager
def _worker_environment() -> Any:
    """CPU only, one thread: also on a machine with a GPU."""
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
