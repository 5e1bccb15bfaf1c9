"""The connection between nodes: who gets in, what everyone hears, and how a loss shows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import JobError, MachineError, ShardwiseError, render
from shardwise.launch import control, nodes
from shardwise.launch.channel import Channel, ForgedError
from shardwise.launch.control import ElsewhereError, Together, join
from shardwise.launch.nodes import Nodes, chosen, free_port, interface_of, resolve
from shardwise.launch.spec import Ending
from shardwise.launch.team import settle


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "JOIN_SECONDS", 5.0)


def together(count: int, work: Callable[[Together], Any], port: int | None = None) -> list[Any]:
    """The result, or the error, of `work` on each of `count` nodes, which are threads."""
    port = port or free_port()
    results: list[Any] = [None] * count

    def node(rank: int) -> None:
        team = None
        try:
            team = join(Nodes(count=count, rank=rank, rendezvous=f"127.0.0.1:{port}"))
            results[rank] = work(team)
        except ShardwiseError as error:
            results[rank] = error
        finally:
            if team is not None:
                team.close()

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return results


@contextmanager
def channels(monkeypatch: pytest.MonkeyPatch, *secrets: str) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection, each of which has read its secret."""
    ends = socket.socketpair()
    first, second = Channel(ends[0], first=True), Channel(ends[1], first=False)
    for end, secret in zip((first, second), secrets, strict=True):
        monkeypatch.setenv("SHARDWISE_SECRET", secret)
        end.receive()
    yield first, second
    for end in (first, second):
        end.close()


@pytest.mark.parametrize("count", [2, 4])
def test_all_nodes_get_the_values_of_all(count: int) -> None:
    def work(team: Together) -> list[Any]:
        return [team.agree(team.nodes.rank * 10), team.agree({"name": team.names[team.nodes.rank]})]

    expected = [number * 10 for number in range(count)]
    for values, names in together(count, work):
        assert values == expected
        assert len(names) == count


def test_a_frame_of_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels(monkeypatch, "a", "b") as (first, second):
        second.send({"do": "stop"})
        with pytest.raises(ForgedError, match="another secret"):
            first.receive()


@pytest.mark.parametrize("change", ["again", "changed", "returned", "later"])
def test_a_frame_counts_once_unchanged_and_in_its_order(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    with channels(monkeypatch, "a", "a") as (first, second):
        frames: list[bytes] = []
        for end in (first, second):
            monkeypatch.setattr(end, "_write", frames.append)
            end.send({"do": "beat"})
            end.send({"do": "stop"})
        by_first, _, one, two = frames
        wire = second._socket  # what the first end reads from
        wire.sendall(
            {"again": one + one, "changed": one[:-3] + b'x"}', "returned": by_first, "later": two}[change]
        )
        with pytest.raises(ForgedError):
            first.receive()


def test_strangers_at_the_port_neither_block_nor_get_in(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    strangers = []

    def knock() -> None:
        until = time.monotonic() + 3
        while len(strangers) < 3 and time.monotonic() < until:
            try:
                stranger = socket.create_connection(("127.0.0.1", port))
            except OSError:
                time.sleep(0.01)
                continue
            strangers.append(stranger)
            stranger.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"shardws1" + bytes(60)][len(strangers) - 1])

    thread = threading.Thread(target=knock)
    thread.start()

    def late(rank: int) -> Together:
        if rank:
            thread.join()
        return join(Nodes(count=2, rank=rank, rendezvous=f"127.0.0.1:{port}"))

    teams: list[Together | None] = [None, None]

    def node(rank: int) -> None:
        teams[rank] = late(rank)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    assert len(strangers) == 3
    assert all(teams)
    for team in teams:
        assert team is not None
        team.close()
    for stranger in strangers:
        stranger.close()
    assert "warning: a connection from 127.0.0.1 was refused" in capfd.readouterr().err


def test_it_listens_on_the_given_address_alone() -> None:
    port = free_port()
    seen: list[str] = []

    def node() -> None:
        with pytest.raises(MachineError):
            join(Nodes(count=2, rank=0, rendezvous=f"127.0.0.1:{port}"))

    thread = threading.Thread(target=node)
    thread.start()
    time.sleep(0.5)
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and int(address.partition(":")[2], 16) == port:
            seen.append(address.partition(":")[0])
    thread.join()
    assert seen == ["0100007F"]  # 127.0.0.1, in the kernel's byte order


