"""The text that starts a run on a cluster: pure functions of settings and arguments."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.clusters import SIGNALS, Cluster, Slurm

MODULE = "torch.distributed.run"  # what the command torchrun is


@dataclass(frozen=True)
class Work:
    """What each process shall do, and how many there are."""

    name: str  # of the run
    directory: Path  # of the run, absolute
    here: Path  # where relative paths begin
    arguments: tuple[str, ...]  # after `launcher train`, as they were written
    nodes: int
    per_node: int  # processes
    gpus: bool = True  # one for each process; on the CPU there is none to ask for

    @property
    def train(self) -> list[str]:
        return ["launcher", "train", *self.arguments]

    @property
    def doctor(self) -> list[str]:
        return ["launcher", "doctor", *self.arguments]


def torchrun(
    cluster: Cluster, python: str, *, nodes: int, per_node: int, endpoint: str | None, name: str
) -> list[str]:
    """torchrun up to -m. endpoint: HOST:PORT where the nodes meet; None: this node alone, at a free port."""
    command = [python, "-m", MODULE]
    if endpoint is None:
        command += ["--standalone"]
    else:
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        command += ["--rdzv-id", name]
    command += ["--nproc-per-node", str(per_node), "--max-restarts", str(cluster.max_restarts)]
    command += ["--signals-to-handle", SIGNALS]
    return [*command, "--shutdown-timeout", str(cluster.shutdown_timeout_seconds), "-m"]


def line(command: Sequence[str]) -> str:
    """A command as it is written in a shell, every argument taken literally."""
    return shlex.join(command)


def unset_only(environment: Mapping[str, str]) -> list[str]:
    """Lines of bash that set and export variables which are not set yet."""
    return [f'[ -n "${{{n}+set}}" ] || export {n}={shlex.quote(v)}' for n, v in environment.items()]


def one_node(work: Work, cluster: Cluster, python: str, words: Sequence[str]) -> list[str]:
    """The command for this machine alone; words: `launcher train ...`."""
    if work.per_node == 1 and cluster.max_restarts == 0:
        return [python, "-m", *words]
    start = torchrun(cluster, python, nodes=1, per_node=work.per_node, endpoint=None, name=work.name)
    return [*start, *words]


def hostfile(hosts: Sequence[str], per_node: int) -> str:
    """DeepSpeed's list of machines."""
    return "".join(f"{host} slots={per_node}\n" for host in hosts)


def deepspeed(
    work: Work, cluster: Cluster, python: str, words: Sequence[str], *, hostfile: str | None, head: str | None
) -> list[str]:
    """DeepSpeed's launcher; several nodes by a hostfile, this one alone without."""
    command = [python, "-m", "deepspeed.launcher.runner"]
    if hostfile is None:
        command += ["--num_gpus", str(work.per_node)]
    else:
        command += ["--hostfile", hostfile, "--num_nodes", str(work.nodes), "--num_gpus", str(work.per_node)]
        words = [words[0], *map(for_pdsh, words[1:])]
    if head is not None:
        command += ["--master_addr", head]
    return [*command, "--master_port", str(cluster.port), "--module", *words]


def deepspeed_env(environment: Mapping[str, str], lines: Sequence[str]) -> str:
    """DeepSpeed's file of variables. lines: NAME=VALUE of the user's own files, which win, as they are there.

    DeepSpeed's launcher puts double quotes around a value with a special character, escapes nothing in it,
    and takes spaces off its ends.
    """
    theirs = {row.partition("=")[0].strip() for row in lines}
    rows = [f"{name}={_in_quotes(value)}" for name, value in environment.items() if name not in theirs]
    return "".join(f"{row}\n" for row in [*lines, *rows])


def _in_quotes(value: str) -> str:
    inside = re.sub(r'([\\"$`])', r"\\\1", value)
    return inside if value == value.strip() else f'""{inside}""'  # two empty words keep the spaces


def for_pdsh(argument: str) -> str:
    """An argument so that the shell at the far end of pdsh reads it as it is.

    DeepSpeed's launcher puts double quotes around what has a space, escaping the double quotes in it, and
    leaves everything else as it is.
    """
    if " " in argument:
        return re.sub(r"([\\$`])", r"\\\1", argument)
    return shlex.quote(argument)


