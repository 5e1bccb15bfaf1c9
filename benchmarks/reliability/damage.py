"""1,000 random damages of a run folder, its token cache and its model folder: each is found, or does no
harm.

    python benchmarks/reliability/damage.py [--count 1000] [--seed 0] [--out FILE]

A run of adapters on a tiny model is stopped in the middle. Then, again and again, one file of a copy is
damaged: a bit flipped, its end cut off, removed, or exchanged with another file. The run is resumed by
the code behind `shardwise train RUN --resume`, in a process of its own. It is `found` where that ends
with an error of its own exit code, or passes over the checkpoint in favour of an older one, or the
reader of the record names the lines that are damaged. It is `harmless` where the run goes on with the
losses and weights of the undisturbed run, bit for bit. All else is `silent` or a `bug`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "distributed"
SAMPLES = HERE.parents[1] / "src" / "shardwise" / "job" / "samples"
sys.path[:0] = [str(TESTS), str(HERE.parents[1] / "tests" / "shared")]
STEPS, STOP = 6, 4
KINDS = ("flip", "truncate", "remove", "exchange")
PLACES = ("run", "cache", "model")


def resume(run: str) -> None:
    """In a process: what `shardwise train RUN --resume` does, without the launcher."""
    import torch

    from shardwise.app import train
    from shardwise.errors import ShardwiseError, render
    from shardwise.training import worker

    torch.set_num_threads(1)
    options = dict.fromkeys(("nodes", "processes", "resume_from", "max_steps", "memory_cap"))
    flags = dict.fromkeys(("resume_or_start", "supervise", "trust_checkpoint", "dry_run", "as_json"), False)
    more = {"simulate_power": False, "debug": False, "on_oom": "stop", "changes": (), "command": ()}
    try:
        spec, _ = train._spec(run, resume=True, **options, **flags, **more)  # type: ignore[arg-type]
    except ShardwiseError as error:
        print(render(error), file=sys.stderr)
        sys.exit(error.exit_code)
    path = Path(run).parents[1] / "spec.json"
    path.write_text(json.dumps(spec.to_json()))
    sys.exit(worker.main([str(path)]))


class Trials:
    """A stopped run, and copies of it in the same place that are damaged and resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sound, self.home = folder, folder / "sound", folder / "home"
        self.run = self.home / "runs" / "run"
        self.output = folder / "output"
        self.home.mkdir()
        os.environ["SHARDWISE_CACHE"] = str(self.home / "cache")
        self._prepare()
        self.home.rename(self.sound)
        self._copy()
        code, text = self._resume()
        assert code == 0, text
        self.expected = self._results()
        self.files = {
            place: [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]
            for place, root in zip(PLACES, self._roots(self.sound), strict=True)
        }

    def _roots(self, home: Path) -> tuple[Path, ...]:
        return home / "runs" / "run", home / "cache", home / "model"

    def _prepare(self) -> None:
        from test_out_of_memory import job

        from shardwise.launch.spec import LaunchSpec
        from shardwise.training.run import run

        def train(name: str, max_steps: int, **model: Any) -> Path:
            values = job(self.home, name, "single", steps=STEPS, save_every=2, worst_case_first=False)
            values["data"] = {
                "train": str(SAMPLES / "training.txt"),
                "sequence_length": 96,
                "eval_fraction": 0,
            }
            values["model"] = model or values["model"]
            run_dir = self.home / "runs" / name
            spec = LaunchSpec(job=values, run_dir=str(run_dir), processes=1, max_steps=max_steps)
            assert self._in_a_fork(lambda: run(spec)) == 0, self.output.read_text()
            return run_dir

        base = train("base", 1)
        shutil.copytree(base / "checkpoints" / "step-000001" / "model", self.home / "model")
        shutil.rmtree(base)
        train("run", STOP, source=str(self.home / "model"), lora={"rank": 4})

    def _copy(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.sound, self.home)

    def _resume(self) -> tuple[int, str]:
        code = self._in_a_fork(lambda: resume(str(self.run)))
        return code, self.output.read_text(errors="replace")

    def _in_a_fork(self, action: Callable[[], object]) -> int:
        """The exit code of a process that does this; what it prints is in `output`."""
        from forks import replace_file, to_the_end

        self.output.write_bytes(b"")
        process = os.fork()
        if process == 0:
            replace_file(1, self.output)
            replace_file(2, self.output)
            to_the_end(action)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _results(self) -> dict[str, Any]:
        """Losses after the stop, and the hashes of the last checkpoint's files."""
        from shardwise.record.manifest import read_manifest
        from shardwise.record.read import read_events

        steps = [event for event in read_events(self.run / "events.jsonl") if event["kind"] == "step"]
        manifest = read_manifest(self.run / "checkpoints" / f"step-{STEPS:06d}")
        return {
            "losses": {event["step"]: event["loss"] for event in steps if event["step"] > STOP},
            "files": {name: entry.sha256 for name, entry in manifest.files.items()},
        }

    def one(self, dice: random.Random) -> dict[str, Any]:
        """Damage one file of a copy, and see."""
        self._copy()
        place = dice.choice(PLACES)
        chosen = dice.choice(self.files[place])
        path = self.home / chosen.relative_to(self.sound)
        kind = dice.choice(KINDS)
        what = {"place": place, "file": str(chosen.relative_to(self.sound)), "kind": kind}
        what["at"] = self._damage(path, kind, dice)
        code, text = self._resume()
        return {**what, "code": code, "result": self._judge(code, text), "says": _headline(text)}

    def _damage(self, path: Path, kind: str, dice: random.Random) -> str | int | None:
        content = path.read_bytes()
        if kind == "remove" or not content:
            path.unlink()
        elif kind == "truncate":
            at = dice.randrange(len(content))
            path.write_bytes(content[:at])
            return at
        elif kind == "flip":
            at = dice.randrange(8 * len(content))
            path.write_bytes(
                content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :]
            )
            return at
        else:
            other = self.home / dice.choice(self.files[dice.choice(PLACES)]).relative_to(self.sound)
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return str(other.relative_to(self.home))
        return None

    def _judge(self, code: int, text: str) -> str:
        from shardwise.record.read import read_events_and_gaps

        if code != 0:
            return "found" if code in (2, 3, 4, 5) else "bug"
        if "passed over" in text:
            return "found"
        try:
            gaps = read_events_and_gaps(self.run / "events.jsonl")[1]
            if self._results() == self.expected:
                return "found" if gaps else "harmless"
        except Exception as error:  # noqa: BLE001 - what cannot be read is no result
            return f"silent: {type(error).__name__}: {error}"
        return "silent"


def _headline(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("error:", "warning:", "  - "))]
    return " ".join(lines)[:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=120.0, help="no more damages after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "damage.json")
    asked = parser.parse_args()
    from kills import import_all

    import_all()

    began, dice, rows = time.monotonic(), random.Random(asked.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for _ in range(asked.count):
            if time.monotonic() - began > 60 * asked.minutes:
                break
            rows.append(trials.one(dice))
            if rows[-1]["result"] not in ("found", "harmless"):
                print(json.dumps(rows[-1]), flush=True)
    harmless = Counter((row["place"], Path(row["file"]).name) for row in rows if row["result"] == "harmless")
    result = {
        "command": f"python benchmarks/reliability/damage.py --count {asked.count} --seed {asked.seed}",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "damages": len(rows),
        "results": dict(Counter(row["result"] for row in rows)),
        "by_place": {
            place: dict(Counter(r["result"] for r in rows if r["place"] == place)) for place in PLACES
        },
        "harmless": {" ".join(key): count for key, count in harmless.most_common()},
        "not_found": [row for row in rows if row["result"] not in ("found", "harmless")],
        "seconds": round(time.monotonic() - began),
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
