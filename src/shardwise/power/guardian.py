"""A small process that puts power limits back when the run that changed them has ended, however it ended.

It has a session of its own and ignores the signals that end a run. SIGKILL to the run's process group does
not reach it. What ends it too (the end of a container or of a batch job's control group, a power failure)
leaves the lease, which the next start settles. Where it fails, it tries again for a minute and then leaves
the lease. It writes what it did to `guardian.log` in the run folder.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from shardwise.device import Device, NoDevice
from shardwise.device.find import find
from shardwise.errors import MachineError, ShardwiseError, what_of
from shardwise.power.lease import Lease, Process, locked, process, read_lease, settle

READY = "ready"
START_SECONDS = 30.0
TRIES, RETRY_SECONDS = 12, 5.0
POLL_SECONDS = 0.2  # where the kernel has no pidfd
LOG = "guardian.log"
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Guardian:
    """The guardian of a lease, as its owner sees it."""

    def __init__(self, lease: Lease) -> None:
        """Starts it, and returns when it is ready; MachineError where it is not."""
        fix = "see the free memory and `ulimit -u`, then `shardwise doctor`"
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(lease.file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # the launcher waits for the end of what workers write
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            raise MachineError(f"no process can be started: {error.strerror}", fix=fix) from None
        assert self._child.stdout is not None
        with self._child.stdout as answers:
            said = answers.readline().strip() if select.select([answers], [], [], START_SECONDS)[0] else ""
        self.process = process(self._child.pid)
        if said != READY or self.process is None:
            self.end()
            what = f"the process that puts power limits back does not start: {said or 'no answer'}"
            raise MachineError(what, fix=fix)

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def end(self) -> None:
        """When there is nothing left to put back."""
        self._child.kill()
        self._child.wait()


def main(file: Path) -> int:
    """Wait for the end of the lease's owner, and settle the lease; 0 where it is settled."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        lease, device = read_lease(file), find()
    except ShardwiseError as error:
        return _decline(what_of(error))
    if not isinstance(lease, Lease):
        return _decline(lease.reason)
    if isinstance(device, NoDevice):
        return _decline(device.reason)
    print(READY, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.chdir("/")
    wait_for_end(lease.owner)
    for _ in range(TRIES):
        if _settle(file, device):
            return 0
        time.sleep(RETRY_SECONDS)
    return 1


def wait_for_end(owner: Process) -> None:
    """Return when this process has ended."""
    try:
        handle = os.pidfd_open(owner.pid)
    except OSError:
        while owner.alive():
            time.sleep(POLL_SECONDS)
        return
    if owner.alive():  # the handle is not one of a later process
        select.select([handle], [], [])
    os.close(handle)


def _settle(file: Path, device: Device) -> bool:
    """Whether nothing is left to do."""
    try:
        with locked(file.parent, create=False):
            lease = read_lease(file)  # its owner has added to it since
            if not isinstance(lease, Lease):
                return not file.exists()
            settled = settle(lease, device)
    except (OSError, ShardwiseError) as error:
        _log(file, [what_of(error)])
        return False
    _log(Path(lease.run), settled.lines)
    return settled.left is None


def _log(folder: Path, lines: list[str] | tuple[str, ...]) -> None:
    if not lines or not folder.is_dir():
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    # the limits matter; nobody is left to read why this could not be written
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as out:
        out.writelines(f"{now} {line}\n" for line in lines)


def _decline(why: str) -> int:
    print(" ".join(why.split()), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
