"""Recipes: accepted and refused values, error messages, overrides, and saving."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.config import (
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    Role,
    RopeScaling,
    Section,
    SweepRange,
    TrainConfig,
    role_of,
    settings,
)
from gptworks.config.objective import RewardObjective
from gptworks.errors import UserError
from gptworks.evaluation.task import AnyTask
from gptworks.recipe import load_recipe, parse_model, parse_recipe, recipe_schema, save_recipe, with_vocab_size

SAMPLE: dict[str, Any] = {
    "name": "sample",
    "model": {"context_length": 64, "n_layers": 2, "d_model": 48, "n_heads": 4, "mlp": "swiglu"},
    "tokenizer": {"type": "bpe", "vocab_size": 300},
    "data": {
        "sources": [{"type": "text", "path": "corpus"}, {"type": "jsonl", "path": "more.jsonl", "field": "body"}],
        "validation": {"fraction": 0.1, "by": "tail"},
    },
    "train": {"max_steps": 20, "batch_size": 8, "micro_batch_size": 4, "betas": [0.9, 0.99]},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """SAMPLE with `section.key` set."""
    section, name = key.split(".")
    return {**SAMPLE, section: {**SAMPLE[section], name: value}}


def write(folder: Path, tree: Any, name: str = "my-run.yaml") -> Path:
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        parse_recipe(tree)
    return str(error.value)


def test_defaults_follow_from_what_is_given() -> None:
    recipe = parse_recipe(SAMPLE)
    model = recipe.model
    assert (model.n_kv_heads, model.d_head, model.d_ff, model.norm_bias) == (4, 12, 128, False)
    assert parse_model(SAMPLE["model"] | {"mlp": "gelu"}).d_ff == 192
    assert (model.vocab_size, recipe.train.accumulation_steps, recipe.run_dir) == (300, 2, Path("runs/sample"))
    assert parse_model(SAMPLE["model"] | {"norm": "layernorm"}).norm_bias is True


def test_settings_are_frozen() -> None:
    recipe = parse_recipe(SAMPLE)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.model.n_layers = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.max_steps = 3  # type: ignore[misc]


# Unknown keys and wrong types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("model.n_layer", "n_layers"),
        ("model.contxt_length", "context_length"),
        ("train.learning_rates", "learning_rate"),
        ("train.max_step", "max_steps"),
        ("tokenizer.vocabsize", "vocab_size"),
        ("data.source", "sources"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    assert f"unknown key `{key}`; did you mean `{near}`?" in refused(changed(key, 1))


def test_a_removed_setting_is_accepted_at_its_neutral_value_and_refused_by_name(tmp_path: Path) -> None:
    for section in (ModelConfig, TrainConfig):
        for name, value in section.removed.items():
            key = f"{section.__name__.removesuffix('Config').lower()}.{name}"
            recipe = load_recipe(write(tmp_path, changed(key, value)))
            assert (recipe.model, recipe.train) == (parse_recipe(SAMPLE).model, parse_recipe(SAMPLE).train)
            save_recipe(recipe, tmp_path / "recipe.yaml")
            assert name not in (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
            assert f"{name} was removed, because experiments showed no gain" in refused(changed(key, "other"))


def test_an_unknown_key_deep_inside_and_at_the_top() -> None:
    source = {"type": "jsonl", "path": "x", "feild": "text"}
    assert "unknown key `data.sources.0.feild`; did you mean `field`?" in refused(changed("data.sources", [source]))
    assert "unknown key `trian`; did you mean `train`?" in refused({**SAMPLE, "trian": {}})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.n_layers", "many", '`model.n_layers`="many"'),
        ("model.n_layers", 0, "greater than 0"),
        ("model.n_layers", 2.5, "`model.n_layers`=2.5"),
        ("model.mlp", "relu", "'swiglu'"),
        ("model.dropout_residual", 1.0, "less than 1"),
        ("train.learning_rate", -1, "greater than 0"),
        ("train.learning_rate", float("nan"), "finite number"),
        ("train.betas", [0.9], "`train.betas"),
        ("data.sources", [], "`data.sources`"),
    ],
)
def test_a_wrong_value_is_shown_with_the_rule(key: str, value: Any, words: str) -> None:
    message = refused(changed(key, value))
    assert f"`{key}" in message
    assert words in message


@pytest.mark.parametrize("missing", ["model", "tokenizer", "data"])
def test_a_missing_section_is_named(missing: str) -> None:
    assert f"`{missing}` is missing" in refused({key: SAMPLE[key] for key in SAMPLE if key != missing})


def test_choices_by_type() -> None:
    assert "`tokenizer` needs a `type`: one of bpe, char, word, gpt2, file" in refused({**SAMPLE, "tokenizer": {}})
    message = refused({**SAMPLE, "tokenizer": {"type": "gpt3"}})
    assert "`tokenizer.type` is `gpt3`" in message
    assert "did you mean `gpt2`?" in message


def test_every_mistake_is_told_at_once() -> None:
    message = refused(changed("model.n_layer", 1) | {"train": {"max_steps": 0}})
    assert "model.n_layer" in message
    assert "train.max_steps" in message


def test_floats_that_yaml_reads_as_text() -> None:
    text = yaml.safe_dump(SAMPLE) + "seed: 7\n"
    tree = yaml.safe_load(text.replace("max_steps: 20", "max_steps: 20\n  learning_rate: 1e-3"))
    assert tree["train"]["learning_rate"] == "1e-3"  # YAML 1.1 wants 1.0e-3
    assert parse_recipe(tree).train.learning_rate == 0.001


# Settings that contradict one another -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("model", {"n_heads": 5}, "d_model=48 is not a multiple of n_heads=5"),
        ("model", {"n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ("model", {"d_head": 3}, "rope_fraction=1 of d_head=3 is 3 elements"),
        ("model", {"n_heads": 16}, "rope_fraction=1 of d_head=3 is 3 elements"),
        ("model", {"norm": "rmsnorm", "norm_bias": True}, "RMSNorm has no shift"),
        ("model", {"window_pattern": ["full", "window"]}, "set window to a token count"),
        ("model", {"window": 8, "window_pattern": ["full"]}, "has no `window` entry"),
        ("model", {"window": 65}, "window=65 is more than context_length=64"),
        ("model", {"rope_fraction": 0.1}, "rope_fraction=0.1 of d_head=12 is 1 elements"),
        ("model", {"position": "learned", "rope_fraction": 0.5}, "rope_fraction is set and position=learned"),
        (
            "model",
            {"position": "none", "rope_scaling": {"type": "yarn", "factor": 2}},
            "rope_scaling is set and position=none: it needs position=rope",
        ),
        ("model", {"window_rope_theta": 500}, "window_rope_theta=500 is set and window is not"),
        ("model", {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 8}}, "only yarn and llama3 have them"),
        ("model", {"rope_scaling": {"type": "longrope", "factor": 2}}, "short_factors belongs to type=longrope"),
        ("model", {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 40}}, "beta_slow=40 is not below"),
        (
            "model",
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_context_length": 65}},
            "original_context_length=65 is longer than context_length=64",
        ),
        (
            "model",
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_fraction": 0.2},
            "at least 4 rotated elements",
        ),
        ("model", {"n_experts": 2, "n_experts_per_token": 3}, "n_experts_per_token=3 is more than n_experts=2"),
        ("model", {"d_ff_shared": 8}, "d_ff_shared=8 is set and n_experts is 0"),
        ("model", {"vocab_size": 299}, "the tokenizer has 300 tokens"),
        ("train", {"max_steps": None}, "set one of max_steps, epochs, max_minutes"),
        ("train", {"micro_batch_size": 3}, "batch_size=8 is not a multiple of micro_batch_size=3"),
        ("train", {"warmup_steps": 20}, "warmup_steps=20 is not less than max_steps=20"),
        ("data", {"sources": [{"type": "text"}]}, "neither path nor url is set"),
        ("data", {"sources": [{"type": "text", "url": "https://x.org/a.txt"}]}, "has no sha256"),
    ],
)
def test_contradictions_are_refused(section: str, changes: dict[str, Any], words: str) -> None:
    assert words in refused({**SAMPLE, section: {**SAMPLE[section], **changes}})


def test_what_the_rules_must_let_through() -> None:
    parse_recipe(changed("model.d_head", 20))  # heads need not fill the width when their size is stated
    parse_recipe({**SAMPLE, "model": {**SAMPLE["model"], "n_heads": 16, "position": "learned"}})  # odd, not rotated
    parse_recipe(changed("model.window", 64))
    parse_recipe(changed("train.warmup_steps", 19))
    parse_recipe({**SAMPLE, "train": {"max_minutes": 0.5}})


def test_layer_windows_repeat_the_pattern() -> None:
    model = parse_model({**SAMPLE["model"], "n_layers": 5, "window": 8, "window_pattern": ["window", "full", "window"]})
    assert model.layer_windows == (8, None, 8, 8, None)
    assert parse_model({**SAMPLE["model"], "window": 8}).layer_windows == (8, 8)


# The vocabulary ---------------------------------------------------------------------------------------------


def test_the_vocabulary_comes_from_the_tokenizer_where_its_settings_fix_it() -> None:
    assert parse_recipe({**SAMPLE, "tokenizer": {"type": "gpt2"}}).model.vocab_size == 50_257
    char = parse_recipe({**SAMPLE, "tokenizer": {"type": "char"}})
    assert char.model.vocab_size == 0
    assert with_vocab_size(char, 65).model.vocab_size == 65
    assert with_vocab_size(with_vocab_size(char, 65), 65).model.vocab_size == 65
    with pytest.raises(UserError, match=r"model\.vocab_size=65 and the tokenizer has 66 tokens"):
        with_vocab_size(with_vocab_size(char, 65), 66)


def test_a_presets_vocabulary_must_be_the_tokenizers() -> None:
    message = refused({**SAMPLE, "model": {"preset": "gpt2"}})
    assert "model.vocab_size=50257 and the tokenizer has 300 tokens" in message
    assert parse_recipe({**SAMPLE, "model": {"preset": "gpt2", "vocab_size": 300}}).model.vocab_size == 300


# Files and overrides ----------------------------------------------------------------------------------------


def test_the_name_is_the_files_or_the_folders(tmp_path: Path) -> None:
    nameless = {key: SAMPLE[key] for key in SAMPLE if key != "name"}
    assert load_recipe(write(tmp_path, nameless)).name == "my-run"
    write(tmp_path, nameless, "recipe.yaml")
    assert load_recipe(tmp_path).name == tmp_path.name.replace("/", "")
    long = tmp_path / f"{'a' * 240}.yaml"
    write(tmp_path, nameless).rename(long)
    assert load_recipe(long).name == "a" * 200, "a file's name may be longer than a recipe's"


def test_overrides_reach_every_depth(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, SAMPLE),
        [
            "train.max_steps=7", "data.sources.0.path=x", "data.sources.1.field=text", "model.d_model=96",
            "train.betas=[0.8, 0.9]", "data.validation.fraction=0.2", "train.learning_rate=1e-3", "seed=5",
        ],
    )  # fmt: skip
    assert (recipe.train.max_steps, recipe.seed, recipe.train.betas) == (7, 5, (0.8, 0.9))
    assert recipe.data.sources[0].path == "x"  # type: ignore[union-attr]
    assert recipe.data.sources[1].field == "text"  # type: ignore[union-attr]
    assert (recipe.model.d_ff, recipe.model.d_head) == (256, 24)
    assert recipe.data.validation.fraction == 0.2
    assert recipe.train.learning_rate == 0.001


def test_an_override_makes_a_section_that_the_file_leaves_out(tmp_path: Path) -> None:
    tree = {**SAMPLE, "data": {"sources": SAMPLE["data"]["sources"]}}
    assert load_recipe(write(tmp_path, tree), ["data.validation.fraction=0.3"]).data.validation.fraction == 0.3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_steps", "not of the form key.path=value"),
        ("=3", "not of the form key.path=value"),
        ("train..max_steps=3", "not of the form key.path=value"),
        ("data.sources.2.path=x", "not an item of a list of 2; use 0 to 1"),
        ("data.sources.first.path=x", "not an item of a list of 2"),
        ("train.max_steps.more=3", "`train.max_steps` is a value"),
        ("train.max_stepz=3", "did you mean `max_steps`"),
        ("train.max_steps=soon", '`train.max_steps`="soon"'),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(write(tmp_path, SAMPLE), [override])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("model: [", "not readable YAML"), ("- a\n- b\n", "holds a list"), ("", "holds nothing")],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(write(tmp_path, text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("model", [SAMPLE["model"], {"preset": "gpt3-125m-banded", "vocab_size": 300}])
def test_a_saved_recipe_loads_equal(tmp_path: Path, model: dict[str, Any]) -> None:
    recipe = parse_recipe({**SAMPLE, "model": model})
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    in_its_folder = recipe.model_copy(update={"run_dir": tmp_path})  # a run folder may have been moved
    assert load_recipe(tmp_path) == in_its_folder


def test_a_preset_with_overrides_recomputes_what_follows(tmp_path: Path) -> None:
    tree = {**SAMPLE, "model": {"preset": "gpt2"}, "tokenizer": {"type": "gpt2"}}
    model = load_recipe(write(tmp_path, tree), ["model.d_model=96", "model.n_heads=6"]).model
    assert (model.d_ff, model.d_head, model.n_kv_heads) == (384, 16, 6)
    assert (model.n_layers, model.init, model.attention_bias) == (12, "gpt2", True)


# The schema -------------------------------------------------------------------------------------------------


def test_the_schema_knows_the_sections_and_their_keys() -> None:
    schema = recipe_schema()
    assert set(Recipe.model_fields) == set(schema["properties"])
    assert {"model", "tokenizer", "data"} <= set(schema["required"])
    definitions = schema["$defs"]
    assert set(definitions["ModelConfig"]["properties"]) == {*ModelConfig.model_fields, "preset"}
    assert "required" not in definitions["ModelConfig"]  # a preset may give them
    for section, definition in {"model": "ModelConfig", "data": "DataConfig", "train": "TrainConfig"}.items():
        assert set(SAMPLE[section]) <= set(definitions[definition]["properties"])
        assert definitions[definition]["additionalProperties"] is False


@pytest.mark.parametrize(("objective", "packs"), [({"packing": True}, True), ({"packing": False}, False)])
def test_dynamic_rotation_is_refused_where_conversations_share_a_row(objective: dict[str, Any], packs: bool) -> None:
    tree = SAMPLE | {
        "model": SAMPLE["model"] | {"position": "rope", "rope_scaling": {"type": "dynamic", "factor": 2}},
        "tokenizer": SAMPLE["tokenizer"] | {"chat_template": "plain"},
        "data": {"sources": [{"type": "conversations", "path": "talk.jsonl"}]},
        "objective": {"type": "instruction"} | objective,
    }
    if packs:
        assert "objective.packing=false" in refused(tree)
    else:
        parse_recipe(tree)


# ------------------------------------------------------------------------------------- what a setting decides


def kinds(annotation: Any) -> Iterator[Any]:
    """Yield the plain types that a value of this annotation may have."""
    if get_origin(annotation) in (Union, UnionType, tuple, dict, Annotated):
        for part in get_args(annotation):
            yield from kinds(part)
    elif annotation is not Ellipsis and not isinstance(annotation, FieldInfo):
        yield annotation


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def all_sections(root: type[Section]) -> set[type[Section]]:
    found, new = set[type[Section]](), {root}
    while new:
        found |= new
        fields = [field for section in new for field in section.model_fields.values()]
        new = {kind for field in fields for kind in kinds(field.annotation) if is_section(kind)} - found
    return found


def test_every_setting_declares_what_it_decides() -> None:
    sections = all_sections(Recipe)
    assert {RopeScaling, LoRAConfig, RewardObjective, ParallelConfig, SweepRange} <= sections
    undeclared = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not all(map(is_section, kinds(field.annotation)))
        and len([item for item in field.metadata if isinstance(item, Role)]) != 1
    ]
    assert not undeclared, "declare a role, see gptworks.config.base.Role"


def test_an_undeclared_setting_is_noticed() -> None:
    class Undeclared(Section):
        size: int = 1

    with pytest.raises(ValueError, match="not enough values"):
        list(settings(Undeclared()))


def test_settings_are_named_as_overrides_name_them(tmp_path: Path) -> None:
    recipe = parse_recipe(
        tiny.recipe_tree(tmp_path, optimizer="adamw") | {"adapter": {"rank": 2}, "initialize_from": "x"}
    )
    found = {setting.path: setting for setting in settings(recipe)}
    for path, setting in found.items():
        value = recipe.model_dump()
        for part in path.split("."):
            value = value[int(part) if isinstance(value, tuple) else part]
        assert value == setting.value, path
    assert found["data.sources.0.path"].role is Role.FREE
    assert role_of(recipe, "train.betas.1") is Role.STEERING
    assert role_of(recipe, "adapter.rank").on_resume == "refused"
    with pytest.raises(KeyError):
        role_of(recipe, "train.lr")


# ---------------------------------------------------------------------------------------------------- absurd values

MAY_BE_NEGATIVE = {"low", "high", "choices", "frequency_penalty", "presence_penalty"}
"""The first three are of a sweep's range: each trial checks them, as the setting that they are tried for."""


