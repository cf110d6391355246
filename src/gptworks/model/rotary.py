"""The rotary embedding (Su et al., 2021): its tables, with scaling for longer contexts, and the rotation of heads."""

import math

import torch
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.kernels import dispatch
from gptworks.model.cost import Shapes

_POSITIONS_AT_ONCE = 2**16


class Rotary(nn.Module):
    """Tables of cosines and sines for the rotary embedding (Su et al., 2021); checkpoints leave them out. Of a head's R
    rotated elements, i and i + R/2 form a pair.

    The stored tables are scaled for the original context and never change. If scaling depends on the text's length, the
    tables of a longer text are computed at each call, so that threads with texts of different lengths share no state.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset()

    def reset(self, device: torch.device | None = None) -> None:
        """Compute the stored tables of all positions, scaled for the original context, and put them on `device` (None:
        torch's default device)."""
        cos, sin = self._whole_tables()
        there = torch.get_default_device() if device is None else device
        self.cos, self.sin = cos.to(there), sin.to(there)

    @torch.inference_mode(False)
    def _whole_tables(self) -> tuple[Tensor, Tensor]:
        """Return `_tables` of all positions, computed in parts because the float64 intermediates are far larger."""
        n_positions, original = self.config.context_length, self.config.original_context_length
        cos, sin = (
            torch.empty(n_positions, self.config.d_rotary // 2, device="cpu", dtype=torch.float32) for _ in "cs"
        )
        for start in range(0, n_positions, _POSITIONS_AT_ONCE):
            part = slice(start, min(start + _POSITIONS_AT_ONCE, n_positions))
            position = torch.arange(part.start, part.stop, device="cpu", dtype=torch.float64)
            cos[part], sin[part] = self._tables(position, original)
        return cos, sin

    @torch.inference_mode(False)  # training reads the tables too, and rejects inference tensors
    def _tables(self, position: Tensor, text_length: int) -> tuple[Tensor, Tensor]:
        """Return float32 cosines and sines [..., R/2] at float64 positions [...] in a text of `text_length` tokens."""
        frequency, factor = frequencies(self.config, text_length, position.device)
        angle = position[..., None] * frequency
        return (factor * angle.cos()).float(), (factor * angle.sin()).float()

    def at(self, positions: slice | Tensor, text_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [..., R/2] at positions [...] of a text that may reach `text_length` tokens.

        `text_length` matters only with scaling by length: it must be the same for all of a text's cached keys.
        """
        scaling = self.config.rope_scaling
        if scaling is None or not scaling.by_length or text_length <= self.config.original_context_length:
            return self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        # on the CPU if the accelerator has no float64
        here = self.cos.device if self.cos.device.type == "cuda" else torch.device("cpu")
        if isinstance(positions, slice):
            positions = torch.arange(self.config.context_length, device=here)[positions]
        cos, sin = self._tables(positions.to(here).double(), text_length)
        return cos.to(self.cos.device, dtype), sin.to(self.cos.device, dtype)


def frequencies(config: ModelConfig, length: int, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Return the radians per token of each of the R/2 pairs, float64, in a text of `length` tokens; and the factor of
    cosines and sines."""
    exponent = torch.arange(0, config.d_rotary, 2, device=device, dtype=torch.float64) / config.d_rotary
    plain, scaling, original = config.rope_theta**-exponent, config.rope_scaling, config.original_context_length
    if scaling is None:
        return plain, 1.0
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "dynamic":
        growth = max(1.0, scaling.factor * length / original - (scaling.factor - 1))
        return plain * growth ** -(exponent * config.d_rotary / (config.d_rotary - 2)), 1.0
    if scaling.short_factors is not None and scaling.long_factors is not None:
        factors = torch.tensor(
            scaling.long_factors if length > original else scaling.short_factors, dtype=torch.float64, device="cpu"
        )
        factors = factors.to(exponent.device, non_blocking=True)
        return plain / factors, scaling.attention_factor or math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    if scaling.type == "llama3":
        turns = plain * original / (2 * math.pi)  # full turns within the original context
        kept = ((turns - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)).clamp(0, 1)
        return plain * kept + plain / scaling.factor * (1 - kept), 1.0

    def pair_that_turns(times: float) -> float:
        """Return the (fractional) index of the pair that makes this many full turns within the original context."""
        return config.d_rotary * math.log(original / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), config.d_rotary - 1)
    ramp = (
        torch.arange(config.d_rotary // 2, device=device, dtype=torch.float64).sub(first).div(max(last - first, 1e-3))
    )
    interpolated = ramp.clamp(0, 1)
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return plain * (1 - interpolated) + plain / scaling.factor * interpolated, factor


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + R/2) of the first R elements of x [..., T, D] by its angle; `table`: cosines, sines."""
    return dispatch.rotate(x, *table)


def rotary_tables_bytes(s: Shapes) -> int:
    """Bytes of all positions' cosines and sines, and of the copies that autocast or rows of several texts need."""
    elements = s.config.d_rotary if s.config.position == "rope" else 0  # R/2 cosines and R/2 sines
    elements *= 1 if s.config.window_rope_theta is None else 2
    looked_up = s.n_tokens if s.several_texts else s.length if s.autocast else 0
    return elements * (4 * s.config.context_length + s.product_bytes * looked_up)
