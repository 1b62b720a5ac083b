"""Joining the processes of a command: the place of this one, as torch and DeepSpeed are told of it."""

from datetime import timedelta

import torch

from launcher.cluster import Placement
from parallel.start import start


def join(place: Placement, device: torch.device, timeout: timedelta) -> str:
    """Join the processes that were started together into one group; the name of this start."""
    return start(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        address=place.master_addr,
        port=place.master_port,
        device=device,
        timeout=timeout,
        agent_store=place.agent_store,
    )
