"""The bounds of every setting, request and file of ours: values outside the bounds in the JSON schema are refused."""

import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import Field, ValidationError

from gptworks.config import Bounded, DatasetRecipe, ModelConfig, Recipe, TrainConfig
from gptworks.config.base import Fixed, PositiveInt, Section
from gptworks.presets import PRESETS
from gptworks.serve.openai import Wire

Tree = dict[str, Any]
Wrap = Callable[[Any], Any]

for module in ("data.jobs", "data.shards", "evaluation.task", "runs.bands", "studio.app"):
    importlib.import_module(f"gptworks.{module}")

BOUNDS = {"less_than", "less_than_equal", "greater_than", "greater_than_equal", "string_too_long", "string_too_short",
          "too_long", "too_short"}  # fmt: skip

OF_OTHER_FORM = {
    "pattern": "texts of a pattern: the longest one that fits is shorter than the class's bound",
    "$ref": "sections inside have bounds of their own, and other keys that they need",
    "CodeSource.languages": "names from a list",
    **{
        f"{kind}.{name}": "a share, which only a whole recipe knows"
        for name in ("smaller_batches", "shorter_contexts")
        for kind in ("BatchSettings", "OptimizerSettings", "TrainConfig")
    },
}
"""Where a value just inside the bound is refused for another reason than a bound."""


def kinds(root: type[Bounded]) -> Iterator[type[Bounded]]:
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


KINDS = sorted(
    {kind for kind in kinds(Bounded) if kind.__module__.startswith("gptworks.") and kind not in (Section, Wire)},
    key=lambda kind: f"{kind.__module__}.{kind.__qualname__}",
)


SECTIONS: Tree = {}
"""The sections inside the one at hand, by name."""


def sample(node: Tree) -> Any:
    """Return a value that a part of a schema allows, in simple cases."""
    if "anyOf" in node or "oneOf" in node:
        return sample(node.get("anyOf", node.get("oneOf"))[0])
    if "$ref" in node:
        node = SECTIONS[node["$ref"].rpartition("/")[2]]
        return {name: sample(node["properties"][name]) for name in node.get("required", ())}
    if "const" in node or "enum" in node:
        return node.get("const", node.get("enum", [None])[0])
    match node.get("type"):
        case "integer" | "number":
            return next(inside(node, "minimum"))[0]
        case "string":
            return "0" * 64 if "{64}" in node.get("pattern", "") else "a" * max(1, node.get("minLength", 1))
        case "array":
            return [sample(one) for one in node.get("prefixItems", ())] or [sample(node["items"])] * node.get(
                "minItems", 0
            )
    return {"object": {}, "boolean": True}.get(node.get("type", "null"))


def parts(node: Tree, wrap: Wrap = lambda value: value) -> Iterator[tuple[Tree, Wrap]]:
    """Yield the parts of a field's schema with numbers, texts, lists or mappings, and a function that puts a value
    there."""
    if "anyOf" in node:
        for one in node["anyOf"]:
            yield from parts(one, wrap)
    elif "enum" in node or "const" in node:
        return
    elif node.get("type") in ("integer", "number", "string"):
        yield node, wrap
    elif node.get("type") == "array":
        yield node, wrap
        fixed = node.get("prefixItems", [])
        for i, one in enumerate(fixed):
            yield from parts(one, lambda v, i=i: wrap([*map(sample, fixed[:i]), v, *map(sample, fixed[i + 1 :])]))
        if not fixed:
            yield from parts(node["items"], lambda v: wrap([v] * max(1, node.get("minItems", 1))))
    elif node.get("type") == "object":
        yield node, wrap
        [key] = node.get("propertyNames", {}).get("enum", [key_of(node, 1)])[:1]
        for inner in (node.get("patternProperties") or {"": node.get("additionalProperties")}).values():
            if isinstance(inner, dict):
                yield from parts(inner, lambda v: wrap({key: v}))


def next_to(value: float, node: Tree, towards: float) -> float:
    if node["type"] == "integer":
        return round(value) + (1 if towards > 0 else -1)
    return math.nextafter(value, math.copysign(math.inf, towards))


def key_of(node: Tree, i: int) -> str:
    """Return the i-th of the keys that a mapping with a pattern may have: a number, or a name."""
    patterns = node.get("patternProperties", ())
    return str(i) if all(re.search(pattern, str(i)) for pattern in patterns) else f"a{i}"


def filled(node: Tree, n: int) -> Any:
    """Return a text, list or mapping with n characters or items."""
    if node["type"] == "string":
        return "a" * n
    if node["type"] == "array":
        return [sample(node["items"])] * n
    if "patternProperties" in node:
        return {key_of(node, i): 0 for i in range(n)}
    inner = node.get("additionalProperties")
    return dict.fromkeys(map(str, range(n)), sample(inner) if isinstance(inner, dict) else 0)


