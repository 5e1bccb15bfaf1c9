"""`shardwise doctor`: whether this machine can train, what is wrong with it, and what it is capable of."""

import json
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, progress
from shardwise.errors import MachineError

CALIBRATE = typer.Option(
    "--calibrate", help="Also measure this machine (minutes) and keep it for the planner."
)


def doctor(calibrate: Annotated[bool, CALIBRATE] = False, as_json: AsJson = False) -> int:
    """Check that this machine can train; say how to fix what cannot.

    Drivers, GPUs, links, kernels, collectives, DeepSpeed, disks and ports are tried out, on the GPUs that
    CUDA_VISIBLE_DEVICES leaves; no setting is changed. Ends with 0 where training can run, else with 4;
    with 4, too, where --calibrate could not measure.
    """
    from shardwise.app.machine import doctor as examine

    with progress("doctor: this takes about half a minute") as show_progress:

        def answered(done: int, probes: int, asked: list[str]) -> None:
            show_progress(f"doctor: {done} of {probes} probes answered; asking {', '.join(asked)}")

        report = examine(calibrate=calibrate, say=answered)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        from shardwise.diagnosis.doctor import show

        show(report)
    done = report.ready and (not calibrate or report.calibration is not None)
    return 0 if done else MachineError.exit_code
