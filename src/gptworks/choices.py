"""Names of which one is chosen, in Python and on the command line; here, since help lists them and imports little."""

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
"""Of matrix products."""
BackendName = Literal["auto", "torch", "native"]
"""What computes for the inference engine; see `choose_backend`."""
CacheName = Literal["auto", "fp32", "bf16", "int8"]
"""How keys and values are kept."""
Sharding = Literal["auto", "none", "zero2", "fsdp"]
"""What a plan sets of train.parallel; auto: as little as fits."""

Weights = Literal["bf16", "fp16", "int8", "int4"]
"""How the matrices of a quantized run are kept."""
HeadWeights = Literal["int8", "int4"]
"""How the head is kept beside int4 matrices."""
LoadedWeights = Literal["auto", "fp32", "bf16", "int8", "int4"]
"""How the matrices of a run are kept once it is loaded; auto: as the run keeps them."""
Rounding = Literal["nearest", "gptq"]

ExportFormat = Literal["hf", "gguf"]
ExportPrecision = Literal["fp32", "bf16", "fp16"]
"""Of the weights in a Hugging Face folder."""
GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Of the matrices in a GGUF file."""
