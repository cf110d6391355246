"""Which architecture of transformers a model belongs to, or what stands in the way."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.interop.huggingface.architectures import EXPORTED
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.settings import biases


def choose_family(config: ModelConfig, tokenizer: Tokenizer) -> tuple[Family, ModelConfig]:
    """The architecture that holds a model with the fewest biases added as zeros, and the model as it holds it.

    Raises:
        UserError: none does; the settings that the nearest ones lack are named.
    """
    split = _split_pattern(tokenizer)
    families = [family for family in EXPORTED if family.own_split in (None, split)]
    obstacles = {family.model_type: family.obstacles(config) for family in families}
    fitting = [family for family in families if not obstacles[family.model_type]]
    if not fitting:
        others = [family for family in EXPORTED if family not in families and not family.obstacles(config)]
        why = (
            f" `{others[0].model_type}` does, but AutoTokenizer splits text for it by a pattern of its own, which is "
            f"not this run's tokenizer's, so that it would read other tokens."
            if others
            else ""
        )
        raise UserError(
            f"no architecture of transformers computes this model: {_nearest(config, obstacles)}.{why} "
            f"gptworks runs it as it is; a model to be exported is to be trained with other settings."
        )
    pairs = [(family, family.adapted(config)) for family in fitting]
    return min(pairs, key=lambda pair: len(biases(pair[1]) - biases(config)))


def _nearest(config: ModelConfig, obstacles: Mapping[str, list[str]]) -> str:
    """The architectures that lack the fewest settings, those alike once."""
    fewest = min(map(len, obstacles.values()))
    lacking: dict[str, str] = {}
    for family, names in obstacles.items():
        if len(names) == fewest:
            given = ", ".join(f"model.{name}={_shown(getattr(config, name))}" for name in names)
            lacking.setdefault(given, family)
    return "; ".join(f"`{family}` does not have {given}" for given, family in lacking.items())


def _split_pattern(tokenizer: Tokenizer) -> str | None:
    """The pattern by which a tokenizer of Qwen's kind splits text; None for another kind."""
    kind = json.loads(tokenizer.to_str())
    steps = (kind["pre_tokenizer"] or {}).get("pretokenizers", [{}])
    normalized = (kind["normalizer"] or {}).get("type")
    pattern: str | None = steps[0].get("pattern", {}).get("Regex")
    return pattern if normalized == "NFC" else None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
