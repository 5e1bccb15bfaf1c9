"""One training process: `python -m shardwise.training.worker SPEC.json`, for a launcher or torchrun."""

import json
import os
import re
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from shardwise.errors import MachineError, ShardwiseError, known, render
from shardwise.launch import heartbeat
from shardwise.launch.nodes import INTERFACES
from shardwise.launch.spec import LaunchSpec, write_report

ERROR_DIR = "SHARDWISE_ERROR_DIR"  # Where the launcher reads what a rank leaves


class DisconnectedError(MachineError):
    """The other end of a connection is gone; on another rank there may be a better cause."""


def main(arguments: list[str] | None = None) -> int:
    """Run the job in the spec file; return the exit code. Errors go to the launcher, or to stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    spec = LaunchSpec.from_json(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    if (folder := os.environ.get(ERROR_DIR)) is not None:
        heartbeat.begin(Path(folder), int(os.environ.get("RANK", "0")))
    if os.environ.get("RANK", "0") == "0" and spec.measure_steps is None:  # a bench has its own lines
        print("starting: loading the model, preparing the data", file=sys.stderr, flush=True)
    try:
        _work(spec)
    except Exception as error:  # noqa: BLE001  (the last place where a bug becomes an exit code)
        shown = error if isinstance(error, ShardwiseError) else _translate(error)
        _report(shown, getattr(shown, "trace", None) or traceback.format_exc(), debug=spec.debug)
        return shown.exit_code
    return 0


def _work(spec: LaunchSpec) -> None:
    import torch.distributed as dist

    from shardwise.engines.runtime.recorded import forget
    from shardwise.training.run import run

    try:
        run(spec)
    finally:
        forget()
    if dist.is_initialized():  # left in order; a rank that failed must not wait for the others here
        dist.destroy_process_group()


def _translate(error: Exception) -> ShardwiseError:
    """An error of a library with a cause the user can act on; any other is a bug."""
    import torch

    where = f"rank {os.environ.get('RANK', '0')}"
    if isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error):
        what = f"communication between the processes failed: {str(error).splitlines()[0]}"
        fix = "run again with NCCL_DEBUG=INFO to see which link failed"
        named, found = os.environ.get(INTERFACES[0], ""), [name for _, name in socket.if_nameindex()]
        if named and named.split(",")[0] not in found:
            fix = f"unset {INTERFACES[0]}: there is no {named} here, but {', '.join(found)}"
        return DisconnectedError(what, where=where, fix=fix)
    if unbuilt := re.search(r"Unable to JIT load the (\w+) op", str(error)):
        fix = "`shardwise doctor` says what it lacks"
        fix = f"apt install libaio-dev; {fix}" if unbuilt[1] == "async_io" else fix
        return MachineError(f"DeepSpeed cannot compile {unbuilt[1]} here", where=where, fix=fix)
    if "loss scale already at minimum" in str(error):  # how DeepSpeed ends a run
        from shardwise.training.loop import overflows

        return overflows(where)
    fix = "this is a bug in shardwise: report it with the log; --debug prints the traceback"
    return known(error, where=where, fix=fix)


def _report(error: ShardwiseError, trace: str, *, debug: bool) -> None:
    """Leave the error for the launcher, which prints one block for all ranks; without one, print it."""
    folder, rank = os.environ.get(ERROR_DIR), os.environ.get("RANK", "0")
    if folder is None:
        if debug:
            print(trace, file=sys.stderr)
        if rank == "0" or error.exit_code == ShardwiseError.exit_code:
            print(render(error), file=sys.stderr)
        return
    record = {**error.to_json(), "traceback": trace}
    if isinstance(error, DisconnectedError):
        record["follows"] = True
    evidence = getattr(error, "evidence", None)  # of OutOfGpuMemoryError
    if evidence is not None:
        record["out_of_memory"] = asdict(evidence)
    write_report(Path(folder), int(rank), record)


if __name__ == "__main__":
    code = main()
    if code:
        # The error is reported and the files are closed. Python's own end in half a process group
        # would print pages of other libraries' complaints, or wait for the other half.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
