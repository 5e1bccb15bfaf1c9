"""What NCCL takes from other kernels of two GPUs, and they from it.

    python benchmarks/overlap/measure.py [--out FILE]

Each line of the result is a collective alone, at some size, or a kernel and a collective at the same time.
Variables of NCCL (NCCL_MAX_CTAS, ...) are read from the environment and stand in each line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

MEGABYTES = (1, 4, 16, 64, 128, 256, 512, 1024)
"""Of bf16 that all GPUs have after a gather, or before a reduction."""

OVERLAPPED = 512
"""That of the collective which runs together with a kernel."""

REPEATS = 20
RANKS = 2

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_of, (Path(folder), arguments.out), nprocs=RANKS, start_method="spawn")


def rank_of(rank: int, folder: Path, out: Path | None) -> None:
    """One GPU's process."""
    torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=RANKS)
    for line in measured():
        if rank == 0:
            text = json.dumps({**line, **about()})
            print(text, flush=True)
            if out:
                with out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
    dist.destroy_process_group()


def about() -> dict[str, Any]:
    return {
        "nccl_variables": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measured() -> Any:
    for megabytes in MEGABYTES:
        for name, collective in collectives(megabytes).items():
            together(None, 0, collective, 3)
            _, alone = together(None, 0, collective, REPEATS)
            yield {"collective": name, "megabytes": megabytes, "milliseconds": alone}
    for name, collective in collectives(OVERLAPPED).items():
        yield {"collective": name, "megabytes": OVERLAPPED, **launched(collective)}
        _, alone = together(None, 0, collective, REPEATS)
        for of, kernel in kernels().items():
            together(kernel, 3, collective, 1)
            one, _ = together(kernel, REPEATS, collective, 0)
            times = max(4, int(REPEATS * alone / one))
            shared, _ = together(kernel, times, collective, int(1.5 * REPEATS))  # the collectives last longer
            _, slowed = together(kernel, 2 * times, collective, REPEATS)  # the kernels do
            yield {
                "collective": name,
                "megabytes": OVERLAPPED,
                "kernel": of,
                "kernel_milliseconds": one,
                "kernel_slower": shared / one - 1,
                "collective_milliseconds": alone,
                "collective_slower": slowed / alone - 1,
            }


def collectives(megabytes: int) -> dict[str, Call]:
    elements = megabytes * 2**20 // 2
    everything = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
    share = torch.randn(elements // RANKS, device="cuda", dtype=torch.bfloat16)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(everything, share, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, everything, async_op=True),
        "all_reduce": lambda: dist.all_reduce(everything, async_op=True),
    }


def kernels() -> dict[str, Call]:
    """Products of Falcon-7B, Llama-2-7B and Qwen3-30B-A3B (128 experts), attention, and what moves memory."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    falcon, llama, experts = random(18176, 4544), random(11008, 4096), random(128, 1536, 2048)
    wide, narrow, rows = random(4096, 4544), random(4096, 4096), random(32768, 2048)
    ends = torch.arange(256, 32769, 256, device="cuda", dtype=torch.int32)
    query, key, value = (random(2, 32, 2048, 128) for _ in range(3))
    mask = torch.rand(32768, 1, device="cuda") > 0.5
    return {
        "product, Falcon": lambda: wide @ falcon.t(),
        "product, Llama": lambda: narrow @ llama.t(),
        "products of experts": lambda: torch._grouped_mm(rows, experts.transpose(-2, -1), offs=ends),
        "attention": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
        "multiplied": lambda: rows * rows,
        "masked": lambda: rows.masked_fill(mask, 0.0),
        "converted": rows.float,
    }


def together(kernel: Call | None, times: int, collective: Call, collectives: int) -> tuple[float, float]:
    """Milliseconds of one kernel and of one collective, of so many that begin at the same time."""
    torch.cuda.synchronize()
    dist.barrier(device_ids=[torch.cuda.current_device()])
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)  # both queues are filled meanwhile
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    begin, end, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    with torch.cuda.stream(side):
        first.record()
        for _ in range(collectives):
            collective().wait()
        last.record()
    begin.record()
    for _ in range(times):
        kernel() if kernel else None
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / max(times, 1), first.elapsed_time(last) / max(collectives, 1)


def launched(collective: Call) -> dict[str, int]:
    """Blocks and threads of NCCL's kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        collective().wait()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    (kernel,) = [event["args"] for event in events if "nccl" in event["name"] and event["cat"] == "kernel"]
    return {"blocks": kernel["grid"][0], "threads": kernel["block"][0]}


if __name__ == "__main__":
    main()
