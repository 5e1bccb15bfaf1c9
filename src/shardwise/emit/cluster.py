"""Files for Kubernetes and SkyPilot: what starts the nodes, around scripts that run the same on each.

The scripts find torchrun's variables there (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...): Kubeflow's
runtimes for torch set them, and the other files here do. The files are the templates next to this one.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardwise.emit.batch import STOP_SECONDS
from shardwise.emit.request import Request

TARGETS = ("kubernetes", "skypilot")

PORT = 29500
FILES, WORK = "/shardwise", "/workspace"  # where the emitted files and the shared disk are mounted
SECRET = "SHARDWISE_SECRET"  # noqa: S105 - the variable's name
FINAL = [1, 2, 3, 5]
"""Exit codes after which a restart does not help; 4 (a node is not able) and 75 (saved) are not of them."""

_YOURS = {
    "claim": "YOUR-CLAIM: a PersistentVolumeClaim that all nodes may write (ReadWriteMany)",
    "volume": "YOUR-VOLUME: a SkyPilot volume that all nodes may write (`sky volumes ls`)",
    "gpu": "YOUR-GPU: the GPU, as `sky show-gpus` names it",
}
"""What only the user knows, as it stands in the files."""


def pack(
    target: str, request: Request, files: Mapping[str, str], script: Sequence[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files of `target`, and the commands that start it. `script`: one of `files`, and its arguments."""
    own, name = request.job_text is not None, _name(request.name)
    secret = SECRET if own and request.nodes > 1 else None
    made = Environment(  # noqa: S701 - these are no pages
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    made.filters["quoted"] = json.dumps
    made.globals |= {"place": FILES, "work": WORK, "port": PORT, "final": FINAL, **_YOURS}

    def text(file: str) -> str:
        return made.get_template(f"{file}.j2").render(
            title=request.title,
            name=name,
            own=own,
            needs="shardwise" if own else "what your script needs",
            secret=secret,
            nodes=request.nodes,
            gpus=request.gpus_per_node,
            files=files,
            folder=request.folder,
            stop_seconds=STOP_SECONDS,
            call=f"cd {WORK} && exec bash {FILES}/{shlex.join(script)}",
        )

    random = '"$(openssl rand -hex 32)"'
    if target == "skypilot":
        given = f" --secret {SECRET}={random}" if secret else ""
        start = f"sky jobs launch {shlex.quote(request.path('task.yaml'))}{given}"
        return {**files, "task.yaml": text("task.yaml")}, (start,)
    once = f"kubectl create secret generic {name}-secret --from-literal=secret={random}"
    jobset, trainjob = (f"kubectl apply -f {shlex.quote(request.path(f'{kind}.yaml'))}" for kind in _KINDS)
    starts = (*([once] if secret else []), jobset, f"{trainjob}  # instead, with Kubeflow Trainer")
    return {f"{kind}.yaml": text(f"{kind}.yaml") for kind in _KINDS}, starts


_KINDS = ("jobset", "trainjob")


def _name(name: str) -> str:
    """A name as Kubernetes takes it for a service, and YAML for text: lower case, from a letter on."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")  # the pods' names add to it
    return plain if plain[:1].isalpha() and yaml.safe_load(plain) == plain else f"run-{plain}"
