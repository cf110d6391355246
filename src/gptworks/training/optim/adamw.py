"""torch's AdamW in fp32, with optional cautious weight decay before torch's step."""

from typing import Any

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.training.distributed.shards import local
from gptworks.training.optim.base import Group, Mesh, decay_where_agreed, gradient_of, slices


def build(groups: list[Group], train: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """Make an AdamW, with cautious weight decay if the recipe sets it."""
    fused = all(p.device.type in ("cpu", "cuda", "mps") for group in groups for p in group["params"])
    kind = CautiousAdamW if train.cautious_weight_decay else torch.optim.AdamW
    return kind(groups, betas=train.betas, eps=train.eps, fused=fused)


class CautiousAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with cautious weight decay, which takes the update's sign from the first moment."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        decays = [group | {"weight_decay": 0.0, "cautious_decay": group["weight_decay"]} for group in groups]
        super().__init__(decays, **settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            amount = group["lr"] * group["cautious_decay"]
            for parameter in group["params"] if amount else ():
                if parameter.grad is not None:
                    _decay(parameter, self.state[parameter].get("exp_avg"), amount, group["betas"][0])
        super().step()


def _decay(parameter: nn.Parameter, moment: Tensor | None, amount: float, beta: float) -> None:
    """Decay this rank's part of a parameter before its update, a slice at a time to save memory. `moment` is the first
    moment before this step's gradient is added; None at the first step."""
    weights, gradients = local(parameter).view(-1), gradient_of(parameter).reshape(-1)
    moments = None if moment is None else local(moment).view(-1)
    for piece in slices(weights):
        decay_where_agreed(
            weights[piece],
            gradients[piece].clone() if moments is None else moments[piece].lerp(gradients[piece], 1 - beta),
            amount,
        )
