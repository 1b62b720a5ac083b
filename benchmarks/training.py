"""Training speed and memory against transformers' Llama: `make bench`, or `python -m benchmarks.training`.

--entries peer torchtitan litgpt olmo_core ... adds transformers without torch.compile, and others where they
are installed (peers.py).
Each turn is a fresh process; each round has one turn of every entry, in rotated order; numbers are medians,
ratios are medians of the ratios within a round. `control` is the peer entered a second time: its ratio says
what the numbers are worth. The last line is everything as JSON.
"""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.compare import order, pairwise_ratio, spread, table
from benchmarks.entries import BUILDERS
from benchmarks.process import numbers

# entry -> what it runs
RUNS = {
    **{name: name for name in ("run", *BUILDERS)},
    "control": "peer_compiled",
}


def run_turn(what: str, options: argparse.Namespace) -> dict[str, Any]:
    """One fresh process; its numbers, or RuntimeError with what it wrote."""
    command = [sys.executable, "-m", "benchmarks.turn", what, "--model", options.model]
    command += ["--precision", options.precision, "--threads", str(options.threads)]
    command += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    command += ["--micro-batch", str(options.micro_batch)]
    command += ["--sequence-length", str(options.sequence_length)]
    command += ["--device", options.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return numbers(what, command, environment)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, dict[str, Any]]], list[float]]:
    """All rounds: the numbers of each entry, and the matmul peaks measured between them."""
    rounds, peaks = [], []
    for number in range(options.rounds):
        peaks.append(run_turn("matmul", options)["flops_per_second"])
        results = {}
        for entry in order(options.entries, number):
            results[entry] = run_turn(RUNS[entry], options)
            speed = results[entry]["tokens_per_second"]
            print(f"round {number + 1}/{options.rounds} {entry}: {speed:.0f} tokens/s", file=sys.stderr)
        rounds.append(results)
    return rounds, peaks


def summary(rounds: list[dict[str, dict[str, Any]]], peaks: list[float], reference: str) -> dict[str, Any]:
    """Medians of each entry, and its ratios to the reference."""
    peak = median(peaks)
    entries = {}
    for entry in rounds[0]:
        speeds = [results[entry]["tokens_per_second"] for results in rounds]
        entries[entry] = {
            "tokens_per_second": median(speeds),
            "spread": spread(speeds),
            "memory_bytes": median(results[entry]["memory_bytes"] for results in rounds),
            "fraction_of_peak": median(results[entry]["flops_per_second"] for results in rounds) / peak,
        }
        for field in ("tokens_per_second", "memory_bytes"):
            values = [{name: result[field] for name, result in results.items()} for results in rounds]
            entries[entry][f"{field}_ratio"] = pairwise_ratio(values, entry, reference)
    return {"matmul_peak_flops": peak, "entries": entries}


def printed(result: dict[str, Any], reference: str) -> str:
    """The summary for people."""
    header = [
        "",
        "tokens/s",
        "spread",
        "of peak",
        "peak memory",
        f"speed / {reference}",
        f"memory / {reference}",
    ]
    rows = [
        [
            entry,
            f"{values['tokens_per_second']:.0f}",
            f"{values['spread']:.1%}",
            f"{values['fraction_of_peak']:.1%}",
            f"{values['memory_bytes'] / 2**20:.0f} MiB",
            f"{values['tokens_per_second_ratio']:.3f}",
            f"{values['memory_bytes_ratio']:.3f}",
        ]
        for entry, values in result["entries"].items()
    ]
    peak = f"matmul peak {result['matmul_peak_flops'] / 1e9:.1f} GFLOP/s"
    return f"{table(header, rows)}\n{peak}"


def machine() -> dict[str, Any]:
    libraries = ("torch", "deepspeed", "transformers", "numpy")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{library: version(library) for library in libraries},
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="updates of a turn that are not timed")
    parser.add_argument("--steps", type=int, default=4, help="updates of a turn that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--model", choices=["fixed", "long", "billion", "smoke"], default="fixed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument(
        "--entries", nargs="+", choices=RUNS, default=["run", "engine", "module", "peer_compiled", "control"]
    )
    parser.add_argument("--reference", choices=RUNS, default="peer_compiled")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    if options.reference not in options.entries:
        parser.error(f"--reference {options.reference} is not among --entries {' '.join(options.entries)}")
    rounds, peaks = measure(options)
    result = summary(rounds, peaks, options.reference)
    print(printed(result, options.reference))
    whole = json.dumps({"machine": machine(), "settings": vars(options), **result, "rounds": rounds})
    print(whole)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(whole + "\n")


if __name__ == "__main__":
    main()
