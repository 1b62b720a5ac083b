"""What starts the processes of a run, each kind with its own settings."""

from typing import Annotated, Literal

from conf.typed import config, setting, union

# What torchrun passes on to its workers; without SIGUSR1 in it, that signal would kill torchrun itself.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
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


@config
class Volume:
    """Storage that all pods see."""

    claim: str = setting(on_resume="free", help="name of a PersistentVolumeClaim")
    path: str = setting(on_resume="free", help="where it is mounted")


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


def _one_line(name: str, value: str) -> None:
    if "\n" in value or "\r" in value:
        raise ValueError(f"{name} ({value!r}) must be one line")


AnyCluster = Annotated[Local | Torchrun | DeepSpeed | Slurm | Kubernetes, union("kind")]
