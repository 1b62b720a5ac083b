"""The command launch: what starts a run somewhere, printed or done, after the run has been checked here."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conf.typed import InvalidConfiguration, Problem, config, setting
from launcher import scripts
from launcher.clusters import AnyCluster, DeepSpeed, Kubernetes, Local, Slurm, Torchrun
from launcher.config import Config, plan, run_directory
from launcher.failure import DONE, FAILED
from launcher.manifests import manifest
from launcher.scripts import Work, line

OWN = ("cluster", "nodes", "gpus_per_node", "hosts", "execute", "preflight", "format")


@config
class Launch(Config):
    """A training run, and what starts it."""

    cluster: AnyCluster = setting(factory=Local, on_resume="free", help="what starts the processes")
    nodes: int | None = setting(None, on_resume="free", help="machines; null: as many as hosts, or 1")
    gpus_per_node: int | None = setting(
        None, on_resume="free", help="processes on each, one a GPU; null: as many as there are GPUs here"
    )
    hosts: list[str] = setting(factory=list, on_resume="free", help="names of the machines: [a,b]")
    preflight: bool = setting(
        False,
        on_resume="free",
        help="run the command doctor on all nodes first, and train only if it is well",
    )
    execute: bool = setting(False, on_resume="free", help="do it; false: print what would be done")

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [*self._problems(), *self._host_problems(), *self._meeting_problems()]
        if problems:
            raise InvalidConfiguration(problems)

    def _problems(self) -> list[Problem]:
        found, cluster = [], self.cluster
        if self.nodes is not None and self.nodes < 1:
            found.append(Problem("nodes", f"nodes ({self.nodes}) must be at least 1"))
        elif self.hosts and self.nodes not in (None, len(self.hosts)):
            found.append(
                Problem("nodes", f"nodes ({self.nodes}) and hosts ({len(self.hosts)}) differ; leave one out")
            )
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            found.append(Problem("gpus_per_node", f"gpus_per_node ({self.gpus_per_node}) must be at least 1"))
        many = (self.nodes or len(self.hosts) or 1) > 1
        if many and cluster.kind == "local":
            message = f"cluster=local is one machine, nodes is {self.nodes or len(self.hosts)}"
            found.append(Problem("nodes", f"{message}; use cluster=torchrun, deepspeed, slurm or kubernetes"))
        if isinstance(cluster, DeepSpeed) and many and not (cluster.hostfile or self.hosts):
            found.append(
                Problem("hosts", "DeepSpeed needs their names; give hosts=[a,b] or cluster.hostfile")
            )
        if isinstance(cluster, DeepSpeed) and cluster.max_restarts:
            message = "DeepSpeed's launcher does not start again; use cluster=torchrun"
            found.append(Problem("cluster.max_restarts", message))
        if isinstance(cluster, DeepSpeed) and any(
            len(v.splitlines()) > 1 for v in cluster.environment.values()
        ):
            message = "DeepSpeed's launcher carries one line a variable; leave out values of several lines"
            found.append(Problem("cluster.environment", message))
        if isinstance(cluster, Kubernetes) and not cluster.image:
            found.append(Problem("cluster.image", "a pod needs an image; give cluster.image=NAME:TAG"))
        return found

    def _host_problems(self) -> list[Problem]:
        found: list[Problem] = []
        for host in self.hosts:
            if not is_host(host):
                found.append(Problem("hosts", f"{host!r} is no name of a machine"))
        twice = sorted({host for host in self.hosts if self.hosts.count(host) > 1})
        if twice:
            found.append(Problem("hosts", f"hosts names {', '.join(twice)} more than once"))
        return found

    def _meeting_problems(self) -> list[Problem]:
        """Where the processes meet."""
        found, cluster = [], self.cluster
        many = (self.nodes or len(self.hosts) or 1) > 1
        if isinstance(cluster, Torchrun) and many and not (cluster.endpoint or self.hosts):
            message = "several nodes must meet somewhere; give cluster.endpoint=HOST or hosts=[HOST,...]"
            found.append(Problem("cluster.endpoint", message))
        if isinstance(cluster, Torchrun) and cluster.endpoint is not None:
            name, port = split_endpoint(cluster.endpoint)
            if not is_host(name) or (port is not None and not 1 <= port <= 65535):
                message = f"cluster.endpoint ({cluster.endpoint!r}) must be HOST or HOST:PORT"
                found.append(Problem("cluster.endpoint", message))
        port = cluster.port
        if isinstance(cluster, Torchrun) and cluster.endpoint is not None:
            port = split_endpoint(cluster.endpoint)[1] or port
        if self.preflight and isinstance(cluster, Torchrun | Kubernetes) and port == 65535:
            message = "port 65535 leaves none for the preflight, which takes the next; use a lower one"
            found.append(Problem("cluster.port", message))
        return found


def is_host(name: str) -> bool:
    """Whether it can be a machine's name or address; one that begins with a dash would be an option."""
    return re.fullmatch(r"[\w.:][\w.:-]*", name) is not None


