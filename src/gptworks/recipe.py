"""Read, override, check and save recipes.

A recipe is a YAML file with sections such as `model`, `tokenizer`, `data` and `train`. `load_recipe` reads it, applies
`key.path=value` overrides, completes model and tokenizer from the run in `initialize_from`, and refuses unknown keys,
wrong types and contradictory settings before any work begins.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from gptworks.config import (
    ENDS,
    AnyRecipe,
    BPETokenizer,
    DatasetRecipe,
    DatasetTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    ModelConfig,
    Recipe,
    Section,
    TokenizerConfig,
)
from gptworks.config.base import MOST_NAME_CHARACTERS
from gptworks.config.explain import explain
from gptworks.config.objective import OBJECTIVE_SETTINGS
from gptworks.errors import UserError, nearest
from gptworks.files import fetched_path, read_given, read_text, write_whole
from gptworks.overrides import apply_overrides
from gptworks.presets import expand_preset
from gptworks.recipes import shipped_paths
from gptworks.yaml_files import MAX_BYTES, Origin, parse_yaml

AnySection = TypeVar("AnySection", bound=Section)

RecipeLike = str | PathLike[str] | Mapping[str, Any] | Recipe
"""A recipe: a file, a shipped recipe's name, a run folder or its URL, nested dictionaries, or a `Recipe`."""

Unsaid = Mapping[str, Mapping[str, Any]]
"""Default settings by section, used where a recipe does not set them."""


def with_vocab_size(recipe: Recipe, vocab_size: int) -> Recipe:
    """Return the recipe with its model's vocabulary size set to the tokenizer's, `vocab_size`.

    With a tokenizer from a file or dataset, a larger size in the recipe is kept, since embeddings of published models
    have unused rows.

    Raises:
        UserError: the recipe sets another size.
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


def name_for(path: Path) -> str:
    """Return a name for a recipe that states none: its file's name, or its folder's if the file is recipe.yaml. Hyphens
    replace characters that a name must not have."""
    return _plain(path.stem if path.stem != "recipe" else path.absolute().parent.name) or "recipe"


def run_name(run_dir: Path) -> str:
    """Return a valid recipe name, made from the name of a run folder."""
    return _plain(run_dir.absolute().name) or "run"


def _plain(name: str) -> str:
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_name).lstrip("._-").rstrip("-")[:MOST_NAME_CHARACTERS]


def load_recipe(recipe: RecipeLike, overrides: Sequence[str] = (), unsaid: Unsaid | None = None) -> Recipe:
    """Read a recipe from a file, a run folder, a shipped name or nested dictionaries, apply `key.path=value` overrides,
    and validate it.

    Args:
        unsaid: default settings that replace the usual defaults.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, a type is wrong, or settings are contradictory.
    """
    if isinstance(recipe, Recipe) and not overrides:
        return recipe
    origin, given = "recipe", by_key(overrides)
    run_dir: Path | None = None
    if isinstance(recipe, Recipe):
        # Keep only settings that were set explicitly, so that derived settings follow the overrides.
        tree = recipe.model_dump(mode="json", exclude_unset=True)
    elif isinstance(recipe, Mapping):
        tree = dict(recipe)
    else:
        origin, tree = read_recipe(recipe)
        tree.setdefault("name", name_for(Path(origin)))
        if is_folder(recipe):
            run_dir = fetched_path(recipe)
            tree["run_dir"] = str(run_dir)  # the run folder may have been moved or copied
    tree = apply_overrides(tree, overrides)
    for section, settings in (unsaid or {}).items():
        tree[section] = _beneath(tree.get(section) or {}, settings)
    if run_dir is None:
        return parse_recipe(tree, origin, given)
    return _with_tokenizer_at_hand(_parse_whole(tree, origin, given), run_dir)


def load_dataset_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read the recipe of a dataset: any recipe, or one with only the sections `tokenizer` and `data`.

    Raises:
        UserError: for the reasons of `load_recipe`.
    """
    if isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    origin, tree = ("recipe", dict(recipe)) if isinstance(recipe, Mapping) else read_recipe(recipe)
    if not tree.keys() <= DatasetRecipe.model_fields.keys():
        return load_recipe(recipe, overrides)
    return parse_section(apply_overrides(tree, overrides), DatasetRecipe, origin, by_key(overrides))


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by key; if a key occurs several times, the last override counts."""
    return {override.partition("=")[0].strip(): override for override in overrides}


def is_folder(recipe: RecipeLike) -> bool:
    """Return whether `recipe` is the path or the URL of a folder, such as a run folder."""
    return isinstance(recipe, str | PathLike) and fetched_path(recipe).is_dir()


def _beneath(said: Any, settings: Mapping[str, Any]) -> Any:
    """Return the settings `said`, completed by the settings in `settings` that `said` lacks."""
    if not isinstance(said, dict):
        return said
    said = expand_preset(said)
    ends = () if ENDS.isdisjoint(said) else ENDS  # a setting of the run's length in `said` replaces all default lengths
    rest = {key: value for key, value in settings.items() if key not in said and key not in ends}
    sections = {key: value for key, value in settings.items() if key in said and isinstance(value, Mapping)}
    return rest | said | {key: _beneath(said[key], value) for key, value in sections.items()}


def recipe_text(path: str | PathLike[str]) -> tuple[Path, str]:
    """Return the path and text of a recipe, given as a file, a run folder, a shipped recipe's name or a pipe.

    Raises:
        UserError: the file does not exist, or cannot be read.
    """
    path = fetched_path(path)
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


def read_recipe(path: str | PathLike[str]) -> tuple[Origin, dict[str, Any]]:
    """Return a recipe's path with its text, by which messages state lines, and its parsed YAML; see `recipe_text`.

    Raises:
        UserError: the file is missing or cannot be read, or its YAML is broken or not a mapping.
    """
    path, text = recipe_text(path)
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        found = "a list" if isinstance(tree, list) else "nothing" if tree is None else f"only {str(tree)[:40]!r}"
        raise UserError(
            f"{path} holds {found}, and a recipe has the sections model, tokenizer, data and train: lines such as "
            f"`model:` with indented lines below them. `gptworks init TEXTS -o FILE` writes one."
        )
    return Origin.of(str(path), text), tree


def _no_such_recipe(path: Path) -> str:
    checkpoint, run = path.parent, path.parents[2] if len(path.parents) > 2 else path
    if checkpoint.parent.name == "checkpoints" and (run / "recipe.yaml").exists():
        return (
            f"{checkpoint} is a checkpoint, not a run folder: give {run} and --resume to continue from its newest "
            f"step-… checkpoint. One named weights-… has no optimizer state and cannot be resumed."
        )
    if path.name == "recipe.yaml" and path.parent.is_dir():
        return str(not_a_run(path.parent))
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, (one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml") or is_run(one)))
    if near:
        return f"{path}: no such recipe file; did you mean {folder / near}?"
    if shipped := nearest(path.with_suffix("").as_posix(), shipped_paths()):
        return f"{path}: no such recipe file; did you mean `{shipped}`, which comes with gptworks?"
    return f"{path}: no such recipe file. `gptworks recipes` lists the shipped ones."


def is_run(folder: Path) -> bool:
    """Return whether the folder is a run folder, which has a recipe.yaml."""
    return (folder / "recipe.yaml").exists()


def not_a_run(folder: Path) -> UserError:
    """Return the error about a folder that is missing or not a run's; its message names a run nearby, if any."""
    words = f"{folder} is not a run folder: it has no recipe.yaml"
    if not folder.is_dir():
        words = f"{folder}: no such run folder"
    if (within := next((one for one in folder.parents if is_run(one)), None)) is not None:
        return UserError(f"{words}; did you mean {within}?")
    if folder.is_dir() and (runs := sorted(one for one in folder.iterdir() if is_run(one))):
        return UserError(f"{words}. Give one of the runs in it, such as {runs[0]}.")
    if (near := near_run(folder)) is not None:
        return UserError(f"{words}; did you mean {near}?")
    return UserError(f"{words}. `gptworks train RECIPE` makes one below runs/.")


