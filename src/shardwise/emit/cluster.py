"""Files for Kubernetes and SkyPilot: what starts the nodes, around scripts that run the same on each.

The scripts find torchrun's variables there (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...): Kubeflow's
runtimes for torch set them, and the other files here do.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from shardwise.emit.batch import STOP_SECONDS
from shardwise.emit.request import Request

TARGETS = ("kubernetes", "skypilot")

PORT = 29500
FILES, WORK = "/shardwise", "/work"  # where the emitted files and the shared disk are mounted
IMAGE, CLAIM, VOLUME, GPU = "YOUR-IMAGE", "YOUR-CLAIM", "YOUR-VOLUME", "YOUR-GPU"
MOST_RESTARTS = 100
SECRET = "SHARDWISE_SECRET"  # noqa: S105 - the variable's name
FINAL = [1, 2, 3, 5]
"""Exit codes after which a restart does not help; 4 (a node is not able) and 75 (saved) are not of them."""

_YOURS = {
    "kubernetes": {CLAIM: "a PersistentVolumeClaim that all nodes may write (ReadWriteMany)"},
    "skypilot": {
        VOLUME: "a SkyPilot volume that all nodes may write (`sky volumes ls`)",
        GPU: "the GPU, as `sky show-gpus` names it",
    },
}
"""What only the user knows, as it stands in the files."""


def pack(
    target: str, request: Request, files: Mapping[str, str], script: Sequence[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files of `target`, and the commands that start it. `script`: one of `files`, and its arguments."""
    call = f"cd {WORK} && exec bash {FILES}/{shlex.join(script)}"
    several, name = request.nodes > 1, _name(request.name)
    if target == "skypilot":
        secret = f' --secret {SECRET}="$(openssl rand -hex 32)"' if several and request.job_text else ""
        start = f"sky jobs launch {shlex.quote(request.path('task.yaml'))}{secret}"
        return {**files, "task.yaml": _text(request, target, [_task(request, call)])}, (start,)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-files"},
        "data": {**files},
    }
    made = {
        "jobset.yaml": _text(request, target, [config, _jobset(request, call)]),
        "trainjob.yaml": _text(request, target, [config, _trainjob(request, call)]),
    }
    once = f'kubectl create secret generic {name}-secret --from-literal=secret="$(openssl rand -hex 32)"'
    starts = [once] if several and request.job_text else []
    starts += [
        f"kubectl apply -f {shlex.quote(request.path('jobset.yaml'))}",
        f"kubectl apply -f {shlex.quote(request.path('trainjob.yaml'))}  # instead, with Kubeflow Trainer",
    ]
    return made, tuple(starts)


def _jobset(request: Request, call: str) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of one Job, whose pods are the nodes."""
    name, own = _name(request.name), request.job_text is not None
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": "node",
        "image": IMAGE,
        "command": ["bash", "-c", call],
        "env": [
            *_environment(request),
            {"name": "PET_NNODES", "value": str(request.nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(request.gpus_per_node)},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": rank}}},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(PORT)},
        ],
        "resources": _resources(request),
        "volumeMounts": _MOUNTS,
    }
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", **_pod(name), "containers": [container]}},
    }
    spec: dict[str, Any] = {"network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}}
    if own:  # all nodes begin again together, and the run goes on
        wrong = {"onExitCodes": {"containerName": "node", "operator": "In", "values": FINAL}}
        job["podFailurePolicy"] = {"rules": [{"action": "FailJob", **wrong}]}
        final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        spec["failurePolicy"] = {"maxRestarts": MOST_RESTARTS, "rules": [final]}
    spec["replicatedJobs"] = [{"name": "node", "replicas": 1, "template": {"spec": job}}]
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}}
    return {**head, "spec": spec}


def _trainjob(request: Request, call: str) -> dict[str, Any]:
    """A TrainJob (trainer.kubeflow.org/v1alpha1) on Kubeflow Trainer's own runtime for torch."""
    name = _name(request.name)
    trainer = {
        "image": IMAGE,
        "command": ["bash", "-c", call],
        "env": _environment(request),
        "numNodes": request.nodes,
        "numProcPerNode": request.gpus_per_node,
        "resourcesPerNode": _resources(request),
    }
    pod = {**_pod(name), "containers": [{"name": "node", "volumeMounts": _MOUNTS}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "shardwise", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}}
    runtime = {"name": "torch-distributed"}
    return {**head, "spec": {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [patch]}}


def _task(request: Request, call: str) -> dict[str, Any]:
    """A SkyPilot task."""
    resources: dict[str, Any] = {
        "accelerators": f"{GPU}:{request.gpus_per_node}",
        "image_id": f"docker:{IMAGE}",
    }
    task: dict[str, Any] = {"name": _name(request.name), "num_nodes": request.nodes, "resources": resources}
    task |= {"file_mounts": {FILES: request.folder}, "volumes": {WORK: VOLUME}, "envs": {"HF_HOME": _HF_HOME}}
    if request.job_text is not None:
        resources["job_recovery"] = {"recover_on_exit_codes": [75]}  # a managed job starts again and goes on
        if request.nodes > 1:
            task["secrets"] = {SECRET: None}
    lines = (
        'export PET_NNODES="$SKYPILOT_NUM_NODES" PET_NODE_RANK="$SKYPILOT_NODE_RANK"',
        f'export PET_NPROC_PER_NODE="$SKYPILOT_NUM_GPUS_PER_NODE" PET_MASTER_PORT={PORT}',
        'export PET_MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)"',
        call,
    )
    return {**task, "run": "\n".join(lines) + "\n"}


_HF_HOME = f"{WORK}/.cache/huggingface"  # a container's own disk is empty after each restart
_MOUNTS = [
    {"name": "files", "mountPath": FILES},
    {"name": "work", "mountPath": WORK},
    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's; a container's own has 64 MiB
]


def _pod(name: str) -> dict[str, Any]:
    volumes = [
        {"name": "files", "configMap": {"name": f"{name}-files"}},
        {"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"terminationGracePeriodSeconds": STOP_SECONDS, "volumes": volumes}


def _environment(request: Request) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": "HF_HOME", "value": _HF_HOME}]
    if request.nodes > 1 and request.job_text is not None:
        secret = {"name": f"{_name(request.name)}-secret", "key": "secret"}
        found.append({"name": SECRET, "valueFrom": {"secretKeyRef": secret}})
    return found


def _resources(request: Request) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(request.gpus_per_node)}}


def _name(name: str) -> str:
    """A name as Kubernetes takes it for a service: lower case, from a letter on; the pods' add to it."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}"


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and what several places share in full."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def _text(request: Request, target: str, documents: Sequence[Mapping[str, Any]]) -> str:
    needed = "what your script needs" if request.job_text is None else "shardwise"
    yours = {IMAGE: f"an image with torch and {needed}"} | _YOURS[target]
    lines = [*request.title, "Write your own:", *(f"  {word}: {what}" for word, what in yours.items())]
    lines.append(f"The disk is {WORK} on each node: relative paths count from it.")
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
