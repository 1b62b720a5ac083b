"""What starts the processes of a run, each kind with its own settings."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal

from conf.typed import config, setting, union

# What torchrun passes on to its workers; without SIGUSR1 in it, that signal would kill torchrun itself.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
START_SECONDS = 120  # before a run has made a step that a time limit could save
LONGEST_SECONDS = 65535  # that Slurm takes for --signal
TIMES = re.compile(
    r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)"
    r"|(?P<m>\d+)(?::(?P<s>\d+))?)"
)
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[numkMGTPE]|[KMGTPE]i)?|\d+(?:\.\d+)?[eE][+-]?\d+")
MARGIN_SECONDS = 60  # after the workers' grace period, for what starts torchrun


@config
class Cluster:
    """What all kinds have."""

    kind: str = setting("local", on_resume="free", help="what starts the processes")
    python: str | None = setting(
        None, on_resume="free", help="the interpreter on the nodes; null: this one, or python in a container"
    )
    environment: dict[str, str] = setting(
        factory=dict,
        on_resume="free",
        help="variables to set on the nodes where they are not set yet: {NCCL_DEBUG: WARN}",
    )
    shutdown_timeout_seconds: int = setting(
        300, on_resume="free", help="how long a signalled run may take to finish its step and save"
    )
    max_restarts: int = setting(
        0, on_resume="free", help="how often torchrun starts all processes again after one has failed"
    )
    port: int = setting(29500, on_resume="free", help="where the processes meet, on the first node")

    def __post_init__(self) -> None:
        if self.shutdown_timeout_seconds < 1 or self.max_restarts < 0 or not 1 <= self.port <= 65535:
            raise ValueError(
                f"shutdown_timeout_seconds ({self.shutdown_timeout_seconds}) must be at least 1, "
                f"max_restarts ({self.max_restarts}) 0 or more, port ({self.port}) 1 to 65535"
            )
        for name in self.environment:
            if not (name.isidentifier() and name.isascii()):
                raise ValueError(f"environment: {name!r} is no name of a variable")


@config
class Local(Cluster):
    """This machine alone, through torchrun when there are several processes."""

    kind: Literal["local"] = setting("local", on_resume="free", help="local: this machine alone")


@config
class Torchrun(Cluster):
    """torchrun on each node, started by hand or by something of your own: the same line everywhere."""

    kind: Literal["torchrun"] = setting("torchrun", on_resume="free", help="torchrun on each node")
    endpoint: str | None = setting(
        None, on_resume="free", help="host name of the node where all meet; null: the first of hosts"
    )
    id: str | None = setting(
        None, on_resume="free", help="name of this meeting, for several jobs at one endpoint; null: run.name"
    )


@config
class DeepSpeed(Cluster):
    """DeepSpeed's own launcher, once, on one node; it reaches the others with pdsh."""

    kind: Literal["deepspeed"] = setting("deepspeed", on_resume="free", help="DeepSpeed's launcher")
    hostfile: str | None = setting(
        None, on_resume="free", help="a hostfile that is there; null: written into run.dir from hosts"
    )


