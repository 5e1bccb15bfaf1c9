"""Host memory of an offloaded optimizer."""

from __future__ import annotations


def pinned(size_bytes: int) -> int:
    """What torch takes for a page-locked tensor: the next power of two (CachingHostAllocator.h: allocate)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
