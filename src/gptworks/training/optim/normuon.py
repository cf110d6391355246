"""NorMuon (Li et al., 2025): Muon whose updates have rows of one size."""

from typing import Any

import torch
from torch import distributed

from gptworks.config import TrainConfig
from gptworks.training.optim import muon


def build(
    groups: list[dict[str, Any]], train: TrainConfig, replicas: distributed.ProcessGroup | None
) -> torch.optim.Optimizer:
    """The optimizer as the recipe sets it; see `gptworks.training.optim.optimizer.Build`."""
    return muon.build(groups, train, replicas, train.normuon_beta)
