"""Pages of recipes' models with random weights: a browser computes what the engine does, of llm-200m too."""

from pathlib import Path

import pytest
import torch

import hf
from gptworks.config import GPT2Tokenizer
from gptworks.interop.html_file import browser, export_html
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe
from gptworks.tokenizer import train_tokenizer

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("recipe", "rows"), [("demo", 4096), ("shakespeare-char", 300), ("llm-200m/pretrain", 50257)])
def test_a_browser_computes_a_recipe_s_model(
    tmp_path: Path, request: pytest.FixtureRequest, recipe: str, rows: int
) -> None:
    try:
        browser.find_browser()
    except browser.Unavailable as reason:
        pytest.skip(str(reason))
    tokenizer = hf.byte_tokenizer()
    if rows == 50257:
        path = request.getfixturevalue("shared_data") / "r50k_base.tiktoken"
        tokenizer = train_tokenizer(GPT2Tokenizer(type="gpt2", path=path), [])
    config = load_recipe(recipe).model.model_copy(update={"vocab_size": rows})
    torch.manual_seed(0)
    model = GPT(config).eval()
    hf.shake(model, 0.02)
    run = hf.make_run(tmp_path / "run", model, tokenizer)
    del model
    found = export_html(run, tmp_path / "model.html").check
    assert found is not None
    assert found.no_browser is None
    assert found.greedy_tokens == 64
    assert found.loss_difference < 1e-3
