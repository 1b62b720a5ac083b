"""All that is to be seen of one GPU, in less than eight minutes: `python -m benchmarks.gpu --out DIRECTORY`.

The GPU's tests; the kernels against their memory floor; and a step of a 1.1B model in bf16 at a sequence
length of 4096, ours against transformers and, where it is installed, torchtitan, with the share of the
measured matmul peak. Each part has its share of the time and its own file, and is told as failed where it
fails; what was done until then stays. To reach: 1.1 x torchtitan compiled, 60 % of the peak.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take."""

    name: str
    arguments: list[str]
    seconds: int


def parts(out: Path, *, small: bool) -> list[Part]:
    """What is run; small: on a CPU, to see that it all runs."""
    tests = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    kernels = ["benchmarks.kernels", "--rounds", "1" if small else "3", "--json", str(out / "kernels.json")]
    training = ["benchmarks.training", "--precision", "bf16", "--rounds", "1" if small else "2"]
    training += ["--json", str(out / "training.json"), "--reference", "peer_compiled", "--entries"]
    training += ["engine", "module", "peer_compiled"]
    if importlib.util.find_spec("torchtitan") is not None:
        training += ["torchtitan"]
    training += ["--device", "cpu" if small else "cuda", "--model", "smoke" if small else "billion"]
    shape = ("32", "2", "1", "1") if small else ("4096", "4", "3", "6")
    for flag, value in zip(("sequence-length", "micro-batch", "warmup", "steps"), shape, strict=True):
        training += [f"--{flag}", value]
    return [Part("tests", tests, 120), Part("kernels", kernels, 90), Part("training", training, 260)]


def carried_out(part: Part, out: Path) -> dict[str, object]:
    """How a part went; what it printed is in a file of its name."""
    begin = time.perf_counter()
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        try:
            command = [sys.executable, "-m", *part.arguments]
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=part.seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    said = "stopped: its time was over" if code is None else "done" if code == 0 else f"failed with {code}"
    seconds = time.perf_counter() - begin
    print(f"{part.name}: {said}, {seconds:.0f} s", flush=True)
    print("".join((out / f"{part.name}.log").read_text(encoding="utf-8").splitlines(keepends=True)[-25:]))
    return {"part": part.name, "result": said, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory of the results")
    parser.add_argument("--small", action="store_true", help="everything tiny and on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    done = [carried_out(part, options.out) for part in parts(options.out.resolve(), small=options.small)]
    (options.out / "parts.json").write_text(json.dumps(done), encoding="utf-8")
    print(json.dumps(done))


if __name__ == "__main__":
    main()
