"""Recipes, data folders and prompts that someone wrote to do harm, or by mistake: each has its message, and quickly."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from gptworks.data.opened import open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.files import sealed_json
from gptworks.recipe import load_recipe, parse_recipe

LETTERS = "bcdefghij"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{letter}: &{letter} [{','.join([f'*{before}'] * 10)}]\n"
    for before, letter in zip("a" + LETTERS, LETTERS, strict=False)
)

RECIPES = {
    "aliases that stand for a billion values": (BOMB, "more than 100,000 values"),
    "a section that contains itself": ("model: &m\n  x: *m\n", "contains itself"),
    "a list that contains itself": ("&a [*a]", "contains itself"),
    "a key that stands twice": ("seed: 1\nseed: 2\n", "the key `seed` stands twice"),
    "brackets without end": ("[" * 5000, "nested more than 64 deep"),
    "braces without end": ("{a: " * 5000, "nested more than 64 deep"),
    "tabs": ("model:\n\tx: 1\n", "not readable YAML"),
    "a number of 6,000 digits": ("seed: " + "9" * 6000, "not readable YAML"),
    "a list": ("- 1\n", "holds list, not a mapping"),
    "nothing": ("", "holds NoneType, not a mapping"),
    "a number for a key": ("1: 2\n", "has the key 1"),
    "code": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "a zero byte": ('run_dir: "a\\0b"\n', "zero byte"),
    "half a character": ('name: "\\ud800"\n', "line 1, column 10: "),
    "a day that is none": ("name: 2020-13-45\n", "not readable YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not readable YAML"),
    "a key that is a list": ("? [1, 2]\n: 3\n", "unhashable key"),
    "a wrong type with a long value": (f"model: [{'1, ' * 9000}1]\n", "valid dictionary"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_hostile_recipe_has_a_short_message(kind: str, tmp_path: Path) -> None:
    text, words = RECIPES[kind]
    path = tmp_path / "hostile.yaml"
    path.write_text(text, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words) as refused:
        load_recipe(path)
    assert len(str(refused.value)) < 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "bytes", "large", "below a file"])
def test_what_is_no_recipe_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    if kind == "folder":
        path.mkdir()
        (path / "recipe.yaml").mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00a")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 34)
    else:
        path.write_text("x")
        path /= "inside"
    with pytest.raises(UserError, match=r"recipe\.yaml"):
        load_recipe(path)


@pytest.mark.parametrize(
    "run_dir", ["runs/exp #2", "runs/a: b", "yes", "007", "null", "[x]", "runs/{a}", " runs/x", '"q"']
)
def test_a_path_of_an_override_is_taken_as_it_is_typed(run_dir: str, tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), [f"run_dir={run_dir}", "train.sample_prompts=[a, b]"])
    assert str(recipe.run_dir) == run_dir
    assert recipe.train.sample_prompts == ("a", "b")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "learning_rate=1",
            "^override `learning_rate=1`: unknown key `learning_rate`; did you mean `train.learning_rate`",
        ),
        ("train.lr=1", "^override `train.lr=1`: unknown key `train.lr`; did you mean `learning_rate`"),
        ("train.max_steps=1:30", "^override `train.max_steps=1:30`: `train.max_steps`"),
        ("train.learning_rate=inf", "^override .*finite"),
        ("run_dir=a\0b", "is not of the form"),
        (f"seed={'9' * 5000}", "`seed`"),
    ],
)
def test_a_wrong_override_is_blamed_itself_and_names_the_nearest_key(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(tiny.write_recipe(tmp_path), [override])


def test_a_misspelled_recipe_names_the_file_beside_it(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    with pytest.raises(UserError, match=r"did you mean .*tiny\.yaml"):
        load_recipe(tmp_path / "tny.yaml")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return prepare(parse_recipe(tiny.recipe_tree(tmp_path))).folder


def resealed(folder: Path, **changes: Any) -> None:
    """A manifest whose own sum is right, as someone would write it who means harm."""
    tree = json.loads((folder / "manifest.json").read_text()) | changes
    tree.pop("sha256", None)
    (folder / "manifest.json").write_text(sealed_json(tree))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 3}, "holds the token"),
        ({"splits": {}}, "has no train split"),
        ({"dtype": "float64"}, "is broken"),
        ({"format_version": 99}, "format 99"),
        ({"tokenizer_files": {"../../text.txt": "0"}}, "not what was written"),
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any], words: str, shards: Path) -> None:
    resealed(shards, **changes)
    with pytest.raises(UserError, match=words):
        open_prepared(shards)
        TokenShards(shards, "train")


def test_a_file_of_shards_outside_the_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    splits = json.loads((shards / "manifest.json").read_text())["splits"]
    splits["train"]["shards"][0]["file"] = "../../text.txt"
    resealed(shards, splits=splits)
    with pytest.raises(UserError):
        TokenShards(shards, "train")


def test_a_task_or_text_that_is_a_folder_is_refused(trained_run: Path, tmp_path: Path) -> None:
    refused = tiny.gptworks("evaluate", trained_run, "--text", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {tmp_path}") and "Traceback" not in refused.stderr


def test_a_recipe_where_a_run_belongs_is_told_so(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    refused = tiny.gptworks("generate", path, "text")
    assert refused.returncode == 2
    assert f"{path} is a file, not a run folder" in refused.stderr
    assert yaml.safe_load(path.read_text())["run_dir"] in refused.stderr
