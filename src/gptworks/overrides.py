"""Settings as overrides, the text that a user types after a command: `train.max_steps=20`."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import to_jsonable_python

from gptworks.errors import UserError
from gptworks.units import whole_number


def as_typed(value: Any) -> str:
    """Return a setting's value as a user would type it in an override."""
    plain = to_jsonable_python(value, fallback=str)
    if isinstance(plain, str):
        return plain
    text = json.dumps(plain, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)  # YAML needs these escaped


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as overrides: `max_steps=20` as `train.max_steps=20`, `model={"n_layers": 2}` as
    `model.n_layers=2`.

    A name that is not a top-level key of a recipe is a setting of the section `train`.
    """
    from gptworks.config import Recipe  # imports pydantic

    return [
        override
        for name, value in settings.items()
        for override in _written(name if name in Recipe.model_fields else f"train.{name}", value)
    ]


def _written(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _written(f"{path}.{name}", inner)
    else:
        yield f"{path}={as_typed(value)}"


# ------------------------------------------------------------------------------------------------------- apply


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree with each `key.path=value` applied; a list's items are addressed by index.

    Raises:
        UserError: an override has another form, or its path leads into a plain value or past a list's end.
    """
    tree = copy.deepcopy(tree)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts) or "\0" in override:
        raise UserError(
            f"override `{override}` is not of the form key.path=value, such as train.max_steps=200, without spaces "
            f"around the equals sign."
        )
    value = _value_of(tuple(part if (n := whole_number(part)) is None else n for part in parts), text)
    node: Any = tree
    index: Any
    for depth, part in enumerate(parts):
        where = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            n_items, index = len(node), whole_number(part)
            if index is None or index >= n_items:
                raise UserError(
                    f"override `{override}`: {where} is not an item of a list of {n_items}; use 0 to {n_items - 1}."
                )
        elif isinstance(node, dict):
            index = part
        else:
            raise UserError(f"override `{override}`: `{'.'.join(parts[:depth])}` is a value and has no keys.")
        if depth == len(parts) - 1:
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node = node[index]


_NOTHING = ("null", "~", "None", "")


def _value_of(location: tuple[Any, ...], text: str) -> Any:
    """Return the value of an override's text, by the type of the setting at `location`.

    Numbers are decimal. Paths and texts are taken literally. Quotes around one of several fixed names are removed.
    Values of other types, such as truth values, lists and sections, are parsed as YAML, or taken literally if parsing
    fails.
    """
    from gptworks.config import Recipe
    from gptworks.config.explain import leaves, sections_at
    from gptworks.yaml_files import parse_yaml

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
    """Return the decimal number in a text (YAML would read 1:30 as 90 and 010 as 8), or any other text unchanged."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def _is_word(leaf: Any) -> bool:
    return get_origin(leaf) is Literal and all(isinstance(value, str) for value in get_args(leaf))
