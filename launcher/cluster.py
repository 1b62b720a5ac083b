"""Which process this is, from the variables of whatever started it; a pure function of the environment."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
# Below the range from which Linux takes the ports of outgoing connections (32768 and up).
FIRST_PORT, PORTS = 15000, 17000
SLURM_OWN_STEPS = range(0xFFFFFFF0, 0x100000000)  # the batch script and interactive shells, no srun tasks


@dataclass(frozen=True)
class Placement:
    """One process among all. master_port 0: this process is alone, and any free port will do."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: str = (
        "none"  # torchrun (the deepspeed launcher sets the same variables), slurm, openmpi or none
    )
    agent_store: bool = False  # torchrun's own process holds the store at that port, not rank 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_size):
            raise ValueError(
                f"{self.launcher} says rank {self.rank} of {self.world_size}, local rank {self.local_rank} "
                f"of {self.local_size}; check the variables it sets"
            )


def placement(environment: Mapping[str, str]) -> Placement:
    """The place of this process by the variables of torchrun or deepspeed, Slurm, Open MPI; else it is alone.

    Raises ValueError when the variables contradict each other or one is missing.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if _is_slurm_task(environment):
        return _slurm(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _openmpi(environment)
    return Placement()


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number of the environment; ValueError when it is missing without a default, or no number."""
    text = environment.get(name)
    if text is None or not text.strip():
        if default is None:
            raise ValueError(
                f"the variable {name} is not set; start with torchrun, deepspeed, srun or mpirun"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the variable {name} is {text!r}; it must be a whole number") from None


def _torchrun(environment: Mapping[str, str]) -> Placement:
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    # Without LOCAL_RANK all processes are on one machine, as hand-written launchers have them.
    local_rank = number(environment, "LOCAL_RANK", rank)
    # deepspeed gives the number of local processes under a name of its own.
    local_size = number(environment, "LOCAL_WORLD_SIZE", number(environment, "LOCAL_SIZE", size))
    address, port = environment.get("MASTER_ADDR", LOOPBACK), number(environment, "MASTER_PORT", 0)
    if size > 1 and not port:
        raise ValueError("MASTER_PORT is not set although WORLD_SIZE is; set MASTER_ADDR and MASTER_PORT too")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Placement(rank, size, local_rank, local_size, address, port, "torchrun", agent)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. The batch script has SLURM_PROCID too, but is no task of many."""
    if "SLURM_PROCID" not in environment or not (
        {"SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"} & environment.keys()
    ):
        return False
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    if step is None:
        return environment.get("ENVIRONMENT") != "BATCH"
    return not (step.isdigit() and int(step) in SLURM_OWN_STEPS)


def _slurm(environment: Mapping[str, str]) -> Placement:
    rank = number(environment, "SLURM_PROCID")
    size = number(environment, "SLURM_STEP_NUM_TASKS", number(environment, "SLURM_NTASKS", 0))
    local_rank = number(environment, "SLURM_LOCALID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    nodes = nodes or environment.get("SLURM_NODELIST")
    address = environment.get("MASTER_ADDR") or (expand_nodes(nodes)[0] if nodes else LOOPBACK)
    job = f"{environment.get('SLURM_JOB_ID') or environment.get('SLURM_JOBID', '')}"
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID", "0")
    port = number(environment, "MASTER_PORT", derived_port(job, step))
    local_size = local_tasks(environment, size, local_rank)
    return Placement(rank, size, local_rank, local_size, address, port, "slurm")


def local_tasks(environment: Mapping[str, str], size: int, local_rank: int) -> int:
    """Tasks on this node: Slurm gives them for all nodes, as `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = number(environment, "SLURM_NODEID", 0)
    guess = counts[node] if node < len(counts) else size
    return max(guess, local_rank + 1)


def _openmpi(environment: Mapping[str, str]) -> Placement:
    rank, size = number(environment, "OMPI_COMM_WORLD_RANK"), number(environment, "OMPI_COMM_WORLD_SIZE")
    local_rank = number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    local_size = number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    address = environment.get("MASTER_ADDR")
    if address is None:
        if local_size != size:
            raise ValueError(
                "mpirun over several machines does not say where rank 0 is; add -x MASTER_ADDR=HOST "
                "(and -x MASTER_PORT=PORT) to the command"
            )
        address = LOOPBACK
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    port = number(environment, "MASTER_PORT", derived_port(job, "openmpi"))
    return Placement(rank, size, local_rank, local_size, address, port, "openmpi")


def derived_port(job: str, step: str) -> int:
    """The same port on all ranks of one job step, another one for another job on the same machine."""
    if job.isdigit() and step.isdigit():
        return FIRST_PORT + (int(job) + 7919 * int(step)) % PORTS  # neighbouring jobs never meet
    return FIRST_PORT + zlib.crc32(f"{job}/{step}".encode()) % PORTS


def expand_nodes(text: str) -> list[str]:
    """Slurm's short form of host names: `a[01-03,7],b` is a01, a02, a03, a7, b."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names += _expand(part.strip())
    if not names:
        raise ValueError(f"the node list {text!r} names no machine")
    return names


def _expand(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part] if part else []
    head, ranges, tail = match.groups()
    names: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.strip().partition("-")
        for index in range(int(first), int(last or first) + 1):
            names += _expand(f"{head}{index:0{len(first)}d}{tail}")
    return names
