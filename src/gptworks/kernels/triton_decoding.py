"""Attention for one new token per text, whose query reads the text's slot of the cache, in Triton on a GPU.

A program computes one query head over a part of the text's keys, which it reads in place. A second kernel combines
the parts (Flash-Decoding, Dao et al., 2023). The parts let a few long texts occupy the whole GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_AT_ONCE = 64
"""Number of keys that a program reads at a time."""

PROGRAMS = 1024
"""Number of programs that occupy all of a large GPU."""

MOST_PARTS = 16
"""Largest number of parts into which a text's keys are divided."""


@triton.jit  # type: ignore[untyped-decorator]
def _part_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    key_scales,
    values,
    value_scales,
    slots,
    positions,
    sums,
    weights,
    q_text,
    q_head,
    capacity,
    factor,
    softcap,
    window,
    group: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    windowed: tl.constexpr,
):
    text, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_heads, n_parts = tl.num_programs(1), tl.num_programs(2)
    slot, last = tl.load(slots + text), tl.load(positions + text)
    first = tl.maximum(last - window + 1, 0) if windowed else last * 0
    length = tl.cdiv(tl.cdiv(last + 1 - first, n_parts), block) * block
    begin = first + part * length
    end = tl.minimum(begin + length, last + 1)
    column = tl.arange(0, padded)
    within = column < width
    query = tl.load(q + text * q_text + head * q_head + column, mask=within, other=0.0).to(tl.float32) * factor
    vectors = (slot * (n_heads // group) + head // group) * capacity  # index of the text's first vector in the cache
    largest = tl.full((), -1e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    out = tl.zeros((padded,), tl.float32)
    for start in range(begin, end, block):
        place = start + tl.arange(0, block)
        there = place < end
        cells = (vectors + place)[:, None] * width + column[None, :]
        read = there[:, None] & within[None, :]
        key = tl.load(keys + cells, mask=read, other=0.0).to(tl.float32)
        value = tl.load(values + cells, mask=read, other=0.0).to(tl.float32)
        score = tl.sum(key * query[None, :], axis=1)
        if scaled:
            score *= tl.load(key_scales + vectors + place, mask=there, other=0.0)
            value *= tl.load(value_scales + vectors + place, mask=there, other=0.0)[:, None]
        if capped:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))  # tanh
        score = tl.where(there, score, -1e30)
        larger = tl.maximum(largest, tl.max(score, axis=0))
        weight = tl.where(there, tl.exp(score - larger), 0.0)
        kept = tl.exp(largest - larger)
        total = total * kept + tl.sum(weight, axis=0)
        out = out * kept + tl.sum(weight[:, None] * value, axis=0)
        largest = larger
    row = (text * n_heads + head) * n_parts + part
    tl.store(weights + 2 * row, largest)
    tl.store(weights + 2 * row + 1, total)
    tl.store(sums + row * padded + column, out)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    sums, weights, out, n_parts: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, n_parts), tl.arange(0, padded)
    largest = tl.load(weights + 2 * (row * n_parts + part))
    total = tl.load(weights + 2 * (row * n_parts + part) + 1)
    share = tl.exp(largest - tl.max(largest, axis=0))
    each = tl.load(sums + (row * n_parts + part)[:, None] * padded + column[None, :])
    result = tl.sum(each * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=column < width)


def attend(
    q: Tensor, keys: Any, values: Any, slots: Tensor, positions: Tensor, factor: float, softcap: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Compute attention of one token of each of N texts.

    Args:
        q: queries [N, H, D], with adjacent elements.
        keys, values: the cache's `Vectors` of a layer, with `data` [n_slots, G, capacity, D] and, in int8, `scale`
            [n_slots, G, capacity].
        slots, positions: each text's slot and its last position, int64 [N]; keys up to this position are read.
        factor: factor of q·k. softcap, window: see `gptworks.model.scores.Scores`.

    Returns:
        [N, H, D], in q's dtype.
    """
    (n_texts, n_heads, width), data = q.shape, keys.data
    n_parts = min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(PROGRAMS, n_texts * n_heads)))
    padded = max(16, triton.next_power_of_2(width))
    sums = torch.empty(n_texts, n_heads, n_parts, padded, dtype=torch.float32, device=q.device)
    weights = torch.empty(n_texts, n_heads, n_parts, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(n_texts, n_heads, width, dtype=q.dtype, device=q.device)
    scale = data if keys.scale is None else keys.scale
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _part_kernel[n_texts, n_heads, n_parts](
            q,
            data,
            scale,
            values.data,
            scale if values.scale is None else values.scale,
            slots,
            positions,
            sums,
            weights,
            q.stride(0),
            q.stride(1),
            data.size(2),
            factor,
            1.0 if softcap is None else softcap,
            0 if window is None else window,
            group=n_heads // data.size(1),
            width=width,
            padded=padded,
            block=KEYS_AT_ONCE,
            scaled=keys.scale is not None,
            capped=softcap is not None,
            windowed=window is not None,
        )
        _sum_kernel[(n_texts * n_heads,)](sums, weights, out, n_parts=n_parts, width=width, padded=padded)
    return out
