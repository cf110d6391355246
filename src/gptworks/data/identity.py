"""The identity of a recipe's dataset, computed from settings and the contents of sources, not from paths or times."""

import json
import platform
from pathlib import Path
from typing import Any

from gptworks.chat_template import find_chat_template, find_other_templates
from gptworks.config import AnyRecipe, FileTokenizer, GPT2Tokenizer, TokenizerConfig
from gptworks.data.cleaning.choose import clean_signature
from gptworks.data.conversations.reading import READING_VERSION
from gptworks.data.opened import datasets_in, folder_named, sha256_text
from gptworks.data.shards import FORMAT_VERSION
from gptworks.data.snippets import SNIPPETS_VERSION
from gptworks.data.sources.anything import Files
from gptworks.data.sources.choose import choose_source, source_signature
from gptworks.errors import UserError
from gptworks.files import sha256_file
from gptworks.special_tokens import stating_files
from gptworks.tokenizer import MAX_TOKENIZER_BYTES

_CONTENTS = (
    "format_version", "sources_signature", "clean_files", "tokenizer_files", "chat_template", "other_templates",
    "snippets_by", "held_out_whole", "split_by",
)  # fmt: skip
"""Keys of `made_from` that are not settings: computing them may need sources or tokenizer files that are gone."""
_PLACES = ("path", "url", "sha256")


def made_from(recipe: AnyRecipe) -> dict[str, Any]:
    """Return everything that decides the contents of the dataset, and the origin of its text, as a dict for JSON.
    Raises UserError if a source or a file of the tokenizer is missing."""
    data = recipe.data
    made = _settings(recipe) | {
        "format_version": FORMAT_VERSION,
        "sources_signature": sha256_text(json.dumps(source_signature([*data.texts, *data.records]))),
        "tokenizer_files": _tokenizer_files(recipe.tokenizer),
        "chat_template": sha256_text(find_chat_template(recipe.tokenizer)),
    }
    if others := find_other_templates(recipe.tokenizer):
        made["other_templates"] = sha256_text(json.dumps(others, sort_keys=True))
    if data.snippets:  # the version of Python decides which texts are Python
        made["snippets_by"] = [SNIPPETS_VERSION, *platform.python_version_tuple()[:2]]
    if (
        data.validation.by != "tail"
        and not data.clean
        and any(isinstance(source, Files) and source.may_divide_texts() for source in map(choose_source, data.texts))
    ):
        made["held_out_whole"] = True  # older datasets lack this key: their training split may have held-out text
    return made | ({"clean_files": clean_signature(data.clean)} if data.clean else {})


def _settings(recipe: AnyRecipe) -> dict[str, Any]:
    data, tokenizer = recipe.data, recipe.tokenizer.model_dump(mode="json")
    if tokenizer.get("begin_prompts") is False:  # datasets built before this setting existed lack it
        del tokenizer["begin_prompts"]
    return {
        "sources": [source.model_dump(mode="json") for source in data.sources],
        "tokenizer": tokenizer,
        "validation": data.validation.model_dump(mode="json"),
        "shard_tokens": data.shard_tokens,
        **({"reading": READING_VERSION} if data.records else {}),
        **({"clean": [one.model_dump(mode="json") for one in data.clean]} if data.clean else {}),
        **({"snippets": data.snippets} if data.snippets else {}),
    }


def folder_for(recipe: AnyRecipe, made: dict[str, Any]) -> Path:
    """Return the dataset's folder in `data.cache_dir`, named shards-DIGEST."""
    placeless = made | {
        "sources": [_without(source, *_PLACES) for source in made["sources"]],
        "tokenizer": _without(made["tokenizer"], "path"),
        **({"clean": [_without(one, "tasks") for one in made["clean"]]} if "clean" in made else {}),
    }
    return folder_named(recipe.data.cache_dir, "shards", placeless)


def _without(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def folder_of_settings(recipe: AnyRecipe) -> Path | None:
    """Return the folder of the dataset built earlier with the recipe's settings, for use if the sources are gone; None
    if there is no such dataset. Raises UserError if there are several such datasets, which have different text."""
    datasets, wanted = datasets_in([recipe.data.cache_dir]), _settings(recipe)
    found = [folder for folder, manifest in datasets if _without(manifest.made_from, *_CONTENTS) == wanted]
    if len(found) > 1:
        raise UserError(
            f"the sources of this recipe are missing, and {' and '.join(map(str, found))} were all built with "
            f"its settings, from different text. Keep one of them in {recipe.data.cache_dir}, or restore the sources."
        )
    return found[0] if found else None


def _tokenizer_files(config: TokenizerConfig) -> list[str]:
    """Return the sha256 of each file that defines the tokenizer or its special tokens."""
    if not isinstance(config, FileTokenizer | GPT2Tokenizer) or config.path is None:
        return []
    path = config.path.expanduser()
    if not path.exists():
        raise UserError(f"tokenizer.path={config.path}: no such file or folder. Give a tokenizer.json, or its folder.")
    candidates = [path, *(path / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))]
    candidates += stating_files(path) if path.is_dir() else []
    return [sha256_file(file, max_bytes=MAX_TOKENIZER_BYTES) for file in candidates if file.is_file()]
