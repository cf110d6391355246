"""GGUF files: `export_gguf` writes one that llama.cpp loads, tokenizer and all.

architectures   each architecture of llama.cpp: which models it computes, their settings and tensors there
vocabulary      the tokenizer in llama.cpp's form, where that gives the same ids
exporting       run folder → GGUF file, its tensors rounded or quantized
"""

from gptworks.interop.gguf.exporting import export_gguf

__all__ = ["export_gguf"]