@config
class Slurm(Cluster):
    """One sbatch script, one torchrun on each node."""

    kind: Literal["slurm"] = setting("slurm", on_resume="free", help="sbatch")
    partition: str | None = setting(None, on_resume="free", help="#SBATCH --partition")
    account: str | None = setting(None, on_resume="free", help="#SBATCH --account")
    qos: str | None = setting(None, on_resume="free", help="#SBATCH --qos")
    time: str | None = setting(None, on_resume="free", help="#SBATCH --time, as 1-12:00:00 or 24:00:00")
    cpus_per_task: int | None = setting(
        None, on_resume="free", help="#SBATCH --cpus-per-task: CPUs of a node"
    )
    gpus: Literal["gpus-per-node", "gres", "none"] = setting(
        "gpus-per-node",
        on_resume="free",
        help="how GPUs are asked for; none: the partition gives whole nodes",
    )
    signal_seconds: int = setting(
        600, on_resume="free", help="so long before the time limit the run is asked to save and stop"
    )
    requeue: bool = setting(
        True, on_resume="free", help="start again where a time limit or a failed node has stopped the run"
    )
    requeue_on_sigterm: bool = setting(
        False,
        on_resume="free",
        help="also after SIGTERM, where preemption does not requeue by itself; scancel does not end it then",
    )
    max_requeues: int = setting(100, on_resume="free", help="no more starts than this")
    options: list[str] = setting(
        factory=list, on_resume="free", help="more lines for #SBATCH: ['--exclusive','--constraint=h100']"
    )
    srun: list[str] = setting(
        factory=list, on_resume="free", help="more options for srun: ['--mpi=none','--cpu-bind=none']"
    )
    container: str | None = setting(None, on_resume="free", help="srun --container-image (pyxis)")
    mounts: list[str] = setting(factory=list, on_resume="free", help="srun --container-mounts: [/a:/a]")
    prologue: list[str] = setting(
        factory=list, on_resume="free", help="lines of bash before the start: ['module load cuda/12.8']"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal_seconds < self.shutdown_timeout_seconds + MARGIN_SECONDS:
            raise ValueError(
                f"signal_seconds ({self.signal_seconds}) must be at least shutdown_timeout_seconds "
                f"({self.shutdown_timeout_seconds}) + {MARGIN_SECONDS}: the save must end before that"
            )
        self._check_numbers()
        if self.mounts and self.container is None:
            raise ValueError(f"mounts ({list(self.mounts)}) need a container")
        for name in ("partition", "account", "qos", "time", "container"):
            _one_line(name, getattr(self, name) or "")
        for name in ("options", "srun", "mounts"):
            for value in getattr(self, name):
                _one_line(name, value)
        for option in self.options:
            if not option.startswith("-"):
                raise ValueError(f"options: {option!r} is no option of sbatch; write --name=value")
        if self.prologue:
            check_bash(self.prologue)

    def _check_numbers(self) -> None:
        if self.signal_seconds > LONGEST_SECONDS:
            raise ValueError(f"signal_seconds ({self.signal_seconds}) must be at most {LONGEST_SECONDS}")
        if self.max_requeues < 0:
            raise ValueError(f"max_requeues ({self.max_requeues}) must be 0 or more")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ValueError(f"cpus_per_task ({self.cpus_per_task}) must be at least 1")
        seconds = None if self.time is None else time_limit(self.time)
        least = self.signal_seconds + START_SECONDS
        if seconds is not None and seconds < least:
            raise ValueError(
                f"time ({self.time}, {seconds} s) must be at least signal_seconds ({self.signal_seconds}) + "
                f"{START_SECONDS} to start: the run would be asked to stop before it has begun"
            )


def time_limit(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None: no limit."""
    if text.lower() in ("unlimited", "infinite", "-1"):
        return None
    match = TIMES.fullmatch(text)
    if match is None:
        raise ValueError(f"time ({text!r}) is no time limit of sbatch; write 1-12:00:00 or 24:00:00")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = 24 * 60 * part["d"] + 60 * (part["dh"] + part["h"]) + part["dm"] + part["hm"] + part["m"]
    return (60 * minutes + part["ds"] + part["hs"] + part["s"]) or None  # 0 is no limit


def check_bash(lines: Sequence[str]) -> None:
    """ValueError for a prologue that bash cannot read, where bash is there to ask."""
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run([bash, "-n"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode or done.stderr:  # a document that does not end is only a warning, and eats the script
        said = (done.stderr.strip() or "no message").splitlines()[0]
        raise ValueError(f"prologue ({list(lines)}) is no bash: {said}")


@config
class Volume:
    """Storage that all pods see."""

    claim: str = setting(on_resume="free", help="name of a PersistentVolumeClaim")
    path: str = setting(on_resume="free", help="where it is mounted")

    def __post_init__(self) -> None:
        if not _is_object_name(self.claim):
            raise ValueError(f"claim ({self.claim!r}) is no name of a PersistentVolumeClaim")
        if not PurePosixPath(self.path).is_absolute() or ":" in self.path:
            raise ValueError(f"path ({self.path!r}) of the claim {self.claim} must be absolute, without ':'")


@config
class Kubernetes(Cluster):
    """One pod a node, as a JobSet or a PyTorchJob."""

    kind: Literal["kubernetes"] = setting("kubernetes", on_resume="free", help="kubectl")
    api: Literal["jobset", "pytorchjob"] = setting(
        "jobset", on_resume="free", help="jobset (jobset.x-k8s.io) or pytorchjob (Kubeflow's operator)"
    )
    image: str = setting("", on_resume="free", help="of the container, with this package installed in it")
    namespace: str | None = setting(None, on_resume="free", help="null: kubectl's current one")
    gpu_resource: str = setting("nvidia.com/gpu", on_resume="free", help="what a GPU is called")
    resources: dict[str, str] = setting(
        factory=dict, on_resume="free", help="more of a pod's requests and limits: {cpu: '96', memory: 1Ti}"
    )
    shared_memory: str = setting("64Gi", on_resume="free", help="size of /dev/shm, which NCCL uses")
    volumes: list[Volume] = setting(
        factory=list, on_resume="free", help="[{claim: NAME, path: /shared}]; run.dir and data.cache in one"
    )
    directory: str | None = setting(None, on_resume="free", help="working directory; null: the image's")
    labels: dict[str, str] = setting(
        factory=dict, on_resume="free", help="of the job: {kueue.x-k8s.io/queue-name: research}"
    )
    node_selector: dict[str, str] = setting(factory=dict, on_resume="free", help="labels of nodes to use")
    service_account: str | None = setting(None, on_resume="free", help="of the pods")
    job_restarts: int = setting(
        10, on_resume="free", help="how often the whole job starts again: evicted pods, lost nodes"
    )
    host_network: bool = setting(False, on_resume="free", help="for fabrics that pods reach only so")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.job_restarts < 0:
            raise ValueError(f"job_restarts ({self.job_restarts}) must be 0 or more")
        for name, amount in {"shared_memory": self.shared_memory, **self.resources}.items():
            if not QUANTITY.fullmatch(amount):
                raise ValueError(f"{name} ({amount!r}) is no amount of Kubernetes; write 64Gi, 96 or 500m")


def _is_object_name(name: str) -> bool:
    """Whether Kubernetes takes it: lower-case words with dots and dashes between them."""
    return len(name) <= 253 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) is not None


def _one_line(name: str, value: str) -> None:
    if "\n" in value or "\r" in value:
        raise ValueError(f"{name} ({value!r}) must be one line")


AnyCluster = Annotated[Local | Torchrun | DeepSpeed | Slurm | Kubernetes, union("kind")]
