"""What the machine is: the device to compute on, and its peak where the maker publishes one."""

import re
from typing import Literal

from conf.typed import config, setting

# (pattern in the name that torch reports, dense bf16 FLOP/s, fp32 FLOP/s without TF32), from the makers' data
# sheets; where a sheet gives the number with sparsity, half of it. The first match counts.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    (r"\bA100\b", 312e12, 19.5e12),  # NVIDIA A100 data sheet
    (r"\bH100 PCIe\b", 756e12, 51e12),  # NVIDIA H100 data sheet, PCIe
    (r"\bH100 NVL\b", 835e12, 60e12),  # NVIDIA H100 data sheet, NVL
    (r"\bH100 80GB HBM3\b", 989.4e12, 67e12),  # NVIDIA H100 data sheet, SXM
    (r"\bH200 NVL\b", 835e12, 60e12),  # NVIDIA H200 data sheet, NVL
    (r"\bH200$", 989.4e12, 67e12),  # NVIDIA H200 data sheet, SXM
    (r"\bGH200\b", 989.4e12, 67e12),  # NVIDIA GH200 data sheet
    (r"\bGB200\b", 2.5e15, None),  # NVIDIA GB200 NVL72 data sheet, per GPU
    (r"\bB200\b", 2.25e15, None),  # NVIDIA DGX B200 data sheet, per GPU
    (r"\bL40S\b", 362.05e12, 91.6e12),  # NVIDIA L40S data sheet
    (r"\bMI300X\b", 1307.4e12, 163.4e12),  # AMD Instinct MI300X data sheet
)


@config
class Machine:
    """What the planner knows of a kind of GPU and of the nodes it stands in. Rates are of one GPU.

    Links count one direction. The efficiencies are shares of the data sheet's figure that large, well-formed
    work reaches; `conf/hardware/*.yaml` has the source of each number.
    """

    name: str = setting(on_resume="free", help="what it is called")
    bf16_flops: float = setting(on_resume="free", help="dense 16-bit FLOP/s of the data sheet")
    fp32_flops: float = setting(on_resume="free", help="fp32 FLOP/s of the data sheet, without TF32")
    memory_bytes: float = setting(on_resume="free", help="memory that a process may fill")
    memory_bytes_per_second: float = setting(on_resume="free", help="bandwidth of that memory")
    node_gpus: int = setting(on_resume="free", help="GPUs of a node")
    node_bytes_per_second: float = setting(on_resume="free", help="link to the other GPUs of the node")
    network_bytes_per_second: float = setting(on_resume="free", help="network to other nodes, of each GPU")
    matmul_efficiency: float = setting(on_resume="free", help="share of the peak that large products reach")
    attention_efficiency: float = setting(
        on_resume="free", help="share of the peak that fused attention reaches"
    )
    memory_efficiency: float = setting(0.85, on_resume="free", help="share of the memory's bandwidth reached")
    link_efficiency: float = setting(0.75, on_resume="free", help="share of a link's bandwidth reached")
    price_per_gpu_hour: float = setting(
        on_resume="free", help="price of a GPU-hour, an assumption: set yours"
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith(("_flops", "_bytes", "_per_second")) and not value > 0:
                raise ValueError(f"hardware.machine.{name} ({value}) must be above 0; take the data sheet's")
        if self.node_gpus < 1:
            raise ValueError(f"hardware.machine.node_gpus ({self.node_gpus}) must be at least 1")
        if not self.price_per_gpu_hour >= 0:
            raise ValueError(
                f"hardware.machine.price_per_gpu_hour ({self.price_per_gpu_hour}) must be 0 or more"
            )
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"hardware.machine.{name} ({getattr(self, name)}) is a share: above 0, at most 1"
                )

    def flops(self, precision: Literal["fp32", "bf16"]) -> float:
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


@config
class Hardware:
    """Where a process computes."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", on_resume="free", help="auto: an accelerator where there is one, else the CPU"
    )
    threads: int | None = setting(
        None, on_resume="free", help="CPU threads of each process; null: cores / local processes"
    )
    peak_flops: float | None = setting(
        None,
        on_resume="free",
        help="peak FLOP/s of one device, for MFU; null: from the table of known devices",
    )

    machine: Machine | None = setting(
        None, on_resume="free", help="the figures of a known kind of GPU, for `plan` and MFU; null: unknown"
    )

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"hardware.threads ({self.threads}) must be at least 1, or null")
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise ValueError(f"hardware.peak_flops ({self.peak_flops}) must be above 0, or null")


def known_peak(device_name: str, precision: Literal["fp32", "bf16"]) -> float | None:
    """Published dense peak FLOP/s of a device by the name torch reports; None for one that is not known.

    A slice of a device (MIG) is not the device: None.
    """
    if "MIG" in device_name:
        return None
    for pattern, bf16, fp32 in PEAKS:
        if re.search(pattern, device_name):
            return bf16 if precision == "bf16" else fp32
    return None


def peak_flops(settings: Hardware, device_name: str, precision: Literal["fp32", "bf16"]) -> float | None:
    """Peak FLOP/s of one device: the setting, else the published value, else None (then there is no MFU)."""
    if settings.peak_flops is not None:
        return settings.peak_flops
    return settings.machine.flops(precision) if settings.machine else known_peak(device_name, precision)
