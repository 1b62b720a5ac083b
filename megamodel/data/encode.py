"""Blocks to tokens, in processes of their own: `python -m megamodel.data.encode` is one of them.

The processes talk in frames over their standard streams: a JSON head, then raw bytes. They import neither
torch nor the program that started them, and nothing is pickled.
"""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from megamodel.data.blocks import Block
from megamodel.data.records import Document, Left, records
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load

DOCUMENT = np.dtype(
    [("file", "<i4"), ("record", "<i8"), ("byte_start", "<i8"), ("byte_length", "<i8"), ("hash", "<u8")]
)
NO_OFFSET = -1  # byte_start of a row of a table
SIDES = ("train", "held_out")
_PIECE_CHARACTERS = 1 << 22  # a longer text is encoded in pieces cut at line ends: bounded memory
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Split:
    """Which side a document is on, by the hash of its content.

    Held out below the threshold; the two sets name exceptions, so that no source is without a side.
    """

    threshold: int
    held_out: frozenset[int] = frozenset()
    train: frozenset[int] = frozenset()

    def side(self, content_hash: int) -> str:
        if content_hash in self.train:
            return "train"
        below = content_hash < self.threshold or content_hash in self.held_out
        return "held_out" if below else "train"


@dataclass
class Encoded:
    """One side of an encoded block: ids as they are stored, tokens of each document, DOCUMENT rows."""

    ids: bytes
    lengths: np.ndarray
    documents: np.ndarray


@dataclass
class Result:
    """An encoded block: both sides, how many records went which way, and those that were left out."""

    sides: dict[str, Encoded]
    counts: Counter[str]
    file: int
    left: list[Left] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """All that decides what a block becomes, beside the block."""

    tokenizer_path: str | None
    tokenizer: TokenizerConfig
    split: Split
    allow_special: bool


