"""Make the page's form for recipes from the schema that `gptworks schema` prints."""

from functools import cache
from typing import Any

import yaml

from gptworks.overrides import as_typed
from gptworks.presets import PRESETS
from gptworks.recipe import recipe_schema

Tree = dict[str, Any]

_INPUTS = {"integer": "number", "number": "number", "boolean": "switch", "string": "text"}
GIVEN_BY_THE_START = ("name", "run_dir")
"""Settings that follow from the name of a new run."""
COMMON = {
    "seed",
    *(f"model.{name}" for name in ("context_length", "n_layers", "d_model", "n_heads", "dropout_residual")),
    *(f"train.{name}" for name in ("max_steps", "batch_size", "learning_rate", "muon_learning_rate", "weight_decay")),
    *(f"train.{name}" for name in ("evaluate_every", "checkpoint_every")),
}
"""Settings that users change most often."""
ENDLESS = 10**9
"""The form does not show upper bounds of this size or more, since they only exclude absurd values."""
_TOPICS = {
    "model": {
        "preset": "model: size", "position": "model: positions", "norm": "model: norms",
        "attention_bias": "model: attention, biases and scales", "n_experts": "model: experts",
        "dropout_embedding": "model: dropout", "init": "model: initial weights",
        "bigram_vocab_size": "model: laboratory",
    },
    "train": {
        "max_steps": "training: length and batches", "activation_checkpointing": "training: memory and speed",
        "router_balance_weight": "training: additional losses", "optimizer": "optimizer", "schedule": "learning rate",
        "ema_decay": "training: averages", "precision": "training: device",
        "log_every": "evaluations, checkpoints and samples", "early_stopping_patience": "training: stops and spikes",
    },
}  # fmt: skip
"""Titles of the groups of each large section, by the first setting of each group in the schema's order."""


@cache
def form() -> list[Tree]:
    """Return the form's groups in the schema's order, with all settings except those in GIVEN_BY_THE_START.

    A group is a section, or a part of a large section. It has `path`, `title`, `help`, `optional`, `fields` and
    `kinds`. `kinds` maps the values of the section's `type` to their help. It is None for a section without kinds.

    A field has `path`, `name`, `help`, `bounds`, `input` (number, switch, choice, text or yaml), `choices`, `default`,
    `nullable`, `common` (whether users often change the setting) and `kinds` (the section's kinds that have the field,
    or None for all kinds).
    """
    schema = recipe_schema()
    groups = (group for group in _groups(schema, "", schema["$defs"]) if group["fields"] or group["optional"])
    return [part for group in groups for part in _parts(group)]


def _parts(group: Tree) -> list[Tree]:
    """Return the groups of a section: the section itself, or several parts of a large section."""
    if (titles := _TOPICS.get(group["path"])) is None:
        return [group]
    parts: list[Tree] = []
    for field in group["fields"]:
        if (title := titles.get(field["name"])) is not None:
            help = group["help"] if not parts else ""
            parts.append(group | {"title": title, "help": help, "fields": []})
        parts[-1]["fields"].append(field)
    return parts


def _groups(section: Tree, path: str, definitions: Tree, help: str = "", optional: bool = False) -> list[Tree]:
    """Return a section of the form, followed by the sections inside it."""
    fields: list[Tree] = []
    below: list[Tree] = []
    members = _members(section, definitions)
    if len(members) > 1:
        words = {"enum": list(members), "default": section.get("default", {}).get("type")}
        fields.append(_field(f"{path}.type", "type", words) | {"kinds": list(members)})
    for kind, member in members.items():
        for name, one in member["properties"].items():
            where = f"{path}.{name}" if path else name
            if where in GIVEN_BY_THE_START or (len(members) > 1 and name == "type"):
                continue
            inner, nullable = _without_null(one)
            found = _resolved(inner, definitions)
            if "properties" in found or "oneOf" in found:
                help_text = one.get("description") or found.get("description", "")
                found = found | ({"default": one["default"]} if one.get("default") is not None else {})
                below += _groups(found, where, definitions, help_text, nullable)
                continue
            field = _field(where, name, found | {k: v for k, v in one.items() if k in ("description", "default")})
            field["nullable"] = nullable
            same = next((other for other in fields if other | {"kinds": None} == field), None)
            if same is not None:
                same["kinds"].append(kind)
            else:
                fields.append(field | {"kinds": [kind]})
    for field in fields:
        field["kinds"] = None if len(field["kinds"]) == len(members) else field["kinds"]
    helps = {kind: member.get("description", "") for kind, member in members.items() if kind}
    group = {"path": path, "title": path or "run", "help": help or section.get("description", ""),
             "optional": optional, "kinds": helps or None, "fields": fields}  # fmt: skip
    return [group, *below]


def _members(section: Tree, definitions: Tree) -> dict[str | None, Tree]:
    """Return the schema of each kind of a section, by the value of `type`. A section without kinds has the key None."""
    if "oneOf" not in section:
        return {None: section}
    kinds = section["discriminator"]["mapping"]
    return {kind: definitions[reference.rpartition("/")[2]] for kind, reference in kinds.items()}


def _resolved(one: Tree, definitions: Tree) -> Tree:
    return definitions[one["$ref"].rpartition("/")[2]] if "$ref" in one else one


def _without_null(one: Tree) -> tuple[Tree, bool]:
    """Return a setting's schema without the option null, and whether the setting may be null."""
    others = [other for other in one.get("anyOf", []) if other != {"type": "null"}]
    nullable = len(others) < len(one.get("anyOf", []))
    return (others[0] if len(others) == 1 else {"anyOf": others} if others else one), nullable


def _field(path: str, name: str, one: Tree) -> Tree:
    choices = [word for part in one.get("anyOf", [one]) for word in part.get("enum") or [part.get("const")] if word]
    if choices and any(part.get("type") == "boolean" for part in one.get("anyOf", [])):
        choices = ["true", "false", *choices]  # for example a setting that is true, false or one of a few words
    if path == "model.preset":
        choices = list(PRESETS)
    kind = "choice" if choices else _INPUTS.get(one.get("type", ""), "yaml")
    return {"path": path, "name": name, "help": one.get("description", ""), "bounds": _bounds(one), "input": kind,
            "choices": choices or None,
            "kinds": None, "nullable": False, "common": path in COMMON,
            "default": None if one.get("default") is None else text_of(one["default"])}  # fmt: skip


def _bounds(one: Tree) -> str:
    """Return a sentence with the bounds of a number; empty without bounds below ENDLESS."""
    least, most = one.get("minimum"), one.get("maximum", ENDLESS)
    if one.get("type") == "integer" and "exclusiveMinimum" in one:
        least = one["exclusiveMinimum"] + 1
    if least is not None and most < ENDLESS:
        return f"From {least:,} to {most:,}."
    low = f"at least {least:,}" if least is not None else _words("above", one.get("exclusiveMinimum"))
    high = _words("at most", most) or _words("below", one.get("exclusiveMaximum"))
    return ", ".join(filter(None, (low, high))).capitalize() + "." * bool(low or high)


def _words(words: str, bound: float | None) -> str:
    return "" if bound is None or bound >= ENDLESS else f"{words} {bound:,}"


def text_of(value: Any) -> str:
    """Return a setting's value as a user types it in the form.

    Mappings and lists of mappings are lines of YAML. Other values are as in an override.
    """
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).strip()
    return as_typed(value)
