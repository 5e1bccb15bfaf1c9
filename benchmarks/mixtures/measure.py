"""What a mixture of experts with sinks (gpt-oss) spends its time on, on a GPU; a line of JSON for each case.

    python benchmarks/mixtures/measure.py > benchmarks/mixtures/results/h200.jsonl

bf16, milliseconds. `products`: the grouped products of a layer's experts, with tokens routed at random, so
that experts get different numbers of them: forward, gradient of the input, gradient of the weight.
`attention`: of gpt-oss-20B's heads with sinks, forward and backward pass, and memory beyond the inputs:
transformers' eager code and ours. `biases`: forward and backward pass of looking the experts' biases up, by
an index and as an embedding; `skewed`: half of the tokens go to one expert.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import product as product_of
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from shardwise.kernels.attention import block_causal_mask, varlen_attention

EXPERTS = (8, 32, 64, 128)
ROWS = (64, 128, 256, 512, 1024, 2048)
"""Of an expert, on average."""
SIZES = ((2048, 1536), (1024, 2048), (2880, 5760), (4096, 14336))
LARGEST = 24 * 1024**3
"""Bytes of a case's tensors; larger ones are left out."""
BIASES = ((32, 8192, 2880), (32, 8192, 5760), (32, 32768, 2880), (32, 32768, 5760))
"""Experts, tokens, length of a bias."""
HEADS, KEY_HEADS, HEAD = 64, 8, 64
WINDOW = 128


def milliseconds(action: Callable[[], object], *, times: int = 12) -> float:
    """Median of single calls."""
    for _ in range(3):
        action()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for start, end in pairs:
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in pairs), 4)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def product(experts: int, rows: int, k: int, n: int) -> dict[str, float]:
    tokens, grouped = experts * rows, torch._grouped_mm
    routed = torch.randint(experts, (tokens,), device="cuda")
    ends = torch.bincount(routed, minlength=experts).cumsum(0).to(torch.int32)
    x, dy, w = values(tokens, k), values(tokens, n), values(experts, k, n)
    return {
        "forward": milliseconds(lambda: grouped(x, w, offs=ends)),
        "input": milliseconds(lambda: grouped(dy, w.transpose(-2, -1), offs=ends)),
        "weight": milliseconds(lambda: grouped(x.t(), dy, offs=ends)),
    }


def attention(tokens: int, window: int | None) -> dict[str, Any]:
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS
    module.sinks = torch.nn.Parameter(torch.randn(HEADS, device="cuda", dtype=torch.bfloat16))
    q, k, v = (values(1, heads, tokens, HEAD).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    borders = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    mask = block_causal_mask(torch.Size([1, tokens]), borders, torch.bfloat16, window or 0)
    packed = {"cu_seq_lens_q": borders, "max_length_q": tokens, "sliding_window": window}

    def eager() -> Tensor:
        return eager_attention_forward(module, q, k, v, mask, scaling=HEAD**-0.5)[0]

    def ours() -> Tensor:
        return varlen_attention(module, q, k, v, None, s_aux=module.sinks, **packed)[0]

    right, found = eager().detach().float(), ours().detach().float()
    difference = round(float((found - right).norm() / right.norm()), 5)
    return {"difference": difference, "eager": passes(eager), "ours": passes(ours)}


def passes(action: Callable[[], Tensor]) -> dict[str, float]:
    upstream = torch.randn_like(action())

    def both() -> None:
        action().backward(upstream)

    time = milliseconds(both)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    return {"ms": time, "gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)}


def biases(experts: int, tokens: int, n: int, skewed: bool) -> dict[str, float]:
    routed = torch.randint(experts, (tokens,), device="cuda")
    routed = (routed * (torch.arange(tokens, device="cuda") % 2) if skewed else routed).sort().values
    bias = values(experts, n).requires_grad_()
    index, embedding = (lambda: bias[routed]), (lambda: torch.embedding(bias, routed))
    return {"index": passes(index)["ms"], "embedding": passes(embedding)["ms"]}


def cases() -> Iterator[dict[str, Any]]:
    for (experts, tokens, n), skewed in product_of(BIASES, (False, True)):
        case = {"experts": experts, "tokens": tokens, "n": n, "skewed": skewed}
        yield {"kind": "biases", **case, **biases(**case)}
    for tokens, window in product_of((1024, 2048, 4096, 8192), (None, WINDOW)):
        yield {"kind": "attention", "tokens": tokens, "window": window, **attention(tokens, window)}
    for experts, rows, (k, n) in product_of(EXPERTS, ROWS, SIZES):
        case = {"experts": experts, "rows": rows, "k": k, "n": n}
        if 4 * experts * (rows * (k + n) + k * n) <= LARGEST:
            yield {"kind": "products", **case, **product(**case)}


def main() -> None:
    torch.manual_seed(0)
    about = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    for case in cases():
        print(json.dumps({**case, **about}), flush=True)


if __name__ == "__main__":
    main()
