"""Import a Hugging Face folder as a run: read `config.json` and safetensors without transformers.

Nothing is guessed: each unknown setting of `config.json`, unused tensor or missing tensor is an error that names it.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.chat_template import ChatTemplate, FolderTemplates, read_templates, save_chat_template
from gptworks.checkpoint import Report
from gptworks.config import DataConfig, FileTokenizer, ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.evaluation.evaluated_run import PLACEHOLDER_SOURCES
from gptworks.files import check_free, check_tree, new_folder
from gptworks.infer.defaults import stated_sampling
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.keys import CONFIG_HARMLESS, about, ignored
from gptworks.interop.huggingface.original import Original, original_of
from gptworks.interop.huggingface.settings import Settings, Values
from gptworks.interop.huggingface.verify import load_their_tokenizer, load_theirs, quiet, require, verify_import
from gptworks.interop.steps import further_training, write_run
from gptworks.interop.tensors import our_tensors
from gptworks.json_files import read_json
from gptworks.pages.tables import in_a_cell
from gptworks.planning.params import count_parameters
from gptworks.recipe import parse_model, run_name
from gptworks.special_tokens import special_tokens, stated_of
from gptworks.tensors import stored_tensors
from gptworks.tokenizer import library_panics, load_tokenizer, save_tokenizer, vocabulary_size

_BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
"""Matches names of masks and rotary frequencies, which older versions of transformers saved. The settings determine
these tensors."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Names of pickled files, which can run code when they are read."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Import:
    """The result of importing a Hugging Face folder."""

    run_dir: Path
    architecture: str
    model: ModelConfig
    parameters: int
    source: str
    """The folder's origin; empty if unknown."""
    notes: tuple[str, ...]
    """Differences from the original that users should know."""
    logit_difference: float | None
    """Largest difference between the run's logits and transformers'; None without a comparison."""


