"""GGUF files: `export_gguf` writes one that llama.cpp loads, including the tokenizer.

architectures   llama.cpp's architectures: which models each supports, and how a file stores them
vocabulary      the tokenizer in llama.cpp's form, refused if token ids would differ
exporting       run folder → GGUF file with tensors in f32, rounded or quantized
"""

from gptworks.errors import not_installed

try:
    from gptworks.interop.gguf.exporting import export_gguf
except ModuleNotFoundError as error:
    if error.name != "gguf":
        raise
    raise not_installed("gguf", "interop", "the export to GGUF") from None

__all__ = ["export_gguf"]
