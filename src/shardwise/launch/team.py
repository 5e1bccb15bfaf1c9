"""This node's part in a run on several: joining, and agreeing on one end, one error and one exit code."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, StoppedError, restored
from shardwise.launch.control import Together, excuse, join
from shardwise.launch.nodes import Place, free_port, interface_of, resolve
from shardwise.launch.spec import Ending, LaunchSpec
from shardwise.launch.startup import check, facts

_LEAVING_CHARS = 100_000  # of a traceback that goes to node 0


@contextmanager
def joined(
    spec: LaunchSpec, while_waiting: Callable[[], object]
) -> Iterator[tuple[LaunchSpec, Place | None, Together | None]]:
    """Meet the other nodes and check that they fit; nothing to do for one machine and for a dry run.

    Gives what to run, this node's place, and the connection to the others, which is closed in the end.
    """
    if spec.nodes is None or spec.dry_run:
        yield spec, None, None
        return
    try:
        mine = facts(spec)
    except ShardwiseError as error:
        excuse(spec.nodes, error)
        raise
    team = join(spec.nodes, while_waiting)
    try:
        shared = check(team, spec, mine, while_waiting)
        port = team.agree(free_port(team.address) if team.first else None, while_waiting)[0]
        if not team.first:
            print(
                f"this is {team.named(spec.nodes.rank)}; the run is shown on {team.named(0)}", file=sys.stderr
            )
        place = Place(
            node=spec.nodes.rank,
            first_rank=spec.nodes.rank * spec.processes,
            world_size=spec.world_size,
            address=resolve(spec.nodes)[1],
            port=port,
            interface=interface_of(team.address),
        )
        yield replace(spec, nodes=replace(spec.nodes, shared=shared)), place, team
    except BaseException as error:
        team.close(error)
        raise
    team.close()


def settle(team: Together, ending: Ending, while_waiting: Callable[[], object]) -> Ending:
    """The ending of the run, of which every node knows its own: the first cause on any node."""
    try:
        endings = team.agree(_to_json(ending), while_waiting)
    except ShardwiseError as over:
        return replace(ending, code=over.exit_code, error=over, out_of_memory=None, log=None, traceback="")
    node = min(range(len(endings)), key=lambda number: _importance(endings[number]))
    first = endings[node]
    if first["code"] == 0:
        return ending
    error = None if first["error"] is None else _error(first, team, node)
    evidence = first["out_of_memory"] if team.first else None
    return replace(
        ending,
        code=first["code"],
        error=None if error is None else team.elsewhere(error),
        out_of_memory=evidence,
        requested=first["requested"],
        traceback=first["traceback"] if team.first else "",
        log=_log(first["log"], team, node) if team.first else None,
    )


def _importance(ending: dict[str, Any]) -> tuple[bool, bool, bool, bool, float]:
    """Failures before stops before success; memory that ran out and causes before what follows from them."""
    code = ending["code"]
    stopped = code == StoppedError.exit_code
    return code == 0, stopped, ending["out_of_memory"] is None, ending["follows"], ending["failed_at"]


def _to_json(ending: Ending) -> dict[str, Any]:
    return {
        **vars(ending),
        "error": ending.error and ending.error.to_json(),
        "traceback": ending.traceback[-_LEAVING_CHARS:],
        "log": None if ending.log is None else str(ending.log.absolute()),
    }


def _error(ending: dict[str, Any], team: Together, node: int) -> ShardwiseError:
    """The error of that node, which says where it was."""
    error = restored({**ending["error"], "exit_code": ending["code"]})
    if not isinstance(error, StoppedError):
        first, *rest = error.problems
        where = ", ".join(filter(None, [team.named(node), first.where]))
        error.problems = (replace(first, where=where), *rest)
    return error


def _log(path: str | None, team: Together, node: int) -> Path | None:
    """The log of that node, as `scp` writes places."""
    if path is None:
        return None
    return Path(path if node == 0 else f"{team.names[node]}:{path}")
