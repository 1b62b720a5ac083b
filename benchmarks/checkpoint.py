"""Saving and loading against torch's and DeepSpeed's, side by side: python -m benchmarks.checkpoint.

Two processes, dp 2, a model of about 200 million parameters: masters and both moments in fp32, 2.4 GB. Each
turn is a fresh pair of processes on an emptied directory; each round has one turn of every entry, in rotated
order. Stall: how long a save holds up training. Write: until it is complete and synced. `copy` writes as many
bytes without anything else. Loading is at pp 2, from what was saved at dp 2: ours from the files, DeepSpeed's
by its universal conversion. Files that were just written are read from the page cache, by all alike. The last
line is everything as JSON.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare import order, pairwise_ratio, table
from benchmarks.training import machine

SAVING = ("ours", "ours at once", "async_save", "save_checkpoint", "copy")
LOADING = {"ours": "load ours", "save_checkpoint": "load universal"}  # after the save that it reads
WORLD = 2


def run_turn(what: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One pair of processes; of each number the larger of the two, of bytes of the state their sum."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
    command = [sys.executable, "-m", "benchmarks.checkpoint_turn", what, str(directory)]
    processes = [
        subprocess.Popen(
            [*command, "--size", options.size],
            env={**os.environ, **ours, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"the turn of {what} failed:\n{out[-3000:]}{error[-3000:]}")
    ranks = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
    return {name: merged(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def merged(name: str, values: list[Any]) -> Any:
    if name == "state_bytes":
        return sum(values)
    return [max(each) for each in zip(*values, strict=True)] if isinstance(values[0], list) else max(values)


def measure(options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """All rounds: the numbers of every entry."""
    rounds = []
    for number in range(options.rounds):
        results: dict[str, dict[str, Any]] = {}
        for entry in order(SAVING, number):
            directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.directory))
            try:
                results[entry] = run_turn(entry, directory, options)
                if entry in LOADING:
                    results[LOADING[entry]] = run_turn(LOADING[entry], directory, options)
            finally:
                shutil.rmtree(directory)
            print(f"round {number + 1}/{options.rounds} {entry}: {results[entry]}", file=sys.stderr)
        rounds.append(results)
    return rounds


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians, over the saves of all rounds, the first of a process apart: it allocates."""
    entries: dict[str, Any] = {}
    for entry in SAVING:
        turns = [results[entry] for results in rounds]
        stalls = [seconds for turn in turns for seconds in turn["stall_seconds"][1:]]
        writes = [seconds for turn in turns for seconds in turn["write_seconds"][1:]]
        entries[entry] = {
            "first_stall_seconds": median(turn["stall_seconds"][0] for turn in turns),
            "stall_seconds": median(stalls),
            "write_seconds": median(writes),
            "bytes_per_second": turns[0]["state_bytes"] / median(writes),
            "host_bytes": median(turn["host_bytes"] for turn in turns),
        }
    for entry in LOADING.values():
        turns = [results[entry] for results in rounds]
        entries[entry] = {name: median(turn[name] for turn in turns) for name in turns[0]}
    flat = [{name: steady(turn) for name, turn in results.items()} for results in rounds]
    stall = [{name: turn["stall"] for name, turn in results.items() if "stall" in turn} for results in flat]
    write = [{name: turn["write"] for name, turn in results.items() if "write" in turn} for results in flat]
    load = [{name: turn["load"] for name, turn in results.items() if "load" in turn} for results in flat]
    return {
        "entries": entries,
        "state_bytes": rounds[0]["ours"]["state_bytes"],
        "ratios": {
            "stall_to_async_save": pairwise_ratio(stall, "ours", "async_save"),
            "stall_to_save_checkpoint": pairwise_ratio(stall, "ours", "save_checkpoint"),
            "write_to_copy": pairwise_ratio(write, "ours", "copy"),
            "write_to_async_save": pairwise_ratio(write, "ours", "async_save"),
            "load_to_universal": pairwise_ratio(load, "load ours", "load universal"),
        },
    }


def steady(turn: dict[str, Any]) -> dict[str, float]:
    if "load_seconds" in turn:
        return {"load": turn["load_seconds"]}
    return {"stall": median(turn["stall_seconds"][1:]), "write": median(turn["write_seconds"][1:])}


def printed(result: dict[str, Any]) -> str:
    """The summary for people."""
    header = ["", "stall", "first stall", "complete after", "MiB/s", "host memory a process"]
    rows = [
        [
            entry,
            f"{values['stall_seconds']:.3f} s",
            f"{values['first_stall_seconds']:.3f} s",
            f"{values['write_seconds']:.3f} s",
            f"{values['bytes_per_second'] / 2**20:,.0f}",
            f"{values['host_bytes'] / 2**20:,.0f} MiB",
        ]
        for entry, values in result["entries"].items()
        if "stall_seconds" in values
    ]
    lines = [f"{result['state_bytes'] / 1e9:.2f} GB of state in {WORLD} processes", table(header, rows)]
    loads = [
        [entry, f"{values['load_seconds']:.3f} s", f"{values['host_bytes'] / 2**20:,.0f} MiB"]
        for entry, values in result["entries"].items()
        if "load_seconds" in values
    ]
    lines.append(table(["", "at another layout", "host memory a process"], loads))
    lines.append(table(["ratio", ""], [[name, f"{value:.2f}"] for name, value in result["ratios"].items()]))
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--directory", help="on the disk to be measured; null: the temporary directory")
    options = parser.parse_args()
    result = summary(measure(options))
    print(printed(result))
    print(json.dumps({**result, "machine": machine()}))


if __name__ == "__main__":
    main()
