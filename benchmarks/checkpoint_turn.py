"""One process of one turn of the checkpoint benchmark: python -m benchmarks.checkpoint_turn WHAT ...

Started once for each rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; each rank prints its numbers as
one line of JSON. What is saved is the state of the same engine for all: masters and both moments, in fp32.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.config import Checkpoint
from checkpoints.manager import Manager
from conf.typed import parse
from megamodel.config import Model
from megamodel.data.batch import Cursor
from megamodel.loss import Loss
from megamodel.model import layers
from megamodel.optim import Optim, adamw
from parallel import start
from parallel.engine import Engine
from parallel.mesh import build_mesh
from parallel.tensor import TensorParallel, VocabularyShard

SIZES = {"small": (2, 64, 512), "full": (12, 1024, 32000)}  # layers, width, vocabulary: 0.2 and 196 million
SAVES = 3
COPY_BLOCK_BYTES = 16 * 2**20


def model(size: str) -> Model:
    n_layers, width, vocabulary = SIZES[size]
    return parse(
        Model,
        {
            "vocab_size": vocabulary,
            "d_model": width,
            "n_layers": n_layers,
            "attention": {"n_heads": 16, "n_kv_heads": 16, "head_width": width // 16},
            "feedforward": {"d_ff": 3 * width},
            "tie_embeddings": True,
        },
    )


def build(size: str, *, pp: int) -> Engine:
    settings, mesh = model(size), build_mesh(tp=1, pp=pp, device=torch.device("cpu"))
    engine = Engine(
        layers(settings, seed=1, documents=False, parallel=TensorParallel(mesh.tp)),
        Loss(z_weight=0.0, start=VocabularyShard(settings.vocab_size, mesh.tp).start, group=mesh.tp),
        mesh=mesh,
        make_optimizer=lambda module: adamw(module, Optim()),
        precision="fp32",
        micro_batch=1,
        accumulation=1,
        clip_norm=1.0,
    )
    generator = torch.Generator().manual_seed(mesh.world.rank)
    for item in engine.state():
        if item.kind != "master":
            item.tensor.uniform_(0.0, 1e-3, generator=generator)
    engine.load_done(10)
    return engine


def reset_peak() -> int:
    """Forget the peak of resident memory; what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def saving(
    engine: Engine, save: Callable[[int], None], finish: Callable[[], None]
) -> dict[str, list[float] | float]:
    """Several saves: how long each holds up training, how long until it is complete, host memory on top."""
    stalls, writes, before = [], [], reset_peak()
    for number in range(SAVES):
        dist.barrier()
        begin = time.perf_counter()
        save(number)
        stalls.append(time.perf_counter() - begin)
        finish()
        writes.append(time.perf_counter() - begin)
    size = sum(4 * item.tensor.numel() for item in engine.state() if item.piece.owner)
    return {
        "stall_seconds": stalls,
        "write_seconds": writes,
        "host_bytes": resident("VmHWM") - before,
        "state_bytes": size,
    }


def ours(engine: Engine, directory: Path, *, background: bool) -> dict[str, Any]:
    config = Checkpoint(background=background, keep=1, keep_best=0)
    manager = Manager(directory, config, engine.mesh)
    return saving(
        engine,
        lambda n: void(manager.save(engine, Cursor(attempt=10 + n, step=10 + n), {})),
        manager.wait,
    )


def void(value: Any) -> None:
    del value


def dcp(engine: Engine, directory: Path) -> dict[str, Any]:
    """torch.distributed.checkpoint.async_save of the same tensors, synced to the disk as ours are."""
    import torch.distributed.checkpoint as checkpoint

    rank = dist.get_rank()
    state = {
        f"{item.kind}.{item.piece.name}.{item.flat_start}.{rank}": item.tensor
        for item in engine.state()
        if item.piece.owner
    }
    group = dist.new_group(backend="gloo")
    pending: list[Any] = []

    def save(number: int) -> None:
        writer = checkpoint.FileSystemWriter(directory / str(number), sync_files=True)
        pending.append(checkpoint.async_save(state, storage_writer=writer, process_group=group))

    return saving(engine, save, lambda: void(pending.pop().result()))


def deepspeed(engine: Engine, directory: Path) -> dict[str, Any]:
    inner = engine._engine
    return saving(
        engine, lambda n: void(inner.save_checkpoint(str(directory), tag=f"step{n}")), lambda: os.sync()
    )


def copy(engine: Engine, directory: Path) -> dict[str, Any]:
    """As many bytes from memory into one file a rank, in blocks, synced: what the disk can do."""
    size = sum(4 * item.tensor.numel() for item in engine.state() if item.piece.owner)
    data = memoryview(bytes(COPY_BLOCK_BYTES))
    directory.mkdir(parents=True, exist_ok=True)

    def save(number: int) -> None:
        with open(directory / f"{number}-{dist.get_rank()}", "wb", buffering=0) as file:
            left = size
            while left:
                left -= file.write(data[: min(left, COPY_BLOCK_BYTES)])
            os.fsync(file.fileno())

    return saving(engine, save, lambda: None)


def load_ours(engine: Engine, directory: Path) -> dict[str, Any]:
    """At another layout than saved, straight from the files."""
    manager = Manager(directory, Checkpoint(background=False), engine.mesh)
    dist.barrier()
    before = reset_peak()
    seconds = timed(lambda: void(manager.restore(engine, "auto")))
    return {"load_seconds": seconds, "host_bytes": resident("VmHWM") - before}


def load_deepspeed(engine: Engine, directory: Path) -> dict[str, Any]:
    """DeepSpeed's conversion into its universal format, then its load at the other layout."""
    inner, universal = engine._engine, directory / "universal"
    tag = (directory / "latest").read_text().strip()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(directory / tag), "--output_folder", str(universal)]
    command += ["--num_extract_workers", "2", "--num_merge_workers", "2", "--inject_missing_state"]
    dist.barrier()
    before = reset_peak()
    convert = 0.0
    if dist.get_rank() == 0:
        convert = timed(lambda: void(subprocess.run(command, check=True, stdout=subprocess.DEVNULL)))
    dist.barrier()
    inner._config.load_universal_checkpoint = True
    load = timed(lambda: void(inner.load_checkpoint(str(directory), tag="universal")))
    peak = resident("VmHWM") - before
    return {
        "convert_seconds": convert,
        "only_load_seconds": load,
        "load_seconds": convert + load,
        "host_bytes": peak,
    }


TURNS: dict[str, tuple[int, Callable[[Engine, Path], dict[str, Any]]]] = {  # pipeline stages, what is done
    "ours": (1, lambda engine, directory: ours(engine, directory, background=True)),
    "ours at once": (1, lambda engine, directory: ours(engine, directory, background=False)),
    "async_save": (1, dcp),
    "save_checkpoint": (1, deepspeed),
    "copy": (1, copy),
    "load ours": (2, load_ours),
    "load universal": (2, load_deepspeed),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=TURNS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start.declare_accelerator("cpu")
    torch.set_num_threads(1)
    start.start(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        device=torch.device("cpu"),
        timeout=timedelta(minutes=20),
    )
    stages, turn = TURNS[options.what]
    engine = build(options.size, pp=stages)
    result = turn(engine, options.directory)
    dist.barrier()
    start.stop()
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
