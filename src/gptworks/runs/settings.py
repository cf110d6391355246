"""Find the settings of a recipe that decide its loss curve, and the settings in which recipes differ."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from gptworks.config import Recipe, role_of


def decisive(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide a loss curve and differ from their defaults, by path.

    A setting decides the curve if the `gptworks.config.Role` in its type says so. The seed, the run folder and the
    paths of text do not; the path of a tokenizer or of starting weights does. Since defaults are left out, a setting
    that a new version adds changes no fingerprint.
    """
    tree = recipe.model_dump(mode="json", exclude={"sweep"}, exclude_defaults=True)
    return {key: value for key, value in flat(tree) if role_of(recipe, key).decides_curve}


def fingerprint(recipe: Recipe) -> str:
    """Return a sha256 of the settings that decide a loss curve. Runs that differ only in their seed have equal ones."""
    return settings_fingerprint(decisive(recipe))


def settings_fingerprint(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()


def differences(recipes: Sequence[Recipe]) -> dict[str, list[Any]]:
    """Return the settings that differ, by path, each with its value in every recipe (None if a recipe lacks it).

    Name, run folder and sweep are left out.
    """
    trees = [dict(flat(recipe.model_dump(mode="json", exclude={"name", "run_dir", "sweep"}))) for recipe in recipes]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: [tree.get(key) for tree in trees] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def text_of(value: Any, room: int = 40) -> str:
    """Return a setting's value as text; if it is longer than `room` characters, only its end."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its path, written as in an override, such as `train.batch_size`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for key, value in items:
        yield from flat(value, f"{path}.{key}" if path else str(key))
