"""Hugging Face folders: `export_huggingface` writes one that stock transformers loads, `import_huggingface` reads one.

settings       clauses, which each write and read a part of `config.json`
positions      the clauses of rotary positions, and of windows in some layers
family         an architecture of transformers: its clauses, and the places of its tensors (interop/tensors.py)
architectures  all architectures: a new one is one entry here
keys           the keys of the JSON files that no clause reads, and the model types that gptworks cannot read
fitting        chooses the architecture that a model is exported as, and rewrites the weights for it
exporting      run folder → Hugging Face folder, kept only if `verify` finds the same outputs
verify         compares a folder with our model: logits, greedy tokens, token ids
importing      Hugging Face folder → run folder, without transformers
original       facts of an imported folder, for comparison with exports of the run
"""

from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.interop.huggingface.importing import import_huggingface

__all__ = ["export_huggingface", "import_huggingface"]
