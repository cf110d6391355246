"""ORPO (Hong et al., 2024): preference tuning in one phase, without a reference model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config.objective import OddsRatioObjective
from gptworks.data.samples import Batch
from gptworks.model.gpt import GPT
from gptworks.training.objectives.next_token import Losses, with_routing
from gptworks.training.objectives.pairs import PairsObjective, answer_lengths, answer_logprobs


def odds_ratio_loss(weight: float, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of P pairs' losses (eq. 6), and the figures to report, as sums over the pairs.

    Args:
        weight: λ of eq. 6.
        logprobs: mean log-probability of each answer's tokens (eq. 3), [2P]: chosen answers, then rejected ones.
    """
    below_1 = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)  # a probability of 1 would have infinite odds
    log_odds = below_1 - torch.log(-torch.expm1(below_1))  # eq. 4
    log_ratio = log_odds[: len(log_odds) // 2] - log_odds[len(log_odds) // 2 :]
    nats = -logprobs[: len(log_ratio)]
    figures = {
        "log_odds_ratio": log_ratio.sum(),
        "chosen_nats_per_token": nats.sum(),
        "accuracy": (log_ratio > 0).float().sum(),
    }
    return (nats - weight * F.logsigmoid(log_ratio)).sum(), figures


class OddsRatio(PairsObjective):
    """The objective of ORPO: pairs of answers, no reference model."""

    settings: OddsRatioObjective
    figures = ("log_odds_ratio", "chosen_nats_per_token", "accuracy")

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Return the `odds_ratio_loss` of a batch, which has inputs and targets, [2P, T]."""
        inputs, targets = batch
        router_logits: list[Tensor] = []
        logprobs = answer_logprobs(model, inputs, targets, router_logits) / answer_lengths(targets)
        loss, figures = odds_ratio_loss(self.settings.weight, logprobs)
        return with_routing(loss, loss, router_logits, model, len(inputs) // 2, self._routing, figures)
