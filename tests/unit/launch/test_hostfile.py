"""Hostfiles as DeepSpeed and MPI write them, and what is wrong in one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardwise.errors import JobError, MachineError, render
from shardwise.launch.hostfile import own_address, read_hostfile, this_first


def read(tmp_path: Path, text: str) -> list[tuple[str, int | None]]:
    path = tmp_path / "hosts"
    path.write_text(text)
    return [(host.name, host.slots) for host in read_hostfile(path)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1 slots=8\nn2 slots=8\n", [("n1", 8), ("n2", 8)]),
        ("# by hand\n\nn1 slots=4 # the first\n  n2\tslots = 4\n", [("n1", 4), ("n2", 4)]),
        ("n1\nn2", [("n1", None), ("n2", None)]),
        ("n1:2\nn2:2\n", [("n1", 2), ("n2", 2)]),
        ("n1 slots=2 max_slots=4\nn2 slots=2 max-slots=8\n", [("n1", 2), ("n2", 2)]),
        ("me@10.0.0.1 slots=1\n10.0.0.2:1\n", [("me@10.0.0.1", 1), ("10.0.0.2", 1)]),
        ("[fe80::1]:2\n", [("fe80::1", 2)]),
    ],
)
def test_deepspeed_s_and_mpi_s_formats(
    text: str, hosts: list[tuple[str, int | None]], tmp_path: Path
) -> None:
    assert read(tmp_path, text) == hosts


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "it names no host", "hosts"),
        ("# nothing\n", "it names no host", "hosts"),
        ("n1 slots=4\nn2 n3\n", "'n2 n3' is not a host", "hosts:2"),
        ("-oProxyCommand=x slots=1\n", "is not a host", "hosts:1"),
        ("n1\n$(touch${IFS}x)\n", "is not a host", "hosts:2"),
        ("n1\nn\x002 slots=1\n", "is not a host", "hosts:2"),
        ("n1 slots=four\n", "four is not one number of processes", "hosts:1"),
        ("n1 slots=0\n", "0 is not one number of processes", "hosts:1"),
        ("n1:2 slots=4\n", "2 and 4 is not one number of processes", "hosts:1"),
        ("n1 slot=4\n", "slot is not known here", "hosts:1"),
        ("n1\nn2\nn1\n", "n1 stands here and in", "hosts:3"),
        ("n1 slots=8\nn2 slots=4\n", "n1 has 8 slots, n2 4 slots", "hosts:2"),
        ("n1 slots=8\nn2\n", "n1 has 8 slots, n2 no slots", "hosts:2"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, what: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        read(tmp_path, text)
    shown = render(caught.value)
    assert what in shown
    assert f"at:  {tmp_path}/{where}\n" in shown


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """DeepSpeed's launcher would warn, and train on this machine alone."""
    with pytest.raises(JobError, match="the hostfile cannot be read: No such file"):
        read_hostfile(tmp_path / "hosts")


def test_what_is_no_file_or_far_too_long_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobError, match="no file"):
        read_hostfile(tmp_path / "pipe")
    (tmp_path / "hosts").write_text("".join(f"n{number}\n" for number in range(300_000)))
    with pytest.raises(JobError, match="at most"):
        read_hostfile(tmp_path / "hosts")


def test_this_machine_is_node_0_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("198.51.100.1\n127.0.0.1\n198.51.100.2\n")
    assert [host.name for host in this_first(read_hostfile(path))] == [
        "127.0.0.1",
        "198.51.100.1",
        "198.51.100.2",
    ]
    path.write_text("198.51.100.1\n127.0.1.1\n")  # where Debian puts a machine's own name
    assert this_first(read_hostfile(path))[0].name == "127.0.1.1"
    path.write_text("198.51.100.1\n198.51.100.2\n")
    with pytest.raises(JobError, match="this machine is not in the hostfile"):
        this_first(read_hostfile(path))
    path.write_text(f"{socket.gethostname()}\nlocalhost\n")
    with pytest.raises(JobError, match="are the same machine, this one"):
        this_first(read_hostfile(path))


def test_the_address_is_that_of_the_way_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(MachineError, match=r"nowhere\.invalid cannot be found from here"):
        own_address("nowhere.invalid")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="there is no ssh here"):
        own_address("127.0.0.1")
