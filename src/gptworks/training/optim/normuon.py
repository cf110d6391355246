"""NorMuon (Li et al., 2025): Muon whose updates are scaled so that rows have similar norms."""

import torch

from gptworks.config import TrainConfig
from gptworks.training.optim import muon
from gptworks.training.optim.base import Group, Mesh


def build(groups: list[Group], train: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """Make a NorMuon."""
    return muon.build(groups, train, mesh, train.normuon_beta)
