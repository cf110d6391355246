"""Attention within the texts of packed rows by torch's flash attention, which computes no scores between texts.

Importing this module loads torch's compiler, which takes seconds.
"""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_ASKS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Arguments that allow grouped queries; torch 2.11 needs no such argument."""


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Compute causal attention within each text of the rows. q, k and v are in bf16 or fp16.

    Args:
        q: [B, H, T, D]. k, v: [B, G, T, D].
        bounds: see `gptworks.model.scores.text_bounds`. window, scale: see `gptworks.model.scores.Scores`.

    Returns:
        [B, H, T, D], in q's dtype; its layout is [B, T, H, D].
    """
    length = q.size(2)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B·T, H, D]
    before = -1 if window is None else window - 1
    y: Any = varlen_attn(q, k, v, bounds, bounds, length, length, scale=scale, window_size=(before, 0), **_ASKS)
    out: Tensor = y.unflatten(0, (-1, length)).transpose(1, 2)
    return out
