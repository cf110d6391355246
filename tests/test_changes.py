"""What a resumed run may change, what it may not, and what its folder says of it."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.data.batches import Batches
from gptworks.data.prepare import find_prepared
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.model import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.train.changes import changed, load_to_resume, read_history, record
from gptworks.train.loop import train
from gptworks.train.objectives.next_token import Batch, Losses, next_token
from gptworks.train.progress import Progress


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, `tiny.yaml`, and its run of four steps. Tests copy it."""
    folder = tmp_path_factory.mktemp("changes")
    path = tiny.write_recipe(folder, max_steps=4, micro_batch_size=2, evaluate_every=4, optimizer="adamw")
    train(load_recipe(path))
    return folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done / "run", tmp_path / "run"))


def resume(run: Path, *overrides: str, **options: Any) -> None:
    train(load_recipe(run, overrides), resume=True, overrides=overrides, **options)


@pytest.mark.parametrize("batch_size", [4, 12])
def test_another_batch_size_goes_on_with_the_next_samples(run: Path, batch_size: int) -> None:
    seen = []

    def watch(model: GPT, batch: Batch) -> Losses:
        if model.training:
            seen.append(batch[0])
        return next_token(model, batch)

    resume(run, f"train.batch_size={batch_size}", "train.max_steps=7", objective=watch)
    recipe = load_recipe(run)
    prepared = find_prepared(recipe)
    assert prepared is not None
    expected, _ = Batches(TokenShards(prepared.folder, "train"), 32, recipe.seed).batch(4 * 8, 3 * batch_size)
    assert torch.equal(torch.cat(seen), expected)


def test_epochs_end_after_as_many_samples_whatever_the_batch_size(run: Path) -> None:
    n_tokens = load_recipe(run).model.context_length * 8
    prepared = find_prepared(load_recipe(run))
    assert prepared is not None
    epochs = 8.5 * n_tokens / prepared.manifest.splits["train"].tokens
    resume(run, "train.max_steps=null", f"train.epochs={epochs}", "train.batch_size=4")
    state = json.loads(sorted(run.glob("checkpoints/*/state.json"))[-1].read_text(encoding="utf-8"))
    assert state["samples"] == pytest.approx(8.5 * 8, abs=4)
    assert state["step"] == 4 + (state["samples"] - 4 * 8) / 4


def test_a_checkpoint_that_counts_batches_is_read(run: Path) -> None:
    state = {"step": 10, "tokens": 99, "batches_passed": 3, "best_step": 2}
    progress = Progress.from_json(state, batch_size=8)
    assert (progress.samples, progress.samples_passed, progress.position) == (80, 24, 104)
    assert Progress.from_json(json.loads(json.dumps(asdict(progress))), 5).position == 104


@pytest.mark.parametrize(
    ("override", "old"),
    [
        ("train.optimizer=muon", "adamw"),
        ("train.evaluate_sequences=4", "8"),
        ("seed=2", "1337"),
        ("model.dropout_residual=0.2", "0.1"),
        ("data.validation.fraction=0.2", "0.1"),
        ("tokenizer.added_tokens=[x]", r"\[\]"),
        ("data.shard_tokens=1000", "100000000"),
    ],
)
def test_what_a_run_cannot_change_is_refused_with_both_values_and_the_fix(run: Path, override: str, old: str) -> None:
    key, _, _ = override.partition("=")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refused:
        resume(run, override)

    assert re.search(rf"started with {re.escape(key)}={old}, and it is now", str(refused.value))
    assert re.search(rf"Resume with {re.escape(key)}={old}, or start anew", str(refused.value))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: data for path, data in before.items() if path.name != ".lock"
    }


def test_an_adapter_cannot_be_put_on_or_taken_off(run: Path) -> None:
    before = load_recipe(run)
    with pytest.raises(UserError, match=r"started with adapter=null"):
        train(parse_recipe(before.model_dump() | {"adapter": {"rank": 2}}), resume=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.max_steps=3"], r"train\.max_steps=3 and .*run has done 4 steps"),
        (["train.max_steps=null", "train.epochs=0.001"], r"train\.epochs=0\.001 and .* has done 4 steps"),
        (["train.max_minutes=0.0001"], r"train\.max_minutes=0\.0001 and .* has done 0\.\d minutes"),
    ],
)
def test_a_length_below_what_is_done_is_refused_by_name(run: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resume(run, *overrides)


def test_a_finished_run_that_is_resumed_stays_as_it_is(run: Path) -> None:
    resume(run)
    assert not read_history(run).changes
    assert not (run / "changes.json").exists()


def test_changes_are_recorded_and_the_card_says_that_the_recipe_does_not_repeat_the_run(run: Path) -> None:
    assert "repeats the run" in (run / "model-card.md").read_text(encoding="utf-8")
    resume(run, "train.max_steps=5", "train.learning_rate=0.001")
    resume(run, "train.max_steps=6")
    changes = read_history(run).changes
    assert [change["step"] for change in changes] == [4, 5]
    assert changes[0]["settings"] == {"train.max_steps": [4, 5], "train.learning_rate": [0.003, 0.001]}
    card = (run / "model-card.md").read_text(encoding="utf-8")
    assert "| from step 4 | train.max_steps 4 → 5, train.learning_rate 0.003 → 0.001 |" in card
    assert "does not repeat the run" in card


def test_free_changes_are_recorded_and_the_recipe_repeats_the_run_still(run: Path) -> None:
    resume(run, "train.keep_checkpoints=3")
    assert [change["settings"] for change in read_history(run).changes] == [{"train.keep_checkpoints": [2, 3]}]
    card = (run / "model-card.md").read_text(encoding="utf-8")
    assert "train.keep_checkpoints 2 → 3" in card
    assert "repeats the run" in card
    assert "does not" not in card


def test_settings_of_the_command_line_that_are_left_out_are_kept(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path, max_steps=3, optimizer="adamw", evaluate_every=9)
    first = CliRunner().invoke(app, ["train", str(path), "train.learning_rate=0.01", "train.keep_every=2"])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(app, ["train", str(path), "--resume", "train.max_steps=4", "train.keep_every=1"])
    assert again.exit_code == 0, again.output
    assert "settings of the earlier command line are kept: train.learning_rate=0.01" in again.output
    assert "changed from step 3 on: train.max_steps 3 → 4, train.keep_every 2 → 1" in again.output
    assert load_recipe(tmp_path / "run").train.learning_rate == 0.01
    recipe, kept = load_to_resume(path)
    assert kept == ["train.learning_rate=0.01", "train.keep_every=1", "train.max_steps=4"]
    assert not changed(load_recipe(tmp_path / "run"), recipe)
    edited = path.read_text(encoding="utf-8").replace("warmup_steps: 2", "warmup_steps: 1")
    path.write_text(edited, encoding="utf-8")
    recipe, _ = load_to_resume(path)
    assert changed(load_recipe(tmp_path / "run"), recipe) == {"train.warmup_steps": (2, 1)}, "the file was edited"


def test_a_change_that_a_crash_kept_from_the_recipe_is_taken_out_of_the_record(run: Path) -> None:
    before = load_recipe(run)
    record(run, 4, {"train.learning_rate": (0.003, 0.5)}, [], before)  # and recipe.yaml is not written any more
    assert read_history(run).changes
    record(run, 4, {}, [], before)
    assert not read_history(run).changes


def test_a_damaged_record_is_named(run: Path) -> None:
    (run / "changes.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"changes\.json is damaged"):
        read_history(run)
