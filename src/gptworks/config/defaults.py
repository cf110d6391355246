"""Defaults of training that depend on the rest of the recipe.

Constant defaults are in train.py and model.py. docs/experiments.md and docs/benchmarks.md have the experiments behind
them.
"""

from collections.abc import Mapping
from typing import Any

from gptworks.config.batches import FUTURE_WEIGHT
from gptworks.config.model import ModelConfig
from gptworks.config.objective import ObjectiveConfig
from gptworks.config.optimizers import OPTIMIZERS

RATE, RATE_WIDTH = 0.02, 512
"""AdamW's rate for embeddings, head and vectors if Muon trains the matrices, and the width of the widest model tried.
In wider models the rate falls with the root of the width, as a precaution. Muon's rate is the same at every width."""

ADAMW_RATE_TIMES_WIDTH, HIGHEST_ADAMW_RATE = 0.5, 0.003
"""AdamW's rate for all weights, times the width, and the highest rate. Inverse to the width (Yang et al., 2022), rates
are 0.7 to 1.6 times those in table 2.1 of Brown et al. (2020)."""

TUNING_RATE_TIMES_WIDTH, HIGHEST_TUNING_RATE = 0.0768, 1e-3
"""The same two values for training from trained weights: the rate is 1e-4 at a width of 768."""

ADAPTER_TIMES = 10
"""Ratio of an adapter's rate to the rate for all weights (Schulman et al., 2025)."""

JUDGED_SHARE = 0.2
"""Factor of the rate for preferences and rewards: a policy that moves fast forgets its language."""

EPOCHS = 4
"""Default number of epochs: up to 4, repeated text is almost as useful as new text (Muennighoff et al., 2023)."""

TUNING_EPOCHS = 2

ENDS = frozenset({"max_steps", "epochs", "max_minutes"})
"""Settings that limit the length of a run."""


def tuning_rate(d_model: int, judged: bool, adapter: bool) -> float:
    """AdamW's rate for fine-tuning.

    Args:
        judged: whether the objective compares or rewards answers.
        adapter: whether only an adapter is trained.
    """
    rate = TUNING_RATE_TIMES_WIDTH / d_model
    rate *= ADAPTER_TIMES if adapter else 1
    rate *= JUDGED_SHARE if judged else 1
    return _rounded(min(rate, HIGHEST_TUNING_RATE))


def train_defaults(
    given: Mapping[str, Any], model: ModelConfig, objective: ObjectiveConfig, tunes: bool, adapter: bool
) -> dict[str, Any]:
    """Defaults for the settings of `train`.

    Args:
        given: the settings in the recipe.
        tunes: whether training starts from trained weights.
        adapter: whether only an adapter is trained.
    """
    adamw = tunes or adapter or given.get("optimizer_state") == "int8"
    optimizer = given.get("optimizer", "adamw" if adamw else "muon")
    settings: dict[str, Any] = {"optimizer": optimizer}
    if tunes or adapter:
        judged = objective.rows_per_sample > 1 or objective.rollouts is not None
        settings |= {"learning_rate": tuning_rate(model.d_model, judged, adapter), "weight_decay": 0.0}
    elif not any(name == optimizer and kind.orthogonalizes for name, kind in OPTIMIZERS.items()):
        rate = min(HIGHEST_ADAMW_RATE, ADAMW_RATE_TIMES_WIDTH / model.d_model)
        settings |= {"learning_rate": _rounded(rate), "weight_decay": 0.1 if optimizer == "adamw" else 0.01}
    else:
        settings["learning_rate"] = _rounded(RATE * min(1, RATE_WIDTH / model.d_model) ** 0.5)
    if model.n_future_tokens > 1 and not adapter:
        settings["future_weights"] = [FUTURE_WEIGHT] * (model.n_future_tokens - 1)
    if ENDS.isdisjoint(given):
        settings["epochs"] = TUNING_EPOCHS if tunes else EPOCHS
    return settings | _by_length(given.get("max_steps"), samples="text" in objective.sources)


def _by_length(steps: Any, samples: bool) -> dict[str, int]:
    """Defaults by the run's steps: warmup of a fiftieth; at least 5 evaluations, 4 checkpoints, 4 samples of text."""
    if not isinstance(steps, int) or steps < 1:
        steps = 500  # the length is not known yet
    return {
        "warmup_steps": min(1000, steps // 50),
        "evaluate_every": max(1, min(250, steps // 5)),
        "checkpoint_every": max(1, min(250, steps // 4)),
        "sample_every": max(1, min(1000, steps // 4)) if samples else 0,
    }


def _rounded(rate: float) -> float:
    """The rate rounded to two significant digits."""
    return float(f"{rate:.2g}")
