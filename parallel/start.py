"""Joining the processes of a run into one group."""

import gc
import importlib
import logging
import os
import warnings
import weakref
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from parallel import heap
from parallel.meeting import meet
from parallel.mesh import Mesh


class Closable(Protocol):
    """What lives no longer than the process group."""

    def close(self) -> None: ...


_living: weakref.WeakSet[Closable] = weakref.WeakSet()


def pick_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This process's device; auto: its GPU, or the CPU where there is none.

    Raises ValueError when there is no GPU for this process and one is wanted.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError("hardware=cuda: there is no GPU here; use hardware=cpu or hardware=auto")
    if local_rank >= count:
        gpus, processes = ("1 GPU", "1 process") if count == 1 else (f"{count} GPUs", f"{count} processes")
        raise ValueError(
            f"this node has {gpus} and its process {local_rank + 1} wants one of its own; start at most "
            f"{processes} a node, or use hardware=cpu"
        )
    return torch.device("cuda", local_rank)


def declare_accelerator(wanted: Literal["auto", "cpu", "cuda"]) -> None:
    """Tell DeepSpeed, before it is imported, that there is nothing but the CPU to use.

    It would look for itself, warn where it finds none, and take a GPU where hardware=cpu asks for none.
    """
    if wanted == "cpu" or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"


def start(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    port: int,
    device: torch.device,
    timeout: timedelta,
    agent_store: bool = False,
) -> str:
    """Initialise the default process group (NCCL on GPUs, gloo on CPU) and DeepSpeed's view of it.

    One process alone needs neither address nor port. agent_store: the store there is the launcher's; else
    rank 0 opens it. Returns the name of this start, for `connect`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        prepare_cpu()
    backend = "nccl" if device.type == "cuda" else "gloo"
    name, store = "", dist.HashStore()
    if world_size > 1:
        serves = rank == 0 and not agent_store
        there = dist.TCPStore(
            address, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        name = meet(there, rank=rank, world_size=world_size, timeout=timeout)
        store = dist.PrefixStore(name, there)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    adopt(local_rank)
    return name


def prepare_cpu() -> None:
    """Settings of this process that make training on a CPU faster."""
    # A trained model makes ever more numbers below 1e-38, with which a CPU computes far slower.
    torch.set_flush_denormal(True)
    heap.keep_freed()


def adopt(local_rank: int) -> None:
    """Let DeepSpeed use the default process group that is already there."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed reads its local rank from here only.
    os.environ["LOCAL_RANK"] = str(local_rank)
    import deepspeed
    import deepspeed.ops

    _without_compiler("deepspeed.runtime.zero.muon.original_muon")

    # It calls collectives by names that newer releases of torch warn of.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its shared-memory collective is compiled with g++ at first use; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)


def _without_compiler(name: str) -> None:
    """Import a module of DeepSpeed whose decorators make torch.compile ready: a second at each start."""
    from deepspeed.runtime import compiler

    compile_ = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        importlib.import_module(name)
    finally:
        compiler.compile = compile_


def connect(address: str, port: int, name: str) -> dist.PrefixStore:
    """A new connection to the store where the processes of the run have met. name: of this start."""
    return dist.PrefixStore(name, dist.TCPStore(address, port, is_master=False))


def wait_for_main(mesh: Mesh, key: str) -> None:
    """Block until the main rank has come here, however long that takes: a group's timeout does not apply."""
    if mesh.world.size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if mesh.is_main:
        store.set(key, "done")
    store.wait([key], timedelta(days=30))


def close_at_stop(engine: Closable) -> None:
    """Have `stop` close it."""
    _living.add(engine)


def stop() -> None:
    """Close what was left open, leave the default process group, and let DeepSpeed forget it."""
    import deepspeed.comm.comm

    for engine in list(_living):
        engine.close()
    _living.clear()
    # A gloo group that something still refers to keeps its threads, which wake a hundred times a second.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
