"""The README.md of an exported folder: description, usage and comparison."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks import __version__
from gptworks.config import Recipe
from gptworks.evaluation.results import MAX_CARD_BYTES
from gptworks.files import read_text, write_whole
from gptworks.interop.huggingface.family import Family

if TYPE_CHECKING:
    from gptworks.interop.huggingface.exporting import Export

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{model_type}, gptworks]
---

# {name}

A language model of {parameters:,} parameters, trained with gptworks {version} (step {step:,}) and written as a
`{architecture}` in {precision}. It loads in stock transformers, without remote code:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this-folder")
model = AutoModelForCausalLM.from_pretrained("this-folder")
ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```
"""


def write_card(folder: Path, export: "Export", recipe: Recipe, family: Family) -> None:
    """Write README.md, with the tables of the run's own card at its end if the run has one."""
    text = _HEAD.format(
        model_type=family.model_type, name=recipe.name, parameters=export.parameters, version=__version__,
        step=export.step, precision=export.precision, architecture=export.architecture,
    )  # fmt: skip
    text += f"\n{family.advice}\n" if family.advice else ""
    text += f"\n## Comparison\n\n{_comparison(export)}\n"
    if export.notes:
        text += "\n## Differences from the run\n\n" + "".join(f"* {note}\n" for note in export.notes)
    run_card = recipe.run_dir / "model-card.md"
    if run_card.exists():
        theirs = read_text(run_card, MAX_CARD_BYTES, inside=recipe.run_dir)
        tables = re.findall(r"^## .*\n\n(?:\|.*\n)+", theirs, re.MULTILINE)
        text += "".join(f"\n{table}" for table in tables)
    write_whole(folder / "README.md", text, new=True)


def _comparison(export: "Export") -> str:
    found = export.verification
    if found is None:
        return "None: the folder was written with `--no-verify`."
    rounded = "" if export.precision == "fp32" else f", both with the weights rounded to {export.precision}"
    return (
        f"transformers {found.transformers_version} against the run, in fp32 arithmetic{rounded}: the logits of "
        f"{found.tokens:,} tokens differ by at most {found.logit_difference:.2e} (the largest logit is "
        f"{found.largest_logit:.1f}), {found.greedy_tokens} greedy tokens from a cache are equal"
        f"{f' ({found.ties} of them up to ties within rounding)' if found.ties else ''}, and so are the token ids of "
        f"{found.texts} texts."
    )
