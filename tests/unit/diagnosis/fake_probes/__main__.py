"""As shardwise.diagnosis.probes is run; FAKE=probe:act,probe@rank:act makes some of them hang or crash."""

import os
import sys

from shardwise.diagnosis.probes.__main__ import main

NAMES = (
    "torch", "formats", "bitsandbytes", "cross_entropy", "attention", "mamba", "liger", "collective",
    "deepspeed", "cpu_adam", "hub", "measure", "quiet", "loud",
)  # fmt: skip
BAD = ("hang", "crash", "leave", "complain", "multiply", "starve")


def wanted() -> dict[str, str]:
    acts = {name: f"acts:{name}" for name in (*NAMES, *BAD)}
    for change in filter(None, os.environ.get("FAKE", "").split(",")):
        place, act = change.split(":")
        name, _, rank = place.partition("@")
        if rank in ("", os.environ.get("RANK", "")):
            acts[name] = f"acts:{act}"
    return acts


main(sys.argv[1], sys.argv[2:], wanted(), "fake_probes")
