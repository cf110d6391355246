"""The defaults of settings that a recipe leaves out, and which of them a resumed run keeps."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from gptworks.config import EARLIER_DEFAULTS, BPETokenizer, LoRAConfig, Recipe
from gptworks.errors import UserError
from gptworks.interop.huggingface.fitting import choose_family
from gptworks.recipe import load_recipe, parse_model, parse_recipe
from gptworks.tokenizer import train_tokenizer
from gptworks.training.changes import changed, load_to_resume
from gptworks.training.loop import train

SIZES = {"context_length": 64, "n_layers": 2, "d_model": 96, "n_heads": 2}


def recipe(train: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **more: Any) -> Recipe:
    data = {"sources": [{"type": "python-stdlib"}]}
    tree = {"model": SIZES | (model or {}), "tokenizer": {"type": "char"}, "data": data, **more}
    return parse_recipe(tree if train is None else tree | {"train": train})


def test_sizes_alone_give_a_modern_model_and_a_whole_training() -> None:
    said_nothing = recipe()
    model, settings = said_nothing.model, said_nothing.train
    assert (model.norm, model.mlp, model.d_ff, model.position) == ("rmsnorm", "swiglu", 256, "rope")
    assert model.qk_norm is True
    assert model.zero_init_projections
    assert (settings.optimizer, settings.learning_rate, settings.muon_learning_rate) == ("muon", 0.02, 0.02)
    assert (settings.schedule, settings.final_rate_fraction, settings.epochs) == ("wsd", 0, 4)
    assert settings.sample_every
    assert settings.warmup_steps


def test_a_model_of_defaults_is_one_that_other_tools_load() -> None:
    tokenizer = train_tokenizer(BPETokenizer(type="bpe", vocab_size=300), [tiny.TEXT])
    family, _ = choose_family(parse_model(SIZES | {"vocab_size": 300}), tokenizer)
    assert family.model_type == "qwen3"


def test_an_initialization_that_is_named_is_not_replaced_by_zeros() -> None:
    assert not parse_model(SIZES | {"init": "gpt2"}).zero_init_projections
    assert parse_model(SIZES | {"init": "gpt2", "zero_init_projections": True}).zero_init_projections


def test_a_preset_says_all_that_its_architecture_is() -> None:
    gpt2 = recipe(model={"preset": "gpt2", "context_length": 64, "n_layers": 2, "d_model": 96, "n_heads": 2}).model
    assert {name: getattr(gpt2, name) for name in EARLIER_DEFAULTS} == EARLIER_DEFAULTS | {"mlp": "gelu_tanh"}
    assert gpt2.d_ff == 4 * 96


# Brown et al. (2020), table 2.1.
@pytest.mark.parametrize(
    ("width", "rate"),
    [(768, 6e-4), (1024, 3e-4), (1536, 2.5e-4), (2048, 2e-4), (2560, 1.6e-4), (4096, 1.2e-4), (12_288, 6e-5)],
)
def test_adamw_alone_is_as_fast_as_gpt3_was(width: int, rate: float) -> None:
    alone = recipe({"optimizer": "adamw"}, {"d_model": width, "n_heads": width // 64}).train
    assert 0.6 < alone.learning_rate / rate < 1.7
    assert alone.weight_decay == 0.1


@pytest.mark.parametrize(
    ("more", "rate"),
    [
        ({}, 1e-4),
        ({"adapter": {"rank": 4}}, 1e-3),
        ({"objective": {"type": "preference"}, "data": {"sources": [{"type": "preferences", "path": "p"}]}}, 2e-5),
    ],
)
def test_trained_weights_are_changed_with_care(more: dict[str, Any], rate: float, tmp_path: Path) -> None:
    base = recipe(model={"d_model": 768, "n_heads": 12}, run_dir=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "recipe.yaml").write_text(yaml.safe_dump(base.model_dump(mode="json")), encoding="utf-8")
    tuned = parse_recipe(
        {"tokenizer": {"type": "char"}, "data": base.data.model_dump(mode="json"), **more}
        | {"initialize_from": str(tmp_path / "base")}
    ).train
    assert (tuned.optimizer, tuned.learning_rate, tuned.weight_decay) == ("adamw", rate, 0)


def test_embeddings_are_changed_less_the_wider_they_are() -> None:
    rates = [recipe(model={"d_model": 64 * n, "n_heads": n}).train.learning_rate for n in (1, 4, 16, 64)]
    assert rates == [0.02, 0.02, 0.014, 0.0071]


@pytest.mark.parametrize("parallel", [{"strategy": "fsdp"}, {"tensor_parallel": 2}])
def test_devices_that_divide_matrices_are_given_the_optimizer_of_one_device(parallel: dict[str, Any]) -> None:
    assert recipe({"parallel": parallel}).train == recipe({}).train.model_copy(
        update={"parallel": recipe({"parallel": parallel}).train.parallel}
    )


def test_an_adapter_is_not_given_muon() -> None:
    assert recipe({"max_steps": 10}, adapter={"rank": 4}).train.optimizer == "adamw"
    assert recipe({"max_steps": 10}, adapter={"rank": 4}).adapter == LoRAConfig(rank=4)
    for other in ("muon", "normuon", "soap"):
        with pytest.raises(UserError, match=rf"train\.optimizer={other} with an adapter"):
            recipe({"max_steps": 10, "optimizer": other}, adapter={"rank": 4})


def test_a_tied_head_has_no_rate_of_its_own() -> None:
    settings = {"max_steps": 10, "rate_factors": {"head": 0.5}}
    assert recipe(settings, model={"tie_embeddings": False}).train.rate_factors.head == 0.5
    with pytest.raises(UserError, match=r"rate_factors\.head=0\.5 and model\.tie_embeddings=true.*embeddings"):
        recipe(settings, model={"tie_embeddings": True})


def test_what_is_not_adamws_alone_is_not_kept_in_8_bits() -> None:
    for other in ("muon", "normuon", "soap"):
        with pytest.raises(UserError, match=rf"optimizer_state=int8 with optimizer={other}.*set optimizer=adamw"):
            recipe({"max_steps": 10, "optimizer": other, "optimizer_state": "int8"})


@pytest.mark.parametrize("steps", [1, 3, 40, 400, 100_000])
def test_a_run_of_any_length_evaluates_samples_and_saves(steps: int) -> None:
    settings = recipe({"max_steps": steps}).train
    assert 1 <= settings.evaluate_every <= min(250, steps)
    assert 1 <= settings.sample_every <= min(1000, steps)
    assert 1 <= settings.checkpoint_every <= min(250, steps)
    assert settings.warmup_steps < steps


def test_a_resumed_run_keeps_what_its_file_does_not_say(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=4)
    for name in ("warmup_steps", "evaluate_every", "checkpoint_every", "sample_every"):
        del tree["train"][name]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    train(load_recipe(path))
    longer, _ = load_to_resume(path, ["train.max_steps=600"])
    assert load_recipe(path, ["train.max_steps=600"]).train.warmup_steps == 12
    assert changed(load_recipe(tmp_path / "run"), longer) == {"train.max_steps": (4, 600)}
    tree["train"] |= {"epochs": 3}
    del tree["train"]["max_steps"]
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended, _ = load_to_resume(path)
    assert (ended.train.max_steps, ended.train.epochs) == (None, 3), "another kind of length replaces the one before"


def test_a_run_from_before_other_defaults_goes_on_as_it_was(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=4)
    for section, names in {"model": ("norm", "mlp", "qk_norm"), "train": ("optimizer", "schedule")}.items():
        for name in names:
            del tree[section][name]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    before = tiny.recipe_tree(tmp_path, max_steps=4)
    before["model"] |= EARLIER_DEFAULTS
    before["train"] |= {"optimizer": "adamw", "schedule": "constant"}
    train(parse_recipe(before))
    shutil.rmtree(tmp_path / "data")
    resumed, _ = load_to_resume(path)
    assert changed(load_recipe(tmp_path / "run"), resumed) == {}
