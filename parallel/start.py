"""Joining the processes of a run into one group."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def pick_device(local_rank: int) -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def start(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    port: int,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Initialise the default process group (NCCL on GPUs, gloo on CPU) and DeepSpeed's view of it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    adopt(local_rank)


def adopt(local_rank: int) -> None:
    """Let DeepSpeed use the default process group that is already there."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed reads its local rank from here only.
    os.environ["LOCAL_RANK"] = str(local_rank)
    import deepspeed
    import deepspeed.ops

    # Its shared-memory collective is compiled with g++ at first use; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)


def stop() -> None:
    """Leave the default process group, and let DeepSpeed forget it."""
    import deepspeed.comm.comm

    if dist.is_initialized():
        dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
