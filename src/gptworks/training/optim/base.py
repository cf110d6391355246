"""Common code of optimizers: how they are built, a step over the parameters, and decoupled weight decay.

Cautious decay affects only the elements that the update moves towards zero (Chen et al., 2025, "Cautious Weight Decay",
arXiv 2510.12402, algorithm 1):

    weight -= rate · (update + decay · weight where update · weight ≥ 0)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptworks.config import TrainConfig

Group = dict[str, Any]
"""Parameters that share a peak learning rate and a weight decay, as torch's optimizers take them."""

Mesh = DeviceMesh | None
"""The ranks that hold the model, by the dimensions data and tensor; None: only this rank."""

Build = Callable[[list[Group], TrainConfig, Mesh], torch.optim.Optimizer]
"""The function `build` in each optimizer's file: it makes the optimizer of parameter groups from the settings."""


class AdamLike(torch.optim.Optimizer):
    """An optimizer with moments, which updates one parameter after the other."""

    def __init__(self, groups: list[Group], betas: tuple[float, float], eps: float, cautious: bool = False) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._cautious = cautious

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None, "no closure is used here"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        raise NotImplementedError


def decay(weights: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Multiply weights by 1 - `amount` before their update; if `cautious`, only those that it moves towards zero.

    Args:
        update: the tensor of the weights' shape whose product with the rate is subtracted from them.
        amount: learning rate times weight decay.
    """
    if cautious:
        decay_where_agreed(weights, update.to(weights.dtype, copy=True), amount)
    else:
        weights.mul_(1 - amount)


def decay_where_agreed(weights: Tensor, update: Tensor, amount: float) -> None:
    """Decay only weights whose update has the same sign or is zero. Overwrites the update."""
    weights.mul_(update.sign_().mul_(weights).ge_(0).mul_(-amount).add_(1))
