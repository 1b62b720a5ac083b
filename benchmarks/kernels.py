"""Kernels against their memory floor: `python -m benchmarks.kernels`.

Each operation moves a known number of bytes: its inputs read once, its results written once. Here is how many
bytes a second that makes, forward and backward, beside a plain copy of the same number of bytes in the same
round: 100 % is what no kernel that reads from memory can beat. Backends: the definition in plain torch
(`eager`), the same under torch.compile (`compiled`, where a C++ compiler or a GPU is), `triton` (on a GPU).
Rounds are interleaved and begin at another entry each time; numbers are medians. The last line is JSON.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare import order, pairwise_ratio, spread, table
from megamodel.kernels import reference

Kernels = Any  # what has the functions of megamodel.kernels.reference
Call = Callable[[Kernels], Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """One operation on tensors of one size."""

    name: str
    call: Call  # kernels -> function of the inputs
    inputs: tuple[Tensor, ...]
    moved: tuple[int, int | None]  # bytes forward and backward; None: nothing to go back through


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    inner: int
    heads: int
    head_width: int
    vocabulary: int
    vocabulary_rows: int


SIZES = {
    "cpu": Sizes(2048, 512, 1376, 8, 64, 32000, 256),  # the training benchmark's step
    "cuda": Sizes(16384, 4096, 14336, 32, 128, 128256, 4096),
}
NORM = {"eps": 1e-5, "offset": 0.0, "rounds_first": True}


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def norm_cases(sizes: Sizes, make: Callable[..., Tensor]) -> list[Case]:
    """x is read and y written; back: x and dy read, dx written; the residual comes and goes on top."""
    x, residual, gain = make(sizes.rows, sizes.width), make(sizes.rows, sizes.width), make(sizes.width)
    whole = size(x)

    def norm(kind: str, bias: Tensor | None) -> Call:
        return lambda kernels: lambda x, w: kernels.norm(x, w, bias, kind=kind, **NORM)

    def add_norm(kernels: Kernels) -> Callable[..., Any]:
        return lambda x, r, w: kernels.add_norm(x, r, w, None, kind="rmsnorm", **NORM)

    return [
        Case("rmsnorm", norm("rmsnorm", None), (x, gain), (2 * whole, 3 * whole)),
        Case("layernorm", norm("layernorm", make(sizes.width).detach()), (x, gain), (2 * whole, 3 * whole)),
        Case("add + rmsnorm", add_norm, (x, residual, gain), (4 * whole, 4 * whole)),
    ]


def rotate_cases(sizes: Sizes, make: Callable[..., Tensor]) -> list[Case]:
    x = make(1, sizes.rows, sizes.heads, sizes.head_width)
    gain, angle = make(sizes.head_width), make(1, sizes.rows, sizes.head_width // 2).detach().float()
    cos, sin = angle.cos(), angle.sin()
    whole, tables = size(x), size(cos, sin)

    def rotate(interleaved: bool) -> Call:
        return lambda kernels: lambda x: kernels.rotate(x, cos, sin, interleaved=interleaved)

    def both(kernels: Kernels) -> Callable[..., Any]:
        return lambda x, w: kernels.norm_rotate(
            x, w, None, cos, sin, kind="rmsnorm", interleaved=False, **NORM
        )

    once, twice = 2 * whole + tables, 3 * whole + tables
    return [
        Case("rotate half", rotate(False), (x,), (once, once)),
        Case("rotate interleaved", rotate(True), (x,), (once, once)),
        Case("norm + rotate", both, (x, gain), (once, twice)),
    ]


def gate_cases(sizes: Sizes, make: Callable[..., Tensor]) -> list[Case]:
    gate, up = make(sizes.rows, sizes.inner), make(sizes.rows, sizes.inner)

    def gated(kernels: Kernels) -> Callable[..., Any]:
        return lambda gate, up: kernels.gate(gate, up, activation="silu")

    def activated(kernels: Kernels) -> Callable[..., Any]:
        return lambda x: kernels.activate(x, activation="gelu_tanh")

    return [
        Case("swiglu", gated, (gate, up), (3 * size(gate), 5 * size(gate))),
        Case("gelu_tanh", activated, (gate,), (2 * size(gate), 3 * size(gate))),
    ]


def entropy_cases(sizes: Sizes, make: Callable[..., Tensor]) -> list[Case]:
    """Logits are read once for their sums, and once more to be replaced by their gradient."""
    rows = sizes.vocabulary_rows
    logits = make(rows, sizes.vocabulary).detach()
    targets = torch.arange(rows, device=logits.device)
    log_z, ones = logits.float().logsumexp(1), torch.full((rows,), 1.0, device=logits.device)
    work = logits.clone()  # the kernel's gradient lies in it then, whose values cost the same to read

    def sums(kernels: Kernels) -> Callable[..., Any]:
        return lambda: kernels.entropy(logits, targets, start=0)

    def gradient(kernels: Kernels) -> Callable[..., Any]:
        return lambda: kernels.entropy_gradient(
            work, targets, log_z, ones, 1e-4 * ones, start=0, softcap=None
        )

    return [
        Case("entropy", sums, (), (size(logits), None)),
        Case("entropy gradient", gradient, (), (2 * size(logits), None)),
    ]


def lecture_cases(make: Callable[..., Tensor]) -> list[Case]:
    """LayerNorm and RMSNorm at (8, 512, 512): torch's own functions, whatever the backend."""
    x, gain, bias = make(8, 512, 512), make(512), make(512)

    def layer(_: Kernels) -> Callable[..., Any]:
        return lambda x, w, b: torch.nn.functional.layer_norm(x, (512,), w, b)

    def rms(_: Kernels) -> Callable[..., Any]:
        return lambda x, w: torch.nn.functional.rms_norm(x, (512,), w, 1e-5)

    moved = 2 * size(x), 3 * size(x)
    return [Case("layernorm (8, 512, 512)", layer, (x, gain, bias), moved),
            Case("rmsnorm (8, 512, 512)", rms, (x, gain), moved)]  # fmt: skip


