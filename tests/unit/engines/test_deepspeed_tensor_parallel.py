from __future__ import annotations

import torch

from shardwise.data.batch import MicroBatch
from shardwise.engines.deepspeed.runtime.tensor_parallel import digest_of


def batch(ids: torch.Tensor, labels: torch.Tensor) -> MicroBatch:
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        cu_seqlens=torch.tensor([0, ids.numel()], dtype=torch.int32),
        max_seqlen=ids.shape[1],
    )


def test_other_rows_other_order_and_other_targets_have_another_digest() -> None:
    ids, labels = torch.randint(64, (2, 50), generator=torch.Generator().manual_seed(0)).chunk(2)
    swapped, ignored = ids.clone(), labels.clone()
    swapped[0, :2] = ids[0, :2].flip(0)
    ignored[0, -1] = -100
    assert ids[0, 0] != ids[0, 1]
    first, second = batch(ids, labels), batch(labels, ids)
    kinds = [
        [first, second],
        [second, first],
        [first],
        [batch(swapped, labels)],
        [batch(ids, ignored)],
        [batch(ids + 1, labels)],
    ]
    assert len({digest_of(kind) for kind in kinds}) == len(kinds)
    assert digest_of([first]) == digest_of([batch(ids.clone(), labels.clone())])