def sbatch(work: Work, cluster: Slurm, python: str, command: str, *, preflight: bool) -> str:
    """The script. command: the `launcher launch` line it was made by, for the comment."""
    lines = ["#!/bin/bash", *_directives(work, cluster), "", *_comment(command)]
    lines += [f"run={shlex.quote(str(work.directory))}", f"cd -- {shlex.quote(str(work.here))} || exit 1"]
    lines += unset_only(cluster.environment) + list(cluster.prologue)
    lines += ["set -u"]  # not for the prologue: modules and conda do not bear it
    lines += ['head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
    meeting = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    start = torchrun(
        cluster, python, nodes=work.nodes, per_node=work.per_node, endpoint="@endpoint@", name="@meeting@"
    )
    # srun does not take it from sbatch.
    cpus = [] if cluster.cpus_per_task is None else [f"--cpus-per-task={cluster.cpus_per_task}"]
    text = line(["srun", "--kill-on-bad-exit=1", *cpus, *_container(cluster), *cluster.srun, *start])
    text = text.replace("@endpoint@", f'"$head:{cluster.port}"').replace("@meeting@", f'"{meeting}"')
    lines += [f"start=({text})", ""]
    if preflight:
        lines += [f'"${{start[@]}}" {line(work.doctor)} || exit 1', ""]
    lines += _AROUND_BEFORE.splitlines() + [f'"${{start[@]}}" {line(work.train)}']
    after = _AROUND_AFTER.replace("@again@", _again(cluster)).replace("@most@", str(cluster.max_requeues))
    return "\n".join([*lines, *after.splitlines()]) + "\n"


# Slurm signals the tasks of the steps, which are torchruns; they pass it on to their workers. The script must
# only outlive what reaches itself. A status older than this start says nothing about it; the file that
# tells the time lies beside it, as another disk may have another clock.
_AROUND_BEFORE = """\
trap : TERM USR1
mkdir -p "$run"
mark=$(mktemp "$run/.start-XXXXXX")"""

_AROUND_AFTER = """\
code=$?

field() { sed -n 's/^.*"'"$1"'": *"\\([^"]*\\)".*$/\\1/p' "$run/status.json"; }
state=none reason=none
if [ "$run/status.json" -nt "$mark" ]; then state=$(field state) reason=$(field reason); fi
rm -f "$mark"
echo "the run is $state ($reason), srun gave $code"
case "$state: $reason" in
"finished: "*) exit 0 ;;
@again@)
    if [ "${SLURM_RESTART_COUNT:-0}" -ge @most@ ]; then
        echo "not started again: @most@ times are the most"
        exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID"
    exit ;;
"stopped: "*) exit 0 ;;
esac
[ "$code" -ne 0 ] || [ "$state" = none ] || code=1
exit "$code\""""


def _again(cluster: Slurm) -> str:
    """The pattern of states after which the job is started again."""
    if not cluster.requeue:
        return '"never"'
    reasons = ["SIGUSR1", "time limit"] + (["SIGTERM"] if cluster.requeue_on_sigterm else [])
    return " | ".join(f'"stopped: {reason}"' for reason in reasons)


def _comment(command: str) -> list[str]:
    return [
        f"# Made by: {' '.join(command.splitlines())}",
        "# At SIGUSR1 and SIGTERM the run finishes its step, saves, stops; this script goes on from there.",
    ]


def _directives(work: Work, cluster: Slurm) -> list[str]:
    options = {
        "job-name": re.sub(r"[^\w.=+-]", "-", work.name),
        "nodes": str(work.nodes),
        "ntasks-per-node": "1",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        "cpus-per-task": None if cluster.cpus_per_task is None else str(cluster.cpus_per_task),
        "output": str(work.directory).replace("%", "%%") + "/slurm-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{cluster.signal_seconds}",
    }
    if work.gpus and cluster.gpus == "gpus-per-node":
        options["gpus-per-node"] = str(work.per_node)
    elif work.gpus and cluster.gpus == "gres":
        options["gres"] = f"gpu:{work.per_node}"
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if cluster.requeue else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {option}" for option in cluster.options]


def _container(cluster: Slurm) -> list[str]:
    if cluster.container is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.mounts)}"] if cluster.mounts else []
    return [f"--container-image={cluster.container}", *mounts]
