"""Mamba's mixer on one GPU: our kernels compared with float64, mamba_ssm's, and other block sizes.

    python benchmarks/mamba/kernel.py accuracy speed --out rows.jsonl
    python benchmarks/mamba/kernel.py sweep kernels --shapes 130m --lengths 2048

Prints one JSON object per line. mamba_ssm's rows need its CUDA extension.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardwise.kernels import selective_scan as scan
from shardwise.kernels.causal_conv import causal_conv_reference
from shardwise.kernels.mamba_inner import mamba_inner

DEVICE = torch.device("cuda")
SHAPES = {"130m": 768, "1b": 2048, "7b": 4864}
"""Widths of the hidden state; twice as many channels, 16 states, 4 taps, dt of rank width / 16."""
STATES, TAPS = 16, 4
TOKENS = 16384
"""Tokens at a time: 8 rows of 2048, 4 of 4096, 1 of 16384; with `--rows 1` a single row of each length."""
Row = dict[str, Any]


def weights(hidden: int, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """The authors' initialisation, but with values of A_log and D that differ."""
    torch.manual_seed(seed)
    width, rank = 2 * hidden, math.ceil(hidden / 16)

    def uniform(*shape: int, bound: float) -> torch.Tensor:
        return (torch.rand(shape, device=DEVICE) * 2 - 1) * bound

    dt = torch.exp(torch.rand(width, device=DEVICE) * math.log(100) + math.log(1e-3))
    values = {
        "conv_weight": uniform(width, TAPS, bound=0.5).to(dtype),
        "conv_bias": uniform(width, bound=0.5).to(dtype),
        "x_proj": uniform(rank + 2 * STATES, width, bound=width**-0.5).to(dtype),
        "dt_proj": uniform(width, rank, bound=rank**-0.5).to(dtype),
        "dt_bias": dt + torch.log(-torch.expm1(-dt)),
        "a_log": torch.log(torch.arange(1.0, STATES + 1, device=DEVICE)) + uniform(width, STATES, bound=0.2),
        "d": 1.0 + uniform(width, bound=0.2),
        "out_proj": uniform(hidden, width, bound=width**-0.5).to(dtype),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


def positions(rows: int, length: int, samples: int = 1) -> torch.Tensor:
    """Rows of `samples` samples each, of random lengths."""
    found = torch.arange(length).repeat(rows, 1)
    generator = torch.Generator().manual_seed(0)
    for row in range(rows):
        for border in torch.randint(1, length, (samples - 1,), generator=generator).sort().values.tolist():
            found[row, border:] = torch.arange(length - border)
    return found.int().to(DEVICE)


def in_float64(xz: torch.Tensor, where: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    x, z = xz.chunk(2, dim=-1)
    u = causal_conv_reference(x, values["conv_weight"], values["conv_bias"], where)
    small = u @ values["x_proj"].t()
    rank = values["dt_proj"].shape[1]
    y = scan.selective_scan_reference(
        u, small[..., :rank] @ values["dt_proj"].t(), -torch.exp(values["a_log"]), small[..., rank:],
        values["d"], values["dt_bias"], where,
    )  # fmt: skip
    return (y * torch.nn.functional.silu(z)) @ values["out_proj"].t()


def accuracy(_: argparse.Namespace) -> Iterator[Row]:
    """Relative errors (norms) of the output and of every gradient, at lengths that no block divides."""
    for dtype, (rows, length, samples), hidden in itertools.product(
        (torch.float32, torch.bfloat16), ((1, 333, 1), (3, 200, 4), (2, 64, 1), (1, 1029, 20)), (48, 200)
    ):
        values, where = weights(hidden, dtype), positions(rows, length, samples)
        xz = torch.randn(rows, length, 4 * hidden, device=DEVICE).to(dtype).requires_grad_()
        exact = {name: value.detach().double().requires_grad_() for name, value in values.items()}
        xz64 = xz.detach().double().requires_grad_()
        out, expected = mamba_inner(xz, where, **values), in_float64(xz64, where, exact)
        upstream = torch.randn_like(out)
        left = torch.autograd.grad(out, [xz, *values.values()], upstream)
        right = torch.autograd.grad(expected, [xz64, *exact.values()], upstream.double())
        pairs = zip(["out", "xz", *values], (out, *left), (expected, *right), strict=True)
        yield {
            "kind": "accuracy",
            "dtype": str(dtype).removeprefix("torch."),
            "rows": rows,
            "length": length,
            "samples_in_a_row": samples,
            "hidden": hidden,
            "errors": {
                name: float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                for name, a, b in pairs
            },
        }


def ours(rows: int, length: int, hidden: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    values, where = weights(hidden, torch.bfloat16), positions(rows, length)
    xz = torch.randn(rows, length, 4 * hidden, device=DEVICE).bfloat16().requires_grad_()
    return lambda: mamba_inner(xz, where, **values), [xz, *values.values()]


def theirs(rows: int, length: int, hidden: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """mamba_ssm's, with xz laid out as its own module makes it: channels first."""
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

    v = weights(hidden, torch.bfloat16)
    flat = torch.randn(4 * hidden, rows * length, device=DEVICE).bfloat16()
    xz = flat.view(4 * hidden, rows, length).transpose(0, 1).requires_grad_()

    def forward() -> torch.Tensor:
        return mamba_inner_fn(
            xz, v["conv_weight"].unsqueeze(1), v["conv_bias"], v["x_proj"], v["dt_proj"], v["out_proj"], None,
            -torch.exp(v["a_log"]), None, None, v["d"], delta_bias=v["dt_bias"], delta_softplus=True,
        )  # fmt: skip

    return forward, [xz, *v.values()]


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median time on the GPU, after three calls that do not count."""
    times = []
    for turn in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def speed(arguments: argparse.Namespace) -> Iterator[Row]:
    """Forward, and forward and backward, with the memory kept between them and the peak."""
    sides = {"shardwise": ours}
    if find_spec("selective_scan_cuda") and find_spec("causal_conv1d"):
        sides["mamba_ssm"] = theirs
    for shape, length, (side, make) in itertools.product(arguments.shapes, arguments.lengths, sides.items()):
        rows = arguments.rows or max(TOKENS // length, 1)
        forward, leaves = make(rows, length, SHAPES[shape])
        upstream = torch.randn_like(forward())

        def both(
            forward: Callable[[], torch.Tensor] = forward,
            leaves: list[torch.Tensor] = leaves,
            upstream: torch.Tensor = upstream,
        ) -> None:
            torch.autograd.grad(forward(), leaves, upstream)

        forward_ms, both_ms = milliseconds(forward), milliseconds(both)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = forward()
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(out, leaves, upstream)
        yield {
            "kind": "speed",
            "side": side,
            "shape": shape,
            "rows": rows,
            "length": length,
            "forward_ms": forward_ms,
            "forward_backward_ms": both_ms,
            "kept_bytes_per_token": kept / (rows * length),
            "peak_bytes_per_token": (torch.cuda.max_memory_allocated() - before) / (rows * length),
        }
        del forward, leaves, upstream, out, both


def scan_inputs(rows: int, length: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Inputs of `selective_scan`, and a gradient of its output."""
    width = 2 * hidden
    v = weights(hidden, torch.bfloat16)
    x, delta, z, dout = (torch.randn(rows, length, width, device=DEVICE).bfloat16() for _ in range(4))
    bc = torch.randn(rows, length, 2 * STATES, device=DEVICE)
    a, d, bias = -torch.exp(v["a_log"].detach()), v["d"].detach(), v["dt_bias"].detach()
    return x, delta, a, bc, d, z, bias, positions(rows, length), dout


def sweep(arguments: argparse.Namespace) -> Iterator[Row]:
    """The scan's three calls with other chunks and, in the forward pass, blocks; the defaults come first."""
    from shardwise.kernels import selective_scan_backward_triton as back
    from shardwise.kernels import selective_scan_triton as sweeps

    for shape, length in itertools.product(arguments.shapes, arguments.lengths):
        rows, hidden = arguments.rows or max(TOKENS // length, 1), SHAPES[shape]
        x, delta, a, bc, d, z, bias, where, dout = scan_inputs(rows, length, hidden)
        usual = scan.chunk_tokens(rows, length, 2 * hidden)
        chunks = [usual, *(c for c in (64, 128, 256, 512, 1024, length) if c != usual and c <= length)]
        for chunk, block in (*((c, 32) for c in chunks), (usual, 64), (usual, 128)):
            common = {"chunk": chunk}
            fixed = (x, delta, a, bc, d, z, bias, where)
            blocks = {"block": block}
            _, states = sweeps.forward(*fixed, **common, **blocks)
            dz = torch.empty_like(z)
            again = sweeps.replay(*fixed, states, dout.clone(), dz, **common, **blocks)
            _, fine, adjoints = again

            # `dout` shrinks from call to call, which costs no time
            run_forward = partial(sweeps.forward, *fixed, **common, **blocks)
            run_replay = partial(sweeps.replay, *fixed, states, dout, dz, **common, **blocks)
            run_backward = partial(
                back.backward, x, delta.clone(), a, bc, d, bias, where, fine, adjoints, dout.clone(),
                **common,
            )  # fmt: skip

            yield {
                "kind": "sweep",
                "shape": shape,
                "rows": rows,
                "length": length,
                **common,
                **blocks,
                "forward_ms": milliseconds(run_forward, 5),
                "replay_ms": milliseconds(run_replay, 5),
                "backward_ms": milliseconds(run_backward, 5),
            }


def kernels(arguments: argparse.Namespace) -> Iterator[Row]:
    """Time of forward and backward, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for shape, length in itertools.product(arguments.shapes, arguments.lengths):
        rows = arguments.rows or max(TOKENS // length, 1)
        forward, leaves = ours(rows, length, SHAPES[shape])
        upstream = torch.randn_like(forward())
        torch.autograd.grad(forward(), leaves, upstream)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            torch.autograd.grad(forward(), leaves, upstream)
            torch.cuda.synchronize()
        yield {
            "kind": "kernels",
            "shape": shape,
            "rows": rows,
            "length": length,
            "ms": {
                e.key[:80]: e.device_time_total / 1000 for e in seen.key_averages() if e.device_time_total
            },
        }


WHAT = {"accuracy": accuracy, "speed": speed, "sweep": sweep, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=WHAT)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 16384])
    parser.add_argument(
        "--rows", type=int, default=0, help="rows at a time; default: as many as make 16384 tokens"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        **{name: importlib.metadata.version(name) for name in ("torch", "triton")},
    }
    if find_spec("mamba_ssm"):
        machine["mamba_ssm"] = importlib.metadata.version("mamba_ssm")
    for what in arguments.what:
        for row in WHAT[what](arguments):
            line = json.dumps({**row, **machine})
            print(line, flush=True)
            if arguments.out:
                with arguments.out.open("a") as out:
                    out.write(line + "\n")


if __name__ == "__main__":
    main()