def inside(node: Tree, *names: str) -> Iterator[tuple[Any, Any]]:
    """Yield, for each bound of a part, the nearest value inside and the nearest outside."""
    for name, towards in (("maximum", 1), ("minimum", -1)):
        exclusive = f"exclusive{name.title()}"
        if name not in names:
            continue
        assert (name in node) != (exclusive in node), f"one bound {name}: {node}"
        if name in node:
            yield node[name], next_to(node[name], node, towards)
        else:
            yield next_to(node[exclusive], node, -towards), node[exclusive]


def cases(node: Tree) -> Iterator[tuple[Any, Any]]:
    if node["type"] in ("integer", "number"):
        yield from inside(node, "maximum", "minimum")
        return
    if "prefixItems" in node or "enum" in node.get("propertyNames", ()):
        return  # so many as they are
    of = {"string": "Length", "array": "Items", "object": "Properties"}[node["type"]]
    most, least = node[f"max{of}"], node.get(f"min{of}", 0)  # a KeyError is a field without a bound
    yield filled(node, most), filled(node, most + 1)
    if least:
        yield filled(node, least), filled(node, least - 1)


def faults(kind: type[Bounded], name: str, value: Any) -> set[str]:
    """Return the types of the errors that a field reports for a value."""
    try:
        kind.model_validate_json(json.dumps({name: value}))
    except ValidationError as error:
        return {item["type"] for item in error.errors(include_input=False) if item["loc"][:1] == (name,)}
    return set()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__qualname__)
def test_every_field_has_a_bound_and_its_schema_states_it(kind: type[Bounded]) -> None:
    schema = kind.model_json_schema()
    SECTIONS.clear()
    SECTIONS.update(schema.get("$defs", {}))
    for name, node in schema.get("properties", {}).items():
        for part, wrap in parts(node):
            if "format" in part and part["format"] != "path":
                continue  # dates and the like have a form
            for within, beyond in cases(part):
                where = f"{kind.__qualname__}.{name}: {part}"
                found = faults(kind, name, wrap(beyond))
                assert found & (BOUNDS | {"value_error"}), f"{where} accepts what is beyond: {found}"
                if not any(key in json.dumps(part) for key in OF_OTHER_FORM) and f"{kind.__qualname__}.{name}" not in (
                    OF_OTHER_FORM
                ):
                    assert not faults(kind, name, wrap(within)), f"{where} refuses what is inside"


def test_all_settings_and_requests_are_looked_at() -> None:
    names = {kind.__qualname__ for kind in KINDS}
    definitions = {name for root in (Recipe, DatasetRecipe) for name in root.model_json_schema()["$defs"]}
    assert definitions | {"Recipe", "DatasetRecipe", "CompletionRequest", "ChatRequest", "ChatMessage", "ForkRequest",
                          "GenerateRequest", "PlaySettings", "WeightsRequest", "Manifest", "Code"} <= names  # fmt: skip
    assert len(KINDS) > 80


def test_of_two_bounds_the_tighter_counts() -> None:
    class Twice(Section):
        low: Fixed[PositiveInt] = Field(1, le=10)
        wide: Fixed[PositiveInt] = Field(1, le=10**12, ge=-5)
        few: Fixed[tuple[int, ...]] = Field((), max_length=2)

    properties = Twice.model_json_schema()["properties"]
    assert (properties["low"]["maximum"], properties["wide"]["maximum"]) == (10, 10**9)
    assert properties["wide"]["exclusiveMinimum"] == 0 and properties["few"]["maxItems"] == 2
    assert faults(Twice, "low", 11) == {"less_than_equal"} and not faults(Twice, "low", 10)


@pytest.mark.parametrize(
    ("name", "most"),
    [("n_layers", 1000), ("d_model", 10**6), ("n_heads", 10**6), ("n_kv_heads", 10**6), ("d_head", 10**6),
     ("d_ff", 10**7), ("n_experts", 4096), ("n_experts_per_token", 4096), ("context_length", 1 << 22)],
)  # fmt: skip
def test_what_decides_a_models_size_is_bounded(name: str, most: int) -> None:
    assert faults(ModelConfig, name, most + 1) == {"less_than_equal"} and not faults(ModelConfig, name, most)


def test_layers_that_are_run_again_count() -> None:
    size = {"context_length": 8, "d_model": 8, "n_heads": 1}
    assert len(ModelConfig(n_layers=10, layer_repeats=100, **size).layer_uses) == 1000
    for repeats in (101, (100,) * 9 + (101,)):
        with pytest.raises(ValidationError, match="repeat at most 1,000"):
            ModelConfig(n_layers=10, layer_repeats=repeats, **size)


def test_presets_are_inside_all_bounds() -> None:
    for settings in PRESETS.values():
        ModelConfig(**settings)
    assert PRESETS["gpt3-175b"]["n_layers"] == 96
    assert TrainConfig(max_steps=10**6, batch_size=1 << 16, micro_batch_size=1).batch_size == 65_536


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, Section)], ids=lambda kind: kind.__name__)
def test_every_setting_of_a_recipe_has_a_description(kind: type[Section]) -> None:
    """docs/reference/ and the studio's forms show the descriptions."""
    if kind.__module__.startswith("gptworks.config."):
        assert [name for name, field in kind.model_fields.items() if name != "type" and not field.description] == []
