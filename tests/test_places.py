"""Every setting that names a path or address outside the recipe is marked as one, so that all access checks find it."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from gptworks.config import Recipe, settings
from gptworks.config.base import Place, Section
from gptworks.recipe import parse_recipe
from gptworks.studio.checking import places

NO_PLACES = {
    "name": "a run's own name, or that of a dataset inside a mixture", "field": "a key of a record",
    "records": "a key of a file", "split": "of a dataset", "revision": "of a dataset", "sha256": "a sum",
    "extensions": "endings of files", "languages": "names of languages", "members": "patterns inside an archive",
    "delimiter": "a character", "exclude": "patterns of names in the folder",
    "added_tokens": "tokens", "patterns": "names of parameters",
    "sample_prompts": "texts", "weights": "by names of datasets", "ranges": "by settings, whose choices are asked",
    "choices": "of a sweep; asked with the setting that they are for",
}  # fmt: skip
"""Settings of text that name no place, and what they are. One that is new is marked, or listed here."""


def parts(kind: Any) -> Iterator[Any]:
    """Yield the types inside a type; none for a Literal."""
    yield kind
    if get_origin(kind) is not Literal:
        for one in get_args(kind):
            yield from parts(one)


def sections(kind: Any, seen: set[Any]) -> Iterator[type[Section]]:
    for one in parts(kind):
        if isinstance(one, type) and issubclass(one, Section) and one not in seen:
            seen.add(one)
            yield one
            for field in one.model_fields.values():
                yield from sections(field.annotation, seen)


def test_every_setting_of_text_is_a_place_or_known_not_to_be_one() -> None:
    found, marked = set(), set()
    for section in sections(Recipe, set()):
        for name, field in section.model_fields.items():
            kinds = [one for one in parts(field.annotation) if isinstance(one, type) and not issubclass(one, Enum)]
            places = [one for one in field.metadata if isinstance(one, Place)]
            if any(issubclass(one, str | Path) for one in kinds):
                found.add((section.__name__, name))
                assert len(places) <= 1
                assert bool(places) != (name in NO_PLACES), (
                    f"{section.__name__}.{name}: mark it with a Place, or list it"
                )
                assert places or not any(issubclass(one, Path) for one in kinds), f"{section.__name__}.{name} is a path"
            marked |= {name for _ in places}
    assert len(found) > 40
    assert marked == {"path", "url", "dataset", "tasks", "cache_dir", "run_dir", "initialize_from", "teacher", "reward",
                      "chat_template"}  # fmt: skip


def test_a_recipes_places_are_found_wherever_they_are() -> None:
    source = {"type": "text", "url": ["https://x.org/a", "https://x.org/b"], "sha256": ["0" * 64, "1" * 64]}
    tree = {
        "name": "a", "model": {"context_length": 8, "n_layers": 1, "d_model": 8, "n_heads": 1},
        "tokenizer": {"type": "bpe", "vocab_size": 300, "chat_template": "t.jinja"}, "train": {"max_steps": 1},
        "data": {"cache_dir": "c", "mixture": [
            {"name": "one", "weight": 1, "sources": [source]},
            {"name": "two", "weight": 1, "sources": [{"type": "huggingface", "dataset": "x/y"}],
             "clean": [{"type": "decontaminate", "tasks": ["t1", "t2"]}]}]},
        "sweep": {"n_trials": 2, "ranges": {"data.cache_dir": {"choices": ["d", "e"]}}},
    }  # fmt: skip
    recipe = parse_recipe(tree)
    assert sorted(places(recipe), key=lambda one: (one[0], one[2])) == [
        ("data.cache_dir", Place.PATH, "c"),
        ("data.mixture.0.sources.0.url", Place.URL, "https://x.org/a"),
        ("data.mixture.0.sources.0.url", Place.URL, "https://x.org/b"),
        ("data.mixture.1.clean.0.tasks", Place.PATH, "t1"), ("data.mixture.1.clean.0.tasks", Place.PATH, "t2"),
        ("data.mixture.1.sources.0.dataset", Place.DATASET, "x/y"),
        ("sweep.ranges.data.cache_dir", Place.PATH, "d"), ("sweep.ranges.data.cache_dir", Place.PATH, "e"),
        ("tokenizer.chat_template", Place.TEMPLATE, "t.jinja"),
    ]  # fmt: skip
    assert next(one.place for one in settings(recipe) if one.path == "run_dir") is Place.PATH
