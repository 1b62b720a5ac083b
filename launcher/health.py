"""What is wrong with the machines of a run, from facts that its processes have gathered: pure functions."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Verdict = Literal["ok", "warn", "fail"]
SKEW_SECONDS = 2.0  # beyond it the logs of two nodes cannot be laid side by side
MASTER_BYTES = 12  # of a parameter in a checkpoint: fp32 master and two moments


class Placed(Protocol):
    """A rank and where it is."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...


@dataclass(frozen=True)
class Facts:
    """Of one process. speeds: of the group of each axis, in bytes a second; wrong: `tp bf16 all-reduce`."""

    rank: int
    host: str
    local_size: int
    versions: dict[str, str]
    forms: dict[str, str]  # operation -> its form
    clock: float  # of time.time(), all taken after one barrier
    free_bytes: int
    device: str
    devices: int  # of this node; 0: the CPU
    groups: dict[str, list[int]]  # axis -> global ranks
    speeds: dict[str, float] = field(default_factory=dict)
    pair_bytes_per_second: float | None = None
    flops: float | None = None
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    verdict: Verdict
    found: str
    way_out: str = ""


def examine(facts: Sequence[Facts], *, parameters: int, slow_factor: float) -> list[Row]:
    """Every check. facts: of all ranks, in rank order; slow_factor: below so much of the median is slow."""
    return [
        *versions(facts),
        *kernels(facts),
        clocks(facts),
        disk(facts, parameters * MASTER_BYTES),
        *devices(facts),
        placement(facts),
        collectives(facts),
        *group_speeds(facts, slow_factor),
        *rank_speeds(facts, slow_factor),
    ]


