"""Find access keys in a job, which is kept in the run folder and sent to trackers."""

import re
from collections.abc import Iterator
from typing import Any

from shardwise.job.source import Key

SHAPES = (
    r"hf_[A-Za-z0-9]{20,}",  # Hugging Face
    r"wandb_v1_[A-Za-z0-9_]{20,}",  # Weights & Biases
    r"sk-(?:ant-|proj-)?[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic
    r"gh[pousr]_[A-Za-z0-9]{30,}",  # GitHub
    r"github_pat_[A-Za-z0-9_]{30,}",
    r"glpat-[A-Za-z0-9_-]{20,}",  # GitLab
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS key id
    r"AIza[A-Za-z0-9_-]{35}",  # Google
    r"xox[abprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"nvapi-[A-Za-z0-9_-]{20,}",  # NVIDIA
    r"pypi-[A-Za-z0-9_-]{40,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",  # JSON web token
)
"""Patterns of access keys that have a known form."""

_SECRET_VALUE = re.compile(
    rf"(?<![A-Za-z0-9_-])(?:{'|'.join(SHAPES)})|-----BEGIN [A-Z ]*PRIVATE KEY-----|//[^/\s:@]+:[^/\s:@]+@"
    r"|(?i:[?&](?:sig|x-amz-[a-z-]+|[a-z_-]*(?:token|key|signature|credential))=)"
)
_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|hf_token|access_token|auth_token|token|password|secret)$", re.IGNORECASE
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")  # under model.revision it is a commit


def find(values: Any, key: Key = ()) -> Iterator[Key]:
    """Yield keys whose value is an access key, or that are named like one."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from find(value, (*key, str(name)))
    elif isinstance(values, list):
        if any(True for value in values for _ in find(value, key)):
            yield key
    elif isinstance(values, str) and (
        _SECRET_VALUE.search(values)
        or (_SECRET_KEY.search(key[-1]) and values)
        or (_WANDB_KEY.fullmatch(values) and key != ("model", "revision"))
    ):
        yield key
