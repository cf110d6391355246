"""Converts pydantic's errors to messages that name each setting as the user wrote it."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from gptworks.config.base import Section
from gptworks.errors import did_you_mean, nearest, shortened
from gptworks.yaml_files import Origin

_EXAMPLES = {
    "model": "model: {n_layers: 4, d_model: 256, n_heads: 4, context_length: 256}",
    "tokenizer": "tokenizer: {type: bpe, vocab_size: 4096}",
    "data": "data: {sources: [{type: files, path: my-texts}]}",
    "train": "train: {epochs: 3}",
}
"""Line to paste for each section that is missing or has no value."""
_NEEDED = {
    "int_": "a whole number", "float_": "a number", "bool_": "true or false", "string_type": "a text",
    "model_type|model_attributes_type|dict_type": "a section: below `{0}:`, indented, lines such as `key: value`",
    "tuple_type|list_type": "a list: below `{0}:`, indented, a line with `- ` for each item, or [a, b]",
}  # fmt: skip
"""Words for the required value of a setting, by a pattern for the beginning of pydantic's error type."""

_MEMBER = re.compile(r"bool|int|float|str|none|(literal|tuple|list|dict|constrained|function)[\[-].*")
"""Matches the type names that pydantic appends to an error's location if a setting allows several plain types."""

MOST_FAULTS = 50
"""Maximum number of errors to explain. It limits the time for comparing unknown names with all known names."""


def explain(error: ValidationError, root: type[Section], origin: str, overrides: Mapping[str, str]) -> str:
    """Return the errors of a section as text, one per line. A line begins with the override of the setting if there is
    one, else with `origin`, such as a file's name. `overrides` maps settings' keys to the overrides as the user wrote
    them."""
    lines = []
    for key, message in faults(error, root):
        given = next((text for name, text in overrides.items() if name == key or key.startswith(f"{name}.")), None)
        place = origin.at(key) if isinstance(origin, Origin) else origin
        where = place if given is None else f"override `{shortened(given, 200)}`"
        lines.append(f"{where}: {message}")
    return "\n".join(dict.fromkeys(lines))


def faults(error: ValidationError, root: type[Section]) -> list[tuple[str, str]]:
    """Return (key of the setting, message) for the first `MOST_FAULTS` errors; an empty key means the section itself.
    If there are more errors, a last item with an empty key states their number."""
    items: list[dict[str, Any]] = [
        dict(item) for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"
    ]
    items = list(_by_setting(items))
    inner = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    # An invalid item also makes its list too short for pydantic: report only the item's error.
    items = [item for item in items if not (item["type"] == "too_short" and item["loc"] in inner)]
    # A misspelled key is missing under its right name: report it once.
    unknown = {item["loc"][:-1]: str(item["loc"][-1]) for item in items if item["type"] == "extra_forbidden"}
    items = [item for item in items if item["type"] != "missing" or not _is_misspelled(item, unknown)]
    found = [(_key(item, root), _explain_one(item, root)) for item in items[:MOST_FAULTS]]
    n_more = len(items) - len(found)
    return [*found, ("", f"and {n_more:,} more like these.")] if n_more else found


