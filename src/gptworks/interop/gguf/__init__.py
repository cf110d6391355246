"""GGUF files: `export_gguf` writes one that llama.cpp loads, including the tokenizer.

architectures   the architectures of llama.cpp: which models each computes, settings and tensors
vocabulary      the tokenizer in llama.cpp's form, if it gives the same ids there
exporting       run folder → GGUF file with rounded or quantized tensors
"""

from gptworks.errors import not_installed

try:
    from gptworks.interop.gguf.exporting import export_gguf
except ModuleNotFoundError as error:
    if error.name != "gguf":
        raise
    raise not_installed("gguf", "interop", "the export to GGUF") from None

__all__ = ["export_gguf"]