def split_endpoint(text: str) -> tuple[str, int | None]:
    """(host, port) of HOST or HOST:PORT; an address of IPv6 has more colons and no port."""
    host, colon, port = text.rpartition(":")
    if colon and ":" not in host and port.isdecimal():
        return host, int(port)
    return text, None


@dataclass(frozen=True)
class Start:
    """What starts a run. commands: [(where, command)] for people; execute: what is run here; files: written
    before."""

    commands: list[tuple[str, str]]
    execute: list[str]
    files: dict[Path, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # set for `execute` where unset


def launch(tree: Launch, arguments: Sequence[str]) -> int:
    """Check the run as `train` would, on so many processes; print or do what starts it.

    arguments: the command line after `launcher launch`; what is not for launch goes on to train as it is.
    """
    work = work_of(tree, arguments)
    start = starting(tree, work, arguments)
    if not tree.execute:
        print(as_json(work, start) if tree.format == "json" else as_text(work, tree, start))
        return DONE
    program = start.execute[0]
    if shutil.which(program) is None:
        raise ValueError(f"there is no {program} on this machine; leave execute out and start it elsewhere")
    for path, text in start.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    environment = {**start.environment, **os.environ}
    if program not in ("sbatch", "kubectl"):
        sys.stdout.flush()
        os.execvpe(program, start.execute, environment)  # so that signals reach what they are for
    return DONE if subprocess.run(start.execute, env=environment).returncode == 0 else FAILED


def own(argument: str) -> bool:
    """Whether an argument is for launch alone."""
    key = argument.partition("=")[0].lstrip("+~")
    return "=" in argument and re.split(r"[./@]", key)[0] in OWN


def work_of(tree: Launch, arguments: Sequence[str]) -> Work:
    """The run on so many processes; ValueError when it does not fit on them."""
    nodes = tree.nodes or len(tree.hosts) or 1
    per_node = tree.gpus_per_node
    if per_node is None:
        per_node = torch.cuda.device_count() if tree.hardware.device != "cpu" else 0
        if per_node == 0:
            raise ValueError(
                "gpus_per_node is not given, and there is no GPU here to count; give gpus_per_node=8 "
                "(processes of a node, with hardware=cpu too)"
            )
    fits(tree, nodes, per_node)
    plan(tree, world_size=nodes * per_node, cuda=tree.hardware.device != "cpu")
    words = tuple(argument for argument in arguments if not own(argument))
    directory, gpus = Path(run_directory(tree)).absolute(), tree.hardware.device != "cpu"
    return Work(tree.run.name, directory, Path.cwd(), words, nodes, per_node, gpus)


def fits(tree: Config, nodes: int, per_node: int) -> None:
    """ValueError when tp x pp does not divide the processes, with what would."""
    tp, pp, world = tree.parallel.tp, tree.parallel.pp, nodes * per_node
    if world % (tp * pp):
        usable = [n for n in range(1, 4 * tp * pp + nodes) if (n * per_node) % (tp * pp) == 0][:3]
        raise ValueError(
            f"{nodes} nodes x {per_node} processes = {world} cannot be split into parallel.tp ({tp}) x "
            f"parallel.pp ({pp}) = {tp * pp}; use nodes in {usable} or another layout"
        )


def starting(tree: Launch, work: Work, arguments: Sequence[str]) -> Start:
    """What starts this run on this cluster."""
    cluster = tree.cluster
    python = cluster.python or sys.executable
    made_by = line(["python", "-m", "launcher", "launch", *arguments])
    if isinstance(cluster, Slurm):
        file = work.directory / "launch.sbatch"
        inside = cluster.python or ("python" if cluster.container else sys.executable)
        text = scripts.sbatch(work, cluster, inside, made_by, preflight=tree.preflight)
        return Start([("once", line(["sbatch", str(file)]))], ["sbatch", str(file)], {file: text})
    if isinstance(cluster, Kubernetes):
        file = work.directory / "launch.yaml"
        command = ["kubectl", "create", "-f", str(file)]
        return Start(
            [("once", line(command))], command, {file: manifest(work, cluster, preflight=tree.preflight)}
        )
    if isinstance(cluster, DeepSpeed):
        return _deepspeed(tree, cluster, work, python)
    if isinstance(cluster, Torchrun) and (work.nodes > 1 or cluster.endpoint):
        return _torchrun(tree, cluster, work, python)
    steps = [work.doctor, work.train] if tree.preflight else [work.train]
    return _here([scripts.one_node(work, cluster, python, words) for words in steps], cluster.environment)


def _here(steps: Sequence[list[str]], environment: Mapping[str, str]) -> Start:
    """Commands of this machine, one after another."""
    before, last = steps[:-1], steps[-1]
    if not before:
        return Start([("here", line(last))], last, environment=environment)
    text = " && ".join([*map(line, before), f"exec {line(last)}"])
    commands = [("here", line(before[0])), ("here, if that is well", line(last))]
    return Start(commands, ["bash", "-c", text], environment=environment)


def _torchrun(tree: Launch, cluster: Torchrun, work: Work, python: str) -> Start:
    host, given = split_endpoint(cluster.endpoint or tree.hosts[0])
    name, meeting = cluster.id or work.name, given or cluster.port

    def start(port: int, name: str, words: list[str]) -> list[str]:
        where = f"{host}:{port}"
        command = scripts.torchrun(
            cluster, python, nodes=work.nodes, per_node=work.per_node, endpoint=where, name=name
        )
        return [*command, *words]

    # At a port of its own: a node that is ready early must not meet the end of the first meeting.
    steps = [start(meeting + 1, f"{name}-doctor", work.doctor)] if tree.preflight else []
    here = _here([*steps, start(meeting, name, work.train)], cluster.environment)
    nodes = tree.hosts or [f"node {number}" for number in range(work.nodes)]
    commands = [
        (f"on {node}{where.removeprefix('here')}", command)
        for node in nodes
        for where, command in here.commands
    ]
    return Start(commands, here.execute, environment=cluster.environment)


def _deepspeed(tree: Launch, cluster: DeepSpeed, work: Work, python: str) -> Start:
    file, files = cluster.hostfile, {}
    if file is None and tree.hosts:
        path = work.directory / "hostfile"
        file, files = str(path), {path: scripts.hostfile(tree.hosts, work.per_node)}
    environment, before = dict(cluster.environment), []
    if file is not None and environment:
        path = work.directory / "deepspeed_env"
        files[path] = scripts.deepspeed_env(
            {name: os.environ.get(name, value) for name, value in environment.items()}, _deepspeed_env_lines()
        )
        # Not by Start.environment: one that is set would win, and these variables would be lost.
        environment, before = {}, ["env", f"DS_ENV_FILE={path}"]
    head = tree.hosts[0] if tree.hosts else None
    steps = [work.doctor, work.train] if tree.preflight else [work.train]
    commands = [
        [*before, *scripts.deepspeed(work, cluster, python, words, hostfile=file, head=head)]
        for words in steps
    ]
    here = _here(commands, environment)
    return Start(here.commands, here.execute, files, environment=environment)


def _deepspeed_env_lines() -> list[str]:
    """What DeepSpeed's launcher would read by itself: NAME=VALUE of the files that DS_ENV_FILE takes away."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    files = dict.fromkeys([Path.home() / name, Path.cwd() / name])  # an absolute name is one file
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return [row for text in texts for row in text.splitlines() if "=" in row]


def as_text(work: Work, tree: Launch, start: Start) -> str:
    """For people, and for a shell: what is not a command or a file is a comment."""
    world, layout = work.nodes * work.per_node, tree.parallel
    dp = world // (layout.tp * layout.pp)
    lines = [
        f"# {work.nodes} x {work.per_node} = {world} processes: tp {layout.tp} x pp {layout.pp} x dp {dp}",
        f"# {work.directory}",
    ]
    for path, text in start.files.items():
        lines += ["", f"# --- {path}", text.rstrip("\n"), "# ---"]
    shown = [f"export {n}={shlex.quote(v)}  # where it is unset" for n, v in start.environment.items()]
    lines += ["", *shown] if shown else [""]
    for where, command in start.commands:
        lines += [f"# {where}", command]
    lines += ["", "# The environment is passed on as it is. Nothing was started; execute=true does it."]
    return "\n".join(lines)


def as_json(work: Work, start: Start) -> str:
    """The same for programs."""
    return json.dumps(
        {
            "nodes": work.nodes,
            "processes": work.nodes * work.per_node,
            "directory": str(work.directory),
            "commands": [{"where": where, "command": command} for where, command in start.commands],
            "files": {str(path): text for path, text in start.files.items()},
            "environment": dict(start.environment),
        }
    )
