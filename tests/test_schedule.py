"""The learning rate against torch's own schedulers and points computed by hand."""

import math
from itertools import pairwise

import pytest
import torch

from gptworks.config import TrainConfig
from gptworks.training.progress import rate_factor
from tiny import plain_training


def factors(train: TrainConfig, steps: int) -> list[float]:
    return [rate_factor(train, step, step / steps) for step in range(steps)]


def test_warmup_then_cosine_equals_torch() -> None:
    steps, warmup, floor = 100, 10, 0.1
    train = plain_training(max_steps=steps, warmup_steps=warmup, final_rate_fraction=floor)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=floor)
    ours = factors(train, steps)
    assert ours[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    for factor in ours[warmup:]:
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        cosine.step()


def test_wsd_is_constant_then_linear_to_the_floor() -> None:
    train = plain_training(max_steps=100, schedule="wsd", decay_fraction=0.6, final_rate_fraction=0.0)
    ours = factors(train, 100)
    assert ours[:41] == [1.0] * 41
    assert ours[70] == pytest.approx(0.5)
    assert ours[99] == pytest.approx(1 / 60)
    assert all(a >= b for a, b in pairwise(ours))


def test_horizon_counts_optimizer_steps_not_micro_batches() -> None:
    whole = plain_training(max_steps=50, batch_size=32)
    cut = plain_training(max_steps=50, batch_size=32, micro_batch_size=4)
    assert cut.accumulation_steps == 8
    assert factors(whole, 50) == factors(cut, 50)


def test_cosine_ends_at_the_final_fraction() -> None:
    train = plain_training(max_steps=10, final_rate_fraction=0.25)
    assert rate_factor(train, 10, 1.0) == pytest.approx(0.25)
    assert rate_factor(train, 5, 0.5) == pytest.approx(0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi / 2)))
