"""Whether the Hugging Face hub answers, and whether it knows who asks."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from huggingface_hub import constants, get_token

SECONDS = 5.0


def reach(stage: Callable[[str], None]) -> dict[str, Any]:
    """One small question to the hub (HF_ENDPOINT, and the proxies that the environment names)."""
    endpoint = constants.ENDPOINT
    token = get_token()
    request = urllib.request.Request(f"{endpoint}/api/{'whoami-v2' if token else 'models?limit=1'}")  # noqa: S310
    if token:
        request.add_header("authorization", f"Bearer {token}")
    stage(f"waiting for {endpoint}")
    start = time.perf_counter()
    found: dict[str, Any] = {"endpoint": endpoint, "token": token is not None}
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310 - https unless HF_ENDPOINT says otherwise
            found["status"] = answer.status
    except urllib.error.HTTPError as error:
        found["status"] = error.code
    except OSError as error:
        found["failed"] = str(getattr(error, "reason", error))[:200]
    found["seconds"] = time.perf_counter() - start
    return found
