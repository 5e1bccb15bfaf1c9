"""Seconds of DeepSpeedCPUAdam's update in host memory, with what ZeRO does before and after it.

    torchrun --nproc-per-node 2 benchmarks/cpu_adam/measure.py --elements 700000000 [--groups 1] [--pinned]

All processes update at the same time. The printed line has one process's seconds, and bytes per second of all
of them: `mul`, gradients clipped in place; `adam`, the update; `cast`, weights in bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

REPEATS = 3
BYTES = {"mul": 8, "adam": 28, "cast": 6}
"""Read and written for an element, as simulate/time/schedule.py counts them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, required=True, help="of each process")
    parser.add_argument("--groups", type=int, default=1, help="sub groups, updated one after the other")
    parser.add_argument("--pinned", action="store_true", help="weights and gradients in page-locked memory")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    count, groups, ranks = arguments.elements, arguments.groups, dist.get_world_size()

    def zeros(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros(count // groups, dtype=dtype)
        return made.pin_memory() if arguments.pinned else made

    weights = [torch.nn.Parameter(zeros()) for _ in range(groups)]
    halves = [zeros(torch.bfloat16) for _ in range(groups)]
    for weight in weights:
        weight.grad = zeros().fill_(0.01)
    seconds = update(DeepSpeedCPUAdam(weights, lr=1e-4, adamw_mode=True), weights, halves)
    if dist.get_rank() == 0:
        rates = {name: round(size * count * ranks / seconds[name] / 1e9, 1) for name, size in BYTES.items()}
        how = {"procs": ranks, "elements": count, "groups": groups, "pin": arguments.pinned}
        found = {name: round(value, 4) for name, value in seconds.items()}
        print(json.dumps({**how, "threads": torch.get_num_threads(), **found, "GB_s": rates}))


def update(
    optimizer: DeepSpeedCPUAdam, weights: list[torch.nn.Parameter], halves: list[torch.Tensor]
) -> Counter[str]:
    """Seconds of each part, the mean of REPEATS updates after a first one; `all` has waits for others."""
    seconds: Counter[str] = Counter()
    for repeat in range(REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        for weight, half in zip(weights, halves, strict=True):
            optimizer.param_groups[0]["params"] = [weight]
            times = [time.perf_counter()]
            for part in (
                lambda w=weight: w.grad.mul_(0.999),
                optimizer.step,
                lambda h=half, w=weight: h.copy_(w),
            ):
                with torch.no_grad():
                    part()
                times.append(time.perf_counter())
            if repeat:
                for name, first, last in zip(BYTES, times, times[1:], strict=False):
                    seconds[name] += (last - first) / REPEATS
        dist.barrier()
        if repeat:
            seconds["all"] += (time.perf_counter() - began) / REPEATS
    return seconds


if __name__ == "__main__":
    main()
