"""A run as a Kubernetes object: plain values of the settings, and the YAML of them."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.clusters import MARGIN_SECONDS, Kubernetes
from launcher.scripts import Work, line, torchrun, unset_only

GROUP = "node"  # of the pods of a JobSet


def manifest(work: Work, cluster: Kubernetes, *, preflight: bool) -> str:
    """The YAML."""
    name = object_name(work.name)
    build = _jobset if cluster.api == "jobset" else _pytorchjob
    return "\n".join(yaml_lines(build(name, work, cluster, preflight))) + "\n"


def object_name(name: str) -> str:
    """A name that Kubernetes takes: pods and services are called after it, within 63 characters."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return found if found[:1].isalpha() else f"run-{found}".rstrip("-")


def literal(argument: str) -> str:
    """Kubernetes replaces $(NAME) in commands and reads $$ as one dollar; each doubled, all stay."""
    return argument.replace("$", "$$")


def _command(work: Work, cluster: Kubernetes, host: str, preflight: bool) -> list[str]:
    python = cluster.python or "python"

    def start(port: int, name: str) -> list[str]:
        where = f"{host}:{port}"
        return torchrun(cluster, python, nodes=work.nodes, per_node=work.per_node, endpoint=where, name=name)

    train = [*start(cluster.port, work.name), *work.train]
    if not (preflight or cluster.environment):
        return [literal(word) for word in train]
    # A variable of the image is not overwritten, which a pod's `env` would do.
    lines = unset_only(cluster.environment)
    if (
        preflight
    ):  # at a port of its own: a node that is ready early must not meet the end of the first meeting
        doctor = [*start(cluster.port + 1, f"{work.name}-doctor"), *work.doctor]
        lines.append(f"{line(doctor)} || exit 1")
    return [literal(word) for word in ["bash", "-c", "\n".join([*lines, f"exec {line(train)}"])]]


def _pod(work: Work, cluster: Kubernetes, host: str, preflight: bool, container: str) -> dict[str, Any]:
    gpus = {cluster.gpu_resource: str(work.per_node)} if work.gpus else {}
    amounts = {**gpus, **cluster.resources}
    volumes = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shared_memory}}
    ]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(cluster.volumes):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path})
    main: dict[str, Any] = {
        "name": container,
        "image": cluster.image,
        "command": _command(work, cluster, host, preflight),
        "resources": {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {},
        "volumeMounts": mounts,
        "ports": [{"containerPort": cluster.port, "name": "rendezvous"}],
    }
    if cluster.directory is not None:
        main["workingDir"] = cluster.directory
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.shutdown_timeout_seconds + MARGIN_SECONDS,
        "containers": [main],
        "volumes": volumes,
    }
    if cluster.node_selector:
        spec["nodeSelector"] = dict(cluster.node_selector)
    if cluster.service_account is not None:
        spec["serviceAccountName"] = cluster.service_account
    if cluster.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec


def _metadata(name: str, cluster: Kubernetes) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name}
    if cluster.namespace is not None:
        found["namespace"] = cluster.namespace
    if cluster.labels:
        found["labels"] = dict(cluster.labels)
    return found


def _jobset(name: str, work: Work, cluster: Kubernetes, preflight: bool) -> dict[str, Any]:
    # The pods of an indexed job have names of their own in the JobSet's service, which is called like it.
    host = f"{name}-{GROUP}-0-0.{name}"
    job = {
        "completionMode": "Indexed",
        "completions": work.nodes,
        "parallelism": work.nodes,
        "backoffLimit": 0,  # one pod alone cannot come back: the JobSet starts all again
        "template": {"spec": _pod(work, cluster, host, preflight, "train")},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, cluster),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": cluster.job_restarts},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorchjob(name: str, work: Work, cluster: Kubernetes, preflight: bool) -> dict[str, Any]:
    # The operator makes a service for each pod, called like the pod; and calls this container pytorch.
    host = f"{name}-master-0"

    def replica(count: int) -> dict[str, Any]:
        pod = _pod(work, cluster, host, preflight, "pytorch")
        del pod["restartPolicy"]
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}

    replicas = {"Master": replica(1)} | ({"Worker": replica(work.nodes - 1)} if work.nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(name, cluster),
        "spec": {
            "runPolicy": {"backoffLimit": cluster.job_restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


# Words that YAML 1.1 reads as something else, and the form of those that it reads as themselves.
RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
PLAIN = re.compile(r"[A-Za-z][\w./-]*")


def yaml_lines(value: Any, indent: str = "") -> Iterator[str]:
    """Mappings, lists, text, whole numbers and booleans as YAML."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(str(key), indent)}:", item, indent + "  ")
    else:
        for item in value:
            if isinstance(item, Mapping) and item:
                first, *rest = yaml_lines(item, indent + "  ")
                yield f"{indent}- {first.lstrip(' ')}"
                yield from rest
            else:
                yield from _entry(f"{indent}-", item, indent + "  ")


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if isinstance(item, Mapping | list) and item:
        yield head
        yield from yaml_lines(item, indent)
    else:
        yield f"{head} {_scalar(item, indent)}"


def _scalar(value: Any, indent: str) -> str:
    """Text that could be read otherwise is written as JSON, which YAML reads; of several lines as a block."""
    if not isinstance(value, str):
        return json.dumps(value)
    lines = value.split("\n")
    if len(lines) > 1 and lines[0][:1] != " " and all(part and part.isprintable() for part in lines):
        return "|-\n" + "\n".join(indent + part for part in lines)
    if PLAIN.fullmatch(value) and value.lower() not in RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)
