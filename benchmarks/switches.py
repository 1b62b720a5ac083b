"""What each switch costs and saves: peak memory and speed of the engine, a fresh process each.

`python -m benchmarks.switches [--precision bf16]` prints a table in Markdown and, as its last line, JSON.
"""

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.compare import table
from benchmarks.process import numbers

SWITCHES: dict[str, dict[str, str]] = {
    "as it comes": {},
    "kernels.compile=block": {"compile": "block"},
    "kernels.head=whole": {"head": "whole"},
    "kernels.attention=sdpa": {"attention": "sdpa"},
    "kernels.attention=whole": {"attention": "whole"},
    "parallel.recompute=attention": {"recompute": "attention"},
    "parallel.recompute=block": {"recompute": "block"},
    "parallel.recompute=block, every 2": {"recompute": "block", "recompute_every": "2"},
    "recompute=block, compile=block": {"recompute": "block", "compile": "block"},
}
ONLY_16_BIT = {"kernels.products=native": {"products": "native"}}


def turn(switch: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.turn", "engine", "--precision", options.precision]
    command += ["--model", options.model, "--steps", str(options.steps), "--switches", json.dumps(switch)]
    command += ["--sequence-length", str(options.sequence_length), "--micro-batch", str(options.micro_batch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return numbers(str(switch), command, environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--model", choices=["fixed", "long", "smoke"], default="fixed")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    switches = SWITCHES | (ONLY_16_BIT if options.precision == "bf16" else {})
    found = {}
    for name, switch in switches.items():
        found[name] = turn(switch, options)
        print(f"{name}: {found[name]['memory_bytes'] / 2**20:.0f} MiB", file=sys.stderr)
    first = found["as it comes"]
    rows = [
        [
            name,
            f"{one['memory_bytes'] / 2**20:,.0f}",
            f"{one['memory_bytes'] / first['memory_bytes']:.2f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['losses'][-1]:.4f}",
        ]
        for name, one in found.items()
    ]
    print(table(["switch", "peak MiB", "against the first", "tokens/s", "last loss"], rows))
    print(json.dumps({"settings": vars(options), "switches": found}))


if __name__ == "__main__":
    main()
