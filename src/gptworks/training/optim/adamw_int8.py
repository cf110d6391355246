"""AdamW with moments in 8 bits and one scale per block of 256 elements (Dettmers et al., 2022).

    first moment    int8    sign(code) · (code / 127)² · largest magnitude in the block
    second moment   uint8   (code / 255)⁴ · largest value in the block

The powers give small values more codes than a linear scale would: the smallest nonzero first moment is 6e-5 of its
block's largest, the smallest second moment 2e-10. No second moment has code 0, because a step divides by its root. A
step computes in float32, one slice of a matrix at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.config.optimizers import SCALED_TOGETHER, n_scales
from gptworks.training.optim.base import Group, Mesh, decay, restore_state, slices

SLOTS = ("exp_avg", "exp_avg_sq")


def build(groups: list[Group], train: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """Make an AdamW with moments in 8 bits."""
    return AdamWInt8(groups, train.betas, train.eps, train.cautious_weight_decay)


class AdamWInt8(torch.optim.Optimizer):
    """`torch.optim.AdamW` with moments in 8 bits."""

    def __init__(self, groups: list[Group], betas: tuple[float, float], eps: float, cautious: bool = False) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._cautious = cautious

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            for slot, dtype in zip(SLOTS, (torch.int8, torch.uint8), strict=True):
                state[slot] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
                state[f"{slot}_scale"] = parameter.new_zeros(n_scales(parameter.shape), dtype=torch.float32)
        state["step"] += 1
        n_steps = state["step"].item()
        rate, root = group["lr"] / (1 - beta1**n_steps), (1 - beta2**n_steps) ** 0.5
        weights, gradients = parameter.view(-1), gradient.reshape(-1)
        for piece in slices(parameter):
            blocks = slice(piece.start // SCALED_TOGETHER, n_scales((piece.stop,)))
            gradient = gradients[piece].float()
            parts = [(state[slot].view(-1)[piece], state[f"{slot}_scale"][blocks]) for slot in SLOTS]
            first = unpack_signed(*parts[0]).lerp_(gradient, 1 - beta1)
            second = unpack_unsigned(*parts[1]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            decay(weights[piece], first, group["lr"] * group["weight_decay"], self._cautious)
            weights[piece].addcdiv_(first, second.sqrt().div_(root).add_(group["eps"]), value=-rate)
            pack_unsigned(second, *parts[1])
            pack_signed(first, *parts[0])
            del first, second  # free both before the next slice allocates

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        restore_state(self, state_dict["state"])


def unpack_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode a first moment, float32 [n], from int8 codes [n] and the scales of their blocks."""
    values = codes.float().div_(127)
    return _scaled(values.mul_(values.abs()), scale)


def unpack_unsigned(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode a second moment, float32 [n], from uint8 codes [n] and the scales of their blocks."""
    return _scaled(codes.float().div_(255).square_().square_(), scale)


def pack_signed(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Encode a first moment [n] into `codes` and `scale`."""
    codes.copy_(_ratios(values.abs(), scale).sqrt_().mul_(127).round_().copysign_(values))


def pack_unsigned(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Encode a second moment [n] into `codes` and `scale`. Overwrites `values`."""
    codes.copy_(_ratios(values, scale).sqrt_().sqrt_().mul_(255).round_().clamp_(min=1))


def _ratios(values: Tensor, scale: Tensor) -> Tensor:
    """Divide non-negative values in place by the largest value in their block, which is written to `scale`."""
    whole, rest = _blocks(values)
    scale[: len(whole)] = whole.amax(1)
    if len(rest):
        scale[-1] = rest.amax()
    return _scaled(values, scale.reciprocal().nan_to_num_(posinf=0.0))


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply values [n] in place by their block's scale."""
    whole, rest = _blocks(values)
    whole.mul_(scale[: len(whole), None])
    rest.mul_(scale[len(whole) :])
    return values


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of values [n]: the full blocks [blocks, 256], and the elements after them."""
    n_whole = values.numel() // SCALED_TOGETHER * SCALED_TOGETHER
    return values[:n_whole].view(-1, SCALED_TOGETHER), values[n_whole:]
