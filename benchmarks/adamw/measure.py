"""Milliseconds of AdamW on a GPU: torch's kernel with what it needs around it, and ours (decision 0111).

    PYTHONPATH=src python benchmarks/adamw/measure.py

`all` begins with bf16 gradients and ends with bf16 weights: the norm, the step, and for torch's fp32 copies
of the gradients before it and a copy of the weights after it. Made-up tensors of the sizes of three models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from shardwise.kernels.adamw_triton import Tensors

DEVICE = torch.device("cuda")
REPEATS = 30
BETAS, EPSILON, RATE, DECAY = (0.9, 0.95), 1e-8, 1e-4, 0.1
TINYLLAMA = [*[2048 * 2048] * 2, *[2048 * 256] * 2, *[2048 * 5632] * 3, *[2048] * 2]
GPT2 = [768 * 2304, 768 * 768, *[768 * 3072] * 2, 2304, 3072, *[768] * 5]
SIZES = {
    "one tensor": [1 << 26],
    "TinyLlama": [32_000 * 2048, *TINYLLAMA * 22, 2048, 32_000 * 2048],
    "GPT-2": [50_257 * 768, 1024 * 768, *GPT2 * 12],
}


def milliseconds(run: Callable[[], None]) -> float:
    """The mean of REPEATS after three."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / REPEATS, 4)


def measure(sizes: Sequence[int]) -> dict[str, float]:
    weights = [torch.randn(size, device=DEVICE) for size in sizes]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    rounded = [weight.bfloat16() for weight in weights]
    gradients = [torch.randn_like(one) for one in rounded]
    steps = [torch.zeros((), device=DEVICE) for _ in weights]
    divisor, skipped = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)

    def torchs(full: list[torch.Tensor]) -> None:
        torch._fused_adamw_(
            weights,
            full,
            means,
            squares,
            [],
            steps,
            lr=RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skipped,
        )

    def torchs_all() -> None:
        full = [gradient.float() for gradient in gradients]
        torch._foreach_norm(full)
        torch._foreach_add_(steps, 1)
        torchs(full)
        torch._foreach_copy_(rounded, weights)

    kept = [gradient.float() for gradient in gradients]
    found = {"torch_all": milliseconds(torchs_all), "torch_kernel": milliseconds(lambda: torchs(kept))}
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad_dtype, weight.grad = None, gradient
    tensors = Tensors([list(row) for row in zip(weights, means, squares, steps, rounded, strict=True)])

    def ours() -> None:
        tensors.step(divisor, skipped, rate=RATE, weight_decay=DECAY, betas=BETAS, epsilon=EPSILON)

    def ours_all() -> None:
        torch._foreach_norm(gradients, 2, torch.float32)
        ours()

    return found | {"ours_all": milliseconds(ours_all), "ours_kernel": milliseconds(ours)}


if __name__ == "__main__":
    for name, sizes in SIZES.items():
        line = {"tensors": name, "elements": sum(sizes), "unit": "ms", **measure(sizes)}
        print(json.dumps({**line, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
