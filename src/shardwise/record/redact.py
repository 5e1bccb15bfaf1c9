"""One redactor for what is shown or sent: secrets are replaced, all else is left as it is.

Not for what is read back and acted on, a run's `job.yaml`: a sentence about a password looks like one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"

_SHAPES = (
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
_TOKEN = re.compile(r"(?<![A-Za-z0-9_-])(?:" + "|".join(_SHAPES) + ")")
# Names that hold secrets; `pad_token`, `target_tokens` and the like are not among them.
_NAMED = re.compile(
    r"(?i)\b([a-z0-9_]*(?:api_?key|access_?key|secret|password|passwd|"
    r"(?:hf|hub|auth|access|api|gh|github|gitlab|slack|refresh|session)_?token)"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',}&]{6,})"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)([A-Za-z0-9._~+/=-]{12,})")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:/@]*:)([^\s@/]+)(?=@)")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)


def redact(text: str) -> str:
    """`text` with every token, key, password and private key replaced by `[hidden]`."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _TOKEN.sub(HIDDEN, text)
    for pattern in (_NAMED, _BEARER, _URL):
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redact_tree(value: Any) -> Any:
    """`redact` on every string in nested JSON values; keys stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redact_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item) for item in value]
    return value
