"""`shardwise power`: the GPUs' power limits and who controls them; `power restore` puts old ones back."""

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardwise.cli.options import AsJson
from shardwise.errors import JobError, MachineError

if TYPE_CHECKING:
    from shardwise.app.power import Power
    from shardwise.power.lease import Lease

ACTION = typer.Argument(
    help="show: limits and leases; try: whether a run may set limits (sets the present ones again); "
    "restore: put back the limits that ended runs have left."
)
FORCE = typer.Option("--force", help="With restore: leases of live runs, too; they then only measure.")


def power(
    action: Annotated[Literal["show", "try", "restore"], ACTION] = "show",
    force: Annotated[bool, FORCE] = False,
    as_json: AsJson = False,
) -> int:
    """Show GPUs' power limits; put back what ended runs have left.

    Ends with 4 where there is no GPU, no permission (try), or a limit cannot be put back (restore).
    """
    if force and action != "restore":
        raise JobError("--force is for `shardwise power restore`", where=f"shardwise power {action}")
    done = _restore(as_json, force) if action == "restore" else (_show if action == "show" else _try)(as_json)
    return 0 if done else MachineError.exit_code


def _show(as_json: bool) -> bool:
    from shardwise.app.power import power as look

    found = look()
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _print(found)
    return not found.failure


def _try(as_json: bool) -> bool:
    from shardwise.app.power import try_permission

    found = try_permission()
    if as_json:
        print(json.dumps({"status": found.status, "reason": found.reason, "fixes": list(found.fixes)}))
    else:
        print("this process may set the power limits" if found.allowed else found.block())
    return found.allowed


def _restore(as_json: bool, force: bool) -> bool:
    from shardwise.app.power import restore

    found, damaged = restore(force=force)
    if as_json:
        rows = [
            {"file": str(lease.file), "run": lease.run, "lines": list(settled.lines) if settled else [],
             "state": "left alone" if settled is None else "settled" if settled.left is None else "failed"}
            for lease, settled in found
        ]  # fmt: skip
        print(json.dumps({"leases": rows, "damaged": damaged}))
    else:
        for lease, settled in found:
            alone = f" its process {lease.owner.pid} is {lease.state}, so it is left alone"
            print(f"{lease.run}:{'' if settled else alone}")
            for line in (settled.lines or ("nothing was left to put back",)) if settled else ():
                print(f"  {line}")
        for bad in damaged or ([] if found else ["no lease: nothing to put back"]):
            print(bad)
    return all(settled is None or settled.left is None for _, settled in found)


def _print(found: "Power") -> None:
    from rich.table import Table

    from shardwise.device import Unavailable
    from shardwise.screen import screen

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, highlight=False)
    table.add_column("GPU", overflow="fold")
    for name in ("limit", "range", "default", "draw"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("control", no_wrap=True)
    owners = {uuid: lease for lease in found.leases for uuid in lease.cards}
    for card in found.cards:
        watts = {
            what: "-" if isinstance(value, Unavailable) else f"{value:.0f}"
            for what, value in found.readings[card.uuid].items()
        }
        span = f"{watts['power_min_watts']}-{watts['power_max_watts']}"
        row = [watts["power_limit_watts"], span, watts["power_default_watts"], watts["power_watts"]]
        owner = owners.get(card.uuid)
        control = "MIG" if card.divided else f"{owner.state} {owner.owner.pid}" if owner else "-"
        table.add_row(f"{card.index} {card.name.removeprefix('NVIDIA ')}", *row, control)
    console = screen(highlight=False)
    if found.failure:
        console.print(f"no GPU: {found.failure}", soft_wrap=True)
    else:
        console.print(table)
        may = "may" if found.may_set else "may not"
        console.print(f"\nIn watts. By its rights this process {may} set them: `shardwise power try` asks.")
    for lease in found.leases:
        console.print(f"\n{_lease(lease)}", soft_wrap=True, markup=False)
    for bad in found.damaged:
        console.print(f"\n{bad}", soft_wrap=True, markup=False)


def _lease(lease: "Lease") -> str:
    import time

    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(lease.since))
    lines = [f"lease since {since}, {lease.state}: {lease.run}", f"  file: {lease.file}"]
    for uuid, card in lease.cards.items():
        levels = ", ".join(f"{level:.0f}" for level in card.levels_watts) or "none yet"
        lines.append(f"  {uuid}: {card.previous_watts:.0f} W before; set: {levels}")
    if lease.state != "alive":
        stale = "shardwise power restore" if lease.state == "stale" else "it belongs to another container"
        lines.append(f"  fix: {stale}")
    return "\n".join(lines)