def import_huggingface(
    folder: str | Path, run_dir: str | Path, *, source: str = "", verify: bool = True, report: Report = lambda _: None
) -> Import:
    """Make a run folder at step 0 from a Hugging Face folder. Weights become fp32, which is exact for bf16 and fp16.

    Args:
        source: the folder's origin, for the run's card.
        verify: compare the run's logits and token ids with transformers', if transformers is installed.

    Raises:
        UserError: the folder is missing, has no safetensors, or contains an unknown setting or tensor; `run_dir` is not
            empty; or transformers does not load the folder, and `verify` is true. The message names the cause.
        RunError: the logits differ from transformers', or the disk is full or fails. No partial folder is left.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    check_free(run_dir)
    check_tree(folder)
    family, model = read_folder_config(folder)
    files = _tensor_files(folder)
    tokenizer, templates = _read_tokenizer(folder, model), read_templates(folder)
    templates, template, broken = _compiled(templates, tokenizer)
    original = original_of(tokenizer, templates)
    recipe = _recipe(run_dir, model)
    report(f"reading a {family.architecture} of {count_parameters(model).total:,} parameters")
    tensors = read_tensors(folder, files, family, model)
    differences = _differences(folder, original) if verify else []
    notes = tuple(dict.fromkeys((*_notes(folder, tokenizer, templates), *broken, *differences)))
    imported = Import(run_dir, family.architecture, model, count_parameters(model).total, source, notes, None)
    with new_folder(run_dir) as aside:
        save_tokenizer(tokenizer, aside / "tokenizer")
        original.write(aside / "tokenizer")
        if template is not None:
            save_chat_template(template, aside / "tokenizer")
        write_run(aside, recipe, tensors, _card(recipe, imported))
        difference = verify_import(aside, "transformers", lambda: load_theirs(folder), report) if verify else None
    return replace(imported, logit_difference=difference)


def read_folder_config(folder: Path) -> tuple[Family, ModelConfig]:
    """Return the architecture and the model configuration of a Hugging Face folder; see `read_config`."""
    return read_config(read_json(folder / "config.json", "Give a folder that transformers' `save_pretrained` wrote."))


def read_config(values: Values) -> tuple[Family, ModelConfig]:
    """Return the architecture that a `config.json` names, and the configuration of the model that it describes. Raises
    a UserError if the architecture or a setting is unknown, or a value is unsupported."""
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(
            f"config.json has model_type `{kind}`{about(kind, FAMILIES)}. gptworks reads {', '.join(FAMILIES)}."
        )
    family, theirs = FAMILIES[kind], Settings(values)
    theirs.take("model_type")
    try:
        fields = family.read(theirs)
    except UserError:
        raise
    except ValidationError as error:
        problem = error.errors()[0]
        raise UserError(f"config.json, rope_parameters: {problem['loc'] or ''} {problem['msg']}.") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json has a value of a wrong type for a `{kind}`: {error}.") from None
    unknown = [name for name in theirs.left() if name not in CONFIG_HARMLESS | family.harmless]
    if "quantization_config" in unknown:
        raise UserError(
            "config.json has `quantization_config`: the weights are quantized, and gptworks reads only fp32, bf16 and "
            "fp16. Import the folder that they were made from, or dequantize them, and quantize the run afterwards."
        )
    if unknown:
        raise UserError(
            f"config.json has `{unknown[0]}`={values[unknown[0]]!r}, which gptworks does not know for a `{kind}`: it "
            f"may change what the model computes. If you know that it does not, delete it from config.json."
        )
    return family, parse_model(fields, "config.json")


def read_tensors(folder: Path, files: Mapping[str, Path], family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Return the model's tensors by our names, in fp32. `files` maps each tensor's name in the folder to its file.
    Raises a UserError if a tensor is missing or unused, has a wrong shape, a dtype other than fp32, bf16 and fp16, or
    values that are not finite, or contradicts another tensor."""
    theirs = _by_known_name(files, family)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in sorted(set(files.values()))}

        def read(known: str, shape: torch.Size) -> Tensor:
            if known not in theirs:
                cause = _cause(files, folder)
                if not cause and known == _head(family):
                    cause = " If the embedding is also the head, set `tie_word_embeddings` to true in it."
                raise UserError(f"the tensor `{known}` is missing: config.json describes a model with it.{cause}")
            name = theirs.pop(known)
            tensor: Tensor = opened[files[name]].get_tensor(name)
            if tensor.shape != shape:
                made = tuple(shape)
                raise UserError(f"the tensor `{name}` has shape {tuple(tensor.shape)}; config.json makes it {made}.")
            if tensor.dtype not in _DTYPES:
                raise UserError(f"the tensor `{name}` is {tensor.dtype}: gptworks reads fp32, bf16 and fp16.")
            if not tensor.isfinite().all():
                raise UserError(f"the tensor `{name}` has values that are not finite: the folder is damaged.")
            return tensor

        tensors = our_tensors(family.places, config, read)
        head = theirs.pop(_head(family), None) if config.tie_embeddings else None
        if head and not torch.equal(opened[files[head]].get_tensor(head).float(), tensors["token_embedding.weight"]):
            raise UserError(f"`{head}` differs from the embedding, and config.json has `tie_word_embeddings`=true.")
    if theirs:
        raise UserError(
            f"the tensor `{next(iter(theirs.values()))}` has no place in a `{family.model_type}` with these settings, "
            f"and {len(theirs) - 1} more: the folder holds a different model than its config.json says."
        )
    return tensors


_WRAPPERS = {
    "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP", "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "module": "DistributedDataParallel", "_forward_module": "DeepSpeed or Lightning", "base_layer": "PEFT",
}  # fmt: skip
"""Parts of tensor names → the program that adds them when it wraps a model."""


def _cause(files: Mapping[str, Path], folder: Path) -> str:
    """Return a sentence that explains why a tensor is missing: a wrapper renamed the tensors, or the folder also has
    files that are not read. Return "" if neither is the case."""
    parts = {part: name for name in files for part in name.split(".")}
    if wrapper := next((part for part in _WRAPPERS if part in parts), None):
        return (
            f" The files have names like `{parts[wrapper]}`, in which {_WRAPPERS[wrapper]} adds `{wrapper}.`: save the "
            f"model inside the wrapper (of PEFT, the merged model)."
        )
    return f" {stray}" if (stray := _stray(folder)) else ""