def named(placed: Sequence[Placed], ranks: Sequence[int]) -> str:
    """`rank 3 (host)`, `ranks 0-3 (a), 4 (b)`."""
    hosts = {one.rank: one.host for one in placed}
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        parts.append(f"{spans([rank for rank in ranks if hosts[rank] == host])} ({host})")
    shown = ", ".join(parts[:6]) + (f" and {len(parts) - 6} hosts more" if len(parts) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def spans(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 is `0-2, 5`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def unequal(ranks: Sequence[Placed], values: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """(name, `torch is 2.13, but 2.11 on rank 5 (b)`) of what is not the same on all. values: one a rank."""
    for name in dict.fromkeys(name for one in values for name in one):
        found: dict[str, list[int]] = {}
        for rank, one in zip(ranks, values, strict=True):
            found.setdefault(one.get(name, "missing"), []).append(rank.rank)
        if len(found) > 1:
            common = max(found, key=lambda value: len(found[value]))
            odd = "; ".join(f"{v} on {named(ranks, r)}" for v, r in found.items() if v != common)
            yield name, f"{name} is {common}, but {odd}"


def versions(facts: Sequence[Facts]) -> Iterator[Row]:
    """Equal on all ranks: another version computes otherwise, or speaks another protocol."""
    odd = [what for _, what in unequal(facts, [one.versions for one in facts])]
    for what in odd:
        yield Row("versions", "fail", what, "install the same environment on all nodes")
    if not odd:
        yield Row("versions", "ok", ", ".join(f"{k} {v}" for k, v in facts[0].versions.items()))


def kernels(facts: Sequence[Facts]) -> Iterator[Row]:
    """Equal on all ranks: what is held twice would drift apart."""
    odd = [what for _, what in unequal(facts, [one.forms for one in facts])]
    for what in odd:
        way_out = "`python -m launcher kernels` says why on each; kernels.OPERATION=FORM names one for all"
        yield Row("kernels", "fail", what, way_out)
    if not odd:
        yield Row("kernels", "ok", ", ".join(f"{name} {form}" for name, form in facts[0].forms.items()))


def clocks(facts: Sequence[Facts]) -> Row:
    middle = statistics.median(one.clock for one in facts)
    far = max(facts, key=lambda one: abs(one.clock - middle))
    skew = abs(far.clock - middle)
    if skew <= SKEW_SECONDS:
        return Row("clocks", "ok", f"within {skew:.2f} s")
    found = f"{named(facts, [far.rank])} is {far.clock - middle:+.1f} s off the median"
    return Row("clocks", "warn", found, "start chronyd or another time service there; logs will not line up")


def disk(facts: Sequence[Facts], checkpoint_bytes: int) -> Row:
    least = min(facts, key=lambda one: one.free_bytes)
    found = f"{_bytes(least.free_bytes)} free at run.dir, a checkpoint takes {_bytes(checkpoint_bytes)}"
    if least.free_bytes >= 3 * checkpoint_bytes:
        return Row("disk", "ok", found)
    verdict = "fail" if least.free_bytes < checkpoint_bytes else "warn"
    return Row("disk", verdict, f"{named(facts, [least.rank])}: {found}", "free some, or another run.dir")


def devices(facts: Sequence[Facts]) -> Iterator[Row]:
    kinds: dict[str, list[int]] = {}
    for one in facts:
        kinds.setdefault(one.device, []).append(one.rank)
    few = [one for one in facts if one.devices and one.devices < one.local_size]
    for one in few[:1]:
        found = f"{named(facts, [one.rank])} sees {one.devices} GPUs for {one.local_size} processes"
        yield Row("devices", "fail", found, "start as many processes a node as it has GPUs")
    if len(kinds) > 1:
        found = "; ".join(f"{kind} on {named(facts, ranks)}" for kind, ranks in kinds.items())
        yield Row("devices", "warn", found, "all wait for the slowest kind; give each kind its own run")
    elif not few:
        nodes = len({one.host for one in facts})
        found = (
            f"{len(facts)} processes on {nodes} node{'s' if nodes > 1 else ''}, each with {facts[0].device}"
        )
        yield Row("devices", "ok", found)


def placement(facts: Sequence[Facts]) -> Row:
    """Tensor parallelism talks several times a layer: within a node, or slow."""
    hosts = {one.rank: one.host for one in facts}
    for one in facts:
        inside = {hosts[rank] for rank in one.groups["tp"]}
        if len(inside) > 1:
            found = f"the tp group of {named(facts, one.groups['tp'])} spans {len(inside)} nodes"
            return Row("layout", "warn", found, "parallel.tp should divide the processes of a node")
    return Row("layout", "ok", "every tp group is within a node")


def collectives(facts: Sequence[Facts]) -> Row:
    bad = [one for one in facts if one.wrong]
    if not bad:
        axes = [axis for axis, ranks in facts[0].groups.items() if len(ranks) > 1]
        return Row("values", "ok", f"right in {', '.join(axes)}" if axes else "one process, nothing to check")
    what = ", ".join(dict.fromkeys(name for one in bad for name in one.wrong))
    found = f"wrong on {named(facts, [one.rank for one in bad])}: {what}"
    way_out = "leave that node out and have its memory, GPU and network card tested"
    return Row("values", "fail", found, way_out)


def group_speeds(facts: Sequence[Facts], slow_factor: float) -> Iterator[Row]:
    """One group of an axis against the others of it. A group is as fast as its ranks say in the median."""
    for axis in facts[0].groups:
        groups: dict[tuple[int, ...], list[float]] = {}
        for one in facts:
            if axis in one.speeds:
                groups.setdefault(tuple(one.groups[axis]), []).append(one.speeds[axis])
        speeds = {ranks: statistics.median(values) for ranks, values in groups.items()}
        if speeds:
            yield _compared(facts, f"all-reduce {axis}", speeds, slow_factor, lambda v: f"{_bytes(v)}/s")


def rank_speeds(facts: Sequence[Facts], slow_factor: float) -> Iterator[Row]:
    """One rank against the others: between two, and alone."""
    pairs = {(f.rank,): f.pair_bytes_per_second for f in facts if f.pair_bytes_per_second is not None}
    alone = {(f.rank,): f.flops for f in facts if f.flops is not None}
    if pairs:
        yield _compared(facts, "transfer", pairs, slow_factor, lambda v: f"{_bytes(v)}/s")
    if alone:
        yield _compared(facts, "matmul", alone, slow_factor, lambda v: f"{v / 1e12:.2f} TFLOP/s")


def _compared(
    facts: Sequence[Facts],
    check: str,
    speeds: Mapping[tuple[int, ...], float],
    slow_factor: float,
    shown: Callable[[float], str],
) -> Row:
    # The upper median: of two the slow one must not hide itself.
    middle = statistics.median_high(speeds.values())
    slow = sorted((v, ranks) for ranks, v in speeds.items() if v < slow_factor * middle)
    if not slow:
        return Row(check, "ok", shown(middle))
    listed = "; ".join(f"{named(facts, ranks)} {shown(v)}" for v, ranks in slow[:4])
    way_out = "look at the links and clocks of that node (nvidia-smi, ibstat), or leave it out"
    return Row(check, "warn", f"{shown(middle)} in the median, but {listed}", way_out)


def _bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
