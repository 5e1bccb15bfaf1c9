"""What the host needs to issue an operator."""

from __future__ import annotations

import pytest

from shardwise.simulate.step_trace import Op
from shardwise.simulate.time.roofline import Host


def _op(name: str) -> Op:
    return Op(kind="elementwise", flops=0.0, read_bytes=0, written_bytes=0, name=name)


@pytest.mark.parametrize("name", ["liger_rms_norm", "causal_conv_backward", "selective_scan_replay"])
def test_a_triton_kernel_is_python_on_both_passes(name: str) -> None:
    host, plain = Host(), _op("add")
    assert host.forward(_op(name)) == host.backward(_op(name)) == host.seconds("triton")
    assert host.seconds("triton") > 4 * host.forward(plain) > 8 * host.backward(plain)


def test_unpacked_weights_cost_what_was_measured_of_llama_2_7b() -> None:
    """672 of them in a step: 0.301 s in int8 and 0.339 in NF4, 0.228 in bf16 (results/host.jsonl)."""
    host = Host()
    for name, seconds in (("int8", 0.301), ("nf4", 0.339)):
        op = _op(f"dequantize_{name}")
        assert host.forward(op) == host.backward(op)
        assert 672 * host.forward(op) == pytest.approx(seconds - 0.228, rel=0.01)
