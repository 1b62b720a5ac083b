"""Seconds from the command to the first update on record, tiny preset: `python -m benchmarks.startup`.

Each turn is a fresh process in a fresh run directory; data and tokenizer are prepared before. The last line
is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

LIMIT_SECONDS = 300
QUICK = ["model=tiny", "train.steps=2", "train.sequence_length=64", "train.micro_batch=2", "hardware=cpu"]
QUIET = ["evaluate.batches=0", "checkpoint.every=0", "sample.max_tokens=0"]


def first_line(process: subprocess.Popen[bytes], metrics: Path) -> bool:
    """Wait until the first line of metrics.jsonl is whole; False when the process ends without it."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < LIMIT_SECONDS:
        ended = process.poll() is not None
        if metrics.is_file() and b"\n" in metrics.read_bytes():
            return True
        if ended:
            return False
        time.sleep(0.01)
    return False


def turn(overrides: list[str]) -> dict[str, Any]:
    """One run; seconds to the first record and to the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", "train", f"run.dir={folder}/run", *overrides]
        with (Path(folder) / "output").open("wb+") as output:
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            started = first_line(process, Path(folder) / "run" / "metrics.jsonl")
            first = time.perf_counter() - begin
            if not started:
                process.kill()
            if process.wait() or not started:
                output.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed:\n{output.read().decode()}")
            return {"first_update_seconds": first, "whole_seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    turn([*QUICK, *QUIET])  # prepares what is missing, warms the file cache
    turns = [turn([*QUICK, *QUIET]) for _ in range(options.rounds)]
    result = {field: median(values[field] for values in turns) for field in turns[0]}
    first, whole = result["first_update_seconds"], result["whole_seconds"]
    print(f"first update after {first:.1f} s, end after {whole:.1f} s")
    print(json.dumps({**result, "turns": turns}))


if __name__ == "__main__":
    main()
