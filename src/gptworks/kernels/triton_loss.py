"""The cross-entropy of rows of logits and its gradient on a GPU, in Triton: one program computes one row.

A program reads its row once for the largest logit and the sum of exponentials. If a gradient is wanted, it reads the
row again and overwrites it: 6 bytes of memory traffic per logit in bf16. There are no atomic operations, so the same
logits give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptworks.config import IGNORED

BLOCK = 4096
"""Number of columns that a program reads at a time."""

COLUMNS_PER_WARP = 256
"""Number of columns of a block per warp: 8 for each thread, 16 bytes in bf16."""


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    factors,
    nats,
    row_stride,
    n_columns,
    ignored: tl.constexpr,
    gradient: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    columns = tl.arange(0, block)
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(nats + row, 0.0)
        if gradient:
            for first in range(0, n_columns, block):
                zeros = tl.zeros((block,), tl.float32).to(logits.dtype.element_ty)
                tl.store(start + first + columns, zeros, mask=first + columns < n_columns)
    else:
        is_column = (target >= 0) & (target < n_columns)
        wanted = tl.load(start + target, mask=is_column, other=float("nan")).to(tl.float32)
        # Each lane has its own maximum and sum. The maximum starts finite, because −inf − (−inf) is NaN.
        lane_max = tl.full((block,), -3.4028234663852886e38, tl.float32)
        lane_sum = tl.zeros((block,), tl.float32)
        for first in range(0, n_columns, block):
            here = first + columns
            x = tl.load(start + here, mask=here < n_columns, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(lane_max, x)
            lane_sum = lane_sum * tl.exp(lane_max - larger) + tl.exp(x - larger)
            lane_max = larger
        row_max = tl.max(lane_max, axis=0)
        row_sum = tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0)
        tl.store(nats + row, (row_max - wanted) + tl.log(row_sum))
        if gradient:
            factor = tl.where(is_column, 1.0, float("nan"))
            if scaled:
                factor *= tl.load(factors + row).to(tl.float32)
            share = 1.0 / row_sum
            for first in range(0, n_columns, block):
                here = first + columns
                x = tl.load(start + here, mask=here < n_columns, other=float("-inf")).to(tl.float32)
                difference = tl.exp(x - row_max) * share - tl.where(here == target, 1.0, 0.0)
                tl.store(start + here, (difference * factor).to(logits.dtype.element_ty), mask=here < n_columns)


def cross_entropy(logits: Tensor, targets: Tensor, factors: Tensor | None, gradient: bool) -> Tensor:
    """Return the rows' losses; see `gptworks.kernels.passes.cross_entropy` for arguments and result."""
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    if not len(logits):
        return nats
    n_columns = logits.size(1)
    block = min(BLOCK, triton.next_power_of_2(n_columns))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _row_kernel[(len(logits),)](
            logits,
            targets.contiguous(),
            nats if factors is None else factors.contiguous(),
            nats,
            logits.stride(0),
            n_columns,
            ignored=IGNORED,
            gradient=gradient,
            scaled=factors is not None,
            block=block,
            num_warps=max(1, block // COLUMNS_PER_WARP),
        )
    return nats
