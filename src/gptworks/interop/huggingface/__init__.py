"""Hugging Face folders: `export_huggingface` writes one that stock transformers loads, `import_huggingface` reads one.

settings       the parts of `config.json`, in both directions
layers         those that differ from layer to layer
tensors        names and layouts of tensors, in both directions
family         an architecture of transformers: its settings and the places of its tensors
architectures  all of them
choice         which one a model belongs to, or what stands in the way
adapt          what an architecture holds in another form: biases, the scale of attention
exporting      run folder → Hugging Face folder, kept only if `verify` finds it equal
verify         a folder beside our model: logits, greedy tokens, token ids
card           the folder's README.md
importing      Hugging Face folder → run folder, without transformers
"""

from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.interop.huggingface.importing import import_huggingface

__all__ = ["export_huggingface", "import_huggingface"]
