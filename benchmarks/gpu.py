"""All that is to be seen of one GPU, in less than eight minutes: `python -m benchmarks.gpu --out DIRECTORY`.

The GPU's tests; the kernels' tests; the kernels against their memory floor; and a step of a 1.1B model in
bf16 at a sequence length of 4096, ours against transformers and, where it is installed, torchtitan, with the
share of the measured matmul peak. Each part has its share of the time and its own file, and is told as failed
where it fails; what was done until then stays. To reach: 1.1 x torchtitan compiled, 60 % of the peak.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import table

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = ("matmul", "engine", "module", "peer_compiled")


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take."""

    name: str
    arguments: list[str]
    seconds: int


def parts(out: Path, *, small: bool) -> list[Part]:
    """What is run; small: on a CPU, to see that it all runs."""
    pytest = ["pytest", "-q", "-p", "no:cacheprovider"]
    kernels = ["benchmarks.kernels", "--rounds", "1" if small else "2", "--json", str(out / "kernels.json")]
    found = [
        Part("gpu-tests", [*pytest, "-m", "gpu", "tests"], 75),
        Part("kernel-tests", [*pytest, "-m", "not slow", "tests/megamodel/kernels"], 75),
        Part("kernels", kernels, 75),
    ]
    titan = ["torchtitan"] if importlib.util.find_spec("torchtitan") is not None else []
    shape = ("smoke", "32", "2", "1", "1", "cpu") if small else ("billion", "4096", "4", "2", "5", "cuda")
    flags = ("model", "sequence-length", "micro-batch", "warmup", "steps", "device")
    how = [part for flag, value in zip(flags, shape, strict=True) for part in (f"--{flag}", value)]
    how += ["--precision", "bf16", "--threads", str(os.cpu_count() or 1)]
    return found + [Part(name, ["benchmarks.turn", name, *how], 70) for name in (*ENTRIES, *titan)]


def carried_out(part: Part, out: Path) -> dict[str, Any]:
    """How a part went; what it printed is in a file of its name. Nothing of it is left running."""
    begin, path = time.perf_counter(), out / f"{part.name}.log"
    with path.open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", *part.arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "stopped: its time was over" if code is None else "done" if code == 0 else f"failed with {code}"
    seconds = time.perf_counter() - begin
    lines = path.read_text(encoding="utf-8").splitlines()
    print(f"{part.name}: {said}, {seconds:.0f} s", *lines[-25:], sep="\n", flush=True)
    numbers = json.loads(lines[-1]) if code == 0 and lines and lines[-1].startswith("{") else None
    return {"part": part.name, "result": said, "seconds": seconds, "numbers": numbers}


def printed(done: list[dict[str, Any]]) -> str:
    """Speed, memory and share of the peak of each entry that came through."""
    numbers = {part["part"]: part["numbers"] for part in done if part["numbers"]}
    peak = numbers.get("matmul", {}).get("flops_per_second")
    rows = [
        [
            name,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['flops_per_second'] / peak:.1%}" if peak else "?",
            f"{one['memory_bytes'] / 2**30:.1f} GiB",
        ]
        for name, one in numbers.items()
        if "tokens_per_second" in one
    ]
    return table(["", "tokens/s", "of matmul peak", "peak memory"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory of the results")
    parser.add_argument("--small", action="store_true", help="everything tiny and on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    done = []
    for part in parts(options.out.resolve(), small=options.small):
        done.append(carried_out(part, options.out))
        (options.out / "parts.json").write_text(json.dumps(done), encoding="utf-8")
    print(printed(done))
    print(json.dumps([{**part, "numbers": bool(part["numbers"])} for part in done]))


if __name__ == "__main__":
    main()
