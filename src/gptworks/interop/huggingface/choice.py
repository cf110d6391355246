"""Choose the architecture of transformers that a model is exported as, or explain why none fits."""

import json

from tokenizers import Tokenizer

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.interop.exports import nearest_architectures
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.settings import biases


def choose_family(config: ModelConfig, tokenizer: Tokenizer) -> tuple[Family, ModelConfig]:
    """The fitting architecture that adds the fewest zero biases, and the model's configuration in it.

    Raises:
        UserError: no architecture fits; the message names the settings that the nearest ones lack.
    """
    split = _split_pattern(tokenizer)
    exported = [family for family in FAMILIES.values() if family.exported]
    families = [family for family in exported if family.own_split in (None, split)]
    obstacles = {family.model_type: family.obstacles(config) for family in families}
    fitting = [family for family in families if not obstacles[family.model_type]]
    if not fitting:
        others = [family for family in exported if family not in families and not family.obstacles(config)]
        why = (
            f" `{others[0].model_type}` does, but AutoTokenizer splits its text by a fixed pattern, not this run's "
            f"tokenizer's, and would read other tokens."
            if others
            else ""
        )
        raise UserError(
            f"no architecture of transformers computes this model: {nearest_architectures(config, obstacles)}.{why} "
            f"gptworks itself can run it; to export a model, train it with other settings."
        )
    pairs = [(family, family.adapted(config)) for family in fitting]
    return min(pairs, key=lambda pair: len(biases(pair[1]) - biases(config)))


def _split_pattern(tokenizer: Tokenizer) -> str | None:
    """The splitting pattern of a tokenizer that normalizes text to NFC, as Qwen's does; None for others."""
    kind = json.loads(tokenizer.to_str())
    steps = (kind["pre_tokenizer"] or {}).get("pretokenizers", [{}])
    normalized = (kind["normalizer"] or {}).get("type")
    pattern: str | None = steps[0].get("pattern", {}).get("Regex")
    return pattern if normalized == "NFC" else None
