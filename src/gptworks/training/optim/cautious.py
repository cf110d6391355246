"""Decoupled weight decay; cautious decay is of only the elements that the update moves towards zero (Chen et al., 2025,
"Cautious Weight Decay", arXiv 2510.12402, algorithm 1):

    weight -= rate · (update + decay · weight where update · weight ≥ 0)
"""

from torch import Tensor


def decay(weights: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Multiply weights by 1 - `amount`, before their update.

    Args:
        update: what the rate is multiplied by and the weights lose, of their shape.
        amount: the rate times the decay.
    """
    if cautious:
        decay_where_agreed(weights, update.to(weights.dtype, copy=True), amount)
    else:
        weights.mul_(1 - amount)


def decay_where_agreed(weights: Tensor, update: Tensor, amount: float) -> None:
    """The same for weights whose sign is that of their update, or zero. Uses the update's memory; it is float32."""
    weights.mul_(update.sign_().mul_(weights).ge_(0).mul_(-amount).add_(1))
