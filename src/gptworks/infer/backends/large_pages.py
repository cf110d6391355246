"""Allocate tensors in large memory pages: reading them takes far fewer address translations."""

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def rooms_in_large_pages(wanted: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Return zeroed tensors [n] of these dtypes and sizes, consecutive in a `large_block`."""
    sizes = [-(-size * dtype.itemsize // 64) * 64 for dtype, size in wanted]
    parts = torch.split(large_block(sum(sizes)), sizes)
    return [part[: size * dtype.itemsize].view(dtype) for part, (dtype, size) in zip(parts, wanted, strict=True)]


def large_block(n_bytes: int) -> Tensor:
    """Return zeroed memory, uint8 [n_bytes], with pages of 2 MiB if the system accepts requests for them.

    The memory is private because a separate switch (`shmem_enabled`) nearly always turns large pages off for shared
    memory. Linux uses large pages only for complete aligned ranges of 2 MiB, and does not report whether it did.
    """
    if not n_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(n_bytes, dtype=torch.uint8)
    try:
        block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return torch.zeros(n_bytes, dtype=torch.uint8)  # raises torch's usual error if memory is short
    with contextlib.suppress(OSError):  # the system's kernel may lack huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)
