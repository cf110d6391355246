"""Hugging Face folders: `export_huggingface` writes one that stock transformers loads, `import_huggingface` reads one.

families     each architecture of transformers: its settings, the places of its tensors
settings     the parts of `config.json`, in both directions
tensors      names and layouts of tensors, in both directions
adapt        what an architecture holds in another form: biases, the scale of attention
exporting    run folder → Hugging Face folder, kept only if `verify` finds it equal
verify       a folder beside our model: logits, greedy tokens, token ids
card         the folder's README.md
importing    Hugging Face folder → run folder, without transformers
"""

from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.interop.huggingface.importing import import_huggingface

__all__ = ["export_huggingface", "import_huggingface"]
