"""Causal attention of queries, keys and values, computed by the first usable kernel.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, D head width.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.kernels import cpu, dispatch
from gptworks.model.cache import SlotLayer
from gptworks.model.cost import ATTENTION, DROPOUT, WEIGHTS_KEPT, Shapes, Stage
from gptworks.model.layers import cap, product_dtype


class Scores(NamedTuple):
    """Settings that turn products of queries and keys into attention weights."""

    window: int | None = None
    """Number of keys that a query sees, including its own; None for all keys up to its own."""
    dropout: float = 0.0
    """Probability of dropping an attention weight."""
    scale: float | None = None
    """Factor of q·k; None for 1/√D."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) before the bias is added; None for no cap."""
    bias: Tensor | None = None
    """Bias [B, T, S], in q's dtype, added to the scores of rows with several texts (`texts_bias`). It includes the
    window's mask. None if each row has one text, or `bounds` separate the texts."""
    bounds: Tensor | None = None
    """Bounds of the texts in rows of several texts (`text_bounds`), in place of a bias if `takes_bounds`."""
    fuses_groups: bool = True
    """See `gptworks.kernels.dispatch.fuses_groups`. If false, keys and values are repeated for grouped queries."""

    def factor(self, q: Tensor) -> float:
        """Return the factor of q·k: `scale`, or 1/√D if `scale` is None."""
        return q.size(-1) ** -0.5 if self.scale is None else self.scale


PLAIN = Scores()

TOKENS_PER_START = 16
"""Bounds replace a bias only in rows with at least this many tokens per place for a text's start. The backward pass of
flash attention adds up gradients in float32 [B·T + 128·B·K, H, D] for K places, so many short texts would need more
memory than the bias."""


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores = PLAIN) -> Tensor:
    """Compute causal dot-product attention, by the first usable kernel of `gptworks.kernels.dispatch`. The T queries
    have the last T of the S key positions.

    Args:
        q: [B, H, T, D]. k, v: [B, G, S, D] with S ≥ T; each key/value head serves H / G query heads.

    Returns:
        [B, H, T, D], in q's dtype.
    """
    if scores.bounds is not None:
        return _attend_within(q, k, v, scores.bounds, scores)
    kernel = dispatch.chosen("attention", q, k, v, training=dispatch.trains(q))
    window, dropout, _, softcap, bias, _, _ = scores
    if kernel.by == dispatch.TORCH:
        in_bands = bias is None and window is not None and q.size(2) == k.size(2) >= 2 * window
        return attend_banded(q, k, v, scores) if in_bands else _attend_torch(q, k, v, scores)
    if bias is None and kernel.by == dispatch.BLOCKS:
        bias = as_bias(causal_mask(q.size(2), k.size(2), window, q.device), q.dtype)
    return kernel.compute(q, k, v, bias, window, dropout, scores.factor(q), softcap)


