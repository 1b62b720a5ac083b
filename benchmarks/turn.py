"""One turn of the training benchmark in a process of its own; its last line is a JSON object.

See entries.py and peers.py for what the entries are; matmul: the peak of this machine.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.entries import BUILDERS
from benchmarks.run_turn import train
from benchmarks.shapes import BATCHES, MODELS, Shape, batches
from megamodel.accounting import flops_per_token, parameter_count


def memory_bytes(field: str) -> int:
    """A field of this process's memory as the kernel counts it: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; the benchmark needs Linux")


def more(options: argparse.Namespace) -> dict[str, Any]:
    """Switches, where they are given: for the engine only."""
    return {} if options.switches is None else {"switches": json.loads(options.switches)}


def rehearse(options: argparse.Namespace) -> int:
    """One update of the smallest model, so that every library is loaded; then the memory all that takes.

    What was compiled is forgotten: with it, the sequence length would be taken for one that changes. A GPU's
    memory is counted by its allocator, which knows of no libraries.
    """
    if options.device == "cuda":
        return settle(torch.device("cuda"))
    shape = replace(shape_of(options), model=MODELS["smoke"])
    step, _ = BUILDERS[options.entry](shape, **more(options))
    step(batches(shape.model, shape.rows, 32)[0])
    del step
    torch._dynamo.reset()
    return settle(shape.device)


def shape_of(options: argparse.Namespace) -> Shape:
    device = torch.device(options.device)
    return Shape(MODELS[options.model], options.micro_batch, options.precision, device)


def settle(device: torch.device) -> int:
    """The memory that is left after what is not used is freed; the peak is counted from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    return memory_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most memory since `settle`: of a CPU the process's, of a GPU the allocator's."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else memory_bytes("VmHWM")


def training_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Time whole updates; memory is the process's peak beyond what it had after its imports."""
    shape = shape_of(options)
    model, imported = shape.model, rehearse(options)
    step, parameters = BUILDERS[options.entry](shape, **more(options))
    if parameters != parameter_count(model):
        raise ValueError(f"{options.entry} has {parameters} parameters, not {parameter_count(model)}")
    feed = batches(model, options.micro_batch, options.sequence_length)
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        begin = time.perf_counter()
        losses.append(step(feed[number % BATCHES]))
        seconds.append(time.perf_counter() - begin)
    return told_of(options, seconds, losses, imported)


def told_of(
    options: argparse.Namespace, seconds: list[float], losses: list[float], imported: int
) -> dict[str, Any]:
    """What a turn prints of its updates; the first ones are not timed."""
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"{options.entry}: a loss is not finite: {losses}")
    timed = statistics.median(seconds[options.warmup :])
    tokens_per_second = options.micro_batch * options.sequence_length / timed
    flops = flops_per_token(MODELS[options.model], options.sequence_length).training
    return {
        "tokens_per_second": tokens_per_second,
        "flops_per_second": tokens_per_second * flops,
        "memory_bytes": peak_bytes(torch.device(options.device)) - imported,
        "step_seconds": seconds[options.warmup :],
        "losses": losses,
    }


def run_turn(options: argparse.Namespace) -> dict[str, Any]:
    """The same of the command `train`, seconds from one line of metrics.jsonl to the next."""
    model, shape = MODELS[options.model], {"rows": options.micro_batch, "precision": options.precision}
    with TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, "rehearsal", MODELS["smoke"], length=32, steps=2, **shape)
        torch._dynamo.reset()
        imported = settle(torch.device(options.device))
        steps = options.warmup + options.steps
        lines = train(folder, "run", model, length=options.sequence_length, steps=steps, **shape)
    told = [line["time/wall"] for line in lines]
    seconds = [after - before for before, after in itertools.pairwise(told)]
    losses = [line["loss/train"] for line in lines]
    return told_of(options, [math.nan, *seconds], losses, imported)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_turn(options: argparse.Namespace) -> dict[str, Any]:
    """The best of several square products: what this machine reaches at most, in FLOP/s."""
    device = torch.device(options.device)
    size = 256 if options.model == "smoke" else 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    best = math.inf
    for _ in range(15):
        synchronise(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        synchronise(device)
        best = min(best, time.perf_counter() - begin)
    return {"flops_per_second": 2 * size**3 / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry", choices=["matmul", "run", *BUILDERS])
    parser.add_argument("--model", choices=MODELS, default="fixed")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--switches", help="JSON of settings of kernels, recompute and recompute_every")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turn = {"matmul": matmul_turn, "run": run_turn}.get(options.entry, training_turn)
    print(json.dumps(turn(options)))


if __name__ == "__main__":
    main()
