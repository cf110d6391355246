"""The parts of an architecture: their figures add up to the totals of describe and plan."""

from math import prod
from typing import Any

import pytest

from gptworks.config import ModelConfig, Recipe
from gptworks.describe.parts import parts
from gptworks.describe.sheet import describe
from gptworks.planning.flops import training_work
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.params import count_parameters, everything, trained
from gptworks.planning.parts import Figures, module_figures
from gptworks.planning.run import plan
from gptworks.planning.state import held_weights_bytes, trained_state_bytes
from gptworks.presets import PRESETS, preset
from gptworks.recipe import parse_recipe
from test_flops import TRAINED
from test_params import random_config


def recipe_of(model: ModelConfig, train: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return parse_recipe({
        "model": model.model_dump(mode="json"), "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]}, "train": {"max_steps": 1} | (train or {}), **more,
    })  # fmt: skip


def check_parts(config: ModelConfig, figures: dict[str, Figures]) -> None:
    """Check that each module belongs to exactly one part, in each layer."""
    named = [name for part in parts(config) if not part.in_block for name in part.in_layer(part.modules, 0)]
    for layer in range(config.n_layers):
        inside = [part for part in parts(config, layer) if part.in_block]
        named += [name for part in inside for name in part.in_layer(part.modules, layer)]
    assert sorted(named) == sorted(figures)


@pytest.mark.parametrize("name", PRESETS)
def test_parts_add_up_to_the_sheet(name: str) -> None:
    config = preset(name)
    figures, sheet = module_figures(recipe_of(config, {"optimizer": "adamw"})), describe(config).to_json()
    check_parts(config, figures)
    whole = sum(figures.values(), Figures())
    total = sheet["parameters"]["total"]
    assert (whole.parameters, whole.adapter_parameters) == (total, 0)
    assert whole.forward == pytest.approx(sheet["flops"]["forward_per_token"], rel=1e-12)
    assert whole.forward + whole.backward == pytest.approx(sheet["flops"]["training_per_token"], rel=1e-12)
    assert whole.weights_bytes == sheet["memory"]["weights_fp32_bytes"] == whole.gradients_bytes
    assert whole.optimizer_bytes == 8 * total
    assert whole.kv_cache_bytes_per_token == sheet["memory"]["kv_cache_fp16_bytes_per_token"]
    by_part, length = sheet["flops"]["parts_per_token"], config.n_layers
    query = sum(
        figures[f"blocks.{layer}.attention.{x}"].forward for layer in range(length) for x in ("query", "key", "value")
    )
    assert query == pytest.approx(by_part["query_key_value"], rel=1e-12)
    scores = sum(figures[f"blocks.{layer}.attention"].forward for layer in range(length))
    assert scores == pytest.approx(by_part["attention_scores"], rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_random_models(seed: int) -> None:
    config = random_config(seed)
    figures = module_figures(recipe_of(config))
    check_parts(config, figures)
    shapes = count_parameters(config).shapes
    for module, found in figures.items():
        own = [prod(shape) for name, shape in shapes.items() if name.rpartition(".")[0] == module]
        assert found.parameters == sum(own)
    for part in parts(config, config.n_layers - 1):
        assert part.words.endswith(".") and "  " not in part.words and part.source and part.name and part.shape


@pytest.mark.parametrize("train", [{"optimizer": "adamw"}, {"optimizer": "muon"},
                                   {"optimizer": "normuon"}, {"optimizer": "soap"},
                                   {"optimizer": "adamw", "optimizer_state": "int8"}])  # fmt: skip
@pytest.mark.parametrize("name", TRAINED)
def test_parts_add_up_to_the_plan(name: str, train: dict[str, Any]) -> None:
    if "adapter" in TRAINED[name] and train["optimizer"] != "adamw":
        return  # no such recipe
    model = ModelConfig(vocab_size=50, context_length=32, n_layers=3, d_model=96, n_heads=4, n_kv_heads=2)
    recipe = recipe_of(model, train, **TRAINED[name])
    whole = sum(module_figures(recipe).values(), Figures())
    count = count_parameters(model)
    part = trained(model, recipe.adapter, recipe.freeze) or everything(count)
    assert whole.parameters == count.total and whole.adapter_parameters == part.added
    assert whole.weights_bytes == held_weights_bytes(count, part)
    assert whole.gradients_bytes == 4 * part.parameters
    state = recipe.train.optimizer_state
    assert whole.optimizer_bytes == trained_state_bytes(count, recipe.train.optimizer, part, state)
    assert whole.kv_cache_bytes_per_token == kv_cache_bytes(model, length=1)
    work = training_work(recipe)
    assert whole.forward == pytest.approx(sum(work.forward.values()))
    assert whole.backward == pytest.approx(sum(work.backward.values()))
    planned = plan(recipe)
    assert (planned.weights_bytes, planned.optimizer_state_bytes) == (whole.weights_bytes, whole.optimizer_bytes)


def test_parts_say_what_their_layer_does() -> None:
    config = ModelConfig(vocab_size=50, context_length=64, n_layers=2, d_model=96, n_heads=4, window=8,
                         window_pattern=("full", "window"), rope_pattern=("rope", "none"))  # fmt: skip
    first, second = ({part.key: part for part in parts(config, layer)} for layer in (0, 1))
    assert "it sees all tokens up to itself" in first["scores"].words
    assert "it sees the last 8 tokens" in second["scores"].words
    assert "Turns the channels" in first["rotary"].words and "does not turn" in second["rotary"].words
    assert first["head"].name == "Head (tied)" and first["head"].tensors_of == ("token_embedding",)
    assert [part.key for part in parts(config)][:5] == ["token_embedding", "norm1", "query", "key", "value"]
