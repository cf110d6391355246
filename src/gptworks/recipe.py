"""Recipe files: reading, overriding, checking, saving.

A recipe is one YAML file with the sections `model`, `tokenizer`, `data` and `train`. `load_recipe` reads it, applies
`key.path=value` overrides, takes what it leaves out of model and tokenizer from the run that it starts from, and
refuses unknown keys, wrong types and settings that contradict one another before any work begins.
"""

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from gptworks.config import (
    ENDS,
    AnyRecipe,
    DatasetRecipe,
    DatasetTokenizer,
    FileTokenizer,
    ModelConfig,
    Recipe,
    Section,
    known_vocab_size,
)
from gptworks.config.base import MOST_NAME_CHARACTERS
from gptworks.config.explain import explain, leaves, sections_at
from gptworks.config.objective import OBJECTIVE_SETTINGS
from gptworks.errors import UserError, nearest
from gptworks.files import read_given, read_text, write_whole
from gptworks.presets import expand_preset
from gptworks.recipes import shipped_paths
from gptworks.yaml_files import MAX_BYTES, parse_yaml

AnySection = TypeVar("AnySection", bound=Section)

RecipeLike = str | PathLike[str] | Mapping[str, Any] | Recipe
"""A recipe's file, shipped name or run folder, its nested dictionaries, or the recipe itself."""

Unsaid = Mapping[str, Mapping[str, Any]]
"""Settings by section that hold where a recipe does not say."""


def with_vocab_size(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe with its model's vocabulary set to the tokenizer's.

    A stated vocabulary may be larger than that of a tokenizer that is read from a file: published models have rows to
    spare in their embeddings.

    Raises:
        UserError: the recipe states another vocabulary.
    """
    stated = recipe.model.vocab_size
    if isinstance(recipe.tokenizer, FileTokenizer | DatasetTokenizer) and stated > vocab_size:
        return recipe
    if stated not in (0, vocab_size):
        raise UserError(
            f"model.vocab_size={stated} and the tokenizer has {vocab_size} tokens: they must be equal. "
            f"Set model.vocab_size={vocab_size} (or leave it out), or give another tokenizer."
        )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": vocab_size})})


def load_recipe(recipe: RecipeLike, overrides: Sequence[str] = (), unsaid: Unsaid | None = None) -> Recipe:
    """Read a recipe file, the one of a run folder or a shipped one by its name, apply `key.path=value` overrides, and
    validate the whole. A recipe that is at hand, as an object or as nested dictionaries, is taken as it is.

    Args:
        unsaid: settings for those that neither the recipe nor an override gives, instead of the defaults.

    Raises:
        UserError: a missing file, broken YAML, an unknown key, a wrong type or settings that contradict one another.
    """
    if isinstance(recipe, Recipe | Mapping):
        return _from_tree(recipe, overrides, unsaid or {})
    run_dir = Path(recipe) if is_folder(recipe) else None
    path, tree = read_recipe(recipe)
    tree.setdefault("name", path.stem if path.stem != "recipe" else path.absolute().parent.name)
    if run_dir is not None:
        tree["run_dir"] = str(run_dir)  # a run folder may have been moved or copied
    given = _by_key(overrides)
    tree = _with_unsaid(apply_overrides(tree, overrides), unsaid or {})
    if run_dir is None:
        return parse_recipe(tree, str(path), given)
    return _with_tokenizer_at_hand(_parse_whole(tree, str(path), given), run_dir)


def load_dataset_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read what describes a dataset: a recipe, or a file that has `tokenizer` and `data` alone.

    Raises:
        UserError: as `load_recipe`.
    """
    if isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    path, tree = (Path("recipe"), dict(recipe)) if isinstance(recipe, Mapping) else read_recipe(recipe)
    if not tree.keys() <= DatasetRecipe.model_fields.keys():
        return load_recipe(recipe, overrides)
    return parse_section(apply_overrides(tree, overrides), DatasetRecipe, str(path), _by_key(overrides))


def _from_tree(recipe: Recipe | Mapping[str, Any], overrides: Sequence[str], unsaid: Unsaid) -> Recipe:
    if isinstance(recipe, Recipe) and not overrides:
        return recipe
    # Of a recipe what was set: what follows from other settings follows from the overrides.
    tree = recipe.model_dump(mode="json", exclude_unset=True) if isinstance(recipe, Recipe) else dict(recipe)
    return parse_recipe(_with_unsaid(apply_overrides(tree, overrides), unsaid), "recipe", _by_key(overrides))


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    return {override.partition("=")[0].strip(): override for override in overrides}


def is_folder(recipe: RecipeLike) -> bool:
    """Whether a recipe is given as a folder: that of a run."""
    return isinstance(recipe, str | PathLike) and Path(recipe).is_dir()


def _with_unsaid(tree: dict[str, Any], unsaid: Unsaid) -> dict[str, Any]:
    return tree | {section: _beneath(tree.get(section) or {}, settings) for section, settings in unsaid.items()}


def _beneath(said: Any, settings: Mapping[str, Any]) -> Any:
    """What is said, and the settings of which nothing is."""
    if not isinstance(said, dict):
        return said
    said = expand_preset(said)
    ends = () if ENDS.isdisjoint(said) else ENDS  # one that is given replaces all
    rest = {key: value for key, value in settings.items() if key not in said and key not in ends}
    sections = {key: value for key, value in settings.items() if key in said and isinstance(value, Mapping)}
    return rest | said | {key: _beneath(said[key], value) for key, value in sections.items()}


def recipe_text(path: str | PathLike[str]) -> tuple[Path, str]:
    """The file of a recipe, which may be a run folder's or a shipped one's, or a pipe, and its text.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = Path(path)
    if path.as_posix() in shipped_paths() and not path.exists():
        path = shipped_paths()[path.as_posix()]
    folder = path if path.is_dir() else None
    path = path if folder is None else folder / "recipe.yaml"
    try:
        text = read_given(path, MAX_BYTES) if folder is None else read_text(path, MAX_BYTES, inside=folder)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_no_such_recipe(path)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    return path, text


def read_recipe(path: str | PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The file of a recipe, as `recipe_text` finds it, and what is written in it.

    Raises:
        UserError: a missing file, broken YAML, or no mapping of names.
    """
    path, text = recipe_text(path)
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} holds {type(tree).__name__}, not a mapping with the sections model, tokenizer, data, train."
        )
    return path, tree


