"""Steps shared by exports: remove heads that other programs lack, and name the architectures nearest to a model."""

from collections.abc import Mapping

from gptworks.config import ModelConfig
from gptworks.model.gpt import GPT


def leave_out_heads(model: GPT) -> list[str]:
    """Remove the heads that predict tokens beyond the next, because other programs do not support them. Return a list
    with one note, or an empty list if there were no such heads. The next token's logits do not change."""
    n = model.drop_future_heads()
    what = "the head of 1 token" if n == 1 else f"the heads of {n} tokens"
    return [f"{what} beyond the next (model.n_future_tokens={n + 1}) left out"] if n else []


def nearest_architectures(config: ModelConfig, obstacles: Mapping[str, list[str]]) -> str:
    """Return a text that names the architectures that lack the fewest of a model's settings, and these settings.

    Args:
        obstacles: architecture name → the settings that it lacks. If several lack the same settings, the text names
            only the first.
    """
    fewest = min(map(len, obstacles.values()))
    nearest: dict[str, str] = {}
    for name, settings in obstacles.items():
        if len(settings) == fewest:
            nearest.setdefault(", ".join(f"model.{setting}={_shown(config, setting)}" for setting in settings), name)
    return "; ".join(f"`{name}` lacks {settings}" for settings, name in nearest.items())


def _shown(config: ModelConfig, setting: str) -> str:
    value: object = config
    for part in setting.split("."):
        value = getattr(value, part)
    return str(value).lower() if isinstance(value, bool) else str(value)
