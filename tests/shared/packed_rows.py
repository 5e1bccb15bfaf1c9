"""Samples, rows of them as the loader makes them, and transformers' own loss of them."""

from __future__ import annotations

from itertools import takewhile

import torch

from shardwise.data.batch import IGNORED, MicroBatch

VOCABULARY = 61


def samples():
    """Token ids and labels (already shifted; some ignored) of five samples of different lengths."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for length in (9, 3, 12, 1, 7):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([IGNORED])])
        labels[: length // 3] = IGNORED
        out.append((ids, labels))
    return out


def packed(pairs, rows=((0, 1, 3), (2,), (4,)), length=14):
    """Rows of samples, then padding, as the loader makes them."""
    ids, labels, positions, borders = [], [], [], [0]
    for row in rows:
        used = 0
        for index in row:
            sample, targets = pairs[index]
            ids.append(sample)
            labels.append(targets)
            positions.append(torch.arange(len(sample)))
            borders.append(borders[-1] + len(sample))
            used += len(sample)
        padding = length - used
        ids.append(torch.full((padding,), 5))
        labels.append(torch.full((padding,), IGNORED))
        positions.append(torch.arange(padding))
        borders.append(borders[-1] + padding)
    sizes = torch.tensor(borders).diff()
    shape = (len(rows), length)
    return MicroBatch(
        input_ids=torch.cat(ids).view(shape),
        labels=torch.cat(labels).view(shape),
        position_ids=torch.cat(positions).view(shape),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=int(sizes.max()),
        single_segment_rows=len(
            list(takewhile(lambda row: len(row) == 1 and len(pairs[row[0]][0]) == length, rows))
        ),
    )


def one_by_one(model, pairs):
    """Hugging Face's mean loss of each sample, times its number of targets."""
    total = torch.zeros((), device=pairs[0][0].device)
    for ids, labels in pairs:
        targets = int((labels != IGNORED).sum())
        if targets:
            unshifted = torch.cat([labels.new_tensor([IGNORED]), labels[:-1]])
            output = model(input_ids=ids[None], labels=unshifted[None], use_cache=False)
            total = total + output.loss * targets
    return total