def _stray(folder: Path) -> str:
    """Return a warning if an index names files that are not read because model.safetensors exists; else ""."""
    if not (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return ""
    others = sorted(set(read_index(folder).values()) - {WEIGHTS})
    if not others:
        return ""
    return f"The folder has {WEIGHTS}, which is read, and {INDEX} of {others[0]}, which is not: delete the wrong one."


def _by_known_name(files: Mapping[str, Path], family: Family) -> dict[str, str]:
    """Return a map: a weight's name in this version of transformers → its name in the files. Raises a UserError if two
    names mean the same weight."""
    theirs: dict[str, str] = {}
    for name in files:
        if _BUFFERS.search(name):
            continue
        module, _, kind = name.rpartition(".")
        if module in family.other_names:
            known = f"{family.other_names[module]}.{kind}"
        else:  # a file saved from a model without a head lacks the prefix
            whole = name == _head(family) or name.startswith(family.prefix)
            known = name if whole else f"{family.prefix}{name}"
        if known in theirs:
            raise UserError(
                f"the tensors `{theirs[known]}` and `{name}` are two names of one weight, `{known}`: the folder "
                f"contradicts itself. Save it again with only the right one."
            )
        theirs[known] = name
    return theirs


def _head(family: Family) -> str:
    """Return the name of the head's matrix in Hugging Face's weights."""
    return next(f"{place.theirs}.weight" for place in family.places if place.ours == ("untied_head",))


# ---------------------------------------------------------------------------------------------------- the folder


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return each tensor's file by tensor name: model.safetensors if it exists, else the file that the index names.
    Raises a UserError if there is neither model.safetensors nor an index, or a file is missing or lacks a tensor."""
    single, index = folder / WEIGHTS, folder / INDEX
    if not single.exists() and not index.exists():
        others = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
        if others:
            raise UserError(
                f"{folder / others[0]} is of a kind that can run code when it is read: gptworks reads only "
                f"safetensors. Save the model again with transformers (`save_pretrained` writes safetensors)."
            )
        found = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))[:3])
        other = f" It has {found}: get the index of these files, or name the only one {WEIGHTS}." if found else ""
        raise UserError(f"{folder} holds no {WEIGHTS} and no {INDEX}.{other}")
    if single.exists():
        return dict.fromkeys(stored_tensors(single, inside=folder), single)
    files = {tensor: folder / name for tensor, name in read_index(folder).items()}
    for path in sorted(set(files.values())):
        if path.parent != folder or not path.exists():
            raise UserError(f"{index} names {path.name}, which is not in {folder}.")
        stored = stored_tensors(path, inside=folder)
        if absent := {tensor for tensor, held in files.items() if held == path} - set(stored):
            raise UserError(f"{index} says that `{min(absent)}` is in {path.name}, but it is not.")
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Return a map: tensor name → name of its file, from the index of a folder with several files. Raises a UserError
    if the index is damaged."""
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{folder / INDEX} has no `weight_map` from tensors to files.")
    return names


def _read_tokenizer(folder: Path, model: ModelConfig) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if (n_ids := vocabulary_size(tokenizer)) > model.vocab_size:
        raise UserError(
            f"{folder / 'tokenizer.json'} has {n_ids} tokens and config.json `vocab_size`={model.vocab_size}: "
            f"they do not belong together."
        )
    special = special_tokens(tokenizer)
    if wrong := [token for token in (*special.before, *special.after) if token >= n_ids]:
        raise UserError(
            f"{folder / 'tokenizer.json'} has a post_processor that adds the id {wrong[0]}, and {n_ids} tokens: it "
            f"belongs to another vocabulary."
        )
    return tokenizer


def _compiled(
    templates: FolderTemplates, tokenizer: Tokenizer
) -> tuple[FolderTemplates, ChatTemplate | None, list[str]]:
    """Return the templates, the compiled default, and a note if the default does not compile and is left out."""
    if templates.default is None:
        return templates, None, []
    try:
        return templates, ChatTemplate(templates.default, tokenizer), []
    except UserError as error:
        return FolderTemplates(templates.others, templates.source), None, [f"{templates.source} is left out: {error}"]


def _notes(folder: Path, tokenizer: Tokenizer, templates: FolderTemplates) -> Iterator[str]:
    """Yield notes for the run's users on ignored settings of the folder, missing end tokens and chat templates."""
    stated = stated_of(tokenizer)
    if stated is not None:
        yield from (*stated.notes, *stated_sampling(stated.generation)[1])
    yield from ignored(folder)
    if stray := _stray(folder):
        yield stray
    special = special_tokens(tokenizer)
    if not special.ends:
        yield "the folder states no token that ends a text: generation stops only at its length"
    if special.after:
        yield f"a prompt is followed by {list(special.after)}, which the post-processor of tokenizer.json adds"
    others = templates.others
    if others and templates.default is None:
        yield (
            f"{templates.source} has the chat templates {', '.join(others)} and no `default`: the run has no chat "
            f"template. Name one with tokenizer.chat_template."
        )
    elif others:
        yield f"chats use the chat template `default`; {', '.join(others)} of {templates.source} are kept for exports"
    if templates.source == "chat_template.json":
        yield "the chat template is from chat_template.json, which transformers reads only for processors"


def _differences(folder: Path, original: Original) -> list[str]:
    """Return a list with a note if AutoTokenizer fails or encodes a text differently. Return an empty list if there is
    no difference, or transformers is not installed."""
    try:
        require("transformers")
    except UserError:
        return []
    with quiet():
        try:
            with library_panics("this tokenizer is broken"):
                theirs = load_their_tokenizer(folder)
                read = {text: theirs(text)["input_ids"] for text in original.texts}
        except Exception as error:  # a folder can cause any exception
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return [f"AutoTokenizer of transformers does not load the folder: {why}"]
    for text, ids in original.texts.items():
        if read[text] != ids:
            return [
                f"AutoTokenizer of transformers reads {text!r} as {read[text][:12]}, by {type(theirs).__name__}; "
                f"gptworks follows tokenizer.json, which gives {ids[:12]}"
            ]
    return []


# ------------------------------------------------------------------------------------------------------- the run


def _recipe(run_dir: Path, model: ModelConfig) -> Recipe:
    """Return a recipe for the run folder. Data and training are placeholders, as gptworks did not train the model."""
    return Recipe(
        name=run_name(run_dir),
        run_dir=run_dir,
        model=model,
        tokenizer=FileTokenizer(type="file", path=run_dir / "tokenizer"),
        data=DataConfig(sources=PLACEHOLDER_SOURCES),
        train=further_training(model),
    )


def _card(recipe: Recipe, imported: Import) -> str:
    model, run_dir = recipe.model, recipe.run_dir
    source = f", {imported.source}" if imported.source else ""
    rows = {
        "parameters": f"{imported.parameters:,}",
        "read from": f"a `{imported.architecture}` of Hugging Face{source}",
        "layers × width × heads": f"{model.n_layers} × {model.d_model} × {model.n_heads}",
        "context": f"{model.context_length:,} tokens",
        "position, norm, MLP": f"{model.position}, {model.norm}, {model.mlp} of {model.d_ff:,}",
    }
    table = "\n".join(f"| {in_a_cell(key)} | {in_a_cell(value)} |" for key, value in rows.items())
    notes = "".join(f"* {in_a_cell(note)}\n" for note in imported.notes)
    return (
        f"# {recipe.name}\n\nA language model that was imported, not trained, by gptworks.\n\n"
        f"## Architecture\n\n| | |\n|---|---|\n{table}\n\n{notes}\n"
        f"The sections `data` and `train` of `recipe.yaml` are placeholders. To train the model further:\n\n"
        f"```bash\ngptworks train {shlex.quote(f'{run_dir}')} {shlex.quote(f'initialize_from={run_dir}')} "
        f"{shlex.quote(f'run_dir={run_dir}-further')} \\\n"
        f"  data.sources.0.type=text data.sources.0.path=my-texts/\n```\n"
    )
