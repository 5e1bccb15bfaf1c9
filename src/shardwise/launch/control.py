"""The control connection of a run on several nodes: one from each node to node 0 (decision 0043).

It carries names, the values of the start-up checks, heartbeats, requests to stop, failures and the end. One
thread: whoever waits calls `tick`, which sends a heartbeat, reads what came, and notices a node that is
silent or gone.
"""

import errno
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.errors import JobError, MachineError, Problem, ShardwiseError, what_of
from shardwise.launch.channel import Channel, ForgedError, Message
from shardwise.launch.nodes import SECRET, Nodes, node_name, resolve

BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0  # ten heartbeats: a node that is silent for as long is lost
JOIN_SECONDS = 300.0  # for all nodes to be started, by hand or while images are pulled
EXCUSE_SECONDS = 5.0  # for a node that cannot take part to find node 0 and say so
GREETING_SECONDS = 10.0
_LEAVE_SECONDS = 2.0
_QUIET_SECONDS = 3.0  # of waiting, before it is explained
_LOOK_EVERY_SECONDS = 0.02


class ElsewhereError(ShardwiseError):
    """Another node shows the error; here one line points there."""

    title = "ended"


@dataclass
class Together:
    """This node among the others. `tick` it more often than every few seconds, or the others give it up."""

    nodes: Nodes
    names: dict[int, str] = field(default_factory=dict)
    address: str = ""  # This node's own, on the network of the rendezvous
    stop: bool = False  # A node was asked to stop
    failed_at: float | None = None  # When a failure was heard of, in Unix seconds
    over: ShardwiseError | None = None  # Why the run cannot go on: a node was lost, or has ended
    alone: bool = False  # Node 0 was lost, so that this node has to explain it
    ahead: dict[str, float] = field(default_factory=dict)
    """On node 0: seconds by which each other node's clock is ahead of its own."""
    channels: dict[int, Channel] = field(default_factory=dict)
    _values: dict[int, dict[int, Any]] = field(default_factory=dict)
    _agreed: dict[int, list[Any]] = field(default_factory=dict)
    _round: int = 0
    _said: set[str] = field(default_factory=set)
    _beat: float = 0.0
    _paused: float = 0.0  # Seconds in which this process did not run
    _ticked: float = field(default_factory=time.monotonic)

    @property
    def first(self) -> bool:
        """Whether this is node 0, which shows errors."""
        return self.nodes.rank == 0

    def named(self, node: int) -> str:
        name = self.names.get(node)
        return f"node {node}" + (f" ({name})" if name else "")

    def tick(self, *, stop: bool = False, failing: bool = False) -> None:
        """Tell what is new here, once; hear what is new elsewhere."""
        now = time.monotonic()
        if now - self._ticked > SILENT_SECONDS / 2:
            self._paused = now - self._ticked
        self._ticked = now
        for word, said in (("stop", stop), ("failing", failing)):
            if said and word not in self._said:
                self._said.add(word)
                self.tell({"do": word})
        if now - self._beat > BEAT_SECONDS:
            self._beat = now
            self.tell({"do": "beat"})
        for node, channel in list(self.channels.items()):
            try:
                for message in channel.receive():
                    self.hear(node, message)
            except (OSError, EOFError, ForgedError, ValueError):
                self._lose(node, "its launcher was killed or ended")
            if now - channel.heard > SILENT_SECONDS and node in self.channels:
                why = f"nothing was heard of it for {SILENT_SECONDS:.0f} s: the machine, its launcher or "
                self._lose(node, f"{why}the network stands still")

    def agree(self, value: object, check: Callable[[], object] = lambda: None) -> list[Any]:
        """Every node's value, by node. Collective. Raises what `check` does, and MachineError for a loss."""
        self._round += 1
        if self.first:
            self._value(0, self._round, value)
        else:
            self.tell({"do": "value", "round": self._round, "value": value})
        while self._round not in self._agreed:
            check()
            self.tick()
            if self.over is not None and self._round not in self._agreed:
                raise self.elsewhere(self.over)
            time.sleep(_LOOK_EVERY_SECONDS)
        return self._agreed.pop(self._round)

    def wait(self, check: Callable[[], object]) -> None:
        """A moment of waiting for the others. Raises what `check` does, and what has ended the run."""
        check()
        self.tick()
        if self.over is not None:
            raise self.elsewhere(self.over)
        time.sleep(_LOOK_EVERY_SECONDS)

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Where `error` is this node's own and the others do not know it, they hear why."""
        if isinstance(error, ShardwiseError) and not isinstance(error, ElsewhereError) and self.over is None:
            problem = asdict(error.problems[0])
            self.tell({"do": "end", "node": self.nodes.rank, "code": error.exit_code, "problem": problem})
        for channel in self.channels.values():
            channel.close(wait_seconds=_LEAVE_SECONDS)
        self.channels.clear()

    def elsewhere(self, error: ShardwiseError) -> ShardwiseError:
        """What this node shows of an error: node 0 all of it, the others a line that points there."""
        if self.first or (self.alone and error is self.over) or isinstance(error, ElsewhereError):
            return error
        what = f"{error.problems[0].what}; {self.named(0)} shows the full error"
        short = ElsewhereError(what)
        short.exit_code = error.exit_code
        return short

    def tell(self, message: Message, *, but: int | None = None) -> None:
        for node, channel in list(self.channels.items()):
            if node != but:
                with suppress(OSError):  # whoever reads from it says why
                    channel.send(message)

    def hear(self, node: int, message: Message) -> None:
        word = message["do"]
        if word in ("stop", "failing") and self.first:
            self.tell(message, but=node)
        if word == "stop":
            self.stop = True
        elif word == "failing":
            self.failed_at = self.failed_at or time.time()
        elif word == "value":
            self._value(node, message["round"], message["value"])
        elif word == "values":
            self._agreed[message["round"]] = message["values"]
        elif word == "names":
            self.names = {int(key): name for key, name in message["names"].items()}
        elif word == "lost":
            self.over = self.over or MachineError(message["what"])
        elif word == "end":
            problem = Problem(**message["problem"])
            what = f"{self.named(message['node'])}: {problem.what}"
            error = ShardwiseError(what, where=problem.where, fix=problem.fix)
            error.exit_code = message["code"]
            self.over = self.over or error
            if self.first:
                self.tell(message, but=node)

    def _value(self, node: int, number: int, value: object) -> None:
        """Node 0 collects; when all are there, everyone gets them."""
        values = self._values.setdefault(number, {})
        values[node] = value
        if len(values) == self.nodes.count:
            everyone = [values[key] for key in sorted(values)]
            del self._values[number]
            self._agreed[number] = everyone
            self.tell({"do": "values", "round": number, "values": everyone})

    def _lose(self, node: int, why: str) -> None:
        self.channels.pop(node).close()
        if self.over is not None:
            return
        what, fix = f"{self.named(node)} was lost: {why}", "see its own output and `dmesg`, and the network "
        fix += "between the nodes; then go on with --resume"
        if self._paused:
            what = f"this is {self.named(self.nodes.rank)}, which did not run for {self._paused:.0f} s; "
            what, fix = f"{what}the others have given it up", "do not suspend a launcher; go on with --resume"
        self.over, self.alone = MachineError(what, fix=fix), node == 0 or self._paused > 0
        self.tell({"do": "lost", "what": what})


