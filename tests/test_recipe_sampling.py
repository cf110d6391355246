"""A recipe's sampling settings: the run states them, every command samples with them, exports hand them on."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers as t
from typer.testing import CliRunner

import tiny
from gptworks.choices import SAMPLING
from gptworks.cli import app
from gptworks.errors import UserError
from gptworks.infer.defaults import sampling_of
from gptworks.infer.engine import load
from gptworks.infer.sampling import SamplingSettings
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.recipe import parse_recipe
from gptworks.special_tokens import special_tokens
from gptworks.training.loop import train

OWN = {"temperature": 0.3, "top_k": 40, "frequency_penalty": 1.0, "presence_penalty": -0.25, "dry_multiplier": 2.0,
       "dry_allowed_length": 3}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an architecture that can be exported, whose recipe has sampling settings."""
    return tiny.trained(tmp_path_factory.mktemp("own"), steps=12, sampling=OWN)


def said(run: Path, *options: str) -> str:
    """What `gptworks generate` continues a text with."""
    asked = ["generate", str(run), "the quick", "--seed", "3", "--max-tokens", "12", "--json", *options]
    text: str = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).stdout)["completions"][0]["text"]
    return text


def test_texts_are_sampled_as_the_recipe_recommends_unless_options_differ(run: Path) -> None:
    engine = load(run)
    assert engine.defaults == SamplingSettings(**OWN)
    assert sampling_of(run / "tokenizer") == SAMPLING._replace(**OWN)
    expected = engine.generate("the quick", SamplingSettings(**OWN, seed=3, max_tokens=12, heal=True))
    plain = engine.generate("the quick", SamplingSettings(seed=3, max_tokens=12, heal=True))
    assert said(run) == expected != plain
    off = "--temperature 0.8 --top-k 0 --frequency-penalty 0 --presence-penalty 0 --dry-multiplier 0"
    assert said(run, *off.split()) == plain


def test_the_special_tokens_are_those_of_a_run_without_sampling_settings(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(run, plain)
    for name in ("generation_config.json", "sums.json"):
        (plain / "tokenizer" / name).unlink()
    assert special_tokens(load(run).tokenizer) == special_tokens(load(plain).tokenizer)
    exported = [export_huggingface(one, tmp_path / f"{i}").folder for i, one in enumerate((run, plain))]
    with_own, without = (json.loads((folder / "generation_config.json").read_text()) for folder in exported)
    assert with_own == without | OWN | {"do_sample": True}


def test_exports_hand_the_settings_on(run: Path, tmp_path: Path) -> None:
    folder = export_huggingface(run, tmp_path / "hf").folder
    theirs = t.GenerationConfig.from_pretrained(folder)
    assert (theirs.do_sample, theirs.temperature, theirs.top_k) == (True, 0.3, 40)
    import_huggingface(folder, tmp_path / "back")
    assert load(tmp_path / "back").defaults == SamplingSettings(**OWN)
    fields = gguf.GGUFReader(export_gguf(run, tmp_path / "run.gguf").file).fields
    own = {name.rpartition(".")[2]: field.contents() for name, field in fields.items() if "sampling" in name}
    assert own == {"temp": pytest.approx(0.3), "top_k": 40}  # llama.cpp has no keys for the others


def test_a_resumed_run_has_the_settings_of_its_recipe_then(tmp_path: Path) -> None:
    tree: dict[str, Any] = tiny.recipe_tree(tmp_path, max_steps=4, evaluate_every=4, checkpoint_every=4)
    for sampling, temperature in ({"temperature": 0}, 0.0), ({"temperature": 0.5}, 0.5), ({}, SAMPLING.temperature):
        resume = (tmp_path / "run").exists()
        train(parse_recipe({**tree, "sampling": sampling}), resume=resume, change=["train.max_steps"] if resume else [])
        assert load(tmp_path / "run").defaults == SamplingSettings(temperature=temperature)
        tree["train"]["max_steps"] += 4


def test_a_setting_out_of_range_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sampling\.top_p"):
        parse_recipe({**tiny.recipe_tree(tmp_path), "sampling": {"top_p": 0}})
