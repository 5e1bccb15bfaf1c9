"""Packed rows of short documents take less attention, and the packed kernel's time."""

from __future__ import annotations

import pytest

from shardwise.job.schema import Job
from shardwise.trace.job import JobTracer

LENGTH = 512


def attention(document_tokens: int | None, *, packing: bool = True) -> dict[str, tuple[float, set[int]]]:
    """FLOPs and keys of the attention of a micro-batch of two rows, by kernel."""
    job = Job.model_validate(
        {
            "name": "run",
            "model": {
                "source": "tiny-llama",
                "weights": "random",
                "config": {"max_position_embeddings": LENGTH},
            },
            "data": {"train": "text.txt", "sequence_length": LENGTH, "packing": packing},
            "train": {"steps": 1, "global_batch": 2, "precision": "bf16"},
        }
    )
    tracer = JobTracer(job, vocab_size=64, capability=(9, 0), document_tokens=document_tokens)
    found: dict[str, tuple[float, set[int]]] = {}
    for op in tracer.trace(2, 0, 1).ops:
        if op.kind == "attention":
            flops, keys = found.get(op.name, (0.0, set()))
            found[op.name] = (flops + op.flops, keys | {op.shape[4]})
    return found


def test_flops_are_those_of_the_documents() -> None:
    rows, documents = attention(None), attention(64)
    total = sum(flops for flops, _ in rows.values())
    assert set(documents) == {"_varlen_attn", "_varlen_attn_backward"}
    assert sum(flops for flops, _ in documents.values()) == pytest.approx(total * 65 / 513)
    assert all(keys == {64} for _, keys in documents.values())


def test_a_document_is_no_longer_than_its_row() -> None:
    total = sum(flops for flops, _ in attention(None).values())
    assert sum(flops for flops, _ in attention(10_000).values()) == pytest.approx(total)


def test_unpacked_rows_hold_one_document() -> None:
    assert attention(64, packing=False) == attention(None, packing=False)