def backends(device: torch.device, asked: Sequence[str]) -> dict[str, Kernels]:
    """The asked ones that can run here; the others are named with the reason."""
    found: dict[str, Kernels] = {}
    for name in asked:
        if (
            name == "compiled"
            and device.type == "cpu"
            and not (shutil.which("g++") or shutil.which("clang++"))
        ):
            print("compiled: left out, there is no C++ compiler", file=sys.stderr)
        elif name == "triton" and (device.type != "cuda" or find_spec("triton") is None):
            print("triton: left out, it needs a GPU and the triton package", file=sys.stderr)
        else:
            found[name] = triton_kernels() if name == "triton" else reference
    return found


def triton_kernels() -> Kernels:
    from megamodel.kernels import triton_entropy, triton_gate, triton_norm, triton_rotate

    modules = (triton_norm, triton_rotate, triton_gate, triton_entropy)
    names = "norm add_norm rotate norm_rotate gate activate entropy entropy_gradient".split()
    found = {name: getattr(m, name) for m in modules for name in names if hasattr(m, name)}
    assert len(found) == len(names)
    return SimpleNamespace(**found)


class Clock:
    """Seconds of a call, the device's own time on a GPU; the fastest of some calls in a row."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        # Larger than any cache: what a call reads has to come from memory.
        self.sweep = torch.empty((256 if self.cuda else 64) << 18, device=device)

    def seconds(self, call: Callable[[], Any], repeats: int = 5) -> float:
        return min(self._once(call) for _ in range(repeats))

    def _once(self, call: Callable[[], Any]) -> float:
        self.sweep.zero_()
        if not self.cuda:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        torch.cuda._sleep(2_000_000)  # cycles: the host is ahead when the first event comes
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000


class Entry:
    """One case on one backend, ready to be timed."""

    def __init__(self, case: Case, backend: str, kernels: Kernels) -> None:
        function = case.call(kernels)
        self.function = torch.compile(function, dynamic=False) if backend == "compiled" else function
        self.inputs = case.inputs
        self.back = case.moved[1] is not None

    def forward(self) -> Any:
        with torch.set_grad_enabled(self.back):
            return self.function(*self.inputs)

    def turn(self, clock: Clock) -> tuple[float, float | None]:
        """Seconds forward and backward."""
        results = self.forward()
        forward = clock.seconds(self.forward)
        if not self.back:
            return forward, None
        results = (results,) if isinstance(results, Tensor) else results
        upstream = [torch.ones_like(r) for r in results]
        backward = clock.seconds(
            lambda: torch.autograd.grad(results, self.inputs, upstream, retain_graph=True)
        )
        return forward, backward


def copy_seconds(clock: Clock, moved: int, device: torch.device) -> float:
    """A copy that reads and writes `moved` bytes together."""
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    return clock.seconds(lambda: target.copy_(source))


def measure(cases: list[Case], kernels: dict[str, Kernels], device: torch.device, rounds: int) -> Any:
    """Rounds of {case: {entry: (forward, backward)}}, where one entry is the copy."""
    clock = Clock(device)
    entries = {(c.name, b): Entry(c, b, k) for c in cases for b, k in kernels.items()}
    for number, ((case, backend), entry) in enumerate(entries.items(), 1):
        entry.turn(clock)  # compiles, and finds pages for the results
        print(f"ready {number}/{len(entries)}: {case}, {backend}", file=sys.stderr)
    found = []
    for number in range(rounds):
        results: dict[str, dict[str, tuple[float, float | None]]] = {}
        for case in cases:
            copies = [m and copy_seconds(clock, m, device) for m in case.moved]
            turns = {b: entries[case.name, b].turn(clock) for b in order(list(kernels), number)}
            results[case.name] = turns | {"copy": (copies[0], copies[1])}
        found.append(results)
        print(f"round {number + 1}/{rounds}", file=sys.stderr)
    return found


def summary(cases: list[Case], rounds: Any) -> dict[str, Any]:
    """Case -> pass -> entry -> bytes a second, its spread, and its part of the copy's."""
    result: dict[str, Any] = {}
    for case in cases:
        for way, (name, moved) in enumerate(zip(("forward", "backward"), case.moved, strict=True)):
            if moved is None:
                continue
            seconds = [{entry: t[way] for entry, t in r[case.name].items()} for r in rounds]
            result.setdefault(case.name, {})[name] = {
                entry: {
                    "bytes_per_second": moved / median(s[entry] for s in seconds),
                    "spread": spread([s[entry] for s in seconds]),
                    "of_copy": pairwise_ratio(seconds, "copy", entry),
                }
                for entry in seconds[0]
            }
    return result


