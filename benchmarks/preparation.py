"""How tokenising scales with processes, and whether memory stays flat: `python -m benchmarks.preparation`.

The corpus is the standard library's source as JSONL, repeated to a size; the tokenizer is trained before.
Each turn is a fresh process that prepares into an empty cache: `one` and `all` take the same corpus with one
worker and with one a core, `long` takes four times the corpus with one a core. The last line is JSON.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare import order, pairwise_ratio, table
from benchmarks.process import numbers

LONG = 4  # times the corpus


def write_corpus(folder: Path, megabytes: int) -> None:
    """short.jsonl of about `megabytes` and long.jsonl of LONG times as much."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
    for name, size in (("short", megabytes << 20), ("long", LONG * megabytes << 20)):
        written = 0
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, text in enumerate(cycle(texts)):
                written += file.write(json.dumps({"text": f"{number}\n{text}"}) + "\n")
                if written >= size:
                    break


def turn(corpus: Path, tokenizer: Path | None, workers: int) -> dict[str, Any]:
    """Prepare one corpus in this process; bytes a second and the peaks of this process and of its workers."""
    from megamodel.data.config import Data
    from megamodel.data.prepare import prepare
    from megamodel.tokenizer import TokenizerConfig

    path = None if tokenizer is None else str(tokenizer)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as cache:
        begin = time.perf_counter()
        prepared = prepare(
            Data(kind="files", paths=[str(corpus)]),  # type: ignore[call-arg]
            TokenizerConfig(path=path),  # type: ignore[call-arg]
            cache=Path(cache),
            workers=workers,
        )
        seconds = time.perf_counter() - begin
        if tokenizer is None:
            prepared.manifest.parent.joinpath("tokenizer.json").rename(corpus.parent / "tokenizer.json")
    kibibytes = [
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return {
        "bytes_per_second": corpus.stat().st_size / seconds,
        "parent_peak_bytes": kibibytes[0] * 1024,
        "worker_peak_bytes": kibibytes[1] * 1024,
    }


def run_turn(folder: Path, name: str, workers: int, *, given: bool = True) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.preparation", "--turn", str(folder / f"{name}.jsonl")]
    command += ["--workers", str(workers)]
    command += ["--tokenizer", str(folder / "tokenizer.json")] if given else []
    return numbers(name, command)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """All rounds of the three entries."""
    entries = {"one": ("short", 1), "all": ("short", options.workers), "long": ("long", options.workers)}
    run_turn(folder, "short", options.workers, given=False)  # trains the tokenizer, warms the file cache
    rounds = []
    for number in range(options.rounds):
        turns = {entry: run_turn(folder, *entries[entry]) for entry in order(list(entries), number)}
        rounds.append(turns)
        print(f"round {number + 1}/{options.rounds}", file=sys.stderr)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=32, help="size of the shorter corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(options.turn, options.tokenizer, options.workers)))
        return
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name), options.megabytes)
        rounds = measure(Path(name), options)
    medians = {
        entry: {field: median(turns[entry][field] for turns in rounds) for field in rounds[0][entry]}
        for entry in rounds[0]
    }
    rows = [
        [entry, f"{v['bytes_per_second'] / 2**20:.1f}"]
        + [f"{v[field] / 2**20:.0f} MiB" for field in ("parent_peak_bytes", "worker_peak_bytes")]
        for entry, v in medians.items()
    ]
    print(table(["", "MiB/s", "parent peak", "worker peak"], rows))
    speeds = [{entry: v["bytes_per_second"] for entry, v in turns.items()} for turns in rounds]
    parents = [{entry: v["parent_peak_bytes"] for entry, v in turns.items()} for turns in rounds]
    ratios = {
        "speed_of_all_workers_to_one": pairwise_ratio(speeds, "all", "one"),
        "parent_peak_of_long_to_short": pairwise_ratio(parents, "long", "all"),
    }
    print(
        f"{options.workers} workers / 1: {ratios['speed_of_all_workers_to_one']:.2f} times as fast; ", end=""
    )
    print(f"memory of {LONG} times the corpus: {ratios['parent_peak_of_long_to_short']:.2f} times")
    print(json.dumps({"workers": options.workers, "medians": medians, "ratios": ratios, "rounds": rounds}))


if __name__ == "__main__":
    main()