def near_run(folder: Path) -> Path | None:
    """Return the run next to `folder`, or else in runs/, with a name similar to the folder's; None if there is none."""
    for place in (folder.parent, Path("runs")):
        if place.is_dir() and (name := nearest(folder.name, (one.name for one in place.iterdir() if is_run(one)))):
            return place / name
    return None


def _with_tokenizer_at_hand(recipe: Recipe, run_dir: Path) -> Recipe:
    """Return a run's recipe, with the run's copies of tokenizer and template if the originals no longer exist."""
    tokenizer, copy = recipe.tokenizer, run_dir / "tokenizer"
    changes: dict[str, Any] = {}
    if isinstance(tokenizer, FileTokenizer) and not tokenizer.path.expanduser().exists() and copy.exists():
        changes["path"] = copy
    template, kept = tokenizer.chat_template, copy / "chat_template.jinja"
    if template is not None and ("." in template or "/" in template) and not Path(template).exists() and kept.exists():
        changes["chat_template"] = str(kept)
    return recipe.model_copy(update={"tokenizer": tokenizer.model_copy(update=changes)}) if changes else recipe


def parse_recipe(tree: dict[str, Any], origin: str = "recipe", overrides: Mapping[str, str] | None = None) -> Recipe:
    """Validate a recipe given as nested dictionaries. Replace `model.preset` by the preset's settings, and complete
    model and tokenizer from the run in `initialize_from`.

    Args:
        origin: the recipe's file, for messages.
        overrides: overrides already applied, by key; a message about such a setting names its override, not the file.

    Raises:
        UserError: a setting is wrong, or the model contradicts the run's.
    """
    if isinstance(tree.get("model"), dict):
        tree = {**tree, "model": expand_preset(tree["model"])}
    source = tree.get("initialize_from")
    if not isinstance(source, str | Path) or not source:
        return _parse_whole(tree, origin, overrides)
    run = fetched_path(source)
    if not (run / "recipe.yaml").exists():
        _require_model_and_tokenizer(tree, Path(source), origin)
        return _parse_whole(tree, origin, overrides)
    recipe = _parse_whole(_completed(tree, run), origin, overrides)
    check_same_model(recipe.model, run)
    return recipe