def printed(result: dict[str, Any], kernels: Sequence[str]) -> str:
    rows = []
    for case, passes in result.items():
        for name, entries in passes.items():
            cells = [f"{entries['copy']['bytes_per_second'] / 1e9:.1f}"]
            for backend in kernels:
                values = entries[backend]
                cells += [f"{values['bytes_per_second'] / 1e9:.1f}", f"{values['of_copy']:.0%}"]
            rows.append([f"{case}, {name}", *cells])
    header = ["GB/s", "copy", *(cell for backend in kernels for cell in (backend, "of copy"))]
    return table(header, rows)


def lecture(rounds: Any, backend: str) -> dict[str, float]:
    """LayerNorm's time over RMSNorm's, forward and with backward."""
    names = {"layer": "layernorm (8, 512, 512)", "rms": "rmsnorm (8, 512, 512)"}
    forward = [{k: r[n][backend][0] for k, n in names.items()} for r in rounds]
    whole = [{k: sum(r[n][backend]) for k, n in names.items()} for r in rounds]
    return {
        "forward": pairwise_ratio(forward, "layer", "rms"),
        "forward_and_backward": pairwise_ratio(whole, "layer", "rms"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--backends", nargs="+", default=["eager", "compiled", "triton"],
                        choices=["eager", "compiled", "triton"])  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, sizes = torch.device(options.device), SIZES[options.device]
    options.precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    cases = [
        case for build in (norm_cases, rotate_cases, gate_cases, entropy_cases) for case in build(sizes, make)
    ]
    cases += lecture_cases(make)
    kernels = backends(device, options.backends)
    rounds = measure(cases, kernels, device, options.rounds)
    result = summary(cases, rounds)
    ratios = {backend: lecture(rounds, backend) for backend in kernels if backend != "triton"}
    print(printed(result, list(kernels)))
    for backend, values in ratios.items():
        words = ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in values.items())
        print(f"LayerNorm's time / RMSNorm's, (8, 512, 512), {backend}: {words}")
    whole = json.dumps({"settings": vars(options), "cases": result, "layernorm_to_rmsnorm": ratios})
    print(whole)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(whole + "\n")


if __name__ == "__main__":
    main()
