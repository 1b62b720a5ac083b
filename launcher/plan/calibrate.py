"""The figures of this machine's CPU, from measurements of about a second."""

import time
from collections.abc import Callable

import psutil
import torch

from launcher.hardware import Machine

SIZE = 1024  # of the square matrices
COPY_BYTES = 64 << 20
SECONDS = 0.25  # of each measurement


def calibrated(processes: int) -> Machine:
    """One process of so many on this machine, which share its cores, memory and bandwidth."""
    copies = copy_rate() / processes
    bf16, fp32 = (product_rate(dtype) / processes for dtype in (torch.bfloat16, torch.float32))
    return Machine(
        name=f"this CPU ({psutil.cpu_count()} threads, measured)",
        bf16_flops=bf16,
        fp32_flops=fp32,
        memory_bytes=float(psutil.virtual_memory().total // processes),
        memory_bytes_per_second=copies,
        node_gpus=processes,
        node_bytes_per_second=copies / 4,  # gloo copies what it sends and what it receives
        network_bytes_per_second=copies / 4,
        matmul_efficiency=1.0,  # measured, not promised
        attention_efficiency=0.5,
        memory_efficiency=1.0,
        link_efficiency=1.0,
        price_per_gpu_hour=0.0,
    )


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices."""
    a, b = (torch.ones(SIZE, SIZE, dtype=dtype) for _ in range(2))
    return 2.0 * SIZE**3 / seconds_of(lambda: torch.mm(a, b))


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / seconds_of(lambda: target.copy_(source))


def seconds_of(work: Callable[[], object]) -> float:
    """The best of the runs that SECONDS allow, at least two; the first warms up."""
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
