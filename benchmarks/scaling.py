"""Two processes of one thread against one process of two: tokens/s at tp 2, pp 2 and dp 2.

`python -m benchmarks.scaling` prints a table and, as its last line, JSON. The global batch is 4 sequences of
512 tokens everywhere, in 4 micro-batches for pp 2. On a CPU the processes talk through gloo on one machine:
the figures say what splitting costs, not what it brings.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.compare import table
from benchmarks.process import numbers

LAYOUTS = {"one": {}, "tp 2": {"tp": 2}, "tp 2, sequence": {"tp": 2}, "pp 2": {"pp": 2}, "dp 2": {"dp": 2}}
ROWS = 4


def launched(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one layout, from processes of its own."""
    world = 1 if name == "one" else 2
    worker = ["-m", "benchmarks.scaling", "--worker", name, "--precision", options.precision]
    worker += ["--model", options.model, "--steps", str(options.steps), "--length", str(options.length)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    threads = str(options.threads // world)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return numbers(name, [*command, *worker], environment)


def work(name: str, options: argparse.Namespace) -> None:
    """One process: an engine at the layout, timed."""
    import torch
    import torch.distributed as dist

    from benchmarks.entries import forms
    from benchmarks.shapes import MODELS, OPTIM, batches
    from megamodel.choose import chunked, equip
    from megamodel.loss import Loss
    from megamodel.model import layers
    from megamodel.optim import adamw
    from parallel import start
    from parallel.config import Parallel
    from parallel.engine import Engine
    from parallel.mesh import build_mesh
    from parallel.tensor import TensorParallel, VocabularyShard

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    start.adopt(int(os.environ["LOCAL_RANK"]))
    sizes = LAYOUTS[name]
    mesh = build_mesh(tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), device=torch.device("cpu"))
    model, (choices, settings) = MODELS[options.model], forms(options.precision)
    micro = 1 if mesh.pp.size > 1 else ROWS // mesh.dp.size
    accumulation = ROWS // (micro * mesh.dp.size)
    engine = Engine(
        layers(
            model,
            seed=0,
            documents=False,
            parallel=TensorParallel(mesh.tp, sequence="sequence" in name),
            equip=lambda part: equip(part, choices),
        ),
        Loss(
            z_weight=model.z_loss,
            start=VocabularyShard(model.vocab_size, mesh.tp).start,
            group=mesh.tp,
            consume=True,
            chunked=chunked(choices, settings),
        ),
        mesh=mesh,
        make_optimizer=lambda module: adamw(module, OPTIM),
        precision=options.precision,
        micro_batch=micro,
        accumulation=accumulation,
        clip_norm=OPTIM.clip_norm,
        bucket_bytes=Parallel().bucket_bytes,
    )
    feed, seconds = batches(model, micro, options.length), []
    for number in range(2 + options.steps):
        begin = time.perf_counter()
        given = [feed[(number + m) % len(feed)] for m in range(accumulation)]
        engine.train_step(given, lr=OPTIM.lr, tried=number + 1)
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps({"tokens_per_second": ROWS * options.length / statistics.median(seconds[2:])}))
    start.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--model", choices=["fixed", "long", "smoke"], default="fixed")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    found = {name: launched(name, options)["tokens_per_second"] for name in LAYOUTS}
    rows = [[name, f"{speed:.0f}", f"{speed / found['one']:.2f}"] for name, speed in found.items()]
    print(table(["layout", "tokens/s", "against one process"], rows))
    print(json.dumps({"settings": vars(options), "tokens_per_second": found}))


if __name__ == "__main__":
    main()
