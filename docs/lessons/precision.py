"""What 16 bits do to a number: the two tables of the lesson on mixed precision."""

from __future__ import annotations

import torch

GRADIENT = 3e-9
"""A gradient as small as those of a large model late in training."""
STEPS, UPDATE = 1000, 1e-3


def formats() -> None:
    """Largest and smallest number of each format, and what becomes of two others."""
    print("format    largest  smallest  1.001 is    gradient 3e-9  the same x 65536")
    for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.items():
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps  # subnormal
        one, small, scaled = (
            torch.tensor(value, dtype=dtype).item() for value in (1.001, GRADIENT, GRADIENT * 2**16)
        )
        print(f"{name}   {info.max:10.4g}  {smallest:8.2g}  {one:<10.6f}  {small:13.2g}  {scaled:16.2g}")


def updates() -> None:
    """A weight of 1 that should grow by 0.001 in each of 1000 steps, to 2."""
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        weight = torch.ones((), dtype=dtype)
        for _ in range(STEPS):
            weight += UPDATE
        print(f"after {STEPS} updates of {UPDATE}, weight stored in {name}: {weight.item():.3f}")


if __name__ == "__main__":
    formats()
    updates()