def token_type(vocab_size: int) -> np.dtype:
    """The smallest stored type that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Encoder:
    """What one process does: blocks in, tokens out. Stateless between blocks."""

    def __init__(self, job: Job) -> None:
        path = job.tokenizer_path
        self.tokenizer: Tokenizer = load(None if path is None else Path(path), job.tokenizer)
        self._job = job
        self._type = token_type(self.tokenizer.vocab_size)

    def encode(self, block: Block, *, file: int, path: str, text_key: str) -> Result:
        """The tokens of every document, in order. ValueError for a ready id outside the vocabulary."""
        kept: list[Document] = []
        result = Result({}, Counter(), file)
        for record in records(block, text_key=text_key, eos_id=self.tokenizer.eos_id):
            result.counts["lines"] += 1
            if isinstance(record, Left):
                result.counts["rejected" if record.rejected else "skipped"] += 1
                result.left.append(record)
            else:
                result.counts["written"] += 1
                kept.append(record)
        ids = [self._ids(document, path) for document in kept]
        sides = [self._job.split.side(document.hash) for document in kept]
        for side in SIDES:
            chosen = [index for index, where in enumerate(sides) if where == side]
            result.sides[side] = Encoded(
                b"".join(ids[index].tobytes() for index in chosen),
                np.array([len(ids[index]) for index in chosen], dtype=np.int64),
                np.array([_row(kept[index], file) for index in chosen], dtype=DOCUMENT),
            )
        return result

    def _ids(self, document: Document, path: str) -> np.ndarray:
        if document.ids is not None:
            return self._ready(document, document.ids, path)
        first = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        pieces = _pieces(document.text)
        parts = self.tokenizer.encode_batch(pieces, allow_special=self._job.allow_special)
        arrays = [np.array(part, dtype=self._type) for part in (first, *parts, [self.tokenizer.eos_id])]
        return np.concatenate(arrays)

    def _ready(self, document: Document, ids: np.ndarray, path: str) -> np.ndarray:
        wrong = np.flatnonzero((ids < 0) | (ids >= self.tokenizer.vocab_size))
        if len(wrong):
            position = document.record - 1 + int(wrong[0])
            raise ValueError(
                f"{path}: token {int(ids[wrong[0]])} at position {position} is outside the vocabulary of "
                f"{self.tokenizer.vocab_size}; give the tokenizer it was made with, or the right data.dtype"
            )
        return ids.astype(self._type)


def _row(document: Document, file: int) -> tuple[int, int, int, int, int]:
    start = NO_OFFSET if document.byte_start is None else document.byte_start
    return (file, document.record, start, document.byte_length, document.hash)


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


class Pool:
    """Worker processes that encode blocks; results come in the order of the blocks, whoever made them.

    At most two blocks a worker are under way, so that memory does not grow with the corpus.
    """

    def __init__(self, job: Job, workers: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers)
        self._processes = [_start(job) for _ in range(workers)]
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes if kind is not None else []:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()

    def encode(self, blocks: Iterable[tuple[Block, int, str, str]]) -> Iterator[Result]:
        """The result of each (block, file number, path, text key)."""
        waiting: deque[Future[Result]] = deque()
        for block, file, path, text_key in blocks:
            head = {"file": file, "path": path, "text_key": text_key, "block": _block_head(block)}
            waiting.append(self._threads.submit(self._call, head, block.payload))
            if len(waiting) > 2 * len(self._processes):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _call(self, head: dict[str, Any], payload: bytes) -> Result:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, head, [payload])
            reply, parts = _read(process.stdout)
        except (OSError, EOFError):
            raise RuntimeError(
                f"a tokenising process ended with code {process.wait()} while it read {head['path']}; "
                "if memory ran out, set data.workers to fewer"
            ) from None
        finally:
            self._idle.put(process)
        if "error" in reply:
            raise ValueError(reply["error"])
        if "failure" in reply:
            raise RuntimeError(f"tokenising {head['path']} failed:\n{reply['failure']}")
        return _result(reply, parts)


def _start(job: Job) -> subprocess.Popen[bytes]:
    """A process that shares nothing with this one; its own session, so that Ctrl-C ends it through us."""
    places = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TOKENIZERS_PARALLELISM": "false",  # one process, one core
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "megamodel.data.encode"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    split = [job.split.threshold, sorted(job.split.held_out), sorted(job.split.train)]
    head = {"path": job.tokenizer_path, "tokenizer": dataclasses.asdict(job.tokenizer), "split": split}
    _write(process.stdin, head | {"allow_special": job.allow_special}, [])
    return process


def _serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """The life of a worker: a job, then blocks until the stream ends."""
    head, _ = _read(source)
    threshold, held_out, train = head["split"]
    split = Split(threshold, frozenset(held_out), frozenset(train))
    job = Job(head["path"], TokenizerConfig(**head["tokenizer"]), split, head["allow_special"])
    encoder = Encoder(job)
    while True:
        try:
            head, parts = _read(source)
        except EOFError:
            return
        block = Block(payload=parts[0], **head["block"])
        try:
            result = encoder.encode(block, file=head["file"], path=head["path"], text_key=head["text_key"])
        except ValueError as error:
            _write(sink, {"error": str(error)}, [])
        except Exception:
            _write(sink, {"failure": traceback.format_exc()}, [])
        else:
            _write(sink, *_result_frame(result))


def _block_head(block: Block) -> dict[str, Any]:
    return {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "payload"}


def _result_frame(result: Result) -> tuple[dict[str, Any], list[bytes]]:
    left = [[item.record, item.reason] for item in result.left]
    parts = []
    for side in SIDES:
        encoded = result.sides[side]
        parts += [encoded.ids, encoded.lengths.tobytes(), encoded.documents.tobytes()]
    return {"counts": result.counts, "file": result.file, "left": left}, parts


def _result(head: dict[str, Any], parts: list[bytes]) -> Result:
    sides = {
        side: Encoded(
            parts[3 * k], np.frombuffer(parts[3 * k + 1], np.int64), np.frombuffer(parts[3 * k + 2], DOCUMENT)
        )
        for k, side in enumerate(SIDES)
    }
    left = [Left(record, reason) for record, reason in head["left"]]
    return Result(sides, Counter(head["counts"]), head["file"], left)


def _write(stream: IO[bytes], head: dict[str, Any], parts: list[bytes]) -> None:
    text = json.dumps(head | {"sizes": [len(part) for part in parts]}).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        stream.write(part)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    head = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    return head, [_exactly(stream, size) for size in head.pop("sizes")]


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) != size:
        raise EOFError
    return content


def main() -> None:
    """Serve on the standard streams; what a library prints goes to standard error."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _serve(sys.stdin.buffer, sink)
    except BrokenPipeError:  # the process that asked has ended: nobody is left to tell
        os._exit(1)


if __name__ == "__main__":
    main()
