"""Export a run as a Hugging Face folder: write a temporary folder, compare it in stock transformers, then rename it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from gptworks import __version__
from gptworks.chat_template import TEMPLATE_FOLDER, load_chat_template, other_templates, save_chat_template
from gptworks.checkpoint import Report, load_run
from gptworks.choices import ExportPrecision
from gptworks.config import ModelConfig, Recipe
from gptworks.errors import RunError, UserError
from gptworks.evaluation.results import MAX_CARD_BYTES
from gptworks.files import check_free, new_folder, read_text, write_whole
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.fitting import adapt_weights, choose_family
from gptworks.interop.huggingface.original import read_original
from gptworks.interop.huggingface.verify import Verification, logit_bound, require, verify_folder
from gptworks.interop.steps import leave_out_heads
from gptworks.interop.tensors import each_tensor, our_tensors
from gptworks.model.gpt import GPT
from gptworks.model.lora import remove_lora
from gptworks.model.shapes import ShapesOnly
from gptworks.special_tokens import Stated, our_config, special_tokens, stated_of
from gptworks.tokenizer import begin_with, encodings, load_tokenizer, prompt_ids, tokenizer_from_json

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_TRAINING_FIELDS = ("dropout_embedding", "dropout_attention", "dropout_residual", "dropout_mlp")


@dataclass(frozen=True)
class Export:
    """The result of exporting a run to a Hugging Face folder."""

    folder: Path
    architecture: str
    precision: str
    parameters: int
    step: int
    verification: Verification | None
    """Result of the comparison with the run; None if it was skipped (`--no-verify`)."""
    notes: tuple[str, ...]
    """Differences between the folder and the run."""


def export_huggingface(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "best",
    precision: ExportPrecision = "fp32",
    verify: bool = True,
    merge: bool = True,
    report: Report = lambda _: None,
) -> Export:
    """Write a run's model as a folder that stock transformers loads.

    Args:
        precision: dtype of the stored weights. The comparison uses our model with the same rounded weights.
        verify: compare the folder with the model before renaming it to `out`.
        merge: merge the run's adapter into its weights; False: export the base without the adapter.

    Raises:
        UserError: the run does not exist or is quantized; `out` is not empty; no architecture of transformers fits the
            model; a weight is too large for `precision`; or `verify` is true, and transformers is not installed.
        RunError: the folder differs from the model, or the disk is full or fails. No partial folder is left.
    """
    out = Path(out)
    check_free(out)
    if verify:
        require("transformers")
    loaded = load_run(run, checkpoint, full=True, merge=merge, report=report)
    if not merge:
        remove_lora(loaded.model)
    heads = leave_out_heads(loaded.model)
    config, tokenizer = loaded.model.config, load_tokenizer(loaded.tokenizer_folder)
    template, original = load_chat_template(loaded.tokenizer_folder, tokenizer), read_original(loaded.tokenizer_folder)
    others = other_templates(loaded.tokenizer_folder)
    family, adapted = choose_family(config, tokenizer)
    weights, changes = adapt_weights(family, config, adapted, loaded.model.state_dict())
    dropped = [name for name in _TRAINING_FIELDS if getattr(config, name) and not getattr(adapted, name)]
    only_training = [f"{name}={getattr(config, name):g}, which only training uses, is left out" for name in dropped]
    notes = (*changes, *heads, *only_training)
    theirs = _rounded(dict(each_tensor(family.places, adapted, weights)), DTYPES[precision])
    with new_folder(out, sum(tensor.nbytes for tensor in theirs.values())) as aside:
        report(f"writing a {family.architecture} of {sum(w.numel() for w in weights.values()):,} parameters")
        # an imported model keeps the end tokens of its folder; other models also end at the template's end of a turn
        ends = template.end_token_ids if template and original is None else special_tokens(tokenizer).ends
        _write_settings(aside, family, config, tokenizer, ends, precision)
        _write_tokenizer(aside, tokenizer, config)
        if template is not None:
            save_chat_template(template, aside)
        for name, source in others.items():  # from the folder that the run or its base was imported from
            (aside / TEMPLATE_FOLDER).mkdir(exist_ok=True)
            write_whole(aside / TEMPLATE_FOLDER / f"{name}.jinja", source, new=True)
        write_tensors(aside, theirs)
        verification = None
        if verify:
            report("comparing it with the run in transformers")
            reference = loaded.model
            if precision != "fp32":
                _check_adapted(loaded.model, model_of(adapted, weights))
                reference = model_of(adapted, our_tensors(family.places, adapted, lambda name, _: theirs[name]))
            verification = verify_folder(
                aside, reference, tokenizer, loaded.recipe.train.sample_prompts, template, original
            )
        parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        export = Export(out, family.architecture, precision, parameters, loaded.checkpoint.step, verification, notes)
        _write_card(aside, export, loaded.recipe, family)
    return export


def model_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> GPT:
    """Return a model with these weights, in eval mode."""
    with ShapesOnly():
        model = GPT(config)
    model.assign(tensors, torch.device("cpu"))
    return model.eval()


@torch.no_grad()
def _check_adapted(ours: GPT, adapted: GPT) -> None:
    """Check in fp32 that `adapt_weights` kept the logits: the folder is later compared only with `adapted`. Raises a
    RunError if the logits of the two models differ."""
    tokens = torch.randint(
        ours.config.vocab_size, (1, min(64, adapted.config.context_length)), generator=torch.Generator().manual_seed(0)
    )
    before, after = ours(tokens), adapted(tokens)
    if not (apart := (before - after).abs().max().item()) <= logit_bound(before.abs().max().item()):
        raise RunError(f"the weights for the export compute another function: a logit differs by {apart:.2e}.")


def _rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the weights to another dtype. Raises a UserError if a value is too large for the dtype."""
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    for name, weight in rounded.items():
        if not weight.isfinite().all():
            raise UserError(f"`{name}` has values that {dtype} cannot hold: export with --dtype bf16 or fp32.")
    return rounded


