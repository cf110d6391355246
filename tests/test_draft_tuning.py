"""Recipes drafted to fine-tune a run on a file of examples."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chats
from gptworks.chat_template import read_templates
from gptworks.cli import app
from gptworks.config.defaults import HIGHEST_TUNING_RATE
from gptworks.draft import finetuning
from gptworks.draft.drafted import TRAINING_SHARE
from gptworks.draft.finetuning import Tuning, base_run, draft_tuning
from gptworks.errors import UserError
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.planning.run import Measured
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.loop import train

CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, instructions and pairs."""
    folder = tmp_path_factory.mktemp("base")
    tree = chats.base_tree(folder, max_steps=1)
    tree["model"]["context_length"] = CONTEXT
    train(parse_recipe(tree))
    chats.write_jsonl(folder / "chats.jsonl", chats.records(90))
    pairs = [{"prompt": f"what of {n}?", "chosen": f"it is {n}.", "rejected": f"it was {n + 1}!"} for n in range(90)]
    chats.write_jsonl(folder / "pairs.jsonl", pairs)
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetuning, "measure_speed", lambda *_: Measured(0, 0, 1000.0))


def drafted(folder: Path, data: str = "chats.jsonl", out: str = "tune.yaml", **options: Any) -> Tuning:
    tuning = draft_tuning(folder / "base", folder / data, Path(out), **options)
    Path(out).write_text(tuning.text(), encoding="utf-8")
    return tuning


def test_a_draft_takes_all_from_the_base_but_what_the_examples_decide(folder: Path) -> None:
    tuning = drafted(folder)
    recipe, base = load_recipe("tune.yaml"), load_recipe(folder / "base")
    assert recipe.model == base.model
    assert recipe.train.row_tokens is not None
    assert 64 <= recipe.train.row_tokens < CONTEXT and recipe.train.row_tokens % 64 == 0
    assert f"× {recipe.train.row_tokens} tokens" in tuning.text() and f"context     {CONTEXT} tokens" in tuning.text()
    assert recipe.tokenizer.chat_template == "alpaca", "the base has no template, and a token that ends a text"
    assert recipe.adapter is None and recipe.train.epochs == 3
    assert not tuning.findings and tuning.plan.fits
    seconds = tuning.plan.steps * tuning.plan.tokens_per_step / 1000
    assert tuning.minutes == pytest.approx(seconds / TRAINING_SHARE / 60)
    outcome = train(load_recipe("tune.yaml"))
    assert outcome.step == tuning.plan.steps
    of_its_own = draft_tuning(Path("runs/tune"), folder / "chats.jsonl", Path("again.yaml"))
    assert "chat_template" not in of_its_own.text(), "the base has one now"


@pytest.mark.parametrize("base", ["full", "int4"])
def test_what_does_not_fit_becomes_an_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    planned, tried = finetuning._Draft.planned, []

    def on_a_small_machine(draft: Any, prepared: Any, device: Any) -> Any:
        tried.append(draft.adapted)
        return planned(draft, prepared, device if draft.adapted == base else replace(device, memory_bytes=2**10))

    monkeypatch.setattr(finetuning._Draft, "planned", on_a_small_machine)
    assert f"at most {HIGHEST_TUNING_RATE:g}" in drafted(folder).text()
    recipe = load_recipe("tune.yaml")
    assert recipe.adapter is not None and recipe.adapter.base == base
    assert tried == [None, "full", "int8", "int4"][: 2 if base == "full" else 4], "rounded only where nothing else fits"
    assert recipe.train.learning_rate == HIGHEST_TUNING_RATE, "ten times that of all weights, within bounds"


def test_pairs_of_answers_are_learned_by_preference_from_a_lower_rate(folder: Path) -> None:
    drafted(folder)
    drafted(folder, "pairs.jsonl", "prefer.yaml", preference=True)
    instruction, preference = load_recipe("tune.yaml"), load_recipe("prefer.yaml")
    assert preference.objective.type == "preference"
    assert preference.train.learning_rate < instruction.train.learning_rate


def test_faults_of_the_data_are_shown_and_nothing_is_overwritten(folder: Path) -> None:
    rows = [{"instruction": f"what of {n}?", "output": "always this."} for n in range(90)]
    chats.write_jsonl(Path("dull.jsonl"), rows)
    result = CliRunner().invoke(app, ["tune", str(folder / "base"), "dull.jsonl"])
    assert result.exit_code == 0, result.output
    assert "stops training: one-answer" in result.stdout
    assert "gptworks inspect tune.yaml" in result.stdout
    again = CliRunner().invoke(app, ["tune", str(folder / "base"), "dull.jsonl"])
    assert "tune.yaml exists" in str(again.exception)


def test_what_is_neither_a_run_nor_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run folder nor a Hugging Face folder"):
        base_run(str(tmp_path), print)


def test_a_tuned_run_keeps_the_other_templates_of_what_its_base_was_imported_from(tmp_path: Path) -> None:
    layouts = pytest.importorskip("layouts")
    layouts.write(tmp_path / "theirs", layouts.LAYOUTS["hermes-3"])
    named = read_templates(tmp_path / "theirs").named
    assert sorted(named) == ["default", "tool_use"]
    base = import_huggingface(tmp_path / "theirs", tmp_path / "base", verify=False).run_dir
    chats.write_jsonl(tmp_path / "chats.jsonl", chats.records(20))
    tuning = draft_tuning(base, tmp_path / "chats.jsonl", Path("tune.yaml"))
    Path("tune.yaml").write_text(tuning.text(), encoding="utf-8")
    tuned = train(load_recipe("tune.yaml", ["train.max_steps=1", "train.epochs=null", "train.warmup_steps=0"]))
    export = export_huggingface(tuned.run_dir, tmp_path / "export", verify=False).folder
    assert read_templates(export).named == named
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(export).chat_template
    assert theirs == dict(named)
    again = import_huggingface(export, tmp_path / "again", verify=False).run_dir
    assert read_templates(export_huggingface(again, tmp_path / "twice", verify=False).folder).named == named


@pytest.mark.parametrize("kept", [{"../../evil": "x"}, {"a": 1}, ["a"]])
def test_names_of_templates_in_a_received_run_name_no_file_elsewhere(folder: Path, tmp_path: Path, kept: Any) -> None:
    shutil.copytree(folder / "base", tmp_path / "received")
    (tmp_path / "received" / "tokenizer" / "sums.json").unlink()
    (tmp_path / "received" / "tokenizer" / "other_templates.json").write_text(json.dumps({"templates": kept}))
    with pytest.raises(UserError, match=r"other_templates\.json has `"):
        export_huggingface(tmp_path / "received", tmp_path / "out" / "export", verify=False)
    assert not (tmp_path / "evil.jinja").exists() and not (tmp_path / "out" / "export").exists()
