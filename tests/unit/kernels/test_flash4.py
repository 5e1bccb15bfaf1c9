"""Flash attention 4 as it is planned. What it computes is in tests/gpu/test_kernels.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.kernels import flash4
from shardwise.kernels.attention import single_segments_are_faster, varlen_attention
from shardwise.kernels.target import Target, meta_stands_for
from shardwise.planner import planning
from shardwise.simulate.step_trace import Op
from shardwise.trace import job as tracing
from shardwise.trace.job import JobTracer
from shardwise.trace.recorder import Recorder
from shardwise.trace.workspace import workspace

HOPPER4 = Target(capability=(9, 0), multiprocessors=132, flash4=True)
META = torch.device("meta")
TOKENS, LONGEST, SEGMENTS = 8192, 2048, 16


def ops(head: int, *, heads: int = 32, key_heads: int = 8, window: int | None = None) -> list[Op]:
    """What forward and backward pass of one packed call issue."""
    recorder = Recorder(HOPPER4)
    with meta_stands_for(HOPPER4):
        q, k, v = (
            torch.empty(1, n, TOKENS, head, device=META, dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, key_heads, key_heads)
        )
        borders = torch.empty(SEGMENTS + 1, device=META, dtype=torch.int32)
        how = {"cu_seq_lens_q": borders, "max_length_q": LONGEST, "sliding_window": window}
        with recorder:
            out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, **how)
            out.backward(torch.empty_like(out))
        assert (out.shape, q.grad.shape, k.grad.shape) == ((1, TOKENS, heads, head), q.shape, k.shape)
    return [op for op in recorder.ops if op.kind == "attention"]


@pytest.mark.parametrize("head", flash4.HEADS)
def test_packed_rows_take_it(head: int) -> None:
    assert [op.name for op in ops(head)] == ["flash4_attention", "flash4_attention_backward"]


@pytest.mark.parametrize("head", [32, 80, 160])
def test_heads_that_it_computes_wrong_or_untested_take_torchs_kernels(head: int) -> None:
    assert [op.name for op in ops(head)] == ["_varlen_attn", "_varlen_attn_backward"]
    with meta_stands_for(HOPPER4):
        assert single_segments_are_faster(META, head)
        assert not single_segments_are_faster(META, 128)


def test_flops_are_those_of_torchs_kernel_and_a_window_lowers_them() -> None:
    forward, backward = ops(128)
    assert backward.flops == 2.5 * forward.flops
    windowed, _ = ops(128, window=512)
    pairs = 512 * 513 / 2 + (LONGEST - 512) * 512
    assert windowed.flops == 4 * 32 * 128 * pairs * TOKENS / LONGEST
    assert (windowed.shape[4], forward.shape[4]) == (512, LONGEST)


@pytest.mark.parametrize(
    ("head", "key_heads", "expected"),
    [
        # (8192 + 17 * 64 - 1) // 64 = 144 blocks of 64 queries, (8192 + 17 * 128 - 1) // 128 = 80 of 128 keys
        (128, 8, [4 * 32 * 9216 * 128, 4 * 32 * 9216, 4 * 32 * 9216, *[4 * 8 * 10240 * 128] * 2]),
        (128, 32, [4 * 32 * 9216 * 128, 4 * 32 * 9216, 4 * 32 * 9216]),
        # 80 blocks of 128 queries
        (64, 32, [4 * 32 * 10240 * 64, 4 * 32 * 10240, 4 * 32 * 10240]),
    ],
)
def test_scratch_of_the_backward_pass(head: int, key_heads: int, expected: list[int]) -> None:
    """As `_flash_attn_bwd` of 4.0.0b36 allocates it; the ledger's rows bear it out within 0.02 %."""
    q = torch.empty(TOKENS, 32, head, device=META, dtype=torch.bfloat16)
    k = torch.empty(TOKENS, key_heads, head, device=META, dtype=torch.bfloat16)
    sums, borders = q.new_empty(32, TOKENS), q.new_empty(SEGMENTS + 1)
    operator = torch.ops.shardwise.flash4_attention_backward.default
    given = (q, q, k, k, q, sums, borders, LONGEST, 1.0, (-1, 0))
    assert workspace(operator, given, [], HOPPER4) == expected


def job(**train: Any) -> Job:
    values = {"steps": 1, "global_batch": 2, "precision": "bf16", **train}
    model = {"source": "tiny-llama", "weights": "random", "config": {"head_dim": 64}}
    data = {"train": "text.txt", "sequence_length": 128}
    return Job.model_validate({"name": "run", "model": model, "data": data, "train": values})


def kernels(tracer: JobTracer) -> set[str]:
    found = tracer.trace(2, 0, 1).ops
    return {op.name for op in found if op.kind == "attention" and "backward" not in op.name}


@pytest.mark.parametrize("documents", [None, 32])
def test_a_plan_takes_it_on_hopper_where_training_does(documents: int | None) -> None:
    how: dict[str, Any] = {"vocab_size": 64, "document_tokens": documents, "flash4": True}
    assert kernels(JobTracer(job(), capability=(9, 0), **how)) == {"flash4_attention"}
    for other in (
        JobTracer(job(), capability=(8, 0), **how),
        JobTracer(job(deterministic=True), capability=(9, 0), **how),
    ):
        assert "flash4_attention" not in kernels(other)


@pytest.mark.parametrize("installed", [False, True])
def test_a_plan_asks_whether_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "installed", lambda: installed)
    planning._kept_tracer.cache_clear()
    found = kernels(planning._tracer(job(), parse_hardware("2xH200"), 64))
    planning._kept_tracer.cache_clear()
    assert ("flash4_attention" in found) == installed


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(JobError, match="cannot be imported") as caught:
        flash4._package()
    assert "pip uninstall flash-attn-4" in caught.value.problems[0].fix
