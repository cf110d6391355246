"""Types of options that are one of several names, and default sampling settings, in Python and commands.

A small module, so that `--help` is fast.
"""

from typing import Literal, NamedTuple

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
"""Number format of the matrices in a model in one HTML file."""
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
    """The server's own defaults are those of OpenAI's API: 16 for completions, the rest of the context for chats."""
    min_tokens: int = 0


SAMPLING = Sampling()
DRY_RANGES = {"dry_multiplier": (0, 100), "dry_base": (1, 10), "dry_allowed_length": (1, 50)}
"""Minimum and maximum of the settings of the DRY penalty."""
