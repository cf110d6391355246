"""`gptworks data show`: documents, windows and steps as the model sees them, with token borders."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import chats
from gptworks.cli import app
from gptworks.data.opened import find_of_run
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.data import data_of
from gptworks.training.objectives.base import choose_objective


def printed(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", "show", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def tree(*arguments: object) -> Any:
    return json.loads(printed(*arguments, "--json"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of conversations, whose dataset is built."""
    home = tmp_path_factory.mktemp("chat")
    base = chats.base_tree(home)
    settings = chats.tune_tree(home) | {"initialize_from": None}
    settings["tokenizer"] = base["tokenizer"] | {"chat_template": "chatml"}
    settings["model"] = base["model"] | {"context_length": 512}
    prepare(parse_recipe(settings))
    (home / "chat.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return home / "chat.yaml"


def test_a_document_is_that_of_the_shards(trained_run: Path) -> None:
    recipe = load_recipe(trained_run)
    made = prepare(recipe)
    for split in ("train", "validation"):
        option = ["--validation"] if split == "validation" else []
        shards = TokenShards(made.folder, split)  # type: ignore[arg-type]
        found = tree(trained_run, "--first", 7, "--tokens", 30, *option)
        assert [token["id"] for token in found["tokens"]] == shards.read(7, 30).tolist()
        assert "".join(token["text"] for token in found["tokens"]) == made.tokenizer.decode(shards.read(7, 30).tolist())
        assert found == tree(made.folder, "--first", 7, "--tokens", 30, *option)


def test_a_step_shows_the_rows_that_the_run_trained_on(trained_run: Path) -> None:
    recipe = load_recipe(trained_run)
    objective = choose_objective(recipe, prepare(recipe).folder)
    size = recipe.train.batch_size
    found = tree(trained_run, "--step", 3, "--sample", 1, "--samples", 2, "--tokens", 9999)
    assert found["n_samples"] == size and not found["skipped"] and len(found["rows"]) == 2
    inputs, targets = objective.batch(2 * size, 0, size)
    for row, number in zip(found["rows"], (1, 2), strict=True):
        ids = [token["id"] for token in row["tokens"]]
        assert ids[:-1] == inputs[number].tolist() and ids[1:] == targets[number].tolist()
        assert [token["learned"] for token in row["tokens"]] == [False] + [True] * len(targets[number])
        assert tree(trained_run, "--window", row["number"], "--tokens", 9999)["rows"][0]["tokens"] == row["tokens"]


def test_tokens_have_borders(trained_run: Path) -> None:
    found = tree(trained_run, "--tokens", 50)
    written = [(token["text"] or token["spelling"]).replace("\n", "⏎\n") for token in found["tokens"]]
    assert written[0] == "<|endoftext|>"
    assert printed(trained_run, "--tokens", 50).partition("\n")[2].rstrip() == "│".join(written) + "│"
    assert "\x1b" not in printed(trained_run)


def test_learned_tokens_are_marked(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = tree(chat, "--window", 0)["rows"]
    shown = printed(chat, "--window", 0)
    inside = "".join(part.partition("⟧")[0] for part in shown.split("⟦")[1:])
    learned = [token["text"] or token["spelling"] for token in row["tokens"] if token["learned"]]
    assert 0 < len(learned) == row["n_learned"] < row["n_tokens"]
    assert inside.replace("│", "") == "".join(learned).replace("\n", "⏎\n")
    begins = [f"── document {token['begins']['document']:,} ──" for token in row["tokens"] if token["begins"]]
    assert len(begins) > 1 and [line for line in shown.splitlines() if line.startswith("──")] == begins
    document = tree(chat)["tokens"]
    assert {token["learned"] for token in document} == {True, False}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32m" in printed(chat) and "⟦" not in printed(chat)


@pytest.mark.parametrize("arguments, message", [
    (["--document", "1", "--window", "1"], "show different things"),
    (["--epoch", "1"], "--epoch is for windows"),
    (["--sample", "1"], "--sample is for a step"),
    (["--validation", "--step", "1"], "--validation is for documents"),
    (["--step", "9999"], "step 9999 is not among those"),
    (["--step", "1", "--sample", "99"], "sample 99 is not in the batch"),
    (["--document", "99"], "document 99 is not in the train split"),
    (["--window", "99999"], "there is no window 99999"),
])  # fmt: skip
def test_impossible_selections_are_refused(trained_run: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        printed(trained_run, *arguments)


def test_items_that_are_no_windows_are_named(chat: Path) -> None:
    with pytest.raises(UserError, match="there is no row 99999: an epoch has"):
        printed(chat, "--window", "99999")


def test_a_dataset_and_a_recipe_show_their_documents_and_windows(trained_run: Path, chat: Path) -> None:
    recipe = load_recipe(trained_run)
    folder = data_of(trained_run).prepared.folder
    assert find_of_run(recipe, trained_run, data_of(folder).prepared.manifest.fingerprint) is not None
    with pytest.raises(UserError, match="is a dataset: what a model sees depends on a recipe"):
        printed(folder, "--window", 0)
    only_data = {key: yaml.safe_load(chat.read_text(encoding="utf-8"))[key] for key in ("tokenizer", "data")}
    (chat.parent / "data.yaml").write_text(yaml.safe_dump(only_data), encoding="utf-8")
    assert tree(chat.parent / "data.yaml") == tree(chat)
    for place in (folder, chat):
        with pytest.raises(UserError, match="is not a run: it has no training steps"):
            printed(place, "--step", 1)