def _no_such_recipe(path: Path) -> str:
    checkpoint, run = path.parent, path.parents[2] if len(path.parents) > 2 else path
    if checkpoint.parent.name == "checkpoints" and (run / "recipe.yaml").exists():
        return (
            f"{checkpoint} is a checkpoint, not a run folder: give {run} and --resume, and training goes on from its "
            f"newest step-… checkpoint. One named weights-… has no optimizer state and is only used."
        )
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, (one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml")))
    if near:
        return f"{path}: no such recipe file; did you mean {folder / near}?"
    if shipped := nearest(path.with_suffix("").as_posix(), shipped_paths()):
        return f"{path}: no such recipe file; did you mean `{shipped}`, which comes with gptworks?"
    return f"{path}: no such recipe file. `gptworks recipes` lists those that have a name."


def _with_tokenizer_at_hand(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe of a run folder, whose tokenizer file may have been left behind: the folder has a copy."""
    tokenizer, copy = recipe.tokenizer, run_dir / "tokenizer"
    changes: dict[str, Any] = {}
    if isinstance(tokenizer, FileTokenizer) and not tokenizer.path.expanduser().exists() and copy.exists():
        changes["path"] = copy
    template, kept = tokenizer.chat_template, copy / "chat_template.jinja"
    if template is not None and ("." in template or "/" in template) and not Path(template).exists() and kept.exists():
        changes["chat_template"] = str(kept)
    return recipe.model_copy(update={"tokenizer": tokenizer.model_copy(update=changes)}) if changes else recipe


def parse_recipe(tree: dict[str, Any], origin: str = "recipe", overrides: Mapping[str, str] | None = None) -> Recipe:
    """Validate a recipe given as plain dictionaries. `model.preset` is replaced by the preset's settings; what model
    and tokenizer leave out is taken from the run that `initialize_from` names.

    Args:
        origin: the file, for messages.
        overrides: those that were applied, by key; messages about these settings name the override instead.

    Raises:
        UserError: a wrong setting; or model and run contradict each other.
    """
    if isinstance(tree.get("model"), dict):
        tree = {**tree, "model": expand_preset(tree["model"])}
    source = tree.get("initialize_from")
    if not isinstance(source, str | Path) or not source:
        return _parse_whole(tree, origin, overrides)
    if not (Path(source) / "recipe.yaml").exists():
        _require_model_and_tokenizer(tree, Path(source), origin)
        return _parse_whole(tree, origin, overrides)
    recipe = _parse_whole(_completed(tree, Path(source)), origin, overrides)
    check_same_model(recipe.model, Path(source))
    return recipe


def _require_model_and_tokenizer(tree: dict[str, Any], source: Path, origin: str) -> None:
    """Refuse a recipe that leaves out what the run it starts from would supply, where that run is missing."""
    model, tokenizer = tree.get("model"), tree.get("tokenizer")
    missing = [] if isinstance(model, dict) and model.keys() >= _SIZES else ["model"]
    missing += [] if isinstance(tokenizer, dict) and "type" in tokenizer else ["tokenizer"]
    if missing:
        raise UserError(
            f"{origin}: initialize_from={source} is not a run folder, for it has no recipe.yaml, and the recipe takes "
            f"its {' and '.join(missing)} from it. Train or import that run first, or correct the path."
        )


_SIZES = {name for name, field in ModelConfig.model_fields.items() if field.is_required()}


def _completed(tree: dict[str, Any], source: Path) -> dict[str, Any]:
    """The tree with what its model and its tokenizer leave out, taken from the run that it starts from."""
    base = load_recipe(source).model.model_dump(mode="json")
    if not _trains_future_heads(tree.get("objective")):
        base["n_future_tokens"] = 1
    model, tokenizer = tree.get("model") or {}, tree.get("tokenizer") or {}
    if isinstance(tokenizer, dict) and "type" not in tokenizer:
        tokenizer = {"type": "file", "path": str(source / "tokenizer")} | tokenizer
    if isinstance(tokenizer, dict) and (tokenizer["type"] != "file" or tokenizer.get("added_tokens")):
        base["vocab_size"] = 0  # another tokenizer has, or new tokens make, another vocabulary
    return {**tree, "model": base | model if isinstance(model, dict) else model, "tokenizer": tokenizer}


def _trains_future_heads(objective: Any) -> bool:
    """Whether heads of tokens beyond the next are taken over from the run that a recipe starts from."""
    kind = OBJECTIVE_SETTINGS.get(str(objective.get("type"))) if isinstance(objective, dict) else None
    return kind is None or kind.trains_future_heads


FREE_TO_CHANGE = frozenset({
    "vocab_size", "context_length", "rope_scaling", "dropout_embedding", "dropout_attention", "dropout_residual",
    "dropout_mlp",
    "init", "init_std", "zero_init_projections", "n_future_tokens",
})  # fmt: skip
"""Fields that the weights do not depend on, or not alone: vocabulary and tokenizer are compared when both are known."""


def check_same_model(model: ModelConfig, source: Path) -> None:
    """Refuse a model that the weights of a run do not belong to.

    Raises:
        UserError: a field differs; both values are named.
    """
    theirs = load_recipe(source).model
    for name in ModelConfig.model_fields:
        ours, other = getattr(model, name), getattr(theirs, name)
        if name not in FREE_TO_CHANGE and ours != other:
            raise UserError(
                f"model.{name}={ours} and initialize_from={source} has {other}: its weights belong to another model. "
                f"Leave model.{name} out, and it is taken from that run."
            )


def _parse_whole(tree: dict[str, Any], origin: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Validate a recipe that leaves nothing out."""
    recipe = parse_section(tree, Recipe, origin, overrides)
    known = known_vocab_size(recipe.tokenizer)
    return recipe if known is None else with_vocab_size(recipe, known)


def parse_model(tree: dict[str, Any], origin: str = "model") -> ModelConfig:
    """Validate the settings of a model given as a plain dictionary."""
    return parse_section(expand_preset(tree), ModelConfig, origin)


def parse_section(
    tree: dict[str, Any], section: type[AnySection], origin: str, overrides: Mapping[str, str] | None = None
) -> AnySection:
    """Validate the settings of any section given as a plain dictionary; see `parse_recipe`."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, section, origin, overrides or {})) from error


def save_recipe(recipe: Recipe, path: Path, history: Sequence[str] = ()) -> None:
    """Write the resolved recipe as YAML, replacing an earlier one at once; `load_recipe` reads back an equal one.

    Args:
        history: what a run has changed on its way, a line each, for who reads the file: written as comments.
    """
    heading = ["These are the run's last settings. On the way:"] if history else []
    comments = "".join(f"# {' '.join(line.split())}\n" for line in [*heading, *history])
    write_whole(path, comments + yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def run_name(run_dir: Path) -> str:
    """A recipe's name for a run folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.absolute().name).strip("-._")
    return name[:MOST_NAME_CHARACTERS] or "run"


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors."""
    schema = Recipe.model_json_schema()
    model = schema["$defs"]["ModelConfig"]
    model["properties"] = {
        "preset": {"type": "string", "description": "Start from this preset."},
        **model["properties"],
    }
    model.pop("required", None)
    schema["title"] = "gptworks recipe"
    return schema


# ------------------------------------------------------------------------------------------------ overrides


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with each `key.path=value` set; list items are named by their index, and values are read as YAML.

    Raises:
        UserError: an override of another form, or a path that runs through a value or past a list's end.
    """
    tree = copy.deepcopy(tree)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts) or "\0" in override:
        raise UserError(f"override `{override}` is not of the form key.path=value, such as train.max_steps=200.")
    value = _value_of(tuple(int(part) if part.isdigit() else part for part in parts), text)
    node: Any = tree
    index: Any
    for depth, part in enumerate(parts):
        where = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            n_items = len(node)
            if not part.isdigit() or int(part) >= n_items:
                raise UserError(
                    f"override `{override}`: {where} is not an item of a list of {n_items}; use 0 to {n_items - 1}."
                )
            index = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise UserError(f"override `{override}`: `{'.'.join(parts[:depth])}` is a value, it has no keys below it.")
        if depth == len(parts) - 1:
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node = node[index]


_NOTHING = ("null", "~", "None", "")


def _value_of(location: tuple[Any, ...], text: str) -> Any:
    """The value of an override's text, by the type of the setting: paths and names are taken as they are typed.

    Lists, sections and settings of several types are read as YAML.
    """
    name = str(location[-1])
    sections = sections_at(location[:-1], Recipe)
    annotations = [section.model_fields[name].annotation for section in sections if name in section.model_fields]
    kinds = {leaf for annotation in annotations for leaf in leaves(annotation)}
    is_list = any(get_origin(part) is tuple for one in annotations for part in (one, *get_args(one)))
    words = {leaf for leaf in kinds if leaf in (str, Path) or _is_word(leaf)}
    numeric = kinds <= {int, float, type(None)}
    if kinds and not is_list and (numeric or kinds - {type(None)} == words):
        if type(None) in kinds and text in _NOTHING:
            return None
        if numeric:
            return _number(text)
        return text if words & {str, Path} else _unquoted(text)
    try:
        return parse_yaml(text, text)
    except UserError:
        return text


def _number(text: str) -> int | float | str:
    """A number as a person writes it (YAML reads 1:30 as 90 and 010 as 8); other text as it is, to be refused."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _unquoted(word: str) -> str:
    """One of a few words, with or without quotes."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def _is_word(leaf: Any) -> bool:
    return get_origin(leaf) is Literal and all(isinstance(value, str) for value in get_args(leaf))
