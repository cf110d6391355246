"""A run that starts from the weights of another."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hf
import tiny
from gptworks.checkpoint import load_run
from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.loop import train
from gptworks.training.start import check_start

NO_STEP: dict[str, Any] = {"max_steps": 1, "warmup_steps": 0, "optimizer": "adamw", "learning_rate": 1e-12,
                           "weight_decay": 0.0, "precision": "fp32"}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=4, precision="fp32")))
    return folder / "run"


def following(source: Path, folder: Path, **model: Any) -> dict[str, Any]:
    """Return a recipe that continues from `source` on other text, with steps too small to matter."""
    tree = tiny.recipe_tree(folder, **NO_STEP)
    tree["tokenizer"] = {"type": "file", "path": str(source / "tokenizer")}
    tree["model"] |= model
    return tree | {"initialize_from": str(source)}


def test_its_first_weights_are_the_best_of_the_other(source: Path, tmp_path: Path) -> None:
    train(parse_recipe(following(source, tmp_path, dropout_residual=0.0)))
    before, after = (load_run(run).model.state_dict() for run in (source, tmp_path / "run"))
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    assert not torch.allclose(after["norm.weight"], torch.ones(32), atol=1e-6), "they had been trained"
    assert "| started from | the run run |" in (tmp_path / "run" / "model-card.md").read_text()


def test_it_goes_on_without_the_other(source: Path, tmp_path: Path) -> None:
    """Once begun, the run has its own weights."""
    tree = following(source, tmp_path)
    train(parse_recipe(tree))
    tree["initialize_from"] = str(tmp_path / "gone")
    tree["train"] |= {"max_steps": 2}
    assert train(parse_recipe(tree), resume=True).step == 2
    with pytest.raises(UserError, match=r"initialize_from=.*gone is not a run folder"):
        train(parse_recipe(tree | {"run_dir": str(tmp_path / "anew")}))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"mlp": "swiglu"}, r"model\.mlp=swiglu and initialize_from=.* has relu2"),
        ({"d_model": 64}, r"model\.d_model=64"),
        ({"norm_eps": 1e-3}, r"model\.norm_eps=0\.001"),
        ({"rope_theta": 99.0}, r"model\.rope_theta=99\.0"),
    ],
)
def test_another_model_is_refused_before_the_data_is_prepared(
    model: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train(parse_recipe(following(source, tmp_path, **model)))
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "run").exists()


def test_model_and_tokenizer_are_those_of_the_other_where_they_are_left_out(source: Path, tmp_path: Path) -> None:
    tree = following(source, tmp_path)
    del tree["model"], tree["tokenizer"]
    base = load_recipe(source).model
    recipe = parse_recipe(tree)
    assert recipe.model == base and base.vocab_size
    assert recipe.tokenizer.model_dump()["path"] == source / "tokenizer"
    longer = parse_recipe(tree | {"model": {"context_length": 64}, "tokenizer": {"added_tokens": ["<|user|>"]}})
    assert longer.model == base.model_copy(update={"context_length": 64, "vocab_size": 0})  # it grows
    train(longer)
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8"))
    assert kept["model"].keys() == ModelConfig.model_fields.keys()
    assert (kept["model"]["d_model"], kept["model"]["vocab_size"]) == (32, base.vocab_size + 1)
    assert kept["tokenizer"]["type"] == "file"
    (moved := tmp_path / "elsewhere").mkdir()
    kept["initialize_from"] = str(moved)  # the run is whole without the other
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
    assert load_recipe(tmp_path / "run").model.vocab_size == base.vocab_size + 1


def test_what_is_left_out_needs_the_other(source: Path, tmp_path: Path) -> None:
    tree = following(source, tmp_path) | {"initialize_from": "runs/none", "tokenizer": {"chat_template": "plain"}}
    with pytest.raises(UserError, match=r"initialize_from=runs/none is not a run folder.* takes its tokenizer from it"):
        parse_recipe(tree)
    with pytest.raises(UserError, match=r"model\.n_layers=3 and initialize_from=.* has 2.*Leave model\.n_layers out"):
        parse_recipe(following(source, tmp_path) | {"model": {"n_layers": 3}})


def test_another_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    """It has the same size, but each id is another character."""
    tree = following(source, tmp_path) | {"tokenizer": {"type": "char"}}
    other = tmp_path / "other.txt"
    other.write_text(tiny.TEXT.replace("q", "Q"), encoding="utf-8")
    tree["data"]["sources"] = [{"type": "text", "path": str(other)}]
    with pytest.raises(UserError, match=r"type=char has .* differs from that of initialize_from=.*\.type=file"):
        train(parse_recipe(tree))


def test_a_longer_context_and_other_dropout_are_taken(source: Path, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 2.0}
    check_start(parse_recipe(following(source, tmp_path, context_length=64, rope_scaling=scaling, init="xavier")))


def test_learned_positions_of_another_length_are_refused(tmp_path: Path) -> None:
    config = tiny.plain_model(vocab_size=hf.VOCABULARY, context_length=32, n_layers=1, d_model=32, n_heads=2,
                         position="learned")  # fmt: skip
    source = hf.make_run(tmp_path / "source", hf.random_model(config))
    tree = following(source, tmp_path)
    tree["model"] = config.model_dump(mode="json") | {"context_length": 16}
    with pytest.raises(UserError, match=r"model\.context_length=16 and .* position embedding of 32"):
        train(parse_recipe(tree))
    tree["model"] = config.model_dump(mode="json") | {"vocab_size": 0}
    with pytest.raises(UserError, match=r"model\.vocab_size=256 and .* token embedding of 260"):
        train(parse_recipe(tree))
    tree["model"] = config.model_dump(mode="json")  # rows to spare are kept
    train(parse_recipe(tree))
    assert load_run(tmp_path / "run").model.config == config


def test_a_run_folder_that_was_moved_has_its_tokenizer_with_it(tmp_path: Path) -> None:
    config = tiny.plain_model(vocab_size=hf.VOCABULARY, context_length=32, n_layers=1, d_model=32, n_heads=2)
    before = hf.make_run(tmp_path / "before", hf.random_model(config))
    assert load_recipe(before).tokenizer.model_dump()["path"] == before / "tokenizer"
    after = before.rename(tmp_path / "after")
    assert load_recipe(after).tokenizer.model_dump()["path"] == after / "tokenizer"


@pytest.mark.parametrize(
    ("part", "fix"),
    [
        ({"adapter": {"rank": 2}}, "adapter.embeddings=true"),
        ({"freeze": {"embeddings": True}}, "freeze.embeddings=false"),
        ({"adapter": {"rank": 2, "embeddings": True}}, None),
        ({"freeze": {"first_blocks": 1}}, None),
    ],
)
def test_new_tokens_need_embeddings_that_are_trained(
    source: Path, tmp_path: Path, part: dict[str, Any], fix: str | None
) -> None:
    tree = following(source, tmp_path) | part
    check_start(parse_recipe(tree))
    tree["tokenizer"] |= {"added_tokens": ["<|user|>"]}
    if fix is None:
        check_start(parse_recipe(tree))
    else:
        with pytest.raises(UserError, match=rf"<\|user\|>, new to initialize_from=.* Set {fix}"):
            check_start(parse_recipe(tree))
