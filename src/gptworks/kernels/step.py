"""Architectures that the C++ engine's step (step.cpp) can compute. The engine, exports and plans check this."""

from gptworks.config import ModelConfig


def refused_architecture(config: ModelConfig) -> str | None:
    """Return the reason why the C++ engine cannot compute an architecture; None if it can."""
    if config.n_experts:
        return "it has no mixture of experts."
    if strange := [name for name in config.laboratory if name != "bigram_vocab_size"]:
        return f"it has no {strange[0]}."
    if config.norm_placement == "after":
        return "it has no norms after attention and MLP alone."
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(config, name) is not None:
            return f"it has no {name}."
    if config.qk_norm == "whole":
        return "it has no norm over all heads together."
    if config.rope_scaling is not None and config.rope_scaling.by_length:
        return f"it has no {config.rope_scaling.type} rotary scaling."
    for name in ("d_head", "d_model", "d_ff"):
        if (width := getattr(config, name)) % 16:
            return f"{name}={width} is not a multiple of 16."
    return None