# -------------------------------------------------------------------------------------------------- the files


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", new=True)


def _write_settings(
    folder: Path, family: Family, config: ModelConfig, tokenizer: Tokenizer, ends: tuple[int, ...], precision: str
) -> None:
    """Write config.json and generation_config.json. `ends`: ids of the tokens that end generation."""
    stated, special = stated_of(tokenizer), special_tokens(tokenizer)
    if stated is None or not stated.has_tokens:
        bos, sampling = special.eos if special.separator else special.bos, {} if stated is None else stated.generation
        generation = Stated(special.names, ends, bos, special.pad, sampling).generation_config()
        ids = {"bos_token_id": bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    else:
        generation = replace(stated, ends=ends).generation_config()
        ids = {name: generation.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    dtype = str(DTYPES[precision]).removeprefix("torch.")
    named = {"dtype": dtype, "torch_dtype": dtype}  # the older name too, without which some tools assume fp32
    _write_json(folder / "config.json", family.write(config) | ids | named | {"use_cache": True})
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Write the run's tokenizer so that transformers puts the same special tokens before a text as gptworks."""
    exported = tokenizer_from_json(tokenizer.to_str())
    if encodings(exported, ["a"], add_special_tokens=True)[0].ids != prompt_ids(tokenizer, "a"):
        separates = special_tokens(tokenizer).separator
        begin_with(exported, [] if separates else [tokenizer.id_to_token(i) or "" for i in prompt_ids(tokenizer, "")])
    write_whole(folder / "tokenizer.json", exported.to_str(pretty=True), new=True)
    names = dict(special_tokens(tokenizer).names)
    settings = our_config(names) | {"model_max_length": config.context_length}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", names)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = 5_000_000_000) -> None:
    """Write tensors to one file, or to shards with an index. A shard has at most `shard_bytes` bytes, or one tensor."""
    from huggingface_hub import split_torch_state_dict_into_shards  # imported late: it reads HF_HOME

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name].contiguous() for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


# ---------------------------------------------------------------------------------------------------- README.md

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


def _write_card(folder: Path, export: Export, recipe: Recipe, family: Family) -> None:
    """Write README.md; it ends with the tables of the run's own model card, if the run has one."""
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


def _comparison(export: Export) -> str:
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
