"""Remove secrets from what is shown or sent; not from `job.yaml`, which is read back unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.job.secrets import SHAPES

HIDDEN = "[hidden]"

_SECRET = re.compile(
    rf"(?<![A-Za-z0-9_-])(?:{'|'.join(SHAPES)})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
# Names that hold secrets; `pad_token`, `target_tokens` and the like are not among them.
_NAMED = re.compile(
    r"(?i)\b([a-z0-9_]*(?:api_?key|access_?key|secret|password|passwd|"
    r"(?:hf|hub|auth|access|api|gh|github|gitlab|slack|refresh|session)_?token)"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',}&]{6,})"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)([A-Za-z0-9._~+/=-]{12,})")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:/@]*:)([^\s@/]+)(?=@)")


def redact(text: str) -> str:
    """Replace every token, key, password and private key by `[hidden]`."""
    text = _SECRET.sub(HIDDEN, text)
    for pattern in (_NAMED, _BEARER, _URL):
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redact_tree(value: Any) -> Any:
    """Apply `redact` to every string in nested JSON values, except keys."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redact_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item) for item in value]
    return value
