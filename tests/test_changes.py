"""Which changes a resumed run may make, which it refuses, and the record of them in its folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.data.batches import Batches
from gptworks.data.prepare import find_prepared
from gptworks.data.samples import Batch
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.files import sealed_json
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.changes import (
    Change,
    History,
    Origin,
    change_words,
    changed,
    check_changes,
    inexact,
    load_to_resume,
    read_history,
    record,
)
from gptworks.training.loop import train
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.record.metrics import read_metrics


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
    """Resume a run with these settings changed, all of which are allowed by name."""
    asked = [override.partition("=")[0] for override in overrides]
    train(load_recipe(run, overrides), resume=True, change=asked, overrides=overrides, **options)


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


ANSWERS = {
    "refused": {
        "train.optimizer=muon": "adamw", "train.evaluate_sequences=4": "8", "seed=2": "1337",
        "model.dropout_residual=0.2": "0.1", "data.validation.fraction=0.2": "0.1", "tokenizer.added_tokens=[x]": "[]",
        "data.shard_tokens=1000": "100000000", "model.n_layers=3": "2",
    },
    "asks": {
        "train.learning_rate=0.001": "0.003", "train.batch_size=4": "8", "train.max_steps=9": "4",
        "train.max_minutes=5": "null", "train.schedule=constant": "cosine", "train.betas=[0.9, 0.99]": "[0.9, 0.95]",
        "train.weight_decay=0": "0.1", "train.grad_clip=2": "1.0", "train.warmup_steps=3": "2",
    },
    "free": {
        "train.precision=fp32": "auto", "train.threads=1": "null", "train.micro_batch_size=4": "2",
        "train.checkpoint_every=2": "4", "train.sample_prompts=[x]": "['']", "train.parallel.strategy=ddp": "auto",
    },
}  # fmt: skip
"""What a resumed run answers to a changed setting; the setting's value so far."""


@pytest.mark.parametrize(
    ("answer", "override", "old"), [(answer, *each) for answer in ANSWERS for each in ANSWERS[answer].items()]
)
def test_each_changed_setting_has_its_answer(done: Path, answer: str, override: str, old: str) -> None:
    key, _, new = override.partition("=")
    before, now = load_recipe(done / "run"), load_recipe(done / "run", [override])
    if answer == "free":
        assert check_changes(before, now).keys() == {key}
        return
    with pytest.raises(UserError) as unasked:
        check_changes(before, now)
    if answer == "refused":
        with pytest.raises(UserError, match=f"Resume with {re.escape(f'{key}={old}')}, or start a new run") as asked:
            check_changes(before, now, [key])
        assert f"started with {key}={old}, and it is now" in str(asked.value) == str(unasked.value)
        return
    assert re.search(rf"  {re.escape(f'{key} {old} → {new}')}(\.0)?: .* depends on", str(unasked.value))
    assert f"add --change {key};" in str(unasked.value) and f"resume with {key}={old}." in str(unasked.value)
    changes = check_changes(before, now, [key])
    assert key in changes and change_words({key: changes[key]}).startswith(f"{key} {old} → {new}")


def test_a_refused_change_leaves_the_folder_as_it_is(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="learning_rate"):
        train(load_recipe(run, ["train.learning_rate=1"]), resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_all_that_must_be_asked_for_is_in_one_message_and_asking_for_a_part_is_not_enough(done: Path) -> None:
    before = load_recipe(done / "run")
    now = load_recipe(done / "run", ["train.learning_rate=1", "train.eps=1e-6"])
    with pytest.raises(UserError, match=r"add --change train\.learning_rate --change train\.eps;"):
        check_changes(before, now)
    with pytest.raises(UserError, match=r"add --change train\.eps;"):
        check_changes(before, now, ["train.learning_rate"])
    with pytest.raises(UserError, match=r"--change train.lerning_rate: .*did you mean `train.learning_rate`\?"):
        check_changes(before, now, ["train.lerning_rate"])


def test_a_run_without_a_checkpoint_is_begun_with_any_rate(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert check_changes(load_recipe(run), load_recipe(run, ["train.learning_rate=1"])).keys() == {
        "train.learning_rate"
    }


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        (["train.schedule=constant"], True), (["train.schedule=wsd", "train.decay_fraction=0.1"], True),
        (["train.schedule=wsd", "train.decay_fraction=0.5"], False), ([], False), (["train.warmup_steps=4"], True),
    ],
)  # fmt: skip
def test_a_longer_run_asks_where_the_rate_has_followed_the_length(done: Path, settings: list[str], same: bool) -> None:
    """The first four steps are the same for any run length only if the rate has not begun to fall in them."""
    before, now = (load_recipe(done / "run", [*settings, f"train.max_steps={n}"]) for n in (5, 50))
    assert (inexact(before, now, changed(before, now), 4) == []) == same