def _require_model_and_tokenizer(tree: dict[str, Any], source: Path, origin: str) -> None:
    """Refuse a recipe without model or tokenizer, since the run `source`, which would supply them, does not exist."""
    model, tokenizer = tree.get("model"), tree.get("tokenizer")
    missing = [] if isinstance(model, dict) and model.keys() >= _SIZES else ["model"]
    missing += [] if isinstance(tokenizer, dict) and "type" in tokenizer else ["tokenizer"]
    if missing:
        raise UserError(
            f"{origin}: initialize_from={source} is not a run folder (it has no recipe.yaml), and the recipe takes its "
            f"{' and '.join(missing)} from it. Train or import that run first, or correct the path."
        )


_SIZES = {name for name, field in ModelConfig.model_fields.items() if field.is_required()}


def _completed(tree: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the tree with model and tokenizer completed from the run `source`, from whose weights training starts."""
    base = load_recipe(source).model.model_dump(mode="json")
    if not _trains_future_heads(tree.get("objective")):
        base["n_future_tokens"] = 1
    model, tokenizer = tree.get("model") or {}, tree.get("tokenizer") or {}
    if isinstance(tokenizer, dict) and "type" not in tokenizer:
        tokenizer = {"type": "file", "path": str(source / "tokenizer")} | tokenizer
    if isinstance(tokenizer, dict) and (tokenizer["type"] != "file" or tokenizer.get("added_tokens")):
        base["vocab_size"] = 0  # another tokenizer or added tokens change the vocabulary
    return {**tree, "model": base | model if isinstance(model, dict) else model, "tokenizer": tokenizer}


def _trains_future_heads(objective: Any) -> bool:
    """Return whether the objective trains the heads for tokens beyond the next; True if the objective is missing or
    unknown. Only then does the model keep these heads of the run."""
    kind = OBJECTIVE_SETTINGS.get(str(objective.get("type"))) if isinstance(objective, dict) else None
    return kind is None or kind.trains_future_heads


FREE_TO_CHANGE = frozenset({
    "vocab_size", "context_length", "rope_scaling", "dropout_embedding", "dropout_attention", "dropout_residual",
    "dropout_mlp",
    "init", "init_std", "zero_init_projections", "n_future_tokens",
})  # fmt: skip
"""Model fields that may differ between a model and the run that supplies its weights."""


def check_same_model(model: ModelConfig, source: Path) -> None:
    """Refuse a model that does not fit the weights of the run `source`.

    Raises:
        UserError: a field differs; the message has both values.
    """
    theirs = load_recipe(source).model
    for name in ModelConfig.model_fields:
        ours, other = getattr(model, name), getattr(theirs, name)
        if name not in FREE_TO_CHANGE and ours != other:
            raise UserError(
                f"model.{name}={ours} and initialize_from={source} has {other}: its weights do not fit. "
                f"Leave model.{name} out to take it from that run."
            )


def _parse_whole(tree: dict[str, Any], origin: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    recipe = parse_section(tree, Recipe, origin, overrides)
    known = _known_vocab_size(recipe.tokenizer)
    return recipe if known is None else with_vocab_size(recipe, known)


def _known_vocab_size(tokenizer: TokenizerConfig) -> int | None:
    """Return the vocabulary size if a tokenizer's settings determine it; None if it depends on the text or a file."""
    n_added = len(set(tokenizer.added_tokens) - {"<|endoftext|>"})  # both tokenizers below already have this token
    if isinstance(tokenizer, GPT2Tokenizer):
        return 50_257 + n_added
    return tokenizer.vocab_size + n_added if isinstance(tokenizer, BPETokenizer) else None


def parse_model(tree: dict[str, Any], origin: str = "model") -> ModelConfig:
    """Validate a model's settings, given as a dictionary; a preset's settings are filled in."""
    return parse_section(expand_preset(tree), ModelConfig, origin)


def parse_section(
    tree: dict[str, Any], section: type[AnySection], origin: str, overrides: Mapping[str, str] | None = None
) -> AnySection:
    """Validate a section given as a dictionary; see `parse_recipe`."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, section, origin, overrides or {})) from error


def save_recipe(recipe: Recipe, path: Path, history: Sequence[str] = ()) -> None:
    """Write the complete recipe as YAML, atomically; `load_recipe` reads an equal recipe from it.

    Args:
        history: lines on changes during the run, to be written as comments.
    """
    heading = ["These are the run's last settings. Changes:"] if history else []
    comments = "".join(f"# {' '.join(line.split())}\n" for line in [*heading, *history])
    write_whole(path, comments + yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, for editors."""
    schema = Recipe.model_json_schema()
    model = schema["$defs"]["ModelConfig"]
    model["properties"] = {
        "preset": {"type": "string", "description": "Start from this preset."},
        **model["properties"],
    }
    model.pop("required", None)
    schema["title"] = "gptworks recipe"
    return schema
