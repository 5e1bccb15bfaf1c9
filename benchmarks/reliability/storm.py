"""A run under a storm of faults comes to the weights of the undisturbed run, to the bit.

    python benchmarks/reliability/storm.py [--strategy zero2] [--steps 500] [--every 20] [--seed 0] [--out F]

`train --supervise` on two CPU processes with gloo, a tiny Llama, saved every ten steps. About every 20 steps
there is a fault, of ten kinds (tests/distributed/fault_worker.py); after a preemption the same command is
given again, as a batch system does. Processes are forks of one that has imported torch, so a start takes
seconds less than a user's. A hang is noticed after SHARDWISE_HANG_SECONDS=5 instead of 60.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("distributed", "shared")]

from forked_command import forked_shardwise  # noqa: E402
from harness import steps_of  # noqa: E402
from test_out_of_memory import write_job  # noqa: E402

from shardwise.record.restarts import read_restarts  # noqa: E402
from shardwise.report.compare import summary  # noqa: E402

KINDS = ("kill", "kill_all", "stop", "spin", "deadlock", "fail", "leave", "preempt", "tear", "fill")
SAVE_EVERY, HANG_SECONDS, MOST_COMMANDS = 10, 5.0, 30
STOPPED = 75


def storm(*, steps: int, every: int, seed: int) -> list[dict[str, Any]]:
    """A fault about every `every` steps: all kinds in random order, again and again."""
    chance, kinds = random.Random(seed), list[str]()
    faults = []
    for middle in range(every, steps - every // 2, every):
        kinds = kinds or chance.sample(KINDS, len(KINDS))
        step = middle + chance.randint(-every // 4, every // 4)
        faults.append({"step": step, "rank": chance.randrange(2), "do": kinds.pop()})
    return faults


def train(folder: Path, faults: list[dict[str, Any]]) -> tuple[list[int], str]:
    """The exit codes of the command, which is given again after a preemption; and what it printed."""
    codes, printed = list[int](), ""
    while not codes or (codes[-1] == STOPPED and len(codes) < MOST_COMMANDS):
        code, _, err = forked_shardwise(
            "train",
            *("job.yaml", "--processes", "2", "--supervise"),
            cwd=folder,
            worker="fault_worker",
            timeout=1800.0,
            SHARDWISE_CACHE=str(folder.parent / "cache"),
            SHARDWISE_HANG_SECONDS=str(HANG_SECONDS),
            FAULTS=json.dumps(faults),
            FAULTS_IN=str(folder),
        )
        codes, printed = [*codes, code], printed + err
        print(err, file=sys.stderr, flush=True)
    return codes, printed


def weights(run: Path) -> str:
    """The hash of the last checkpoint's weights."""
    newest = max(run.glob("checkpoints/step-*"))
    return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()


def measured(folder: Path, faults: list[dict[str, Any]], *, strategy: str, steps: int) -> dict[str, Any]:
    """One run of the job, and what it came to."""
    folder.mkdir()
    write_job(folder, strategy, steps=steps, save_every=SAVE_EVERY, eval_every=0)
    began = time.monotonic()
    codes, _ = train(folder, faults)
    seconds, run = time.monotonic() - began, folder / "runs" / "run"
    found = summary(run)["supervised"]
    lines = read_restarts(run)
    return {
        "exit_codes": codes,
        "weights_sha256": weights(run),
        "losses": [event["loss"] for event in steps_of(run)],
        "came": sum(1 for _ in folder.glob("fault-*")),
        "starts": sum(line["event"] == "began" for line in lines),
        "failures": found["failures"],
        "ettr": found["ettr"],
        "productive_seconds": found["productive_seconds"],
        "wall_seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    faults = storm(steps=given.steps, every=given.every, seed=given.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: measured(Path(folder) / name, sent, strategy=given.strategy, steps=given.steps)
            for name, sent in (("undisturbed", []), ("storm", faults))
        }
    calm, wild = runs["undisturbed"], runs["storm"]
    equal = calm["weights_sha256"] == wild["weights_sha256"] and calm.pop("losses") == wild.pop("losses")
    wild["came"] = f"{wild['came']} of {len(faults)}"
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("shardwise", "torch", "deepspeed")},
        "strategy": given.strategy,
        "processes": 2,
        "steps": given.steps,
        "seed": given.seed,
        "save_every": SAVE_EVERY,
        "hang_seconds": HANG_SECONDS,
        "faults": faults,
        "equal": equal,
        **runs,
    }
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.parent.mkdir(exist_ok=True)
        given.out.write_text(text + "\n")
    print(f"{wild['came']} faults, {wild['starts'] - 1} restarts, ETTR {wild['ettr']:.1%}, equal: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