def test_a_card_that_says_repeats_is_right(tmp_path: Path) -> None:
    """A longer run at a constant rate needs no `--change`, and a new run of its recipe.yaml ends with the same
    weights."""
    tree = tiny.recipe_tree(tmp_path, max_steps=3, optimizer="adamw", schedule="constant", evaluate_every=9)
    train(parse_recipe(tree))
    train(load_recipe(tmp_path / "run", ["train.max_steps=5"]), resume=True)
    card = (tmp_path / "run" / "model-card.md").read_text(encoding="utf-8")
    assert "| from step 3 | train.max_steps 3 → 5 |" in card and "next to this file repeats the run" in card
    train(load_recipe(tmp_path / "run" / "recipe.yaml", [f"run_dir={tmp_path / 'again'}"]))
    one, other = (tmp_path / name / "checkpoints" / "step-000005" / "model.safetensors" for name in ("run", "again"))
    assert one.read_bytes() == other.read_bytes()


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


def test_a_damaged_checkpoint_hinders_no_other_length(run: Path) -> None:
    """A run resumes from the checkpoint before a damaged one, also if its length in minutes changes."""
    newest = run / "checkpoints" / "step-000004"
    shutil.copytree(newest, run / "checkpoints" / "step-000006")
    (run / "checkpoints" / "step-000006" / "state.json").unlink()
    before, asked = load_recipe(run), ["train.max_minutes"]
    check_changes(before, load_recipe(run, ["train.max_minutes=9", "train.max_steps=7"]), [*asked, "train.max_steps"])
    with pytest.raises(UserError, match=r"max_minutes=0\.0001 and .* minutes"):
        check_changes(before, load_recipe(run, ["train.max_minutes=0.0001", "train.max_steps=7"]), asked)


def test_a_finished_run_that_is_resumed_stays_as_it_is(run: Path) -> None:
    resume(run)
    assert not read_history(run).changes
    assert not (run / "changes.json").exists()


def test_the_card_and_the_recipe_say_what_happened_at_which_step(run: Path) -> None:
    assert "repeats the run" in (run / "model-card.md").read_text(encoding="utf-8")
    resume(run, "train.max_steps=5", "train.learning_rate=0.001")
    resume(run, "train.max_steps=6")
    changes = read_history(run).changes
    assert [change.step for change in changes] == [4, 5]
    assert changes[0].settings == {"train.max_steps": [4, 5], "train.learning_rate": [0.003, 0.001]}
    card = (run / "model-card.md").read_text(encoding="utf-8")
    assert "| from step 4 | train.max_steps 4 → 5, train.learning_rate 0.003 → 0.001 |" in card
    assert "| from step 5 | train.max_steps 5 → 6 |" in card
    assert "does not repeat the run" in card
    head = [line for line in (run / "recipe.yaml").read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert head[1] == "# from step 4: train.max_steps 4 → 5, train.learning_rate 0.003 → 0.001"
    rates = {r["step"]: r["learning_rate"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"}
    assert rates[4] > 0.001 > rates[5], "as the card says"


def test_all_origins_of_a_fork_of_forks_are_named() -> None:
    history = History(origins=[Origin(name, 4, "ab" * 32) for name in ("third", "second", "first")])
    for text in (" ".join(history.lines()), str(history.origin_rows())):
        assert [name for name in ("third", "second", "first") if f"the run {name} at step 4" in text] == [
            "third", "second", "first",
        ]  # fmt: skip
    assert History().origin_rows() == {}


def test_free_changes_are_recorded_and_the_recipe_repeats_the_run_still(run: Path) -> None:
    resume(run, "train.keep_checkpoints=3")
    assert [change.settings for change in read_history(run).changes] == [{"train.keep_checkpoints": [2, 3]}]
    card = (run / "model-card.md").read_text(encoding="utf-8")
    assert "train.keep_checkpoints 2 → 3" in card
    assert "repeats the run" in card
    assert "does not" not in card


def test_settings_of_the_command_line_that_are_left_out_are_kept(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path, max_steps=3, optimizer="adamw", evaluate_every=9)
    first = CliRunner().invoke(app, ["train", str(path), "train.learning_rate=0.01", "train.keep_every=2"])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(
        app, ["train", str(path), "--resume", "--change", "train.max_steps=4", "train.keep_every=1"]
    )
    assert again.exit_code == 0, again.output
    assert "settings of the earlier command line are kept: train.learning_rate=0.01" in again.output
    assert "changed from step 3 on:\n  train.max_steps 3 → 4\n  train.keep_every 2 → 1\n" in again.output
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
    lost = Change(4, {"train.learning_rate": [0.003, 0.5]}, exact=True)
    record(run, 4, lost, [], before)  # and recipe.yaml is not written any more
    assert read_history(run).changes
    record(run, 4, None, [], before)
    assert not read_history(run).changes


def test_a_damaged_record_is_named(run: Path) -> None:
    (run / "changes.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"changes\.json is damaged"):
        read_history(run)
    for wrong in ({"changes": [{"step": "x", "settings": {}}]}, {"changes": [{"step": 1, "settings": {"seed": [1]}}]},
                  {"origins": [8]}, {"overrides": {}}, {"more": []}):  # fmt: skip
        (run / "changes.json").write_text(sealed_json(wrong), encoding="utf-8")
        with pytest.raises(UserError, match=rf"changes\.json is damaged \({next(iter(wrong))}"):
            read_history(run)
