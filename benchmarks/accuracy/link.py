"""Measure the link between two nodes of two GPUs: one pair across it, both pairs at once, and all four GPUs.

    python benchmarks/accuracy/link.py --out two-nodes.json

Both nodes are on this machine; NCCL_HOSTID makes NCCL take them for two, joined by its sockets. `both pairs`
and `all` are what a row is predicted with (predict.two_nodes). --cpu tries the script over gloo.
The output is a line of results/two_nodes_link.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from shardwise.diagnosis.calibrate import link_between
from shardwise.diagnosis.probes.ranks import calls_for, seconds_of
from shardwise.hardware.calibration import Sample
from shardwise.launch.nodes import free_port
from shardwise.record.environment import versions

SIZES = (2**12, 2**16, 2**20, 2**24, 2**27, 2**28)
GROUPS = {
    "one pair": [[0, 2]],
    "both pairs": [[0, 2], [1, 3]],
    "all": [[0, 1, 2, 3]],
    "node": [[0, 1], [2, 3]],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    multiprocessing.spawn(rank_main, (free_port(), arguments.cpu, arguments.out), nprocs=4)


def rank_main(rank: int, port: int, cpu: bool, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_HOSTID": f"node-{rank // 2}"}
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl", rank=rank, world_size=4)
    found = {}
    for name, groups in GROUPS.items():
        mine = None
        for members in groups:
            made = dist.new_group(members)
            mine = made if rank in members else mine
        samples = [
            Sample(
                what=what,
                bytes=size,
                seconds=seconds_of(device, call_of(what, size, mine, device), calls=calls_for(size)),
            )
            for what in ("all_gather", "reduce_scatter", "all_reduce")
            for size in SIZES[: 3 if cpu else None]
        ]
        if rank == 0:
            assert mine is not None
            rate = link_between(samples, mine.size())
            found[name] = {"rate": rate and vars(rate), "samples": [vars(one) for one in samples]}
    if rank == 0:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        device_name = "CPU" if cpu else torch.cuda.get_device_name()
        head = {"device": device_name, "date": date, "versions": versions()}
        out.write_text(json.dumps(head | found, indent=1) + "\n", encoding="utf-8")
        print({name: one["rate"] for name, one in found.items()}, file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


def call_of(
    what: str, size: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """A call among the ranks of a group; nothing for the others, which only begin together with these."""
    if group is None:
        return lambda: None
    full, part = (torch.zeros(size // 4 // parts, device=device) for parts in (1, group.size()))
    if what == "all_gather":
        return partial(dist.all_gather_into_tensor, full, part, group=group)
    if what == "all_reduce":
        return partial(dist.all_reduce, full, group=group)
    return partial(dist.reduce_scatter_tensor, part, full, group=group)


if __name__ == "__main__":
    main()
