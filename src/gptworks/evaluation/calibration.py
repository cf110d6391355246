"""Calibration: about 70% of the tokens that a model predicts with 70% probability should be right."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.errors import UserError
from gptworks.evaluation.loss import LOGITS_AT_ONCE, NO_TOKEN, batches_of
from gptworks.evaluation.metrics import Floats
from gptworks.evaluation.results import Measured
from gptworks.model.gpt import GPT, eval_mode

N_BINS = 15


def measure_calibration(
    model: GPT, windows: Iterable[tuple[Tensor, Tensor]]
) -> tuple[dict[str, Measured], list[dict[str, Any]]]:
    """Compare the probability of the model's guess, its most probable token, with its accuracy (Guo et al., 2017).

    Return the expected calibration error and the accuracy of the guesses, with intervals over windows; and `N_BINS`
    bins of equal width. A bin has the number of targets at which the guess had a probability within (low, high], the
    mean probability, and the share of guesses that were right. The last two are None in an empty bin.

    `windows` are as for `evaluate_loss`. Raise a UserError if they have no target to count.
    """
    rows = []
    with eval_mode(model), torch.inference_mode():
        for inputs, targets in batches_of(windows):
            features = model.features(inputs.to(model.device))
            confidence, guess = _likeliest(model, features.flatten(0, 1))
            confidence, hit = confidence.cpu().view(targets.shape), (guess.cpu().view(targets.shape) == targets)
            for one, right, counted in zip(confidence, hit, targets != IGNORED, strict=True):
                rows.append(_binned(one[counted].double().numpy(), right[counted].numpy()))
    if not rows or not any(row.any() for row in rows):
        raise UserError(NO_TOKEN)
    statistics = np.stack(rows)  # for each window: number of tokens, sum of confidences and number of hits, by bin
    tokens, _, hits = np.split(statistics, 3, axis=1)
    measured = {
        "calibration error": Measured.of("calibration", statistics),
        "next-token accuracy": Measured.of("mean", np.stack([hits.sum(1), tokens.sum(1)], axis=1)),
    }
    bins = [
        {
            "low": i / N_BINS, "high": (i + 1) / N_BINS, "n_tokens": int(count),
            "confidence": confidence / count if count else None, "accuracy": hit / count if count else None,
        }
        for i, (count, confidence, hit) in enumerate(zip(*np.split(statistics.sum(0), 3), strict=True))
    ]  # fmt: skip
    return measured, bins


def _likeliest(model: GPT, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return probability and id, [N] each, of the most probable token for features [N, C], a few rows at a time."""
    parts = torch.split(features, max(1, LOGITS_AT_ONCE // model.config.vocab_size))
    best = [model.logits(part).float().softmax(-1).max(-1) for part in parts]
    return torch.cat([one.values for one in best]), torch.cat([one.indices for one in best])


def _binned(confidence: Floats, hit: np.ndarray) -> Floats:
    """Return the number of tokens, sum of confidences and number of hits in each bin (low, high], [3·B]."""
    place = np.clip(np.ceil(confidence * N_BINS).astype(np.int64) - 1, 0, N_BINS - 1)
    weights = (np.ones_like(confidence), confidence, hit.astype(np.float64))
    return np.concatenate([np.bincount(place, weight, N_BINS) for weight in weights])
