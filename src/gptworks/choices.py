"""Types of options that take one of several names, and the default sampling settings.

The module is small, so that `--help` is fast.
"""

import operator
from typing import Any, ClassVar, Literal, NamedTuple

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
"""Precision of matrix products."""
BackendName = Literal["auto", "torch", "native"]
"""Backend of the inference engine; see `choose_backend`."""
CacheName = Literal["auto", "fp32", "bf16", "int8"]
"""Number format of keys and values in the cache."""
Sharding = Literal["auto", "none", "zero2", "fsdp"]
"""Tensors to shard among devices (train.parallel); auto: as few as needed to fit."""

Weights = Literal["bf16", "fp16", "int8", "int4"]
"""Number format of a quantized run's matrices."""
HeadWeights = Literal["int8", "int4"]
"""Number format of the head in an int4 run."""
LoadedWeights = Literal["auto", "fp32", "bf16", "int8", "int4"]
"""Number format of a loaded run's matrices; auto: as the run stores them."""
Rounding = Literal["nearest", "gptq"]

ExportFormat = Literal["hf", "gguf", "html"]
ExportPrecision = Literal["fp32", "bf16", "fp16"]
"""Precision of the weights in a Hugging Face folder."""
HTMLWeights = Literal["int8", "int4", "bf16", "fp32"]
"""Number format of the matrices in an HTML export."""
GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Tensor type of the matrices in a GGUF file."""


class Sampling(NamedTuple):
    """Default sampling settings of the commands, the server, the studio and Python, for models that state none. Of the
    settings that change probabilities, only the temperature has an effect at these values."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    max_tokens: int = 200
    """The server instead uses the defaults of OpenAI's API: 16 for completions, the rest of the context for chats."""
    min_tokens: int = 0


SAMPLING = Sampling()


class Rule:
    """Help text and bounds of a sampling setting. The bounds have pydantic's names: ge, gt, le, lt."""

    _WORDS: ClassVar = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

    def __init__(self, help: str, **bounds: Any) -> None:
        self.help, self.bounds = help, bounds

    def allows(self, value: float) -> bool:
        return all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items())

    def __str__(self) -> str:
        return " and ".join(f"{self._WORDS[name]} {bound}" for name, bound in self.bounds.items())


SAMPLING_RULES = {
    "temperature": Rule("0 takes the likeliest token (greedy).", ge=0, le=10**6),
    "top_k": Rule("Keep the k likeliest tokens. 0: all.", ge=0, lt=2**31),
    "top_p": Rule("Keep the likeliest tokens that hold this much probability.", gt=0, le=1),
    "min_p": Rule("Drop tokens below this share of the likeliest one's probability.", ge=0, lt=1),
    "repetition_penalty": Rule("Above 1: tokens that occurred become less likely.", ge=0.001, le=1000),
    "frequency_penalty": Rule("Subtracted from a token's logit each time it was generated.", ge=-100, le=100),
    "presence_penalty": Rule("Subtracted once from the logit of a generated token.", ge=-100, le=100),
    "dry_multiplier": Rule("Above 0: tokens that would go on repeating text become less likely (DRY).", ge=0, le=100),
    "dry_base": Rule("DRY: factor by which the penalty grows with each repeated token.", ge=1, le=10),
    "dry_allowed_length": Rule("DRY: tokens that may be repeated without a penalty.", ge=1, le=50),
}
"""Rules of the sampling settings that a recipe or a generation_config.json may state. OpenAI's API has other ranges."""