def test_a_stop_and_a_failure_reach_every_node() -> None:
    def work(team: Together) -> tuple[bool, bool]:
        until = time.monotonic() + 5
        while time.monotonic() < until and not (team.stop and team.failed_at):
            team.tick(stop=team.nodes.rank == 2, failing=team.nodes.rank == 1)
            if team.nodes.rank == 2:
                team.stop = True
            if team.nodes.rank == 1:
                team.failed_at = 1.0
            time.sleep(0.01)
        team.agree(None)
        return team.stop, team.failed_at is not None

    assert together(3, work) == [(True, True)] * 3


def test_a_node_that_goes_is_named_on_node_0_and_pointed_to_elsewhere() -> None:
    def work(team: Together) -> Any:
        return None if team.nodes.rank == 2 else team.agree(1)

    first, second, _ = together(3, work)
    assert type(first) is MachineError
    assert render(first).startswith("error: node 2 (")
    assert "was lost: its launcher was killed or ended" in render(first)
    assert isinstance(second, ElsewhereError)
    assert second.exit_code == 4
    assert "node 2 (" in str(second)
    assert "shows the full error" in str(second)
    assert len(render(second).splitlines()) == 1


def test_a_silent_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(control, "BEAT_SECONDS", 0.1)

    def work(team: Together) -> Any:
        if team.nodes.rank == 1:
            time.sleep(1.5)
        return team.agree(1)

    first, second = together(2, work)
    assert "nothing was heard of it for 0 s" in str(first)
    assert "which did not run for" in str(second)


def test_the_end_of_a_node_is_told_with_its_reason() -> None:
    def work(team: Together) -> Any:
        if team.nodes.rank == 1:
            error = JobError("the moon is full", fix="wait")
            team.close(error)
            raise error
        return team.agree(1)

    first, second, third = together(3, work)
    assert first.exit_code == second.exit_code == third.exit_code == 2
    assert "the moon is full" in str(first)
    assert "node 1 (" in str(first)
    assert isinstance(third, ElsewhereError)


def ending(code: int, **options: Any) -> Ending:
    error = None if code == 0 else ShardwiseError(f"code {code}", where="rank 9")
    return Ending(code=code, error=error, **options)


@pytest.mark.parametrize(
    ("endings", "node", "code"),
    [
        ([ending(0), ending(0)], 0, 0),
        ([ending(75), ending(0)], 0, 75),
        ([ending(4, failed_at=1.0, follows=True), ending(1, failed_at=2.0)], 1, 1),  # the cause
        ([ending(1, failed_at=3.0), ending(2, failed_at=2.0)], 1, 2),  # the first
        ([ending(75, failed_at=1.0), ending(2, failed_at=9.0)], 1, 2),
        ([ending(4, failed_at=1.0), ending(3, failed_at=9.0, out_of_memory={"ranks": [1]})], 1, 3),
    ],
)
def test_every_node_ends_with_the_first_cause(endings: list[Ending], node: int, code: int) -> None:
    first, second = together(2, lambda team: settle(team, endings[team.nodes.rank], lambda: None))
    assert first.code == second.code == code
    if code == 0:
        assert first.error is second.error is None
        return
    assert len(render(second.error).splitlines()) == 1
    if code != 75:
        assert f"at:  node {node} (" in render(first.error)
    assert (first.out_of_memory is not None) == (code == 3)


def test_one_machine_needs_none_of_the_options() -> None:
    assert chosen(None, None, None) is None
    assert chosen(1, 0, None) is None
    assert chosen(2, 1, "[::1]:29500") == Nodes(count=2, rank=1, rendezvous="[::1]:29500")
    with pytest.raises(JobError, match="three options"):
        chosen(None, 0, None)
    with pytest.raises(JobError, match="three options"):
        chosen(None, 1, None)


def test_addresses() -> None:
    nodes = Nodes(count=2, rank=1, rendezvous="[::1]:29500")
    assert resolve(nodes)[1:] == ("::1", 29500)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") is None
    with pytest.raises(MachineError, match="is unknown here"):
        resolve(Nodes(count=2, rank=1, rendezvous="no.such.host.invalid:29500"))


def test_a_free_port_is_none_that_a_connection_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {free_port() < 32_768 for _ in range(100)} == {True}
    monkeypatch.setattr(nodes, "PORTS", range(20_000, 20_010))
    with socket.create_server(("127.0.0.1", 20_001)):
        assert 20_001 not in {free_port() for _ in range(100)}
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