def _by_setting(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the errors. For a setting of several plain types, merge pydantic's errors, one per type, into one."""
    settings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in items:
        *place, last = item["loc"] or ("",)
        if not (place and isinstance(last, str) and _MEMBER.fullmatch(last)):
            yield item
        elif tuple(place) in settings:
            settings[tuple(place)]["members"].append(item)
        else:
            settings[tuple(place)] = {**item, "loc": tuple(place), "members": [item]}
            yield settings[tuple(place)]


def _is_misspelled(missing: Mapping[str, Any], unknown: Mapping[tuple[Any, ...], str]) -> bool:
    *section, name = missing["loc"]
    return bool(get_close_matches(unknown.get(tuple(section), ""), [str(name)]))


def _key(item: Mapping[str, Any], root: type[Section]) -> str:
    return ".".join(str(part) for part in _visible(item["loc"], root))


def _explain_one(item: dict[str, Any], root: type[Section]) -> str:
    location: tuple[Any, ...] = item["loc"]
    key = _key(item, root)
    if item["type"] == "extra_forbidden":
        known = sorted({name for section in sections_at(location[:-1], root) for name in section.model_fields})
        hint = did_you_mean(str(location[-1]), known, f"; known here: {', '.join(known)}.")
        name = str(location[-1])
        elsewhere = _elsewhere(name, root) or (None if nearest(name, known) else _elsewhere(name, root, close=True))
        return f"unknown key `{key}`" + (f"; did you mean `{elsewhere}`?" if elsewhere else hint)
    if item["type"] == "missing":
        example = _EXAMPLES.get(key)
        return f"`{key}` is missing" + (f": add the line `{example}`" if example else ".")
    if item["type"] == "union_tag_not_found":
        tags = [get_args(section.model_fields["type"].annotation)[0] for section in sections_at(location, root)]
        return f"`{key}` needs a `type`: one of {', '.join(tags)}."
    if item["type"] == "union_tag_invalid":
        tag, tags = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        hint = did_you_mean(str(tag), tags.replace("'", "").split(", "))
        return f"`{key}.type` is `{tag}`: one of {tags}{hint}"
    if (told := _in_words(item, key)) is not None:
        return told
    item = next((one for one in item.get("members", ()) if _needed(one) is None), item)  # an error about a bound
    message: str = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message.startswith(("Input", "Field")) else message
    if not key:
        return message
    value = "" if item["type"] == "value_error" else "=" + json.dumps(item["input"], default=str)
    return f"`{key}`{shortened(value, 200)}: {message.removeprefix('input ')}"


def _in_words(item: Mapping[str, Any], key: str) -> str | None:
    """Return the message about a value of a wrong type; None if pydantic's message applies."""
    kind, value = item["type"], item["input"]
    last = key.rpartition(".")[2]
    each = [_needed(member) for member in item.get("members", [item])]
    if not all(each) or not key:
        return None
    needed = " or ".join(filter(None, each))
    shown = shortened(json.dumps(value, default=str, ensure_ascii=False), 100)
    if value is None and key in _EXAMPLES:
        return f"`{key}` has no value: write `{_EXAMPLES[key]}`"
    if value is None:
        return f"`{key}` has no value: it needs {needed.format(last)}"
    written = _number_in(value) if kind.startswith(("int", "float")) else None
    if written is not None and kind.startswith("int") and written != int(written):
        written = None
    return f"`{key}`={shown}: it needs {needed.format(last)}" + ("" if written is None else f": write {written:.15g}")


def _needed(item: Mapping[str, Any]) -> str | None:
    kind, value = item["type"], item["input"]
    if kind != "literal_error":
        return next((words for pattern, words in _NEEDED.items() if re.match(pattern, kind)), None)
    choices = re.findall("'([^']*)'", item["ctx"]["expected"])
    near = get_close_matches(str(value), choices, 1)
    words = item["ctx"]["expected"] if len(choices) == 1 else f"one of {item['ctx']['expected']}"
    return words + "".join(f"; did you mean `{one}`?" for one in near)


def _number_in(value: Any) -> float | None:
    """Return the number that a text such as 1,000, 1e6, 10k, 1.5M or 5 min begins with; None if there is none."""
    match = (
        re.fullmatch(r"\s*(-?[\d,_]*\.?\d+(?:[eE][-+]?\d+)?)\s*([kMG]\b)?.*", value) if isinstance(value, str) else None
    )
    try:
        return None if match is None else float(re.sub("[,_]", "", match[1])) * 1000 ** " kMG".index(match[2] or " ")
    except ValueError:
        return None


def _elsewhere(name: str, root: type[Section], path: str = "", close: bool = False) -> str | None:
    """Return the path of a setting with this name (with `close`: a similar name) in an inner section, such as
    `train.learning_rate` for `learning_rate`; None if there is none."""
    for field_name, field in root.model_fields.items():
        for leaf in leaves(field.annotation):
            if isinstance(leaf, type) and issubclass(leaf, Section) and "type" not in leaf.model_fields:
                inner = f"{path}{field_name}."
                matches = get_close_matches(name, leaf.model_fields, 1, 0.8 if close else 1.0)
                if matches:
                    return f"{inner}{matches[0]}"
                if (found := _elsewhere(name, leaf, inner, close)) is not None:
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
