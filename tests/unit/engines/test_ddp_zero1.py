"""Buckets of gradients: each is that of one backward pass, whatever the pass before left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.engines.ddp_zero1.runtime import Bucket
from shardwise.engines.runtime.protocol import World

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, local_rank=0, device=CPU, data_rank=0, data_size=1)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32])
def test_an_expert_without_tokens_leaves_no_gradient_of_the_pass_before(sums: torch.dtype) -> None:
    names = ("busy", "idle")
    weights = {name: nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for name in names}
    bucket = Bucket(weights, ALONE, sums=sums, sent=sums)
    for passed, having in ((1.0, names), (2.0, ("busy",)), (3.0, ("idle",))):
        bucket.reset()
        for name in having:
            weights[name].grad = torch.full((3,), passed, dtype=torch.bfloat16)
            bucket.take(name, weights[name])
            assert weights[name].grad is None
        assert bucket.missing == set(names) - set(having)
        bucket.reduce().wait()
        found = {name: part.tolist() for name, _, part in bucket.pieces(bucket.reduced())}
        assert found == {name: [passed if name in having else 0.0] * 3 for name in names}