def _attend_torch(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    if scores.bias is not None:
        return fused(q, k, v, scores.bias[:, None], scores)
    n_queries, n_keys = q.size(2), k.size(2)
    if scores.window is None or scores.window >= n_keys:
        if n_queries == 1:
            return fused(q, k, v, None, scores)
        if n_queries == n_keys:
            return fused(q, k, v, None, scores, is_causal=True)
    return fused(q, k, v, causal_mask(n_queries, n_keys, scores.window, q.device), scores)


def _attend_within(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scores: Scores) -> Tensor:
    from gptworks.kernels import flash  # loads torch's compiler, which is slow

    q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
    return flash.attend(q, k, v, bounds, scores.window, scores.scale)


def takes_bounds(config: ModelConfig, half: bool, has_flash: bool) -> bool:
    """Whether flash attention computes rows of several texts from the texts' bounds, without a bias.

    Args:
        half: whether products are in bf16 or fp16.
        has_flash: see `gptworks.kernels.dispatch.has_flash`.
    """
    plain = config.attention_softcap is None and not config.dropout_attention
    return has_flash and half and plain and config.d_head % 8 == 0 and config.d_head <= 256


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, *, is_causal: bool = False) -> Tensor:
    """Compute attention in torch, by a fused kernel if possible. Without one, or with a softcap, all T × S scores of
    every head are in memory. mask: boolean, or a tensor to add to the scores; broadcast to [B, 1, T, S]; includes
    window and bias."""
    if scores.softcap is not None:
        mask = causal_mask(q.size(2), k.size(2), None, q.device) if is_causal else mask
        v = _for_each_head(v, q.size(1))  # [B, H, S, D]
        return F.dropout(attention_weights(q, k, mask, scores).to(q.dtype), scores.dropout) @ v
    if not (scores.fuses_groups and takes_groups(q.device, mask is not None)):
        k, v = _for_each_head(k, q.size(1)), _for_each_head(v, q.size(1))  # [B, H, S, D]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=scores.dropout, is_causal=is_causal, scale=scores.scale,
        enable_gqa=q.size(1) != k.size(1),
    )  # fmt: skip


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return the weight of each key for each query, [B, H, T, S], in float32 or wider. mask: see `fused`."""
    scale, softcap = scores.factor(q), scores.softcap
    products = q @ _for_each_head(k, q.size(1)).transpose(-2, -1)  # [B, H, T, S]
    scored = products * scale if softcap is None else softcap * torch.tanh(products * (scale / softcap))
    if mask is not None:
        scored = scored + (as_bias(mask, q.dtype) if mask.dtype == torch.bool else mask)
    return scored.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))


def _for_each_head(x: Tensor, n_heads: int) -> Tensor:
    """Repeat each key/value head of x [B, G, S, D] for its query heads: [B, n_heads, S, D]."""
    return x if x.size(1) == n_heads else x.repeat_interleave(n_heads // x.size(1), dim=1)


def takes_groups(device: torch.device, masked: bool) -> bool:
    """Whether a fused kernel of the device supports grouped-query attention. On CUDA, no fused kernel supports it with
    a mask: flash attention refuses masks, and the memory-efficient kernel refuses groups."""
    return not (masked and device.type == "cuda")


def attend_banded(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute `attend` for a window of at most half the text (S = T), with T × 2·window scores instead of T × T.

    The text is cut into blocks of `window` tokens, and a block's queries see only keys of their own and the previous
    block. Blocks become batch elements, so that any device's fused kernel can compute them.
    """
    window = scores.window
    assert window is not None
    batch, length = q.size(0), q.size(2)
    n_blocks = -(-length // window)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, n_blocks * window - length)).reshape(*x.shape[:2], n_blocks, window, -1)

    q, k, v = blocks(q), blocks(k), blocks(v)  # [B, H, n, W, D]
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), dim=3) for x in (k, v))  # [B, G, n, 2W, D]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B·n, H, W, D], [B·n, G, 2W, D]
    mask = causal_mask(window, 2 * window, window, q.device).repeat(n_blocks, 1, 1)  # [n, W, 2W]
    mask[0, :, :window] = False  # the first block has no previous block
    mask = mask.repeat(batch, 1, 1).unsqueeze(1)  # [B·n, 1, W, 2W]
    y = fused(q, k, v, mask, scores)
    y = y.view(batch, n_blocks, *y.shape[1:]).transpose(1, 2)  # [B, H, n, W, D]
    return y.flatten(2, 3)[:, :, :length]


def attend_slots(q: Tensor, k: Tensor, v: Tensor, cache: SlotLayer, scores: Scores) -> Tensor:
    """Compute `attend` for a flat batch of several texts' tokens; each token sees only its own text's cache slot.

    Args:
        q: [1, H, N, D].
        k, v: [1, G, N, D], which are first stored in the cache.

    Returns:
        [1, H, N, D].
    """
    parts, keys, values = cache.rows.parts, cache.keys, cache.values
    if parts is None or _one_product(q, len(parts)):
        return _attend_one_token_each(q, k, v, cache, scores)
    out, first = [], 0
    for slot, start, n_new in parts:
        row, end = slice(first, first + n_new), start + n_new
        keys[slot, :, start:end], values[slot, :, start:end] = k[0, :, row], v[0, :, row]
        seen_keys, seen_values = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        out.append(attend(q[:, :, row], seen_keys, seen_values, scores))
        first += n_new
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _one_product(q: Tensor, n_texts: int) -> bool:
    return q.device.type != "cpu" and n_texts > 1 and q.size(2) == n_texts


