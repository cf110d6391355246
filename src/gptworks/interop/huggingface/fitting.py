"""Fit a model to transformers: choose the architecture, and rewrite the weights for it."""

import json
from collections.abc import Mapping

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.settings import biases
from gptworks.interop.steps import nearest_architectures
from gptworks.interop.tensors import expected_tensors


def choose_family(config: ModelConfig, tokenizer: Tokenizer) -> tuple[Family, ModelConfig]:
    """Return the fitting architecture that adds the fewest zero biases, and the model's configuration in it. Raises a
    UserError if no architecture fits; the message names the nearest architectures and the settings that they lack."""
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
    """Return a tokenizer's first splitting pattern; None without a pattern, or without normalization to NFC, which
    Qwen's tokenizers have."""
    kind = json.loads(tokenizer.to_str())
    steps = (kind["pre_tokenizer"] or {}).get("pretokenizers", [{}])
    normalized = (kind["normalizer"] or {}).get("type")
    pattern: str | None = steps[0].get("pattern", {}).get("Regex")
    return pattern if normalized == "NFC" else None


def adapt_weights(
    family: Family, config: ModelConfig, adapted: ModelConfig, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return weights with which `adapted` has the same outputs as `config` with `tensors`, and notes about the changes.
    Raises a UserError if query biases are not zero, and the architecture has no query biases."""
    weights, changes = dict(tensors), []
    if "qkv" in biases(config) - biases(adapted):
        _move_value_biases(family, config, weights)
        changes.append("value biases are merged into the output's; key biases, which have no effect, are left out")
    if (factor := config.score_scale / adapted.score_scale) != 1.0:
        _scale_queries(adapted, weights, factor)
        changes.append(f"queries are multiplied by {factor:g}, since this architecture scales attention differently")
    expected = expected_tensors(adapted)
    if absent := [name for name in expected if name not in weights]:
        assert all(name.endswith(".bias") for name in absent), f"a weight is missing: {absent[0]}"
        weights |= {name: torch.zeros(expected[name].shape) for name in absent}
        kinds = ", ".join(sorted(biases(adapted) - biases(config)))
        changes.append(f"biases that the model does not have ({kinds}) are zeros")
    return weights, changes


def _move_value_biases(family: Family, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Remove the biases of query, key and value from `weights`, without changing the model's outputs.

    Attention weights sum to 1, so a value's bias passes through unchanged and can move to the output projection. A
    key's bias adds the same number to all scores of a query, which softmax cancels. A query's bias must be zero.
    """
    group = config.n_heads // config.n_kv_heads
    for layer in range(config.n_layers):
        attention = f"blocks.{layer}.attention"
        if weights.pop(f"{attention}.query.bias").any():
            raise UserError(
                f"model.attention_bias={str(config.attention_bias).lower()}, and `{family.model_type}`, the only "
                f"architecture of transformers for this model, has no query biases: those of layer {layer} are not "
                f"zero. Train with model.attention_bias=out to export."
            )
        weights.pop(f"{attention}.key.bias")
        value = weights.pop(f"{attention}.value.bias").view(config.n_kv_heads, -1)  # [n_kv_heads, d_head]
        value = value.repeat_interleave(group, dim=0).flatten()  # [n_heads · d_head]
        moved = weights[f"{attention}.out.weight"].double() @ value.double()
        if config.out_bias:
            moved = moved + weights[f"{attention}.out.bias"].double()
        weights[f"{attention}.out.bias"] = moved.float()


def _scale_queries(adapted: ModelConfig, weights: dict[str, Tensor], factor: float) -> None:
    """Multiply q·k by `factor`: scale the query norm's weight or, without that norm, the query's weight and bias."""
    for layer in range(adapted.n_layers):
        attention = f"blocks.{layer}.attention"
        scaled = ("query_norm.weight",) if adapted.qk_norm else ("query.weight", "query.bias")
        for name in scaled:
            if f"{attention}.{name}" in weights:
                weights[f"{attention}.{name}"] = weights[f"{attention}.{name}"] * factor
