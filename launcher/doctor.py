"""The command doctor: every process of a run looks at its machine, rank 0 says what is wrong."""

import dataclasses
import json
import os
import platform
import shutil
import socket
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
from torch.cuda import nccl

from conf.typed import config, setting
from launcher.cluster import Placement, placement
from launcher.config import Config, Plan, plan
from launcher.failure import DONE, FAILED
from launcher.forms import by_name, chosen
from launcher.health import Facts, Row, examine
from launcher.joining import join
from launcher.rundirectory import git_state
from megamodel.accounting import parameter_count
from parallel import probe
from parallel.exchange import exchange_over
from parallel.mesh import Mesh, build_mesh
from parallel.start import declare_accelerator, pick_device, stop

REPEATS = 5


@config
class Doctor(Config):
    """A training run that is about to be, and how closely its machines are looked at."""

    slow_factor: float = setting(
        0.7, on_resume="free", help="what is slower than so much of the median is named"
    )
    probe_mib: int | None = setting(
        None, on_resume="free", help="size of the transfers that are timed; null: 64 on GPUs, 1 on CPUs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.slow_factor < 1 or (self.probe_mib is not None and self.probe_mib < 1):
            raise ValueError(
                f"slow_factor ({self.slow_factor}) must be between 0 and 1, probe_mib ({self.probe_mib}) at "
                "least 1, or null"
            )


def doctor(tree: Doctor) -> int:
    """Run on every process of the run, started as it would be; 1 when something failed. Writes nothing."""
    place = placement(os.environ)
    declare_accelerator(tree.hardware.device)
    device = pick_device(tree.hardware.device, place.local_rank)
    settled = plan(tree, world_size=place.world_size, cuda=device.type == "cuda")
    join(place, device, timedelta(seconds=tree.run.timeout_seconds))
    try:
        mesh = build_mesh(tp=tree.parallel.tp, pp=tree.parallel.pp, device=device)
        exchange = exchange_over(mesh.world)
        exchange.everyone(None)
        facts = gather(tree, settled, place, mesh, clock=time.time())
        everyone = [Facts(**values) for values in exchange.everyone(dataclasses.asdict(facts))]
    finally:
        stop()
    rows = examine(everyone, parameters=parameter_count(tree.model), slow_factor=tree.slow_factor)
    if mesh.is_main:
        print(as_json(rows) if tree.format == "json" else as_text(rows))
    return FAILED if any(row.verdict == "fail" for row in rows) else DONE


def gather(tree: Doctor, settled: Plan, place: Placement, mesh: Mesh, *, clock: float) -> Facts:
    """What this process sees and measures. Collective."""
    device = mesh.device
    cuda = device.type == "cuda"
    axes = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp}
    if all(group.size < mesh.world.size for group in axes.values()):
        axes["world"] = mesh.world
    size = (tree.probe_mib or (64 if cuda else 1)) << 20
    wrong = []
    types = {
        "fp32": torch.float32,
        settled.precision: torch.bfloat16 if settled.precision == "bf16" else torch.float32,
    }
    for name, dtype in types.items():
        for axis, group in axes.items():
            wrong += [f"{axis} {name} {what}" for what in probe.wrong_collectives(group, device, dtype)]
        wrong += [f"pp {name} {what}" for what in probe.wrong_transfers(mesh.pp, device, dtype)]
    speeds = {axis: probe.all_reduce_speed(group, device, size, REPEATS) for axis, group in axes.items()}
    dtype = types[settled.precision]
    return Facts(
        rank=place.rank,
        host=socket.gethostname(),
        local_size=place.local_size,
        versions=own_versions(),
        forms=by_name(chosen(settled, device)),
        clock=clock,
        free_bytes=free_bytes(settled.directory),
        device=torch.cuda.get_device_name(device) if cuda else "a CPU",
        devices=torch.cuda.device_count() if cuda else 0,
        groups={axis: list(group.ranks) for axis, group in axes.items()},
        speeds={axis: speed for axis, speed in speeds.items() if speed is not None},
        pair_bytes_per_second=probe.pair_speed(mesh.world, device, size, REPEATS)
        if mesh.world.size > 1
        else None,
        flops=probe.matmul_speed(device, dtype, 4096 if cuda else 256, REPEATS),
        wrong=wrong,
    )


def own_versions() -> dict[str, str]:
    """What must be equal everywhere."""
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "megamodel"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    git = git_state(Path(__file__).resolve().parents[1])
    if git is not None:
        found["source"] = git["commit"][:12] + (f"+{git['changes'][:8]}" if git["changes"] else "")
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def free_bytes(directory: Path) -> int:
    """Of the file system that the directory is on, or will be."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def as_text(rows: list[Row]) -> str:
    """One table; the way out below what is not well."""
    width = max(len(row.check) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.verdict:<4}  {row.check:<{width}}  {row.found}")
        lines += [f"{'':<4}  {'':<{width}}  -> {row.way_out}"] if row.way_out else []
    return "\n".join(lines)


def as_json(rows: list[Row]) -> str:
    """The same for programs."""
    verdicts = [row.verdict for row in rows]
    worst = "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
    return json.dumps({"verdict": worst, "checks": [dataclasses.asdict(row) for row in rows]})
