"""Defaults of training settings that depend on the rest of the recipe.

Constant defaults are next to the settings. docs/experiments.md and docs/benchmarks.md give the experiments behind the
defaults.
"""

from collections.abc import Mapping
from typing import Any

from gptworks.config.batches import FUTURE_WEIGHT
from gptworks.config.model import ModelConfig
from gptworks.config.objective import ObjectiveConfig
from gptworks.config.optimizers import OPTIMIZERS

RATE, RATE_WIDTH = 0.02, 512
"""AdamW's learning rate if Muon trains the matrices, and the width of the widest model in our experiments. In wider
models this rate is divided by the square root of the ratio of widths, as a precaution. Muon's rate does not change."""

ADAMW_RATE_TIMES_WIDTH, HIGHEST_ADAMW_RATE = 0.5, 0.003
"""Learning rate of optimizers that do not orthogonalize, multiplied by the width, and the maximum of the rate. The
rate, inverse to the width (Yang et al., 2022), is 0.7 to 1.6 times the rate in table 2.1 of Brown et al. (2020)."""

TUNING_RATE_TIMES_WIDTH, HIGHEST_TUNING_RATE = 0.0768, 1e-3
"""AdamW's learning rate for fine-tuning, multiplied by the width (1e-4 × 768), and the maximum of the rate."""

ADAPTER_TIMES = 10
"""Ratio of an adapter's learning rate to the rate for all weights (Schulman et al., 2025)."""

JUDGED_SHARE = 0.2
"""Factor of the learning rate when training on preferences or rewards; at a higher rate, the model loses fluency."""

EPOCHS = 4
"""Default number of epochs: for 4 epochs, repeated text is almost as useful as new text (Muennighoff et al., 2023)."""

TUNING_EPOCHS = 2

ENDS = frozenset({"max_steps", "epochs", "max_minutes"})
"""Settings that limit the length of a run."""


def tuning_rate(d_model: int, judged: bool, adapter: bool) -> float:
    """Return AdamW's default learning rate for fine-tuning. `judged`: whether the objective compares or rewards
    answers. `adapter`: whether only an adapter is trained."""
    rate = TUNING_RATE_TIMES_WIDTH / d_model
    rate *= ADAPTER_TIMES if adapter else 1
    rate *= JUDGED_SHARE if judged else 1
    return _rounded(min(rate, HIGHEST_TUNING_RATE))


def train_defaults(
    given: Mapping[str, Any], model: ModelConfig, objective: ObjectiveConfig, tunes: bool, adapter: bool
) -> dict[str, Any]:
    """Return the defaults of `train` that depend on other sections of the recipe or on the settings `given` in `train`.
    `tunes`: whether training starts from trained weights. `adapter`: whether only an adapter is trained."""
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
    """Return the steps of the warmup, and the steps between evaluations, checkpoints and samples, for a run of `steps`
    steps. `samples`: whether the run samples texts."""
    if not isinstance(steps, int) or steps < 1:
        steps = 500  # the number of steps is unknown or invalid
    return {
        "warmup_steps": min(1000, steps // 50),
        "evaluate_every": max(1, min(250, steps // 5)),
        "checkpoint_every": max(1, min(250, steps // 4)),
        "sample_every": max(1, min(1000, steps // 4)) if samples else 0,
    }


def _rounded(rate: float) -> float:
    """Round a rate to two significant digits."""
    return float(f"{rate:.2g}")
