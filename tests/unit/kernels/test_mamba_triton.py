"""The mixer's Triton kernels: right in Triton's interpreter, and what Hopper's compiler makes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_equal_float64_in_the_interpreter():
    """Chunks, rows, samples that begin on and off their borders, sizes that no block divides."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "triton_worker"],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) == 12
    for case, errors in results.items():
        bound = 1e-2 if "bf16" in case else 1e-6
        assert all(error < bound for error in errors.values()), (case, errors)


def compiled(kernel, constants, *, half, integers, **options):
    """For sm_90, as on a GPU: addresses of tensors are multiples of 16, sizes are anything."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in integers:
            signature[name] = "i32"
        else:
            kind = "i32" if name == "positions" else "bf16" if name in half else "fp32"
            signature[name], attributes[place,] = f"*{kind}", [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, **options})


def machine_code(kernel):
    """(stack bytes, instructions by name) of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return int(re.findall(r"STACK:(\d+)", usage)[0]), re.findall(r"\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_on_hopper_no_scan_crosses_threads_and_states_stay_in_registers():
    """What the kernels' speed rests on, and a change of block sizes, or of Triton, can undo."""
    from shardwise.kernels import selective_scan_backward_triton, selective_scan_triton
    from shardwise.kernels.selective_scan import BLOCK, TILE

    half = {"x", "delta", "z", "out", "dout", "dz", "fine", "dy", "dbc"}
    integers = {"tokens", "chunk"}
    shape = {"width": 9728, "n_state": 16, "complete": True, "tile": TILE, "block": BLOCK}
    sweep = {**shape, "z_stride": 2 * 9728, "dz_stride": 2 * 9728, "n_block": 16, "carried": True}
    for mode, unrolled in selective_scan_triton.UNROLLED.items():
        constants = {**sweep, "mode": mode, "unrolled": unrolled}
        kernel = compiled(selective_scan_triton._sweep, constants, half=half, integers=integers)
        stack, code = machine_code(kernel)
        assert stack == 0
        assert not any(name.startswith(("SHFL", "LDS", "BAR")) for name in code)
    kernel = compiled(
        selective_scan_backward_triton._back,
        {**shape, "precision": "tf32"},
        half=half,
        integers=integers,
        num_stages=1,
        maxnreg=selective_scan_backward_triton.REGISTERS,
    )
    stack, code = machine_code(kernel)
    assert stack == 0
    assert any(name.startswith("HMMA") for name in code)
    assert sum(name.startswith("SHFL") for name in code) < 10  # scans across threads would be hundreds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_on_hopper_the_convolutions_filters_stay_in_registers():
    from shardwise.kernels import causal_conv_triton
    from shardwise.kernels.causal_conv import CONVOLVED
    from shardwise.kernels.causal_conv_triton import AHEAD, AHEAD_BACK, CHANNELS

    shape = {"taps": 4, "has_bias": True, "block_t": CONVOLVED, "block": CHANNELS}
    half = {"x", "weight", "bias", "out", "dout", "dx"}
    integers = {"tokens", "width", "x_stride", "dx_stride"}
    for kernel, ahead in ((causal_conv_triton._forward, AHEAD), (causal_conv_triton._backward, AHEAD_BACK)):
        stack, _ = machine_code(compiled(kernel, {**shape, "ahead": ahead}, half=half, integers=integers))
        assert stack == 0, kernel.fn.__name__
