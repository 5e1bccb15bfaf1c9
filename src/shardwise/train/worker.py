"""One training process: `python -m shardwise.train.worker SPEC.json`, started by the launcher or torchrun."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from shardwise.errors import WRITE_ERRORS, MachineError, ShardwiseError, render, unwritten


def main(arguments: list[str] | None = None) -> int:
    """Runs the job in the spec file; returns the exit code. Errors go to the launcher, or to stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _work(Path(arguments[0]))
    except ShardwiseError as error:
        _tell(error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  (the last place where a bug becomes an exit code)
        known = _translate(error)
        if known is None:
            traceback.print_exc()
            _tell(_bug(error))
            return 1
        _tell(known)
        return known.exit_code
    return 0


def _work(spec_path: Path) -> None:
    from shardwise.launch.spec import LaunchSpec
    from shardwise.train.run import run

    try:
        run(LaunchSpec.from_json(json.loads(spec_path.read_text())))
    finally:
        _leave()


def _leave() -> None:
    """Leave the process group in order; a rank that failed must not wait for the others here."""
    import torch.distributed as dist

    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def _translate(error: Exception) -> ShardwiseError | None:
    """Errors of libraries that have a cause the user can act on."""
    import torch

    if isinstance(error, torch.distributed.DistBackendError) or "/gloo/" in str(error):
        return MachineError(
            f"communication between the processes failed: {str(error).splitlines()[0]}",
            where=f"rank {os.environ.get('RANK', '0')}",
            fix="run again with NCCL_DEBUG=INFO to see which link failed",
        )
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        return unwritten(error)
    if "loss scale already at minimum" in str(error):  # DeepSpeed's way to end a run
        from shardwise.train.loop import overflows

        return overflows(f"rank {os.environ.get('RANK', '0')}")
    return None


def _bug(error: Exception) -> ShardwiseError:
    return ShardwiseError(
        f"{type(error).__name__}: {error}",
        where=f"rank {os.environ.get('RANK', '0')}",
        fix="this is a bug in shardwise; run again with --debug for the traceback, and report it",
    )


def _tell(error: ShardwiseError) -> None:
    """Leave the error for the launcher, which prints one block for all ranks."""
    folder, rank = os.environ.get("SHARDWISE_ERROR_DIR"), os.environ.get("RANK", "0")
    if folder is None:
        if rank == "0":
            print(render(error), file=sys.stderr)
        return
    problems = [asdict(problem) for problem in error.problems]
    record = {"exit_code": error.exit_code, "headline": error.headline, "problems": problems}
    evidence = getattr(error, "evidence", None)  # of OutOfGpuMemoryError
    if evidence is not None:
        record["out_of_memory"] = asdict(evidence)
    path = Path(folder) / f"rank-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(record))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    code = main()
    if code:
        # What failed has told so, and closed its files. To take the interpreter apart around half a process
        # group would print pages of other libraries' complaints, or wait for the other half.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
