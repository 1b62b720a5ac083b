"""The next step read while the current one is computed."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from megamodel.data.batch import Cursor
from megamodel.data.loader import LoadedStep, Loader


@dataclass(frozen=True)
class _Request:
    sample: int
    skipped: tuple[tuple[int, int], ...]
    micro_batch: int
    accumulation: int


class Prefetcher:
    """A Loader for one data rank that reads one step ahead in a thread.

    `at` returns what Loader.at would: a guess that proves wrong (a rewind, another batch size) is thrown
    away. Used from one thread; `close` ends the other. pin: batches lie in pinned memory, for a GPU.
    """

    def __init__(self, loader: Loader, *, data_rank: int, data_size: int, pin: bool = False) -> None:
        self._loader, self._pin = loader, pin
        self._data_rank, self._data_size = data_rank, data_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._guess: tuple[_Request, Future[LoadedStep]] | None = None

    def at(self, cursor: Cursor, *, micro_batch: int, accumulation: int) -> LoadedStep:
        request = _Request(cursor.sample, cursor.skipped, micro_batch, accumulation)
        if self._guess is not None and self._guess[0] == request:
            step = self._guess[1].result()
        else:
            step = self._read(request)
        ahead = replace(request, sample=step.next_sample)
        self._guess = (ahead, self._thread.submit(self._read, ahead))
        return step

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, request: _Request) -> LoadedStep:
        cursor = Cursor(sample=request.sample, skipped=request.skipped)
        step = self._loader.at(
            cursor,
            micro_batch=request.micro_batch,
            accumulation=request.accumulation,
            data_rank=self._data_rank,
            data_size=self._data_size,
        )
        return replace(step, batches=[batch.pinned() for batch in step.batches]) if self._pin else step