@pytest.mark.parametrize(
    "section", sorted(set.union(*map(all_sections, (Recipe, *get_args(AnyTask)))), key=lambda one: one.__name__)
)
def test_no_setting_accepts_an_absurd_number_or_text(section: type[Section]) -> None:
    """Tries a number of 31 or 309 digits, an infinite one, NaN, a negative one, and a text of a million characters, for
    each setting that takes numbers or texts."""
    for name, field in section.model_fields.items():
        leaves = set(kinds(field.annotation))
        values: list[Any] = ["x" * 10**6] * (not leaves.isdisjoint({str, Path}))
        if not leaves.isdisjoint({int, float}):
            values += [10**30, 1e308, math.inf, -math.inf, math.nan, *([] if name in MAY_BE_NEGATIVE else [-1])]
        for value in values:
            for given in (value, [value], [value] * 2):
                with pytest.raises(ValidationError) as error:
                    section.model_validate({name: given})
                assert any(item["loc"] and item["loc"][0] == name for item in error.value.errors()), (name, value)


@pytest.mark.parametrize("command", ["describe", "plan", "data build", "train"])
@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (f"model.n_layers={10**30}", "less than or equal to 1000"),
        (f"model.d_model={10**30}", "less than or equal to 1000000"),
        (f"model.vocab_size={10**30}", "less than or equal to 10000000"),
        (f"train.max_steps={'9' * 5000}", "`train.max_steps`"),
        ("train.epochs=1e300", "less than or equal to"),
        ("train.max_minutes=inf", "finite"),
        ("train.parallel.timeout_seconds=1e300", "less than or equal to"),
        ("sweep={ranges: {seed: {low: 0, high: 1e300}}}", "less than or equal to 1000000000000000"),
        ("sweep={ranges: {train.learning_rate: {low: 0, high: 1, step: 5e-324}}}", "values"),
        ("name=" + "x" * 10**6, "at most 200 characters"),
        ("run_dir=" + "x" * 10**6, "it may have 4,096"),
        ("data.sources.0.path=" + "x" * 10**6, "at most 100000 characters"),
    ],
    ids=lambda value: value.partition("=")[0],
)
def test_an_absurd_setting_is_refused_in_a_few_words(command: str, override: str, rule: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command.split(), str(tiny.write_recipe(tmp_path)), override])
    assert isinstance(result.exception, UserError)
    message = str(result.exception)
    assert rule in message and override.partition("=")[0] in message and len(message) < 1000
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "tiny.yaml"}, "nothing is made"
