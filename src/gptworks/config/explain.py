"""Converts pydantic's errors to messages that name each setting as the user wrote it."""

import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from gptworks.config.base import Section
from gptworks.errors import did_you_mean, shortened

MOST_FAULTS = 50
"""Maximum number of errors to explain: for each, an unknown name may be compared with all known names."""


def explain(error: ValidationError, root: type[Section], origin: str, overrides: Mapping[str, str]) -> str:
    """Return the errors of a section as text, one per line.

    Args:
        origin: where the settings come from, such as a file's name.
        overrides: applied overrides by key; a message about such a setting names the override instead of `origin`.
    """
    lines = []
    for key, message in faults(error, root):
        given = next((text for name, text in overrides.items() if name == key or key.startswith(f"{name}.")), None)
        where = origin if given is None else f"override `{shortened(given, 200)}`"
        lines.append(f"{where}: {message}")
    return "\n".join(dict.fromkeys(lines))


def faults(error: ValidationError, root: type[Section]) -> list[tuple[str, str]]:
    """Return (key of the setting, message) for the first `MOST_FAULTS` errors; an empty key means the section itself.
    If there are more errors, a last item with an empty key states their number."""
    items: list[dict[str, Any]] = [
        dict(item) for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"
    ]
    inner = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    # An invalid item also makes its list too short for pydantic: report only the item's error.
    items = [item for item in items if not (item["type"] == "too_short" and item["loc"] in inner)]
    found = [(_key(item, root), _explain_one(item, root)) for item in items[:MOST_FAULTS]]
    n_more = len(items) - len(found)
    return [*found, ("", f"and {n_more:,} more like these.")] if n_more else found


def _key(item: Mapping[str, Any], root: type[Section]) -> str:
    return ".".join(str(part) for part in _visible(item["loc"], root))


def _explain_one(item: dict[str, Any], root: type[Section]) -> str:
    location: tuple[Any, ...] = item["loc"]
    key = _key(item, root)
    if item["type"] == "extra_forbidden":
        known = sorted({name for section in sections_at(location[:-1], root) for name in section.model_fields})
        hint = did_you_mean(str(location[-1]), known, f"; known here: {', '.join(known)}.")
        elsewhere = _elsewhere(str(location[-1]), root)
        return f"unknown key `{key}`" + (f"; did you mean `{elsewhere}`?" if elsewhere else hint)
    if item["type"] == "missing":
        return f"`{key}` is missing."
    if item["type"] == "union_tag_not_found":
        tags = [get_args(section.model_fields["type"].annotation)[0] for section in sections_at(location, root)]
        return f"`{key}` needs a `type`: one of {', '.join(tags)}."
    if item["type"] == "union_tag_invalid":
        tag, tags = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        hint = did_you_mean(str(tag), tags.replace("'", "").split(", "))
        return f"`{key}.type` is `{tag}`: one of {tags}{hint}"
    message: str = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message.startswith(("Input", "Field")) else message
    if not key:
        return message
    value = "" if item["type"] == "value_error" else "=" + json.dumps(item["input"], default=str)
    return f"`{key}`{shortened(value, 200)}: {message.removeprefix('input ')}"


def _elsewhere(name: str, root: type[Section], path: str = "") -> str | None:
    """Return the path of a setting with this name in an inner section: `learning_rate` → `train.learning_rate`."""
    for field_name, field in root.model_fields.items():
        for leaf in leaves(field.annotation):
            if isinstance(leaf, type) and issubclass(leaf, Section) and "type" not in leaf.model_fields:
                inner = f"{path}{field_name}."
                if name in leaf.model_fields:
                    return f"{inner}{name}"
                if (found := _elsewhere(name, leaf, inner)) is not None:
                    return found
    return None


def _visible(location: tuple[Any, ...], root: type[Section]) -> Iterator[Any]:
    """Yield the parts of an error's location that are keys, without the `type` that pydantic adds in a union."""
    for depth, part in enumerate(location):
        before = sections_at(location[:depth], root)
        if not (isinstance(part, str) and len(before) > 1 and part != "type"):
            yield part


def sections_at(location: tuple[Any, ...], root: type[Section]) -> list[type[Section]]:
    """Return the section types that may be at a location; several if the location leaves a union's `type` open."""
    current: list[Any] = [root]
    for part in location:
        sections = [c for c in current if isinstance(c, type) and issubclass(c, Section)]
        tagged = [
            c for c in sections if "type" in c.model_fields and get_args(c.model_fields["type"].annotation) == (part,)
        ]
        if len(sections) > 1 and tagged:
            current = tagged
        elif isinstance(part, int):
            continue
        elif any(get_origin(c) is dict for c in current):  # a mapping, whose keys users choose
            current = [leaf for c in current for leaf in leaves(get_args(c)[1])]
        else:
            current = [
                leaf for c in sections if part in c.model_fields for leaf in leaves(c.model_fields[part].annotation)
            ]
    return [c for c in current if isinstance(c, type) and issubclass(c, Section)]


def leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types inside an annotation's unions, tuples and `Annotated`."""
    if get_origin(annotation) is Annotated:
        yield from leaves(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, tuple):
        for argument in get_args(annotation):
            yield from leaves(argument)
    else:
        yield annotation