def join(nodes: Nodes, check: Callable[[], object] = lambda: None) -> Together:
    """Meet the other nodes; returns when all are there. `check` is called while waiting, and may raise.

    Raises JobError where the nodes' numbers do not fit together, MachineError where one does not come.
    """
    together = Together(nodes, names={nodes.rank: node_name()})
    try:
        if nodes.rank == 0:
            _host(together, check)
        else:
            _visit(together, check, JOIN_SECONDS)
            while len(together.names) < nodes.count:
                together.wait(check)
    except BaseException as error:
        together.close(error)
        raise
    return together


def excuse(nodes: Nodes, error: ShardwiseError) -> None:
    """Tell node 0, if it is there, that this node cannot take part, so that nobody waits for it."""
    together = Together(nodes, names={nodes.rank: node_name()})
    if nodes.rank > 0:
        with suppress(ShardwiseError):
            _visit(together, lambda: None, EXCUSE_SECONDS)
    together.close(error)


@dataclass
class _Hosting:
    """Node 0 while the others join."""

    together: Together
    pending: dict[Channel, str] = field(default_factory=dict)  # And where each comes from
    refused: list[str] = field(default_factory=list)

    def accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            connection, (host, *_) = listener.accept()
            with suppress(OSError):
                channel = Channel(connection, first=True)
                channel.send({"do": "welcome", "name": node_name()})
                self.pending[channel] = str(host)

    def look(self) -> None:
        """Let in who has said who it is; drop who has another secret, or says nothing."""
        for channel, host in list(self.pending.items()):
            try:
                messages = channel.receive()
                if messages:
                    del self.pending[channel]
                    self._let_in(messages[0], channel)
                    for message in messages[1:]:
                        self.together.hear(messages[0]["node"], message)
                elif time.monotonic() - channel.heard > GREETING_SECONDS:
                    raise EOFError
            except (OSError, EOFError, ForgedError, ValueError) as error:
                del self.pending[channel]
                channel.close()
                if isinstance(error, ForgedError):
                    self.refused.append(f"a connection from {host} was refused: {what_of(error)}")
                    print(f"warning: {self.refused[-1]}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Drop whoever has said nothing."""
        for channel in self.pending:
            channel.close()

    def _let_in(self, hello: Message, channel: Channel) -> None:
        together, node, name = self.together, hello["node"], hello["name"]
        ours = together.nodes.count
        error = None
        if hello["nodes"] != ours:
            what = f"{name} was started with --nodes {hello['nodes']}, node 0 with --nodes {ours}"
            error = JobError(what, where="--nodes", fix="give the same number on every node")
        elif node in together.names:
            what = f"{name} and {together.names[node]} were both started as node {node}"
            error = JobError(what, where="--node-rank", fix="give every node a rank of its own")
        if error is not None:
            together.channels[-1] = channel  # it hears of it, too
            raise error
        together.channels[node], together.names[node] = channel, name
        together.ahead[str(node)] = hello["now"] - time.time()


def _host(together: Together, check: Callable[[], object]) -> None:
    family, address, port = resolve(together.nodes)
    hosting, together.address = _Hosting(together), address
    until, said = time.monotonic() + JOIN_SECONDS, False
    with _listen(family, address, port) as listener, closing(hosting):
        while len(together.names) < together.nodes.count:
            hosting.accept(listener)
            hosting.look()
            together.wait(check)
            missing = [str(node) for node in range(together.nodes.count) if node not in together.names]
            if not said and time.monotonic() > until - JOIN_SECONDS + _QUIET_SECONDS:
                said = True
                waiting = f"waiting for node {', '.join(missing)} at {address}:{port}"
                print(waiting, file=sys.stderr, flush=True)
            if time.monotonic() > until:
                what = f"node {', '.join(missing)} did not come to {address}:{port} in {JOIN_SECONDS:.0f} s"
                fix = "see its output; start all nodes, open the port, set the same SHARDWISE_SECRET"
                raise MachineError("; ".join([what, *hosting.refused[:3]]), where="--rendezvous", fix=fix)
    together.tell({"do": "names", "names": together.names})


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """Listen on that address alone."""
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        what = f"node 0 cannot listen on {address}:{port}: {error.strerror}"
        fix = "choose a port that is free: another run or program has this one"
        if error.errno == errno.EADDRNOTAVAIL:
            fix = "start the machine that has this address with --node-rank 0, or give another address"
        raise MachineError(what, where="--rendezvous", fix=fix) from None
    listener.setblocking(False)
    return listener


def _visit(together: Together, check: Callable[[], object], seconds: float) -> None:
    """Connect to node 0, which may not be there yet, and say who this is."""
    _, address, port = resolve(together.nodes)
    until, said = time.monotonic() + seconds, seconds < JOIN_SECONDS
    nodes = together.nodes
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=3.0)
            break
        except OSError as error:
            check()
            reason = error.strerror or str(error)
            if time.monotonic() > until:
                what = f"node 0 cannot be reached at {address}:{port}: {reason}"
                fix = "start node 0; see that this machine reaches the address and no firewall is between"
                raise MachineError(what, where="--rendezvous", fix=fix) from None
        if not said and time.monotonic() > until - seconds + _QUIET_SECONDS:
            said = True
            print(f"waiting for node 0 at {address}:{port} ({reason})", file=sys.stderr, flush=True)
        time.sleep(0.2)
    channel = Channel(connection, first=False)
    together.address = channel.address()
    name = together.names[nodes.rank]
    channel.send({"do": "hello", "node": nodes.rank, "nodes": nodes.count, "name": name, "now": time.time()})
    _welcome(together, channel, address, port)
    together.channels[0] = channel


def _welcome(together: Together, channel: Channel, address: str, port: int) -> None:
    """Wait for node 0's first frame, which shows that it has the same secret."""
    where = "--rendezvous"
    try:
        while not (messages := channel.receive()):
            if time.monotonic() - channel.heard > GREETING_SECONDS:
                raise EOFError
            time.sleep(_LOOK_EVERY_SECONDS)
    except ForgedError as error:
        what = f"{address}:{port} is not node 0 of this run: {what_of(error)}"
        fix = f"set the same {SECRET} on every node, or on none"
        raise MachineError(what, where=where, fix=fix) from None
    except (OSError, EOFError):
        what = f"{address}:{port} does not answer as node 0"
        raise MachineError(what, where=where, fix="another program has the port: choose another") from None
    together.names[0] = messages[0]["name"]
    for message in messages[1:]:
        together.hear(0, message)
