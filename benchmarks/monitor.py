"""What judging costs a step: python -m benchmarks.monitor.

One process, the fixed model of the training benchmark in fp32. Guarded steps and steps whose judge says yes
at once are taken in turn; both clip, so both need the norm and the one reduction. Beside the ratio of
medians, which noise limits, the seconds inside the judge are measured, with a history as long as it gets. The
last line is JSON.
"""

import argparse
import json
import statistics
import time
from datetime import timedelta

import numpy as np
import torch

from benchmarks.shapes import MODELS, batches
from benchmarks.training import machine
from launcher.guard import Guard
from launcher.monitor import Monitor, Observation, judge
from megamodel.data.batch import Cursor
from megamodel.loss import Loss
from megamodel.model import layers
from megamodel.optim import Optim, adamw
from parallel import start
from parallel.engine import Engine, Signals, accept
from parallel.mesh import build_mesh
from parallel.tensor import TensorParallel


def grown(guard: Guard, attempts: int) -> None:
    """A history of an ordinary run, as long as the windows are and longer."""
    noise = np.random.default_rng(0).normal(0, 0.05, attempts)
    for step, value in enumerate(noise.tolist(), 1):
        seen = Observation(step, 3.0 + 3.0 / step**0.5 + value, 1.0 + abs(value))
        guard.history = judge(guard.history, seen, guard.settings).history


def build(rows: int, name: str) -> Engine:
    model, optim = MODELS[name], Optim(lr=3e-4)
    return Engine(
        layers(model, seed=0, documents=False, parallel=TensorParallel()),
        Loss(z_weight=model.z_loss, consume=True),
        mesh=build_mesh(tp=1, pp=1, device=torch.device("cpu")),
        make_optimizer=lambda module: adamw(module, optim),
        precision="fp32",
        micro_batch=rows,
        accumulation=1,
        clip_norm=optim.clip_norm,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="of each kind")
    parser.add_argument("--model", choices=MODELS, default="fixed")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start.start(
        rank=0,
        world_size=1,
        local_rank=0,
        address="",
        port=0,
        device=torch.device("cpu"),
        timeout=timedelta(seconds=60),
    )
    engine = build(options.micro_batch, options.model)
    feed = batches(MODELS[options.model], options.micro_batch, options.sequence_length)
    guard = Guard(Monitor())
    grown(guard, 3000)
    inside: list[float] = []

    def guarded(signals: Signals) -> bool:
        begin = time.perf_counter()
        answer = guard.judge(signals)
        inside.append(time.perf_counter() - begin)
        return answer

    seconds: dict[str, list[float]] = {"guarded": [], "plain": []}
    for number in range(2 * options.steps + 4):
        name = "guarded" if number % 2 else "plain"
        guard.expect(Cursor(step=3000 + number))
        begin = time.perf_counter()
        engine.train_step(
            [feed[number % len(feed)]],
            lr=1e-5,
            tried=number + 1,
            judge=guarded if name == "guarded" else accept,
        )
        if number >= 4:
            seconds[name].append(time.perf_counter() - begin)
    step = statistics.median(seconds["plain"])
    ratio = statistics.median(seconds["guarded"]) / step
    share = statistics.mean(inside) / step
    judged = 1e6 * statistics.mean(inside)
    print(f"step {step:.3f} s; guarded / plain {ratio:.4f}; {judged:.0f} us in the judge")
    print(f"judging is {share:.4%} of a step")
    print(json.dumps({"machine": machine(), "step_seconds": step, "ratio": ratio, "share": share}))
    start.stop()


if __name__ == "__main__":
    main()