def _attend_one_token_each(q: Tensor, k: Tensor, v: Tensor, cache: SlotLayer, scores: Scores) -> Tensor:
    """`attend_slots` for one token per text, in one call: on accelerators, launching many small kernels takes long."""
    parts, slots, last = cache.rows.parts, cache.rows.slots, cache.rows.positions  # [N] each
    cache.keys[slots, :, last], cache.values[slots, :, last] = k[0].transpose(0, 1), v[0].transpose(0, 1)
    queries = q[0].transpose(0, 1)  # [N, H, D]
    kernel = dispatch.chosen("cached_attention", queries)
    if kernel.by == dispatch.TRITON:
        result: Tensor = kernel.compute(
            queries, cache.keys, cache.values, slots, last, scores.factor(q), scores.softcap, scores.window
        )
        return result.transpose(0, 1).unsqueeze(0)
    assert parts is not None, "only Triton reads the lengths on the GPU"
    longest = max(start for _, start, _ in parts) + 1
    key = torch.arange(longest, device=q.device)
    visible = key <= last[:, None]  # [N, S]
    if scores.window is not None:
        visible &= key > last[:, None] - scores.window
    keys, values = cache.keys[slots, :, :longest], cache.values[slots, :, :longest]  # [N, G, S, D]
    y = fused(queries.unsqueeze(2), keys, values, visible[:, None, None], scores)  # [N, H, 1, D]
    return y.squeeze(2).transpose(0, 1).unsqueeze(0)


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a boolean mask [T, S], true for keys that a query may see. Queries have the last T of the S positions."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor to add to scores: 0 where the mask is true, −∞ elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def texts_bias(positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the bias [B, T, T] that lets each query see only keys of its text, up to its own and within the window.

    Args:
        positions: each token's position in its own text, int64 [B, T]; a text begins at each 0.
    """
    length = positions.size(1)
    text = (positions == 0).cumsum(1)
    mask = (text[:, :, None] == text[:, None, :]) & causal_mask(length, length, window, positions.device)
    return as_bias(mask, dtype)


def text_bounds(starts: Tensor, length: int) -> Tensor:
    """Return the index of each text's first token in the flat batch [B·T], then B·T itself: int32 [B·K + 1], ascending.

    Args:
        starts: where each text begins in its row, int32 [B, K]. Rows with fewer texts have `length` in the remaining
            places, which means empty texts.
    """
    rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device)[:, None]
    return F.pad((starts + rows * length).flatten(), (0, 1), value=len(starts) * length)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, scores: Scores = PLAIN) -> Tensor:
    """Reference for `attend`: computes one query at a time, without dropout and bias. For tests."""
    (_, heads, n_queries, _), n_keys = q.shape, k.size(2)
    out = torch.empty_like(q)
    for head in range(heads):
        group = head * k.size(1) // heads
        for i in range(n_queries):
            last = n_keys - n_queries + i
            first = 0 if scores.window is None else max(0, last - scores.window + 1)
            keys, values = k[:, group, first : last + 1], v[:, group, first : last + 1]  # [B, s, D]
            scored = torch.einsum("bd,bsd->bs", q[:, head, i], keys) * scores.factor(q)
            out[:, head, i] = torch.einsum("bs,bsd->bd", cap(scored, scores.softcap).softmax(-1), values)
    return out


def bias_bytes(s: Shapes) -> int:
    """Bytes of the biases that separate the texts in a row: one for each distinct window, shared by all its layers."""
    return len(set(s.config.layer_windows)) * s.products(s.length) if s.several_texts and not has_bounds(s) else 0


def has_bounds(s: Shapes) -> bool:
    """Whether flash attention separates the texts in a row by their bounds."""
    return s.several_texts and takes_bounds(s.config, s.autocast, s.has_flash)


def is_blocked(s: Shapes) -> bool:
    """Whether training uses `gptworks.kernels.cpu.Attention`, which saves attention weights in blocks of queries."""
    return s.on_cpu and not s.native and s.length <= cpu.LONGEST


def is_masked(s: Shapes, window: int | None) -> bool:
    """Whether attention needs a mask, because the kernel cannot infer which keys a query may see."""
    return not has_bounds(s) and (s.several_texts or (window is not None and window < s.length))


def is_grouped(s: Shapes) -> bool:
    """Whether each key/value head serves several query heads."""
    return s.config.n_kv_heads != s.config.n_heads


def is_plain(s: Shapes, window: int | None) -> bool:
    """Whether torch computes attention as plain products with all weights in float32, for lack of a fused kernel.

    torch does so for grouped queries in float32 on an accelerator, unless a mask or an old GPU requires repeated keys;
    always on MPS; and on a CPU with dropout.
    """
    if s.on_cpu:
        return s.config.dropout_attention > 0
    if not s.has_fused:
        return True
    return is_grouped(s) and not s.autocast and s.fuses_groups and not is_masked(s, window)


def saves_output(s: Shapes, window: int | None) -> bool:
    """Whether attention saves its result for the backward pass."""
    return s.native or not (is_blocked(s) or is_plain(s, window) or s.config.attention_softcap is not None)


def output_is_shared(s: Shapes, window: int | None) -> bool:
    """Whether attention saves its result in the layout that the output projection needs, so that both save one tensor.

    The C++ kernel, flash attention within bounds and torch's float32 kernel for GPUs always use that layout. torch's
    other fused kernels use the queries' layout. Rotation changes the queries' layout; on an accelerator, QK-norm does
    so too.
    """
    if s.native or has_bounds(s):
        return True
    if is_blocked(s) or is_plain(s, window):
        return False
    as_projected = s.config.position != "rope" and (s.on_cpu or not s.config.qk_norm)
    return as_projected or (not s.on_cpu and not s.autocast)


def scores_cost(s: Shapes, window: int | None) -> Stage:
    """Return the memory of `attend`, which depends on the kernel that computes it."""
    c = s.config
    q, k = s.products(c.n_heads * c.d_head), s.products(c.n_kv_heads * c.d_head)
    leaves = q + 2 * k
    separate = is_masked(s, window) or not s.fuses_groups
    repeated = not s.on_cpu and is_grouped(s) and separate  # repeats keys and values: `takes_groups`
    heads = s.batch_size * c.n_heads
    if s.native:
        return Stage("attention", {ATTENTION: 2 * q + 2 * k + 4 * heads * s.length}, arrives=q, leaves=leaves)
    if is_blocked(s):  # keys and values are repeated for each query head
        slices = cpu.query_blocks(s.length, s.length, window)
        blocks = [heads * (rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in slices]
        kept = sum(blocks) if c.dropout_attention else 0
        last, before = blocks[-1] * s.product_bytes, (blocks[-2] if len(blocks) > 1 else 0) * s.product_bytes
        loop = 2 * before + 3 * last if kept else max(before + 2 * last, 2 * last + q)
        capped = c.attention_softcap is not None  # tanh of the scores is saved too
        loop = max(loop, 3 * last) if capped else loop
        return Stage(
            "attention",
            {ATTENTION: 3 * q, WEIGHTS_KEPT: (1 + capped) * sum(blocks) * s.product_bytes, DROPOUT: kept},
            arrives=q,
            leaves=leaves,
            scratch=q + 2 * (q - k) + loop,
        )
    if s.several_texts:
        window = None  # the bias includes the window, and flash attention needs no mask for it
    if repeated:
        k = q
    padded, keys_seen = 1.0, s.length
    scratch = 4 * heads * s.length if has_bounds(s) else 0  # a gradient of 0 for the logarithms of the weights' sums
    if window is not None and s.length >= 2 * window:  # banded attention stores keys and values twice
        padded, keys_seen = -(-s.length // window) * window / s.length, 2 * window
        q, k = round(q * padded), round(2 * k * padded)
        scratch = q + 3 * k
    if repeated:
        scratch = q + 2 * k - leaves  # gradients of repeated keys and values, before summation
    pairs = round(s.length * padded) * keys_seen
    if c.attention_softcap is not None:  # saves the tanh, the float32 weights and their cast copy
        one = heads * pairs * s.product_bytes
        weights = 4 * heads * pairs + (one if s.autocast else 0)
        dropped = one + (heads * pairs * 4 if s.on_cpu else heads * pairs) if c.dropout_attention else 0
        return Stage(
            "attention",
            {ATTENTION: 3 * q, WEIGHTS_KEPT: one + weights, DROPOUT: dropped},
            arrives=q,
            leaves=leaves,
            scratch=4 * heads * pairs + one,
        )
    if is_plain(s, window):
        weights = 4 * heads * pairs
        dropped = heads * pairs * 4 + weights if c.dropout_attention else 0  # factors, and weights after dropout
        kept, scaled = 3, 0
        if not s.has_fused and window is not None and s.length >= 2 * window:  # keys and values are stored twice
            kept = 5
        elif not s.has_fused and not is_grouped(s):  # the gradient of the scaled queries
            scaled = q
        return Stage(
            "attention",
            {ATTENTION: kept * round(s.floats(c.n_heads * c.d_head) * padded), WEIGHTS_KEPT: weights, DROPOUT: dropped},
            arrives=q,
            leaves=leaves,
            scratch=(1 if dropped else 2) * weights + scaled - leaves,  # the leaving gradient does not exist yet
        )
    masked = window is not None and window < s.length
    mask = (s.batch_size if keys_seen < s.length else 1) * pairs * s.product_bytes if masked else 0
    saved = 2 * q + 2 * k + 4 * heads * s.length + mask
    return Stage("attention", {ATTENTION: saved}, arrives=q, leaves=leaves, scratch=scratch)
