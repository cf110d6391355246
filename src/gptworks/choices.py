"""Types of named choices, in Python and on the command line; a separate module, so that `--help` imports little."""

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
"""Precision of matrix products."""
BackendName = Literal["auto", "torch", "native"]
"""Backend of the inference engine; see `choose_backend`."""
CacheName = Literal["auto", "fp32", "bf16", "int8"]
"""Storage of keys and values."""
Sharding = Literal["auto", "none", "zero2", "fsdp"]
"""The tensors to shard (train.parallel); auto: as few as needed to fit."""

Weights = Literal["bf16", "fp16", "int8", "int4"]
"""Storage of a quantized run's matrices."""
HeadWeights = Literal["int8", "int4"]
"""Storage of the head in an int4 run."""
LoadedWeights = Literal["auto", "fp32", "bf16", "int8", "int4"]
"""Storage of the matrices of a loaded run; auto: as in the run."""
Rounding = Literal["nearest", "gptq"]

ExportFormat = Literal["hf", "gguf"]
ExportPrecision = Literal["fp32", "bf16", "fp16"]
"""Precision of the weights in a Hugging Face folder."""
GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Type of the matrices in a GGUF file."""
